"""Strides of outputs: the same on every backend, so that `out.view(...)`, compiled code and fakes agree.

The rule is `torch.empty_like` of a dense q in q's stride order, with Dv in place of D. Dims whose stride says nothing
about order (size 1, or stride 0 from expand) keep their place relative to their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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


def empty_output(q: Tensor, head_dim_v: int) -> Tensor:
    """An uninitialised output for `q`: its shape with `head_dim_v` last, its dtype, device and stride order."""
    shape = (*q.shape[:-1], head_dim_v)
    return q.new_empty_strided(shape, dense_strides(shape, q.stride()))
