# ruff: noqa: N815 (the fields of Head carry the letters of the paper)
"""The truth: attention forward and backward in float64, by explicit dense formulas, one (batch, head) at a time.

Slow, dense and obvious on purpose. No autograd, no tiles, no code of any backend; visibility is written here from the
definition rather than taken from `Band.dense`. For one head with n queries, m keys and everything past the lengths
sliced away (so that not even a NaN there can matter):

    R  = scale Q K^T                        raw scores
    T  = cap tanh(R / cap)                  or R without a softcap
    S  = T + attn_mask - slope |p - j|      -inf where hidden
    P  = exp(S - lse),  lse = log(sum_j exp S_ij + exp sink)
    O  = (P o Z) V                          Z = keep / (1 - p) of dropout, else 1
    delta = rowsum(dO o O) - dlse
    dP = Z o (dO V^T)
    dS = P o (dP - delta)                   also the gradient of attn_mask
    dR = dS o (1 - (T / cap)^2)
    dQ = scale dR K;  dK = scale dR^T Q;  dV = (P o Z)^T dO
    dsink = -sum_i exp(sink - lse_i) delta_i

A row that sees no key has P = 0, O = 0 and gradients 0; its lse is -inf (then dlse is ignored), or the sink.
Source of the backward formulas: FlashAttention-2, arXiv 2307.08691, section 2.2, with the terms of the contract added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdispatch_conformance.philox import keep_mask
from flashdispatch_registry.backend import Extras
from flashdispatch_registry.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a backend must return, in float64; gradients are None when no dout and no dlse was given."""

    out: Tensor
    """(B, Sq, Hq, Dv)."""
    lse: Tensor
    """(B, Hq, Sq)."""
    dq: Tensor | None = None
    """(B, Sq, Hq, D)."""
    dk: Tensor | None = None
    """(B, Sk, Hkv, D)."""
    dv: Tensor | None = None
    """(B, Sk, Hkv, Dv)."""
    dattn_mask: Tensor | None = None
    """The mask's own shape, summed over its broadcast dims; only for a float mask."""
    dsinks: Tensor | None = None
    """(Hq,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One (batch, query head) with every intermediate that the formulas name, float64, lengths already cut to n and m.

    The gradients of K and V are this query head's share; the sum over its GQA group is the caller's.
    """

    b: int
    h: int
    Q: Tensor
    """(n, D)."""
    K: Tensor
    """(m, D)."""
    V: Tensor
    """(m, Dv)."""
    T: Tensor
    """(n, m) scores after softcap, before mask and bias."""
    S: Tensor
    """(n, m), -inf where hidden."""
    visible: Tensor
    """(n, m) bool."""
    tanh_slope: Tensor
    """(n, m): dT/dR = 1 - (T / cap)^2, or ones."""
    bias: Tensor
    """(n, m): the finite part of what was added to T."""
    P: Tensor
    """(n, m) before dropout."""
    Z: Tensor
    """(n, m): keep / (1 - p), or ones."""
    O: Tensor  # noqa: E741 (the paper's letter)
    """(n, Dv)."""
    lse: Tensor
    """(n,)."""
    sink: Tensor | None
    """() logit."""
    sink_weight: Tensor
    """(n,): exp(sink - lse), the probability of the sink column; 0 without sinks."""
    dO: Tensor
    """(n, Dv); zeros when none was given."""
    dlse: Tensor
    """(n,); 0 when none was given, and where it must be ignored."""
    delta: Tensor
    """(n,): rowsum(dO o O) - dlse."""
    dP: Tensor
    """(n, m)."""
    dS: Tensor
    """(n, m)."""
    dR: Tensor
    """(n, m)."""
    dQ: Tensor
    """(n, D)."""
    dK: Tensor
    """(m, D)."""
    dV: Tensor
    """(m, Dv)."""


def length(lens: Tensor | None, b: int, padded: int) -> int:
    """The length of sequence b: its entry of `lens`, kept inside 0..padded, or the padded length."""
    return padded if lens is None else min(max(int(lens[b]), 0), padded)


def position(problem: Problem, n: int, m: int) -> Tensor:
    """p(i) for i = 0..n-1, int64 (n, 1): i + m - n bottom-right, i top-left."""
    i = torch.arange(n)[:, None]
    return i if problem.band.align == "top_left" else i + (m - n)


def inside_band(problem: Problem, n: int, m: int) -> Tensor:
    """Bool (n, m): p - left <= j <= p + right, an absent limit hiding nothing."""
    distance = torch.arange(m)[None, :] - position(problem, n, m)  # (n, m): j - p
    inside = torch.ones(n, m, dtype=torch.bool)
    if problem.band.left is not None:
        inside &= distance >= -problem.band.left
    if problem.band.right is not None:
        inside &= distance <= problem.band.right
    return inside


def _mask_of_head(attn_mask: Tensor, b: int, h: int, n: int, m: int) -> Tensor:
    """The (n, m) part of a broadcast mask, in its own dtype."""
    part = attn_mask[b if attn_mask.shape[0] > 1 else 0, h if attn_mask.shape[1] > 1 else 0]
    part = part[: n if part.shape[0] > 1 else 1, : m if part.shape[1] > 1 else 1]
    return part.detach().cpu().expand(n, m)


def _keep(problem: Problem, seed: Tensor | None, stream: int, n: int, m: int) -> Tensor:
    """Z (n, m) of dropout."""
    if not problem.dropout_p:
        return torch.ones(n, m, dtype=torch.float64)
    if seed is None:
        raise ValueError("dropout needs extras.dropout_seed")
    if problem.dropout_p >= 1.0:
        return torch.zeros(n, m, dtype=torch.float64)
    kept = keep_mask(int(seed[0]), int(seed[1]), stream, n, m, problem.dropout_p)
    return torch.from_numpy(kept).double() / (1.0 - problem.dropout_p)


def heads(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Iterator[Head]:
    """Every (batch, query head) worked out, batch-major. Arguments as in `truth`."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]

    def exact(tensor: Tensor, b: int, h: int, count: int) -> Tensor:
        return tensor.detach()[b, :count, h].cpu().double()

    for b in range(batch):
        n, m = length(extras.q_lens, b, seqlen_q), length(extras.kv_lens, b, seqlen_k)
        distance = (position(problem, n, m) - torch.arange(m)[None, :]).abs().double()  # (n, m): |p - j|
        band = inside_band(problem, n, m)
        for h in range(heads_q):
            kv = h // (heads_q // heads_kv)
            Q, K, V = exact(q, b, h, n), exact(k, b, kv, m), exact(v, b, kv, m)
            T = problem.scale * (Q @ K.T)
            tanh_slope = torch.ones_like(T)
            if problem.softcap is not None:
                unit = torch.tanh(T / problem.softcap)
                T, tanh_slope = problem.softcap * unit, 1.0 - unit.square()

            visible, bias = band.clone(), torch.zeros_like(T)
            if extras.attn_mask is not None:
                mask = _mask_of_head(extras.attn_mask, b, h, n, m)
                if mask.dtype == torch.bool:
                    visible &= mask
                else:
                    added = mask.double()
                    visible &= added != -torch.inf
                    bias = bias + torch.where(added == -torch.inf, 0.0, added)
            if extras.alibi_slopes is not None:
                slopes = extras.alibi_slopes.detach().cpu().double()
                bias = bias - (slopes[b, h] if slopes.dim() == 2 else slopes[h]) * distance
            S = torch.where(visible, T + bias, -torch.inf)

            sink = None if extras.sinks is None else extras.sinks.detach().cpu().double()[h]
            top = S.amax(-1) if m else torch.full((n,), -torch.inf, dtype=torch.float64)
            if sink is not None:
                top = torch.maximum(top, sink)
            shift = torch.where(top == -torch.inf, 0.0, top)
            E = torch.exp(S - shift[:, None])
            E_sink = torch.zeros_like(shift) if sink is None else torch.exp(sink - shift)
            total = E.sum(-1) + E_sink
            lse = shift + torch.log(total)  # log 0 = -inf where nothing is seen
            seen = torch.where(total == 0, 1.0, total)
            P, sink_weight = E / seen[:, None], E_sink / seen

            Z = _keep(problem, extras.dropout_seed, b * heads_q + h, n, m)
            O = (P * Z) @ V  # noqa: E741

            dO = torch.zeros_like(O) if dout is None else exact(dout, b, h, n)
            dL = torch.zeros_like(lse) if dlse is None else dlse.detach()[b, h, :n].cpu().double()
            dL = torch.where(lse == -torch.inf, 0.0, dL)
            delta = (dO * O).sum(-1) - dL
            dP = Z * (dO @ V.T)
            dS = P * (dP - delta[:, None])
            dR = dS * tanh_slope
            yield Head(
                b=b, h=h, Q=Q, K=K, V=V, T=T, S=S, visible=visible, tanh_slope=tanh_slope, bias=bias,
                P=P, Z=Z, O=O, lse=lse, sink=sink, sink_weight=sink_weight, dO=dO, dlse=dL,
                delta=delta, dP=dP, dS=dS, dR=dR,
                dQ=problem.scale * (dR @ K), dK=problem.scale * (dR.T @ Q), dV=(P * Z).T @ dO,
            )  # fmt: skip


def reduce_to(total: Tensor, part: Tensor, b: int, h: int) -> None:
    """Adds one head's (n, m) `part` to `total` of a broadcast mask's shape, summing over the dims of size 1."""
    target = total[b if total.shape[0] > 1 else 0, h if total.shape[1] > 1 else 0]
    if target.shape[0] == 1:
        part = part.sum(0, keepdim=True)
    if target.shape[1] == 1:
        part = part.sum(1, keepdim=True)
    target[: part.shape[0] if target.shape[0] > 1 else 1, : part.shape[1] if target.shape[1] > 1 else 1] += part


def truth(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Truth:
    """Attention in float64 on the tensors as given, already rounded to their dtype.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), dout (B, Sq, Hq, Dv), dlse (B, Hq, Sq), any strides, dtypes
    and device. `problem` gives the meaning (band, scale, softcap, dropout_p); shapes are the tensors' own. Gradients
    are worked out when dout or dlse is given, a missing one counting as zeros.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group = heads_q // heads_kv if heads_kv else 1

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    backward = dout is not None or dlse is not None
    out, lse = zeros(batch, seqlen_q, heads_q, head_dim_v), zeros(batch, heads_q, seqlen_q) - torch.inf
    dq, dk, dv = zeros(*q.shape), zeros(batch, seqlen_k, heads_kv, head_dim), zeros(*v.shape)
    float_mask = extras.attn_mask is not None and extras.attn_mask.is_floating_point()
    dattn_mask = zeros(*extras.attn_mask.shape) if float_mask and extras.attn_mask is not None else None
    dsinks = None if extras.sinks is None else zeros(heads_q)
    for head in heads(problem, q, k, v, extras, dout, dlse):
        b, h, n, m = head.b, head.h, head.Q.shape[0], head.K.shape[0]
        out[b, :n, h], lse[b, h, :n] = head.O, head.lse
        if not backward:
            continue
        dq[b, :n, h] = head.dQ
        dk[b, :m, h // group] += head.dK
        dv[b, :m, h // group] += head.dV
        if dattn_mask is not None:
            reduce_to(dattn_mask, head.dS, b, h)
        if dsinks is not None:
            dsinks[h] -= (head.sink_weight * head.delta).sum()
    if not backward:
        return Truth(out=out, lse=lse)
    return Truth(out=out, lse=lse, dq=dq, dk=dk, dv=dv, dattn_mask=dattn_mask, dsinks=dsinks)
