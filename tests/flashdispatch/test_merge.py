"""merge_attention joins two parts of the keys exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashdispatch import attention, merge_attention


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("cut", [0, 1, 5, 8, 9])
def test_two_parts_merged_are_the_whole(qkv: Any, cut: int, layout: Any) -> None:
    q, k, v = qkv(seqlen_q=4, seqlen_k=9, heads_kv=2, dtype=torch.float64, requires_grad=True)

    def run(k: torch.Tensor, v: torch.Tensor) -> Any:
        given = (t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v))
        return attention(*given, layout=layout, return_lse=True)

    whole, whole_lse = run(k, v)
    out, lse = merge_attention(*run(k[:, :cut], v[:, :cut]), *run(k[:, cut:], v[:, cut:]), layout=layout)
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)
    dout, dlse = torch.randn_like(whole), torch.randn_like(whole_lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    wanted = torch.autograd.grad((whole, whole_lse), (q, k, v), (dout, dlse))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_sinks_go_to_one_part_only(qkv: Any) -> None:
    q, k, v = qkv(dtype=torch.float64)
    sinks = torch.randn(4)
    whole, whole_lse = attention(q, k, v, sinks=sinks, return_lse=True)
    one = attention(q, k[:, :3], v[:, :3], sinks=sinks, return_lse=True)
    out, lse = merge_attention(*one, *attention(q, k[:, 3:], v[:, 3:], return_lse=True))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_two_empty_parts_are_zero_with_finite_gradients(qkv: Any) -> None:
    q, k, v = qkv(requires_grad=True)
    empty = attention(q, k[:, :0], v[:, :0], return_lse=True)
    out, lse = merge_attention(*empty, *empty)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()
    out.sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))


def test_the_dtype_of_the_parts_is_kept(qkv: Any) -> None:
    parts = attention(*qkv(dtype=torch.bfloat16), return_lse=True)
    out, lse = merge_attention(*parts, *parts)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_parts_that_do_not_fit_raise(qkv: Any) -> None:
    out, lse = attention(*qkv(), return_lse=True)
    with pytest.raises(ValueError, match="two outputs of one shape"):
        merge_attention(out, lse, out[:, :3], lse)
    with pytest.raises(ValueError, match="two outputs of one shape"):
        merge_attention(out, lse.transpose(1, 2), out, lse)
    for parts in ((out, lse, out.half(), lse), (out, lse, out, lse.to("meta")), (out, lse.int(), out, lse.int())):
        with pytest.raises(ValueError, match="one floating dtype and one device"):
            merge_attention(*parts)
