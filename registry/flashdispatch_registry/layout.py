"""Strides of outputs: the same on every backend, so that `out.view(...)`, compiled code and fakes agree.

The rule is `torch.empty_like` of a dense q in q's stride order, with Dv in place of D. Dims whose stride says nothing
about order (size 1, or stride 0 from expand) keep their place relative to their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashdispatch_registry.problem import Layout, Problem


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims are ordered in memory as the strides `like` are.

    The last dim is always innermost, with stride 1.
    """
    order = list(range(len(shape) - 1))  # outermost first

    def says_nothing(dim: int) -> bool:
        return shape[dim] == 1 or like[dim] == 0

    for end in range(1, len(order)):
        at = end
        for left in range(end - 1, -1, -1):
            if says_nothing(order[left]) or says_nothing(order[at]):
                continue
            if like[order[left]] >= like[order[at]]:
                break
            order[left], order[at] = order[at], order[left]
            at = left
    strides = [1] * len(shape)
    step = max(shape[-1], 1)
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def output_strides(shape: Sequence[int], q_strides: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The contract's strides of an output of `shape` (B, S, H, Dv), for a q of `q_strides` seen as (B, S, H, D).

    Neighbours are those of the caller's `layout`: it decides where a dim goes whose stride says nothing.
    """
    if layout == "bshd":
        return dense_strides(shape, q_strides)
    b, s, h, d = range(4)
    batch, heads, rows, last = dense_strides([shape[i] for i in (b, h, s, d)], [q_strides[i] for i in (b, h, s, d)])
    return batch, rows, heads, last


def empty_output(problem: Problem, q: Tensor) -> Tensor:
    """An uninitialised output for `q` (B, S, H, D): (B, S, H, Dv) in q's dtype and device, with the contract's strides.

    Sizes come from q, not from the problem, whose lengths may be hints; Dv is the problem's.
    """
    shape = (*q.shape[:3], problem.head_dim_v)
    return q.new_empty_strided(shape, output_strides(shape, q.stride(), problem.layout))


def empty_gradient(tensor: Tensor) -> Tensor:
    """An uninitialised gradient of `tensor`: its shape, dtype and stride order, dense."""
    return tensor.new_empty_strided(tensor.shape, dense_strides(tensor.shape, tensor.stride()))


Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a shape, strides and a dtype, with nothing in it."""


def empty_on(device: torch.device) -> Empty:
    """``torch.empty_strided(shape, strides, dtype=dtype)`` on `device`, which on a GPU must be the current one.

    There it is the function that torch's compiled graphs allocate with, where torch has it: half the host time.
    """
    fast: Empty | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # noqa: SLF001
    if device.type == "cuda" and fast is not None:
        return fast
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def rows_of(q: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """What LSE and Delta are made as, for a q (B, S, H, D): (B, Hq, Sq) float32, dense."""
    batch, seqlen_q, heads, _ = q.shape
    return (batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1), torch.float32
