"""Dense attention by formula. q, k, v and out are (B, S, H, D); S, P and dS are (B, H, Sq, Sk), float32 at least."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashdispatch_registry import Extras, Forward, Gradients, Needs, Problem, empty_output


def prepare(problem: Problem) -> None:
    """Nothing to compile."""


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
    """O = softmax(scale Q K^T) V, and LSE = log sum exp of each row."""
    S = _scores(problem, q, k)
    lse = torch.logsumexp(S, dim=-1)  # (B, H, Sq); -inf in a row that sees no key
    out = empty_output(problem, q)
    out.copy_(torch.einsum("bhij,bjhd->bihd", _weights(S, lse), v.to(S.dtype)))
    return Forward(out, lse, (q, k, v, out, lse) if problem.needs_backward else ())


def backward(problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs) -> Gradients:
    """dV = P^T dO, dS = scale P (dO V^T - Delta + dLSE), dQ = dS K, dK = dS^T Q, with Delta = rowsum(dO O)."""
    q, k, v, out, lse = saved
    P = _weights(_scores(problem, q, k), lse)
    Q, K, V, dO = (x.to(P.dtype) for x in (q, k, v, dout))
    Delta = torch.einsum("bihd,bihd->bhi", dO, out.to(P.dtype))
    if dlse is not None:
        Delta -= dlse.masked_fill(lse == -math.inf, 0.0)  # a row that sees no key has no gradient
    dS = P * (torch.einsum("bihd,bjhd->bhij", dO, V) - Delta[..., None]) * problem.scale
    return Gradients(
        q=torch.einsum("bhij,bjhd->bihd", dS, K).to(q.dtype) if needs.q else None,
        k=torch.einsum("bhij,bihd->bjhd", dS, Q).to(k.dtype) if needs.k else None,
        v=torch.einsum("bhij,bihd->bjhd", P, dO).to(v.dtype) if needs.v else None,
    )


def _scores(problem: Problem, q: Tensor, k: Tensor) -> Tensor:
    """scale Q K^T, -inf where position hides the key. Lengths come from the tensors: the problem's may be hints."""
    visible = problem.band.dense(q.shape[1], k.shape[1]).to(q.device)
    dtype = torch.promote_types(q.dtype, torch.float32)
    S = torch.einsum("bihd,bjhd->bhij", q.to(dtype), k.to(dtype)) * problem.scale
    return S.masked_fill(~visible, -math.inf)


def _weights(S: Tensor, lse: Tensor) -> Tensor:
    """P = exp(S - LSE), 0 in a row that sees no key: -inf - -inf would be NaN."""
    return torch.exp(S - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
