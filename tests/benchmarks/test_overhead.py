"""Host time of a call: what choosing and checking add to the backend itself, beside PyTorch's whole call.

    make bench            # or: pytest tests/benchmarks/test_overhead.py --benchmark-enable --benchmark-only

The backend here computes nothing, so what is timed is the core. On a GPU the shape is B1 H8 S128 D64, bfloat16, and
PyTorch's number holds its kernel's launch; on a CPU it is one element, so that PyTorch's kernel hardly counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashdispatch import attention, explain
from flashdispatch_registry import Extras, Forward, Gradients, Needs, Problem

GPU = torch.cuda.is_available()
BATCH, SEQLEN, HEADS, HEAD_DIM = (1, 128, 8, 64) if GPU else (1, 1, 1, 8)
KIND: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if GPU else {}


class Nothing:
    """Returns ready-made values."""

    def __init__(self) -> None:
        self.out = torch.zeros(BATCH, SEQLEN, HEADS, HEAD_DIM, **KIND)
        self.lse = torch.zeros(BATCH, HEADS, SEQLEN, device=self.out.device)

    def forward(self, problem: Problem, q: Any, k: Any, v: Any, extras: Extras) -> Forward:
        out, lse = self.out.detach(), self.lse.detach()  # fresh ones, or autograd would grow a chain of them
        return Forward(out, lse, (q, k, v, out, lse) if problem.needs_backward else ())

    def backward(self, problem: Problem, saved: Any, dout: Any, dlse: Any, needs: Needs) -> Gradients:
        return Gradients(self.out, self.out, self.out)

    def prepare(self, problem: Problem) -> None: ...


@pytest.fixture
def nothing(add_backend: Any) -> str:
    add_backend("nothing", backend=Nothing())
    return "nothing"


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_cached_call(benchmark: Any, nothing: str, grad: bool) -> None:
    q = torch.zeros(BATCH, SEQLEN, HEADS, HEAD_DIM, requires_grad=grad, **KIND)
    attention(q, q, q, causal=True, backend=nothing)
    out = benchmark(lambda: attention(q, q, q, causal=True, backend=nothing))
    assert out.shape == q.shape


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_torch_sdpa_dispatch(benchmark: Any, grad: bool) -> None:
    q = torch.zeros(BATCH, HEADS, SEQLEN, HEAD_DIM, requires_grad=grad, **KIND)
    out = benchmark(lambda: scaled_dot_product_attention(q, q, q, is_causal=True))
    assert out.shape == q.shape


def test_a_new_plan(benchmark: Any) -> None:
    q = torch.zeros(BATCH, SEQLEN, HEADS, HEAD_DIM, **KIND)
    plan = benchmark(lambda: explain(q, q, q, causal=True))
    assert plan.chosen is not None
