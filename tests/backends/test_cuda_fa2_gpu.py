"""cuda_fa2 on a GPU: sequences packed behind each other, which its kernels serve and no call makes yet.

What all backends have in common is in test_kernels_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from flashdispatch import attention
from flashdispatch_backends.cuda_fa2.arguments import ADDRESSES, NUMBERS_FORMAT, STRIDED, Launch, described
from flashdispatch_backends.cuda_fa2.launch import BoundKernel, backend
from flashdispatch_registry import Band, Problem

pytestmark = pytest.mark.gpu

HEADS, HEADS_KV, HEAD_DIM = 4, 2, 64
LENGTHS_Q = (5, 0, 150, 129, 1)
LENGTHS_K = (9, 40, 131, 0, 200)


def packed(launch: Launch, rows: dict[str, int]) -> Launch:
    """The launch for tensors without a batch dim: `rows` has how many each of them has."""
    numbers = list(NUMBERS_FORMAT.unpack(launch.numbers))
    for at, name in enumerate(STRIDED):
        heads = HEADS_KV if name in ("k", "v", "dk", "dv") else HEADS
        numbers[3 * at : 3 * at + 3] = (0, heads * HEAD_DIM, HEAD_DIM)
    first = 3 * len(STRIDED)
    numbers[first : first + 3] = (0, rows["q"], HEADS * rows["q"])
    return replace(launch, numbers=NUMBERS_FORMAT.pack(*numbers))


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)][:-1], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_those_of_calls_of_their_own(causal: bool) -> None:
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)

    def make(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, HEAD_DIM, device="cuda", dtype=torch.float16)

    q, k, v, dout = make(total_q, HEADS), make(total_k, HEADS_KV), make(total_k, HEADS_KV), make(total_q, HEADS)
    made = {name: torch.full_like(like, 7.0) for name, like in (("out", q), ("dq", q), ("dk", k), ("dv", v))}
    lse = torch.full((HEADS, total_q), 7.0, device="cuda")
    lengths = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in (LENGTHS_Q, LENGTHS_K)]
    tensors = {
        "q": q, "k": k, "v": v, "dout": dout, "lse": lse, "rows": torch.empty(2, HEADS, total_q, device="cuda"),
        "q_lens": lengths[0], "kv_lens": lengths[1], "q_starts": starts(LENGTHS_Q), "k_starts": starts(LENGTHS_K),
        **made,
    }  # fmt: skip
    problem = Problem(
        arch="sm_{}{}".format(*torch.cuda.get_device_capability()), dtype=torch.float16, batch=len(LENGTHS_Q),
        heads_q=HEADS, heads_kv=HEADS_KV, seqlen_q=max(LENGTHS_Q), seqlen_k=max(LENGTHS_K), head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM, scale=HEAD_DIM**-0.5, band=Band.of(causal=causal), q_lens=True, kv_lens=True,
        needs_grad=("q", "k", "v"),
    )  # fmt: skip
    for launch in described(problem, torch.bool, backend.shape):
        passed = launch.tensors | {"q_starts", "k_starts"}
        kernel = BoundKernel(packed(launch, {"q": total_q}), torch.device("cuda", torch.cuda.current_device()))
        kernel.start(True, *[tensors[name].data_ptr() if name in passed else 0 for name in ADDRESSES])

    ends_q, ends_k = [0, *accumulate(LENGTHS_Q)], [0, *accumulate(LENGTHS_K)]
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        leaves = [x[None].detach().requires_grad_() for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
        out, its_lse = attention(*leaves, causal=causal, return_lse=True, backend="cuda_fa2")
        gradients = torch.autograd.grad(out, leaves, dout[None, q0:q1])
        assert torch.equal(made["out"][q0:q1], out[0])
        assert torch.equal(lse[:, q0:q1], its_lse[0])
        assert torch.equal(made["dq"][q0:q1], gradients[0][0])
        assert torch.equal(made["dk"][k0:k1], gradients[1][0])
        assert torch.equal(made["dv"][k0:k1], gradients[2][0])
