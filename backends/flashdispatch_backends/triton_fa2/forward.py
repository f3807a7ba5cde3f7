"""The forward kernel: FlashAttention-2, Algorithm 1 (arXiv 2307.08691, "FA-2"), in plain Triton.

One program owns one block of queries of one head. Its Q stays on the chip, K and V stream past, and a softmax row is
finished piece by piece (FA-2 section 2.3.1). For each query three running values, all in float32:

    m       the largest score so far                       m_new = max(m, rowmax(S))     P = exp(S - m_new)
    l       the sum of exp(S - m) so far                   alpha = exp(m - m_new)        l = alpha l + rowsum(P)
    acc     the sum of exp(S - m) V so far                                               acc = alpha acc + P V

    O = acc / l  and  LSE = m + log l  are written once, at the end.

program ids     One dimension, pid = (b * Hq + h) * blocks + block: the blocks of a head run side by side and find its K
                and V in the L2 cache. Under a causal mask the last block has the most work, so blocks count down, and a
                few heads take turns (`work_of_program`): heavy blocks first, and light ones fill the gaps at the end.
tiles           block_m queries by block_n keys, from `tiles.py`: S and acc must fit into registers, and what is fastest
                is measured. Small tiles let several programs share a multiprocessor, and one's softmax then hides
                behind another's products. The head dim is not split; it is padded with zeros to a power of two (at
                least 64 on sm_90 and sm_100, else 16) on the chip, never in memory.
strides         q (B, Sq, Hq, D), k and v (B, Sk, Hkv, ·) have any strides with a contiguous last dim. Query head h
                reads key/value head h // group (GQA): nothing is expanded. Offsets are 64 bit.
the loop        Two of them, each key block in one: first the whole ones, of which position hides nothing, then those
                that the window's left edge, the diagonal or the end of the keys cuts. Blocks beyond are not visited.
                (The online softmax does not mind the order.)
masks           Position and tails in the second loop only; attn_mask, where there is one, in both. Hidden scores are
                -inf before exp. A row that has seen no key has m = -inf, and subtracts 0.
kept            m, l, acc on the chip; LSE for the backward, which recomputes P from it.
hardware        tl.dot becomes mma.sync on sm_80, sm_86 and sm_120, wgmma on sm_90, and tcgen05 on sm_100 where a tile
                has at least 64 rows (else mma.sync). P goes to the second product without passing through shared
                memory: in registers, on sm_100 in tensor memory, where acc lies, too. K and V are copied
                asynchronously, num_stages - 1 blocks ahead.
the tail        Rows past a sequence's length are stored as out = 0 and LSE = -inf; nothing is written past its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdispatch_backends.triton_fa2.scores import (
    LOG2E,
    block_start,
    count_blocks,
    diagonal,
    dropout_keep,
    exponential,
    in_units,
    key_blocks,
    load_tile,
    scores,
    sequence,
    store_tile,
    work_of_program,
)


@triton.jit
def forward_kernel(
    q, k, v, out, lse, mask, slopes, sinks, q_lens, kv_lens, seed, q_starts, k_starts,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh, stride_mb, stride_mh, stride_mm, stride_mn, stride_slopes,
    heads, group, heads_at_once, seqlen_q, seqlen_k, left, right, scale, softcap, threshold, kept,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOP_LEFT: tl.constexpr, MASK: tl.constexpr, PLAIN: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills out (B, Sq, Hq, Dv) and, unless it is None, lse (B, Hq, Sq). PLAIN: a score is scale * q.k, scale >= 0."""
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
    k += b64 * stride_kb + kv64 * stride_kh + k_start * stride_ks
    v += b64 * stride_vb + kv64 * stride_vh + k_start * stride_vs

    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    i = rows[:, None]

    # FA-2 Algorithm 1 line 5, or the state after a sink: one more column, of value zero
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:
        m = tl.zeros((BLOCK_M,), tl.float32) + in_units(tl.load(sinks + h), NATURAL)
        l += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    if first < q_len:
        slope = 0.0
        if slopes is not None:
            slope = in_units(tl.load(slopes + b * stride_slopes + h), NATURAL)
        if mask is not None:
            mask += b64 * stride_mb + h64 * stride_mh
        shift = diagonal(q_len, kv_len, TOP_LEFT)
        last = tl.minimum(first + BLOCK_M, q_len) - 1
        edges = key_blocks(first, last, shift, kv_len, left, right, BLOCK_N)
        Q = load_tile(q, first, stride_qs, q_len, BLOCK_M, BLOCK_D, D, True)
        for cut in tl.static_range(2):  # whole blocks, then cut ones
            for index in tl.range(count_blocks(edges, cut, BLOCK_N)):
                key = block_start(edges, index, cut, BLOCK_N)
                # FA-2 Algorithm 1 lines 7 to 10
                K = load_tile(k, key, stride_ks, kv_len, BLOCK_N, BLOCK_D, D, cut)
                qk = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
                if PLAIN and not cut:  # the scale is folded: one fused multiply-add and one exp2 a score
                    m_new = tl.maximum(m, tl.max(qk, 1) * scale)
                    P = tl.exp2(qk * scale - m_new[:, None])
                    alpha = tl.exp2(m - m_new)
                else:
                    j = (key + tl.arange(0, BLOCK_N))[None, :]
                    S, _ = scores(
                        qk, i, j, first, key, shift, q_len, kv_len, left, right, scale, softcap, slope, mask, stride_mm,
                        stride_mn, cut, slopes is not None, MASK,
                    )  # fmt: skip
                    m_new = tl.maximum(m, tl.max(S, 1))
                    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key yet: -inf - 0, not -inf - -inf
                    P = exponential(S - base[:, None], NATURAL)
                    alpha = exponential(m - base, NATURAL)
                l = alpha * l + tl.sum(P, 1)  # before dropout, which leaves the softmax as it is
                if seed is not None:
                    P = tl.where(dropout_keep(seed, first, key, bh, threshold, BLOCK_M, BLOCK_N), P, 0.0)
                V = load_tile(v, key, stride_vs, kv_len, BLOCK_N, BLOCK_DV, DV, cut)
                acc = tl.dot(P.to(V.dtype), V, acc * alpha[:, None], input_precision=PRECISION)
                m = m_new

    # FA-2 Algorithm 1 lines 12 to 15. A row without keys has l = 0 and acc = 0.
    inside = rows < q_len
    if seed is not None:
        acc *= kept
    O = tl.where(inside[:, None], acc / tl.where(l == 0.0, 1.0, l)[:, None], 0.0)
    store_tile(out, O, first, stride_os, q_end, BLOCK_M, BLOCK_DV, DV)
    if lse is not None:
        m = tl.where(inside, m, float("-inf"))
        LSE = m + tl.log2(l) / LOG2E if NATURAL else (m + tl.log2(l)) / LOG2E  # log2(0) = -inf: no key
        tl.store(lse + b64 * stride_lb + h64 * stride_lh + q_start + rows, LSE, mask=rows < q_end)
