"""Joining two parts of the keys: the softmax of the whole from the softmax of each part and its LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdispatch_registry.errors import InvalidRequestError, InvalidTypeError
from flashdispatch_registry.problem import Layout


def merge_attention(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, *, layout: Layout = "bshd"
) -> tuple[Tensor, Tensor]:
    """Exactly the attention over keys 1 and 2 together, from `attention(..., return_lse=True)` over each part.

    With m = max(lse1, lse2):  l = e^(lse1 − m) + e^(lse2 − m),  lse = m + log l,  out = Σ e^(lse_i − lse)·out_i
    (FlashAttention, arXiv 2205.14135, section 3.1). A part that saw no key (LSE −inf) leaves the other unchanged; if
    both did, the result is 0 with LSE −inf. Differentiable in all four. Give sinks to one of the parts only.

    Args:
        out1: (B, Sq, Hq, Dv) for layout "bshd", (B, Hq, Sq, Dv) for "bhsd".
        lse1: (B, Hq, Sq), natural log.
        out2: like out1.
        lse2: like lse1.
        layout: of the outputs.

    Returns:
        (out, lse): out in out1's dtype, summed in the LSE's dtype; lse like lse1.

    Raises:
        InvalidRequestError: (ValueError) shapes, dtypes or devices that don't fit each other.
        InvalidTypeError: (TypeError) something that is no tensor.
    """
    for name, tensor in (("out1", out1), ("lse1", lse1), ("out2", out2), ("lse2", lse2)):
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    heads, rows = (2, 1) if layout == "bshd" else (1, 2)
    expected = (out1.shape[0], out1.shape[heads], out1.shape[rows]) if out1.dim() == 4 else ()
    if (
        layout not in ("bshd", "bhsd")
        or out1.shape != out2.shape
        or {tuple(lse1.shape), tuple(lse2.shape)} != {expected}
    ):
        raise InvalidRequestError(
            "merge_attention needs two outputs of one shape and their LSEs (B, Hq, Sq); got outputs "
            f"{tuple(out1.shape)} and {tuple(out2.shape)}, LSEs {tuple(lse1.shape)} and {tuple(lse2.shape)}, layout "
            f"{layout!r}"
        )
    devices = {tensor.device for tensor in (out1, lse1, out2, lse2)}
    floating = out1.is_floating_point() and lse1.is_floating_point()
    if out1.dtype is not out2.dtype or lse1.dtype is not lse2.dtype or len(devices) > 1 or not floating:
        raise InvalidRequestError(
            f"merge_attention needs one floating dtype and one device: outputs {out1.dtype} {out1.device} and "
            f"{out2.dtype} {out2.device}, LSEs {lse1.dtype} {lse1.device} and {lse2.dtype} {lse2.device}"
        )
    # m is a constant of the derivative (it cancels); 0 where neither part saw a key, so that no −inf − −inf appears.
    m = torch.maximum(lse1, lse2).detach()
    m = torch.where(m == -torch.inf, 0.0, m)
    w1, w2 = torch.exp(lse1 - m), torch.exp(lse2 - m)  # (B, Hq, Sq)
    l = w1 + w2  # noqa: E741  the paper's name
    empty = l == 0
    l = torch.where(empty, 1.0, l)  # noqa: E741
    lse = torch.where(empty, -torch.inf, m + torch.log(l))

    def weighted(w: Tensor, out: Tensor) -> Tensor:
        w = (w / l)[..., None]  # (B, Hq, Sq, 1)
        return (w.transpose(1, 2) if layout == "bshd" else w) * out

    return (weighted(w1, out1) + weighted(w2, out2)).to(out1.dtype), lse
