"""PyTorch's own CUDA kernels as backends, so that the suite's gates can be calibrated on kernels that are not ours.

    PYTHONPATH=tests/peers flashdispatch conformance run --plugin torch_sdpa --backend sdpa_flash

They declare what these kernels do without padding or copies: dense and square causal attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import flashdispatch
from flashdispatch_registry import (
    BackendSpec,
    Code,
    Extras,
    Forward,
    Gradients,
    HeadDims,
    Needs,
    Problem,
    Reason,
    Support,
    empty_output,
)

aten = torch.ops.aten
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def why_not(problem: Problem) -> Iterable[Reason]:
    """is_causal is top-left, and FLASH has it for square problems alone; empty tensors need no kernel."""
    if problem.band.right is not None and problem.seqlen_q != problem.seqlen_k:
        yield Reason(Code.BACKEND_LIMIT, "Sq", str(problem.seqlen_q), f"{problem.seqlen_k}, as Sk, with causal")
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
        yield Reason(Code.BACKEND_LIMIT, "shape", "an empty tensor", "at least one query and one key")


class Kernel:
    """One of them: `run` gives out and lse and what its backward wants, `back` the gradients. All in (B, H, S, D)."""

    def __init__(self, run: Callable[..., tuple[Any, ...]], back: Callable[..., tuple[Tensor, ...]]) -> None:
        self.run, self.back = run, back

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        causal = problem.band.right is not None
        out, lse, *more = self.run(*(x.transpose(1, 2) for x in (q, k, v)), causal, problem.scale)
        result = empty_output(problem, q)
        result.copy_(out.transpose(1, 2))
        exact = lse[..., : q.shape[1]].contiguous()  # EFFICIENT pads its rows
        return Forward(result, exact, (q, k, v, out, lse, *more) if problem.needs_backward else ())

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        q, k, v, *more = saved
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v))
        got = self.back(*heads_first, *more, problem.band.right is not None, problem.scale)
        dq, dk, dv = (x.transpose(1, 2) for x in got[:3])
        return Gradients(dq if needs.q else None, dk if needs.k else None, dv if needs.v else None)

    def prepare(self, problem: Problem) -> None:
        pass


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse, seed, offset


def _flash_back(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset, scale=scale
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)


def _efficient_back(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = [True, True, True, False]
    return aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, seed, offset, 0.0, wanted, causal, scale=scale
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(lse.shape[:3]), seed, offset


def _cudnn_back(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None], seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip


FLASH, EFFICIENT, CUDNN = Kernel(_flash, _flash_back), Kernel(_efficient, _efficient_back), Kernel(_cudnn, _cudnn_back)


def _register(name: str, factory: str, dtypes: set[torch.dtype], largest: int) -> None:
    support = Support(
        dtypes=frozenset(dtypes),
        head_dims=HeadDims(8, largest, 8),
        causal=frozenset({"bottom_right", "top_left"}),
        backward=True,
        lse=True,
    )
    flashdispatch.register(
        BackendSpec(name=name, factory=factory, support=support, by_name_only="a peer to compare with", why_not=why_not)
    )


_register("sdpa_flash", "torch_sdpa:FLASH", {F16, BF16}, 256)
_register("sdpa_efficient", "torch_sdpa:EFFICIENT", {F16, BF16, F32}, 256)
_register("sdpa_cudnn", "torch_sdpa:CUDNN", {F16, BF16}, 128)
