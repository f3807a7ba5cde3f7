"""The sdpa() shim means what PyTorch's scaled_dot_product_attention means."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashdispatch import sdpa

CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)), {}),
    "causal is top-left": (((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)), {"is_causal": True}),
    "causal with Sq > Sk": (((2, 4, 7, 8), (2, 4, 5, 8), (2, 4, 5, 8)), {"is_causal": True}),
    # pytorch/pytorch#103082
    "decode under causal sees key 0 only": (
        ((1, 1, 1, 8), (1, 1, 8, 8), (1, 1, 8, 8)),
        {"is_causal": True},
    ),
    "scale": (((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)), {"scale": -0.3}),
    "gqa": (((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)), {"enable_gqa": True}),
    "rank 3": (((4, 5, 8), (4, 7, 8), (4, 7, 8)), {"is_causal": True}),
    "rank 2": (((5, 8), (7, 8), (7, 8)), {}),
    "rank 5": (((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_same_as_pytorch(name: str) -> None:
    shapes, arguments = CALLS[name]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    ours, theirs = sdpa(q, k, v, **arguments), scaled_dot_product_attention(q, k, v, **arguments)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(
        torch.autograd.grad(ours.sin().sum(), (q, k, v)),
        torch.autograd.grad(theirs.sin().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(5, 7), (4, 5, 7), (2, 1, 1, 7), (2, 4, 5, 7)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_same_masks_as_pytorch(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    mask = torch.randn(shape) if kind == "float" else torch.rand(shape) > 0.2
    torch.testing.assert_close(sdpa(q, k, v, mask), scaled_dot_product_attention(q, k, v, mask))


def test_a_mask_over_many_batch_dims_follows_them() -> None:
    q = torch.randn(2, 3, 4, 5, 8)
    shapes = ((2, 1, 4, 5, 5), (3, 4, 5, 5), (4, 1, 5), (5, 5))
    for mask in (torch.rand(shape) > 0.2 for shape in shapes):
        torch.testing.assert_close(sdpa(q, q, q, mask), scaled_dot_product_attention(q, q, q, mask))


def test_the_signature_is_pytorchs() -> None:
    names = list(inspect.signature(sdpa).parameters)
    assert names == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]


def test_what_pytorch_refuses_is_refused_in_words() -> None:
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(ValueError, match="exclude each other"):
        sdpa(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        sdpa(q, q[:, :2], q[:, :2])
    with pytest.raises(ValueError, match="one rank"):
        sdpa(q, q[0], q[0])
    with pytest.raises(ValueError, match="one batch shape"):
        sdpa(q, q[:1], q[:1])


def test_the_output_can_be_viewed_as_pytorchs_can() -> None:
    q = torch.randn(1, 100, 4, 8).transpose(1, 2)  # pytorch/pytorch#153903
    k = torch.randn(1, 4, 104, 8)
    out = sdpa(q, k, k)
    assert out.stride() == torch.empty_like(q).stride()
    assert out.transpose(1, 2).view(1, 100, 32).shape == (1, 100, 32)
