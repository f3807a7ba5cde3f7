"""A drop-in for `torch.nn.functional.scaled_dot_product_attention`: PyTorch's names, shapes and meaning."""

from __future__ import annotations

from torch import Tensor

from flashdispatch._attention import attention
from flashdispatch_registry.errors import InvalidRequestError, InvalidTypeError


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`attention` under PyTorch's calling convention.

    What differs from `attention`: the layout is (..., H, S, D), `is_causal` is top-left (query i sees keys 0..i), and
    grouped heads must be allowed with `enable_gqa`. What differs from PyTorch: a query that sees no key gives 0 on
    every backend, dropout's mask follows our Philox contract, batch dims are not broadcast between query, key and value
    (expand them first), and bad shapes raise before any work.

    Args:
        query: (S, D), (H, S, D), (B, H, S, D), or with more leading dims.
        key: likewise, with the same leading dims.
        value: likewise.
        attn_mask: broadcastable to (..., H, Sq, Sk): bool (True = attend) or float (added).
        dropout_p: applied always; pass 0.0 in evaluation, as with PyTorch's.
        is_causal: top-left causal mask; can't be combined with attn_mask.
        scale: None is 1/√D.
        enable_gqa: let Hq be a multiple of Hkv.

    Raises:
        InvalidRequestError: (ValueError) and the other errors of `attention`.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if is_causal and attn_mask is not None:
        raise InvalidRequestError(
            "is_causal=True and attn_mask exclude each other in PyTorch; use attention() for both"
        )
    rank = query.dim()
    if rank < 2 or key.dim() != rank or value.dim() != rank:
        raise InvalidRequestError(
            f"query, key and value need one rank of at least 2, got {rank}, {key.dim()} and {value.dim()}"
        )
    lead = query.shape[:-3]
    if key.shape[:-3] != lead or value.shape[:-3] != lead:
        raise InvalidRequestError(
            f"query, key and value need one batch shape, got {tuple(lead)}, {tuple(key.shape[:-3])} and "
            f"{tuple(value.shape[:-3])}; expand them first"
        )
    q, k, v = (_four_dims(tensor) for tensor in (query, key, value))
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise InvalidRequestError(
            f"{q.shape[1]} query heads and {k.shape[1]} key heads need enable_gqa=True, as in PyTorch"
        )
    if attn_mask is not None and rank > 4 and attn_mask.dim() > 3:
        # More leading dims than (B, H): the mask follows the batch dims into one, which copies what is broadcast there.
        attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
    out = attention(
        q,
        k,
        v,
        causal="top_left" if is_causal else False,
        attn_mask=attn_mask,
        scale=scale,
        dropout_p=dropout_p,
        layout="bhsd",
    )
    return out.view(*query.shape[:-1], value.shape[-1]) if rank != 4 else out


def _four_dims(tensor: Tensor) -> Tensor:
    """(..., H, S, D) -> (B, H, S, D)."""
    if tensor.dim() == 4:
        return tensor
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor[(None,) * (4 - tensor.dim())]
