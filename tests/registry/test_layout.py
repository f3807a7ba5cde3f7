"""Output strides are those of `torch.empty_like` of a dense q in q's stride order."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from flashdispatch_registry import empty_gradient, empty_output
from flashdispatch_registry.layout import dense_strides

# Orders in memory, outermost first, of the dims (B, S, H) in front of an innermost D.
ORDERS = list(itertools.permutations(range(3)))
SHAPES = [(2, 3, 5, 4), (1, 3, 5, 4), (2, 1, 5, 4), (2, 3, 1, 4), (1, 1, 5, 4), (1, 1, 1, 4), (2, 3, 5, 1)]


def dense(shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """A dense tensor of `shape` whose dims lie in memory in `order`, outermost first."""
    return torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


def that_matter(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Strides of dims with more than one element; the others address nothing."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_output_of_a_dense_q_has_its_empty_likes_strides(shape, order) -> None:
    q = dense(shape, (*order, 3))
    ours = dense_strides(shape, q.stride())
    assert that_matter(shape, ours) == that_matter(shape, torch.empty_like(q).stride())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim_v", [1, 4, 6])
def test_dv_takes_the_place_of_d(order, head_dim_v: int) -> None:
    q = dense((2, 3, 5, 4), (*order, 3))
    expected = dense((2, 3, 5, head_dim_v), (*order, 3)).stride()
    assert dense_strides((2, 3, 5, head_dim_v), q.stride()) == expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_slice_of_a_packed_qkv_keeps_its_order_and_becomes_dense(order) -> None:
    q = dense((2, 3, 15, 4), (*order, 3))[:, :, 5:10]
    assert dense_strides(q.shape, q.stride()) == torch.empty_like(q).stride()


@pytest.mark.parametrize("order", [order for order in itertools.permutations(range(4)) if order[-1] != 3])
def test_the_last_dim_is_innermost_whatever_q_says(order) -> None:
    shape = (2, 3, 5, 4)
    strides = dense_strides(shape, dense(shape, order).stride())
    assert strides[-1] == 1
    assert torch.empty_strided(shape, strides).numel() == 120


@pytest.mark.parametrize("expanded", [dims for n in (1, 2, 3) for dims in itertools.combinations(range(3), n)])
@pytest.mark.parametrize("order", ORDERS)
def test_an_expanded_q_gets_a_dense_output_with_its_last_dim_innermost(order, expanded) -> None:
    shape = (2, 3, 5, 4)
    q = dense(tuple(1 if dim in expanded else size for dim, size in enumerate(shape)), (*order, 3)).expand(shape)
    strides = dense_strides(shape, q.stride())
    assert strides[-1] == 1
    assert strides == torch.empty_like(q).stride()


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0)])
def test_empty_dims_are_no_trouble(shape, problem) -> None:
    out = empty_output(problem(head_dim_v=7), torch.empty(shape))
    assert out.shape == (*shape[:3], 7)
    assert out.is_contiguous()


def test_the_output_takes_dtype_and_device_from_q(problem) -> None:
    q = torch.empty(2, 3, 5, 4, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    out = empty_output(problem(head_dim_v=8), q)
    assert out.shape == (2, 5, 3, 8)
    assert (out.dtype, out.device) == (q.dtype, q.device)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("expanded", [(), (0,), (1,), (2,), (1, 2)], ids=str)
def test_a_dim_whose_stride_says_nothing_goes_where_the_callers_layout_has_it(problem, layout, expanded) -> None:
    shape = (2, 3, 5, 4)
    q = torch.empty([1 if dim in expanded else size for dim, size in enumerate(shape)]).expand(shape)
    view = q if layout == "bshd" else q.transpose(1, 2)
    out = empty_output(problem(layout=layout, head_dim_v=4), view)
    assert (out if layout == "bshd" else out.transpose(1, 2)).stride() == torch.empty_like(q).stride()


def test_a_gradient_keeps_the_order_of_its_tensor() -> None:
    tensor = torch.empty(2, 5, 3, 4).transpose(1, 2)
    assert empty_gradient(tensor).stride() == tensor.stride()
