"""The whole contract in plain PyTorch: FlashAttention spelled out, forward and backward, on any device.

Requirement: every feature, any dtype incl. float64, deterministic, no O(Sq * Sk) memory, and no device value read on
the host, so that a CUDA graph can capture it. It is the floor that auto-selection falls back to, and the whole
contract to copy from. It is not fast on a GPU: a kernel keeps a tile on the chip, here every step goes through memory.

The algorithm (FlashAttention, arXiv 2205.14135; FlashAttention-2, arXiv 2307.08691, "FA-2")
--------------------------------------------------------------------------------------------
Attention is ``O = softmax(S) V`` with ``S = scale * Q K^T``, and S is too large to store. So S is made in tiles S_ij of
m queries by n keys, and a softmax row is finished piece by piece, the online softmax (FA-2 section 2.3.1). For each
query row three running values suffice:

    m_i     the largest score so far
    l_i     the sum of exp(S - m_i) so far
    acc_i   the sum of exp(S - m_i) V so far: the output before normalisation

A new tile may raise the maximum; what is there was relative to the old one and is rescaled (FA-2 Algorithm 1):

    m_new = max(m_i, rowmax(S_ij))         P_ij  = exp(S_ij - m_new)        alpha = exp(m_i - m_new)
    l_i   = alpha l_i + rowsum(P_ij)       acc_i = alpha acc_i + P_ij V_j   m_i   = m_new

After the last tile ``O_i = acc_i / l_i`` and ``LSE_i = m_i + log(l_i)``. The tiles may come in any order, and the same
rule merges two parts of the keys that were worked on apart. A softmax sink is one more column with zero value: it only
starts the row, at m_i = sink and l_i = 1.

The backward (FA-2 Algorithm 2) has no stored P either: ``P_ij = exp(S_ij - LSE_i)`` makes it again, already normalised.
With ``Delta = rowsum(dO * O)``, which equals rowsum(P * dP) but needs no P (FlashAttention, appendix B.2):

    dV = P^T dO      dP = dO V^T      dS = P * (dP - Delta)      dQ = scale dS K      dK = scale dS^T Q

A gradient of the LSE adds P * dLSE to dS: ``Delta - dLSE`` takes the place of Delta. Dropout multiplies the P of dV and
dP by the mask of the forward, drawn again from its counters (`philox`). A sink gets -exp(sink - LSE) (Delta - dLSE)
from each row. FA-2 runs over the key blocks outermost, so that a thread block owns its dK and dV; here nothing runs at
the same time, and the order of the forward does for both passes.

Memory: the forward needs a few tiles beside its outputs, the backward also dK and dV in the dtype computed in.

What is easy to get wrong
-------------------------
- A row that has seen no key yet has m_i = -inf, and -inf - -inf is NaN: such a row subtracts 0.
- Hidden scores become -inf before exp, not 0 after it: exp(0 - LSE) overflows when every score is about -120.
- 0 * NaN is NaN. K and V past kv_lens are zeroed when loaded; rows with LSE = -inf (no key, or past q_lens) have their
  Q, dO and dLSE zeroed in the backward.
- The LSE is one float32. Next to a mask value like finfo.min log(l) is lost in it, see `_row_total`.

Copying it
----------
Keep `flashdispatch_backends`, `forward`, `backward` and `prepare`. Give the spec your name and, in `Support`, only what
you have: what is not declared is never asked of you. Put your kernels in a module of their own, named by `factory`:
this one is imported at discovery, and may load no kernel language. Make outputs with `empty_output`, save only tensors
of the call, and take lengths from the tensors: under torch.compile with dynamic shapes those in the Problem are hints.

Letters: B batch, Hq/Hkv query and key/value heads, G = Hq / Hkv, Sq/Sk lengths, D/Dv head dims. Tensors are
(B, S, H, D), tiles (B, Hkv, G*m, D) of queries and (B, Hkv, n, D) of keys: the query heads that share a key/value head
are more rows of one matrix product. So K and V are never repeated, and dK and dV come out summed over the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from flashdispatch_backends.torch_reference.tiles import Tiles
from flashdispatch_registry import (
    BackendSpec,
    Extras,
    Forward,
    Gradients,
    HeadDims,
    Needs,
    Problem,
    Support,
    empty_gradient,
    empty_output,
    hookimpl,
)


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    """The declaration: everything is supported, wherever PyTorch runs."""
    yield BackendSpec(
        name="torch_reference",
        factory="flashdispatch_backends.torch_reference",
        support=Support(
            dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
            head_dims=HeadDims(),
            head_dims_v=HeadDims(),
            devices=frozenset({"cpu", "cuda", "mps", "xpu"}),
            causal=frozenset({"bottom_right", "top_left"}),
            window=True,
            attn_mask=frozenset({"bool", "float"}),
            attn_mask_grad=True,
            alibi=True,
            sinks=True,
            sinks_grad=True,
            lengths=True,
            softcap=True,
            dropout=True,
            gqa=True,
            backward=True,
            lse=True,
            lse_grad=True,
            deterministic=True,
        ),
        priority={"*": 0},
        numerics="exact",
        memory="chunked",
        fused=False,
        portable=True,
    )


def prepare(problem: Problem) -> None:
    """Nothing to compile."""


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
    """FA-2 Algorithm 1. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
    tiles = Tiles.of(problem, q, k, extras)
    batch, seqlen_q, heads_q, _ = q.shape
    out = empty_output(problem, q)
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=tiles.dtype)
    for rows in tiles.row_blocks():
        Q_i = tiles.load_rows(q, rows) * problem.scale
        m_i, l_i, acc_i = _online_softmax(tiles, Q_i, k, v, rows)
        tiles.store_rows(out, rows, acc_i / l_i.masked_fill(l_i == 0, 1.0))  # a row without keys has acc = 0
        tiles.store_column(lse, rows, m_i + l_i.log())
    if tiles.q_lens is not None:  # a sink has given the rows past q_lens an LSE, too
        lse.masked_fill_(torch.arange(seqlen_q, device=q.device) >= tiles.q_lens.view(batch, 1, 1), -math.inf)
    return Forward(out, lse, (q, k, v, out, lse, *extras.given(problem)) if problem.needs_backward else ())


def _online_softmax(tiles: Tiles, Q_i: Tensor, k: Tensor, v: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """m, l (B, Hkv, G*m, 1) and acc (B, Hkv, G*m, Dv) of one query block over all keys."""
    m_i = tiles.sink_column(rows)
    l_i = torch.zeros_like(m_i) if tiles.extras.sinks is None else torch.ones_like(m_i)
    acc_i = Q_i.new_zeros((*Q_i.shape[:-1], v.shape[-1]))
    for keys in tiles.key_blocks(rows):
        K_j, V_j = tiles.load_keys(k, keys), tiles.load_keys(v, keys)
        S_ij, _ = _scores(tiles, Q_i, K_j, rows, keys)
        m_new = torch.maximum(m_i, S_ij.amax(dim=-1, keepdim=True))
        base = m_new.masked_fill(m_new == -math.inf, 0.0)  # no key so far: -inf - 0, not -inf - -inf
        P_ij = S_ij.sub_(base).exp_()
        alpha = (m_i - base).exp_()
        l_i = alpha * l_i + P_ij.sum(dim=-1, keepdim=True)  # of the weights before dropout
        acc_i = alpha * acc_i + _drop(P_ij, tiles.dropped(rows, keys), tiles.problem.dropout_p) @ V_j
        m_i = m_new
    return m_i, l_i, acc_i


def backward(problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs) -> Gradients:
    """FA-2 Algorithm 2, query blocks outermost."""
    q, k, v, out, lse, *given = saved
    extras = Extras.restored(problem, given)
    tiles = Tiles.of(problem, q, k, extras)
    needs_dS = needs.q or needs.k or needs.attn_mask
    dq = empty_gradient(q) if needs.q else None
    dK = tiles.zeros(k.transpose(1, 2).shape) if needs.k else None
    dV = tiles.zeros(v.transpose(1, 2).shape) if needs.v else None
    dmask = tiles.zeros(extras.attn_mask.shape) if needs.attn_mask and extras.attn_mask is not None else None
    dsinks = tiles.zeros(extras.sinks.shape) if needs.sinks and extras.sinks is not None else None

    for rows in tiles.row_blocks():
        LSE_i = tiles.load_column(lse, rows)  # (B, Hkv, G*m, 1)
        empty = LSE_i == -math.inf  # rows that see no key, and those past q_lens
        LSE_i = LSE_i.masked_fill(empty, 0.0)
        Q_i = (tiles.load_rows(q, rows) * problem.scale).masked_fill(empty, 0.0)
        dO_i = tiles.load_rows(dout, rows).masked_fill(empty, 0.0)
        Delta_i = (dO_i * tiles.load_rows(out, rows)).sum(dim=-1, keepdim=True)  # (B, Hkv, G*m, 1)
        if dlse is not None:
            Delta_i -= tiles.load_column(dlse, rows).masked_fill(empty, 0.0)
        total_i = None if tiles.float_mask is None else _row_total(tiles, Q_i, k, LSE_i, rows)

        if dsinks is not None:
            P_sink = _normalised(tiles.sink_column(rows), LSE_i, total_i).masked_fill(empty, 0.0)
            dsinks -= tiles.by_head(P_sink * Delta_i, rows).sum(dim=(0, 3, 4)).flatten()  # (Hq,)
        if not needs_dS and dV is None:
            continue
        dQ_i = torch.zeros_like(Q_i)
        for keys in tiles.key_blocks(rows):
            K_j, V_j = tiles.load_keys(k, keys), tiles.load_keys(v, keys)
            S_ij, tanh_ij = _scores(tiles, Q_i, K_j, rows, keys)
            P_ij = _normalised(S_ij, LSE_i, total_i)
            dropped = tiles.dropped(rows, keys)
            if dV is not None:
                dV[:, :, keys] += _drop(P_ij, dropped, problem.dropout_p).mT @ dO_i
            if not needs_dS:
                continue
            dP_ij = _drop(dO_i @ V_j.mT, dropped, problem.dropout_p)
            dS_ij = dP_ij.sub_(Delta_i).mul_(P_ij)
            if dmask is not None:
                dmask_ij = tiles.of_mask(dmask, rows, keys)
                dmask_ij += tiles.by_head(dS_ij, rows).sum_to_size(dmask_ij.shape)
            if tanh_ij is not None:
                dS_ij *= 1 - tanh_ij.square()
            if dq is not None:
                dQ_i += dS_ij @ K_j
            if dK is not None:
                dK[:, :, keys] += dS_ij.mT @ Q_i  # sums over the group, too; Q_i carries the scale
        if dq is not None:
            tiles.store_rows(dq, rows, dQ_i * problem.scale)

    return Gradients(
        q=dq,
        k=None if dK is None else empty_gradient(k).copy_(dK.transpose(1, 2)),
        v=None if dV is None else empty_gradient(v).copy_(dV.transpose(1, 2)),
        attn_mask=None if dmask is None or extras.attn_mask is None else dmask.to(extras.attn_mask.dtype),
        sinks=None if dsinks is None or extras.sinks is None else dsinks.to(extras.sinks.dtype),
    )


def _normalised(S: Tensor, LSE_i: Tensor, total_i: Tensor | None) -> Tensor:
    """P = exp(S - LSE), in place of S."""
    P = S.sub_(LSE_i).exp_()
    return P if total_i is None else P.div_(total_i)


def _row_total(tiles: Tiles, Q_i: Tensor, k: Tensor, LSE_i: Tensor, rows: slice) -> Tensor:
    """What exp(S - LSE) sums to over each row, (B, Hkv, G*m, 1): 1, but for the rounding of the LSE.

    Next to a mask value like finfo.min the LSE has no digits left for log(l), and P would be too large by the number of
    keys. Costs one product more; the rounding of ordinary scores is no larger in the LSE than in S itself.
    """
    total_i = (tiles.sink_column(rows) - LSE_i).exp_()
    for keys in tiles.key_blocks(rows):
        S_ij, _ = _scores(tiles, Q_i, tiles.load_keys(k, keys), rows, keys)
        total_i += S_ij.sub_(LSE_i).exp_().sum(dim=-1, keepdim=True)
    return total_i.masked_fill_(total_i == 0, 1.0)


def _scores(tiles: Tiles, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
    """S_ij (B, Hkv, G*m, n), -inf where hidden; and tanh(S / softcap), which the backward needs.

    In the contract's order: scale (already in Q_i) * Q K^T, softcap, float mask and ALiBi, then what hides keys.
    """
    S_ij = Q_i @ K_j.mT
    tanh_ij = None
    if tiles.problem.softcap is not None:
        tanh_ij = S_ij.div_(tiles.problem.softcap).tanh_()
        S_ij = tanh_ij * tiles.problem.softcap
    _add_bias(tiles, tiles.by_head(S_ij, rows), rows, keys)
    _hide(tiles, tiles.by_head(S_ij, rows), rows, keys)
    return S_ij, tanh_ij


def _add_bias(tiles: Tiles, S: Tensor, rows: slice, keys: slice) -> None:
    """Adds the float attn_mask and ALiBi to S (B, Hkv, G, m, n), in place."""
    if tiles.float_mask is not None:
        S += tiles.of_mask(tiles.float_mask, rows, keys)
    if tiles.slopes is not None:
        S.addcmul_(tiles.slopes, tiles.distance(rows, keys).abs().to(S.dtype), value=-1.0)


def _hide(tiles: Tiles, S: Tensor, rows: slice, keys: slice) -> None:
    """Sets S (B, Hkv, G, m, n) to -inf where a key is hidden, in place, each mask in its own broadcast shape.

    Filled, not added, so that a NaN past the lengths goes away. A tile in which nothing hides a key is left alone.
    """
    if tiles.bool_mask is not None:
        S.masked_fill_(~tiles.of_mask(tiles.bool_mask, rows, keys), -math.inf)
    if tiles.band_cuts(rows, keys):
        band, distance = tiles.problem.band, tiles.distance(rows, keys)
        if band.left is not None:
            S.masked_fill_(distance < -band.left, -math.inf)
        if band.right is not None:
            S.masked_fill_(distance > band.right, -math.inf)
    if tiles.q_lens is not None:
        S.masked_fill_(tiles.index(rows)[:, None] >= tiles.q_lens, -math.inf)
    if tiles.kv_lens is not None:
        S.masked_fill_(tiles.index(keys) >= tiles.kv_lens, -math.inf)


def _drop(x: Tensor, dropped: Tensor | None, p: float) -> Tensor:
    """Dropout of a tile; p = 1 gives 0, not 0 * inf."""
    if dropped is None:
        return x
    return x.masked_fill(dropped, 0.0).mul_(1 / (1 - p) if p < 1 else 0.0)
