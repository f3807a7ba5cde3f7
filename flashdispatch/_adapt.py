"""The contract's adapters: a caller's tensors -> what a backend gets. Views wherever possible; a plan lists the rest.

Runs on real tensors and under tracing alike, with ordinary differentiable operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdispatch._arguments import needs_copy
from flashdispatch_registry.backend import Extras
from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.problem import Problem


def adapt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_lens: Tensor | None,
    kv_lens: Tensor | None,
    dropout_seed: int | Tensor | None,
    problem: Problem,
    cast_to: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """q, k, v as (B, S, H, D) views with a contiguous last dim, and the extras in the backend's form."""
    q, k, v = (as_bshd(tensor, problem, cast_to) for tensor in (q, k, v))
    if attn_mask is not None:
        if cast_to is not None and attn_mask.dtype not in (torch.bool, torch.float32, problem.dtype):
            attn_mask = attn_mask.to(problem.dtype)
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())].resolve_neg()  # leading dims broadcast
    seed = _seed(dropout_seed, q.device) if problem.dropout_p else None
    small = (_dense(tensor) for tensor in (alibi_slopes, sinks, q_lens, kv_lens, seed))
    return q, k, v, Extras(attn_mask, *small)


def _dense(tensor: Tensor | None) -> Tensor | None:
    """One of the small extras, contiguous: a copy of a few numbers, in place of a stride argument of every kernel."""
    return None if tensor is None else tensor.resolve_neg().contiguous()


def as_bshd(tensor: Tensor, problem: Problem, cast_to: torch.dtype | None) -> Tensor:
    """One of q, k, v as a (B, S, H, D) view with a contiguous last dim."""
    if cast_to is not None and tensor.dtype is not torch.float64:
        tensor = tensor.to(cast_to)
    if needs_copy(tensor):
        tensor = tensor.contiguous()
    return tensor.transpose(1, 2) if problem.layout == "bhsd" else tensor


def _seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """(seed, offset) as an int64 tensor on `device`; drawn from torch's own generator there when none is given.

    On the device, so that a CUDA graph's replay draws fresh masks; filled there, so that nothing is copied from the
    host.
    """
    if isinstance(seed, Tensor):
        return seed
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequestError(f"dropout_seed must fit 64 bits, got {seed}")
    signed = seed - 2**64 if seed >= 2**63 else seed
    return torch.cat([torch.full((1,), signed, dtype=torch.int64, device=device),
                      torch.zeros(1, dtype=torch.int64, device=device)])  # fmt: skip
