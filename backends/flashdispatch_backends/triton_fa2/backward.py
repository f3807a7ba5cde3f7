"""The backward kernels: FlashAttention-2, Algorithm 2 (arXiv 2307.08691, "FA-2"), as two passes without atomics.

P is not stored by the forward. Every backward kernel makes it again, already normalised, from S and the LSE; with
Delta = rowsum(dO * O), which equals rowsum(P * dP) (FlashAttention, arXiv 2205.14135, appendix B.2):

    P = exp(S - LSE)    dV = P^T dO    dP = dO V^T    dS = P * (dP - Delta)    dQ = scale dS K    dK = scale dS^T Q

FA-2 runs over key blocks and adds dQ up in memory, with atomics, whose order is nobody's. Here dQ has a pass of its
own: seven products instead of five (eight where dK and dV have a pass each), and in return the gradients are bitwise
repeatable, always, and no accumulator of the size of Q is kept in memory. A gradient of the LSE adds P * dLSE to dS:
Delta - dLSE takes the place of Delta.

dq_kernel       One program per query block, as in the forward (heavy blocks first); Q, dO and acc = dQ stay, K and V
                stream. It also makes Delta, which the other kernels read: it has dO on the chip anyway.
dkdv_kernel     One program per key block of a key/value head; K, V, dK and dV stay, Q and dO stream, for one query head
                of the group after the other (GQA: the sum over the group costs nothing). It works on the transposed
                tile, S^T = K Q^T, so that P^T and dS^T are left operands of the next product as they are, in registers.
program ids     As in the forward; in dkdv_kernel of key/value heads. Under a causal mask a few of them take turns, and
                key blocks count up, since the first one has the most work.
tiles           block_m by block_n from `tiles.py`, each kernel with its own; dK and dV are two accumulators, so that
                registers bound them. Where they are too wide for registers side by side, dkdv_kernel runs once for
                each, and makes S twice.
strides         As in the forward; dout has any strides with a contiguous last dim. Offsets are 64 bit.
the loop        Two, as in the forward: whole blocks, then those that an edge of the band or a tail cuts.
masks           Hidden scores are -inf before exp, key tails too: exp(0 - LSE) overflows when every score is about -120.
kept            From the forward: q, k, v, out, LSE. Beside them in memory: Delta, 4 bytes a row; with natural
                scores (scores.py: a float mask) `total`, 4 more; partial sums of dsinks and dmask.
coarse LSE      A float mask may put all scores of a row near finfo.min, where a float32 LSE has no digits left for
                log(l), and exp(S - LSE) is as many times too large as there are keys. Where one of its rows is that far
                out, dq_kernel first sums P over the row, and leaves 1 / sum in `total` for the other kernels.
empty rows      LSE = -inf (no key, or past q_lens) reads as +inf, so that P = exp(S - inf) = 0; Delta is 0 there.
hardware        As in the forward.
the tail        Rows past the lengths are loaded as 0, and their gradients stored as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdispatch_backends.triton_fa2.scores import (
    block_start,
    count_blocks,
    diagonal,
    dropout_keep,
    exponential,
    in_units,
    key_blocks,
    load_tile,
    query_blocks,
    scores,
    sequence,
    store_tile,
    work_of_program,
)

COARSE_LSE: tl.constexpr = tl.constexpr(4096.0)
"""Beyond it a float32 LSE is too coarse to normalise by: its last digit is worth 2**-11 of P, and more further on."""


@triton.jit
def load_rows(base, first, end, BLOCK: tl.constexpr):
    """One float32 a row, of Delta, dLSE or total; 0 past the end."""
    row = tl.arange(0, BLOCK)
    return tl.load(base + first + row, mask=row < end - first, other=0.0)


@triton.jit
def load_lse(base, first, end, NATURAL: tl.constexpr, BLOCK: tl.constexpr):
    """LSE in the scores' units; +inf for a row that sees no key and past the end, so that exp(S - LSE) is 0 there."""
    row = tl.arange(0, BLOCK)
    LSE = tl.load(base + first + row, mask=row < end - first, other=float("-inf"))
    return in_units(tl.where(LSE == float("-inf"), float("inf"), LSE), NATURAL)


@triton.jit
def dq_kernel(
    q, k, v, out, lse, dout, dlse, delta, total, dq, dsinks, mask, slopes, sinks, q_lens, kv_lens, seed,
    q_starts, k_starts,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, stride_dqb, stride_dqs, stride_dqh,
    stride_lb, stride_lh, stride_mb, stride_mh, stride_mm, stride_mn, stride_slopes,
    heads, group, heads_at_once, seqlen_q, seqlen_k, left, right, scale, softcap, threshold, kept, gradient_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOP_LEFT: tl.constexpr, MASK: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills delta and, with natural scores, total (B, Hq, Sq).

    And unless they are None dq (B, Sq, Hq, D), and dsinks (B, Hq, blocks), which the host sums.
    """
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block, bh = work_of_program(blocks, heads_at_once)
    if right is not None:
        block = blocks - 1 - block
    b, h = bh // heads, bh % heads
    b64, h64, kv64 = tl.cast(b, tl.int64), tl.cast(h, tl.int64), tl.cast(h // group, tl.int64)

    q_start, q_len, q_end = sequence(q_starts, q_lens, b, seqlen_q)
    k_start, kv_len, _k_end = sequence(k_starts, kv_lens, b, seqlen_k)
    q += b64 * stride_qb + h64 * stride_qh + q_start * stride_qs
    out += b64 * stride_ob + h64 * stride_oh + q_start * stride_os
    dout += b64 * stride_dob + h64 * stride_doh + q_start * stride_dos
    k += b64 * stride_kb + kv64 * stride_kh + k_start * stride_ks
    v += b64 * stride_vb + kv64 * stride_vh + k_start * stride_vs
    row_base = b64 * stride_lb + h64 * stride_lh + q_start

    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dO = load_tile(dout, first, stride_dos, q_len, BLOCK_M, BLOCK_DV, DV, True)
    O = load_tile(out, first, stride_os, q_len, BLOCK_M, BLOCK_DV, DV, True)
    LSE = load_lse(lse + row_base, first, q_len, NATURAL, BLOCK_M)
    Delta = tl.sum(dO.to(tl.float32) * O.to(tl.float32), 1)  # FA-2 Algorithm 2 line 4
    if dlse is not None:
        Delta -= load_rows(dlse + row_base, first, q_len, BLOCK_M)
    Delta = tl.where(LSE == float("inf"), 0.0, Delta)
    tl.store(delta + row_base + rows, Delta, mask=rows < q_end)
    slope = 0.0
    if slopes is not None:
        slope = in_units(tl.load(slopes + b * stride_slopes + h), NATURAL)
    if mask is not None:
        mask += b64 * stride_mb + h64 * stride_mh
    shift = diagonal(q_len, kv_len, TOP_LEFT)
    last = tl.minimum(first + BLOCK_M, q_len) - 1
    keys_seen = tl.where(first < q_len, kv_len, 0)  # a block of padding has no keys to visit
    edges = key_blocks(first, last, shift, keys_seen, left, right, BLOCK_N)
    Q = load_tile(q, first, stride_qs, q_len, BLOCK_M, BLOCK_D, D, True)

    share = tl.full((BLOCK_M,), 1.0, tl.float32)
    if total is not None:
        if tl.max(tl.where(LSE == float("inf"), 0.0, tl.abs(LSE))) > COARSE_LSE:
            sums = tl.zeros((BLOCK_M,), tl.float32)
            for key in tl.range(edges[0], edges[3], BLOCK_N):
                K = load_tile(k, key, stride_ks, kv_len, BLOCK_N, BLOCK_D, D, True)
                qk = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
                j = (key + tl.arange(0, BLOCK_N))[None, :]
                S, _ = scores(
                    qk, i, j, first, key, shift, q_len, kv_len, left, right, scale, softcap, slope, mask, stride_mm,
                    stride_mn, True, slopes is not None, MASK,
                )  # fmt: skip
                sums += tl.sum(exponential(S - LSE[:, None], NATURAL), 1)
            if sinks is not None:
                sums += exponential(tl.load(sinks + h) - LSE, NATURAL)
            share = tl.where(sums == 0.0, 1.0, 1.0 / sums)
        tl.store(total + row_base + rows, share, mask=rows < q_len)

    if dsinks is not None:
        P_sink = exponential(in_units(tl.load(sinks + h), NATURAL) - LSE, NATURAL) * share
        tl.store(dsinks + bh * blocks + block, -tl.sum(P_sink * Delta))

    if dq is not None:
        for cut in tl.static_range(2):
            for index in tl.range(count_blocks(edges, cut, BLOCK_N)):
                key = block_start(edges, index, cut, BLOCK_N)
                K = load_tile(k, key, stride_ks, kv_len, BLOCK_N, BLOCK_D, D, cut)
                V = load_tile(v, key, stride_vs, kv_len, BLOCK_N, BLOCK_DV, DV, cut)
                qk = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
                dP = tl.dot(dO, tl.trans(V), input_precision=PRECISION)
                j = (key + tl.arange(0, BLOCK_N))[None, :]
                S, tanh = scores(
                    qk, i, j, first, key, shift, q_len, kv_len, left, right, scale, softcap, slope, mask, stride_mm,
                    stride_mn, cut, slopes is not None, MASK,
                )  # fmt: skip
                P = exponential(S - LSE[:, None], NATURAL)
                if total is not None:
                    P *= share[:, None]
                if seed is not None:
                    keep = dropout_keep(seed, first, key, bh, threshold, BLOCK_M, BLOCK_N)
                    dP = tl.where(keep, dP * kept, 0.0)
                dS = P * (dP - Delta[:, None])
                if softcap is not None:
                    dS *= 1.0 - tanh * tanh
                acc = tl.dot(dS.to(K.dtype), K, acc, input_precision=PRECISION)
        dq += b64 * stride_dqb + h64 * stride_dqh + q_start * stride_dqs
        store_tile(dq, acc * gradient_scale, first, stride_dqs, q_end, BLOCK_M, BLOCK_D, D)


@triton.jit
def dkdv_kernel(
    q, k, v, lse, dout, delta, total, dk, dv, mask, slopes, q_lens, kv_lens, seed, q_starts, k_starts,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    stride_lb, stride_lh, stride_mb, stride_mh, stride_mm, stride_mn, stride_slopes,
    heads, heads_at_once, seqlen_q, seqlen_k, left, right, scale, softcap, threshold, kept, gradient_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOP_LEFT: tl.constexpr, MASK: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills dk (B, Sk, Hkv, D) and dv (B, Sk, Hkv, Dv), each unless it is None."""
    blocks = tl.cdiv(seqlen_k, BLOCK_N)
    block, b_kv = work_of_program(blocks, heads_at_once)
    heads_kv = heads // GROUP
    b, kv_head = b_kv // heads_kv, b_kv % heads_kv
    b64, kv64 = tl.cast(b, tl.int64), tl.cast(kv_head, tl.int64)

    q_start, q_len, _q_end = sequence(q_starts, q_lens, b, seqlen_q)
    k_start, kv_len, k_end = sequence(k_starts, kv_lens, b, seqlen_k)
    k += b64 * stride_kb + kv64 * stride_kh + k_start * stride_ks
    v += b64 * stride_vb + kv64 * stride_vh + k_start * stride_vs

    first = block * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    j = keys[:, None]
    acc_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    acc_v = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    if first < kv_len:
        shift = diagonal(q_len, kv_len, TOP_LEFT)
        edges = query_blocks(first, first + BLOCK_N - 1, shift, q_len, kv_len, left, right, BLOCK_M)
        K = load_tile(k, first, stride_ks, kv_len, BLOCK_N, BLOCK_D, D, True)
        V = load_tile(v, first, stride_vs, kv_len, BLOCK_N, BLOCK_DV, DV, True)
        for member in tl.range(GROUP):
            h = kv_head * GROUP + member
            h64 = tl.cast(h, tl.int64)
            bh = b * heads + h
            row_base = b64 * stride_lb + h64 * stride_lh + q_start
            q_h = q + b64 * stride_qb + h64 * stride_qh + q_start * stride_qs
            dout_h = dout + b64 * stride_dob + h64 * stride_doh + q_start * stride_dos
            slope = 0.0
            if slopes is not None:
                slope = in_units(tl.load(slopes + b * stride_slopes + h), NATURAL)
            mask_h = mask
            if mask is not None:
                mask_h = mask + b64 * stride_mb + h64 * stride_mh
            for cut in tl.static_range(2):
                for index in tl.range(count_blocks(edges, cut, BLOCK_M)):
                    row = block_start(edges, index, cut, BLOCK_M)
                    Q = load_tile(q_h, row, stride_qs, q_len, BLOCK_M, BLOCK_D, D, cut)
                    dO = load_tile(dout_h, row, stride_dos, q_len, BLOCK_M, BLOCK_DV, DV, cut)
                    LSE = load_lse(lse + row_base, row, q_len, NATURAL, BLOCK_M)
                    qkT = tl.dot(K, tl.trans(Q), input_precision=PRECISION)
                    i = (row + tl.arange(0, BLOCK_M))[None, :]
                    ST, tanhT = scores(
                        qkT, i, j, row, first, shift, q_len, kv_len, left, right, scale, softcap, slope, mask_h,
                        stride_mm, stride_mn, cut, slopes is not None, MASK,
                    )  # fmt: skip
                    PT = exponential(ST - LSE[None, :], NATURAL)
                    if total is not None:
                        PT *= load_rows(total + row_base, row, q_len, BLOCK_M)[None, :]
                    ZT = PT  # the weights after dropout
                    if seed is not None:
                        keepT = tl.trans(dropout_keep(seed, row, first, bh, threshold, BLOCK_M, BLOCK_N))
                        ZT = tl.where(keepT, PT * kept, 0.0)
                    if dv is not None:
                        acc_v = tl.dot(ZT.to(dO.dtype), dO, acc_v, input_precision=PRECISION)
                    if dk is not None:
                        Delta = load_rows(delta + row_base, row, q_len, BLOCK_M)
                        dPT = tl.dot(V, tl.trans(dO), input_precision=PRECISION)
                        if seed is not None:
                            dPT = tl.where(keepT, dPT * kept, 0.0)
                        dST = PT * (dPT - Delta[None, :])
                        if softcap is not None:
                            dST *= 1.0 - tanhT * tanhT
                        acc_k = tl.dot(dST.to(Q.dtype), Q, acc_k, input_precision=PRECISION)
    if dk is not None:
        dk += b64 * stride_dkb + kv64 * stride_dkh + k_start * stride_dks
        store_tile(dk, acc_k * gradient_scale, first, stride_dks, k_end, BLOCK_N, BLOCK_D, D)
    if dv is not None:
        dv += b64 * stride_dvb + kv64 * stride_dvh + k_start * stride_dvs
        store_tile(dv, acc_v, first, stride_dvs, k_end, BLOCK_N, BLOCK_DV, DV)
