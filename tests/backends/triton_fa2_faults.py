"""Runs in a process that Triton interprets, and prints the largest error of each: calls that were once wrong on
triton_fa2, and sequences packed behind each other, for which the kernels are ready and the API is not yet.

Errors are relative to the reference in float64, over out, the LSE and the gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashdispatch import attention
from flashdispatch_backends.triton_fa2.arguments import described
from flashdispatch_backends.triton_fa2.compile import KERNELS
from flashdispatch_registry import Band, Problem
from flashdispatch_registry.tile_table import Shape


def run(q: Tensor, k: Tensor, v: Tensor, backend: str, arguments: dict[str, Any]) -> list[Tensor]:
    out, lse = attention(q, k, v, return_lse=True, backend=backend, **arguments)
    seen = lse.isfinite()
    (out.square().sum() + lse.masked_fill(~seen, 0.0).sum()).backward()
    return [out, lse.masked_fill(~seen, 0.0), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]


def error(arguments: dict[str, Any], hook: Callable[[Tensor], Tensor] | None = None, **sizes: int) -> float:
    """Of one call with float32 tensors."""
    torch.manual_seed(0)
    dim, dim_v = sizes.get("head_dim", 32), sizes.get("head_dim_v", 32)
    layout = arguments.get("layout", "bshd")
    shapes = [(3, 20, 4, dim), (3, 20, 4, dim), (3, 20, 4, dim_v)]
    if layout == "bhsd":
        shapes = [(b, h, s, d) for b, s, h, d in shapes]
    tensors = [torch.randn(shape) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in tensors]
    if hook is None:
        got = run(*leaves, "triton_fa2", arguments)
    else:
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda x: x):
            got = run(*leaves, "triton_fa2", arguments)
    want = run(*(x.double().requires_grad_() for x in tensors), "torch_reference", arguments)
    return max(float((one - other).norm() / other.norm().clamp(min=1e-9)) for one, other in zip(got, want, strict=True))


def dense(x: Tensor) -> Tensor:
    """What an offloader that copies large tensors to dense memory does."""
    return x.contiguous() if x.dim() == 4 and x.shape[-1] == 64 else x


lens = torch.tensor([3, 99, 15, 99, 7, 99], dtype=torch.int32)[::2]
one_length = torch.tensor([5], dtype=torch.int32).expand(3)
FAULTS: dict[str, dict[str, Any]] = {
    "strided lengths": {"arguments": {"q_lens": lens, "kv_lens": lens}},
    "expanded lengths": {"arguments": {"q_lens": one_length, "kv_lens": one_length, "causal": True}},
    "strided sinks": {"arguments": {"sinks": torch.randn(8)[::2]}},
    "expanded sinks": {"arguments": {"sinks": torch.randn(1).expand(4)}},
    "strided slopes": {"arguments": {"alibi_slopes": torch.rand(8)[::2]}},
    "transposed slopes": {"arguments": {"alibi_slopes": torch.rand(4, 3).t()}},
    "slopes expanded over the heads": {"arguments": {"alibi_slopes": torch.rand(3, 1).expand(3, 4)}},
    "a strided seed": {"arguments": {"dropout_p": 0.3, "dropout_seed": torch.tensor([5, 9, 1, 9])[::2]}},
    "a mask with the negative bit": {"arguments": {"attn_mask": torch.randn(20, 20, dtype=torch.cfloat).conj().imag}},
    "softcap 50": {"arguments": {"softcap": 50.0}},
    "softcap 1e6": {"arguments": {"softcap": 1e6}},
    "softcap 1e30": {"arguments": {"softcap": 1e30}},
    "saved tensors made dense": {"arguments": {"layout": "bhsd"}, "hook": dense, "head_dim_v": 64},
}


def packed_error() -> float:
    """Of sequences behind each other in one tensor, each with a start and a length; nothing else may be written."""
    torch.manual_seed(0)
    heads, dim, lengths_q, lengths_k = 2, 32, [70, 0, 5, 130], [64, 9, 0, 131]
    total_q, total_k = sum(lengths_q) + 7, sum(lengths_k) + 7  # 7 rows that are nobody's
    q, dout = (torch.randn(total_q, heads, dim) for _ in range(2))
    k, v = (torch.randn(total_k, heads, dim) for _ in range(2))
    out, dq, dk, dv = (torch.full_like(x, 7.0) for x in (q, q, k, v))
    lse, delta = (torch.full((heads, total_q), 7.0) for _ in range(2))
    starts_q, starts_k = ([sum(lengths[:i]) for i in range(4)] for lengths in (lengths_q, lengths_k))
    numbers = [torch.tensor(x, dtype=torch.int32) for x in (lengths_q, lengths_k, starts_q, starts_k)]
    shape = Shape(64, 64, 4, 1)
    problem = Problem(
        arch="cpu", dtype=torch.float32, batch=4, heads_q=heads, heads_kv=heads, seqlen_q=max(lengths_q),
        seqlen_k=max(lengths_k), head_dim=dim, head_dim_v=dim, scale=dim**-0.5, band=Band(None, 0), q_lens=True,
        kv_lens=True, needs_grad=("q", "k", "v"),
    )  # fmt: skip
    tensors = dict(zip(("q_lens", "kv_lens", "q_starts", "k_starts"), numbers, strict=True)) | {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "delta": delta, "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip
    for launch in described(problem, torch.bool, lambda *_: shape):
        names = KERNELS[launch.recipe.kernel].arg_names
        given = dict(zip(names[len(launch.pointers) :], launch.rest, strict=True))
        for letter in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
            given |= {f"stride_{letter}b": 0, f"stride_{letter}s": heads * dim, f"stride_{letter}h": dim}
        given |= {"stride_lb": 0, "stride_lh": total_q}
        KERNELS[launch.recipe.kernel][(launch.grid,)](
            *(tensors.get(name, given.get(name)) for name in names)
        )  # the names of tensors and numbers differ
    assert all((x[sum(lengths_q) :] == 7.0).all() for x in (out, dq))
    assert all((x[sum(lengths_k) :] == 7.0).all() for x in (dk, dv))
    worst = 0.0
    for at_q, at_k, n, m in zip(starts_q, starts_k, lengths_q, lengths_k, strict=True):
        rows, keys = slice(at_q, at_q + n), slice(at_k, at_k + m)
        leaves = [x.double()[None].requires_grad_() for x in (q[rows], k[keys], v[keys])]
        right = attention(*leaves, causal=True, backend="torch_reference")
        gradients = torch.autograd.grad(right, leaves, dout[rows].double()[None])
        pairs = zip((out[rows], dq[rows], dk[keys], dv[keys]), (right, *gradients), strict=True)
        worst = max(worst, *(float((one - other[0]).norm() / other.norm().clamp(min=1e-9)) for one, other in pairs))
    return worst


if __name__ == "__main__":
    print(json.dumps({name: error(**fault) for name, fault in FAULTS.items()} | {"packed": packed_error()}))  # noqa: T201
