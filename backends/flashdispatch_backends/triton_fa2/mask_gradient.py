"""The gradient of a float attn_mask: dS, summed in float32 over the dims that the mask broadcasts.

Only a mask that wants a gradient pays for it, with a pass of its own: a mask shared by sequences and heads needs their
sum, which neither backward kernel sees whole, and atomics would make it depend on chance. S and P are made again
as in `backward`, from q, k, v, dO, the LSE, and the Delta and `total` that dq_kernel left:

    dmask_ij = sum over what is broadcast of P_ij (dP_ij - Delta_i)

program ids     One dimension, key blocks fastest, then query blocks or `parts` of them, then the mask's heads, then its
                sequences. A mask without rows (one number per key) is summed in at most `parts` pieces per key, which
                the host adds up; a mask without keys leaves one number per row and key block.
the loop        Over the sequences, heads and query blocks that share the program's entries of the mask. Tiles that the
                band hides are passed over.
tiles           block_m by block_n, a careful one: no row of `tiles.py` is shipped. acc, S and dP fill the registers.
strides         As in the backward; dmask is contiguous. A dim that the mask broadcasts has stride 0.
hardware        As in the forward.
masks           All of them, in every tile: a float mask is rarely the fast path.
kept            acc, a (block_m, block_n) tile in float32.
the tail        Entries past the lengths get 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdispatch_backends.triton_fa2.backward import load_lse, load_rows
from flashdispatch_backends.triton_fa2.scores import (
    diagonal,
    dropout_keep,
    exponential,
    key_blocks,
    load_tile,
    scores,
    sequence,
)


@triton.jit
def dmask_kernel(
    q, k, v, lse, dout, delta, total, dmask, mask, slopes, q_lens, kv_lens, seed,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_lb, stride_lh, stride_mb, stride_mh, stride_mm, stride_mn, stride_slopes,
    batch, heads, group, seqlen_q, seqlen_k, left, right, scale, softcap, threshold, kept, parts,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TOP_LEFT: tl.constexpr, PRECISION: tl.constexpr,
    PER_SEQUENCE: tl.constexpr, PER_HEAD: tl.constexpr, PER_ROW: tl.constexpr, PER_KEY: tl.constexpr,
):  # fmt: skip
    """dmask, contiguous float32: (B | 1, Hq | 1, Sq | parts, Sk | key blocks), to be summed where PER_ is false."""
    key_block_count = tl.cdiv(seqlen_k, BLOCK_N)
    query_block_count = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    key_block = pid % key_block_count
    part = (pid // key_block_count) % parts
    of_mask = pid // (key_block_count * parts)  # the mask's sequence * its heads + its head

    key = key_block * BLOCK_N
    keys = key + tl.arange(0, BLOCK_N)
    j = keys[None, :]
    per_part = tl.cdiv(query_block_count, parts)
    first_block = part * per_part
    end_block = tl.minimum(first_block + per_part, query_block_count)

    first_b, end_b = 0, batch
    first_h, end_h = 0, heads
    if PER_HEAD:
        first_h = of_mask % heads
        end_h = first_h + 1
    if PER_SEQUENCE:
        first_b = of_mask // heads if PER_HEAD else of_mask
        end_b = first_b + 1

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for b in tl.range(first_b, end_b):
        _q_start, q_len, _q_end = sequence(None, q_lens, b, seqlen_q)
        _k_start, kv_len, _k_end = sequence(None, kv_lens, b, seqlen_k)
        shift = diagonal(q_len, kv_len, TOP_LEFT)
        b64 = tl.cast(b, tl.int64)
        for h in tl.range(first_h, end_h):
            h64, kv64 = tl.cast(h, tl.int64), tl.cast(h // group, tl.int64)
            slope = 0.0
            if slopes is not None:
                slope = tl.load(slopes + b * stride_slopes + h)
            q_h = q + b64 * stride_qb + h64 * stride_qh
            dout_h = dout + b64 * stride_dob + h64 * stride_doh
            row_base = b64 * stride_lb + h64 * stride_lh
            mask_h = mask + b64 * stride_mb + h64 * stride_mh
            K = load_tile(k + b64 * stride_kb + kv64 * stride_kh, key, stride_ks, kv_len, BLOCK_N, BLOCK_D, D, True)
            V = load_tile(v + b64 * stride_vb + kv64 * stride_vh, key, stride_vs, kv_len, BLOCK_N, BLOCK_DV, DV, True)
            for block in tl.range(first_block, end_block):
                row = block * BLOCK_M
                i = (row + tl.arange(0, BLOCK_M))[:, None]
                last = tl.minimum(row + BLOCK_M, q_len) - 1
                edges = key_blocks(row, last, shift, kv_len, left, right, BLOCK_N)
                if (row < q_len) & (key >= edges[0]) & (key < edges[3]):
                    Q = load_tile(q_h, row, stride_qs, q_len, BLOCK_M, BLOCK_D, D, True)
                    dO = load_tile(dout_h, row, stride_dos, q_len, BLOCK_M, BLOCK_DV, DV, True)
                    qk = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
                    dP = tl.dot(dO, tl.trans(V), input_precision=PRECISION)
                    S, _ = scores(
                        qk, i, j, row, key, shift, q_len, kv_len, left, right, scale, softcap, slope, mask_h, stride_mm,
                        stride_mn, True, slopes is not None, "float",
                    )  # fmt: skip
                    P = exponential(S - load_lse(lse + row_base, row, q_len, True, BLOCK_M)[:, None], True)
                    P *= load_rows(total + row_base, row, q_len, BLOCK_M)[:, None]
                    if seed is not None:
                        keep = dropout_keep(seed, row, key, b * heads + h, threshold, BLOCK_M, BLOCK_N)
                        dP = tl.where(keep, dP * kept, 0.0)
                    acc += P * (dP - load_rows(delta + row_base, row, q_len, BLOCK_M)[:, None])

    row = first_block * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    if PER_ROW and PER_KEY:
        at = dmask + (tl.cast(of_mask, tl.int64) * seqlen_q + rows[:, None]) * seqlen_k + j
        tl.store(at, acc, mask=(rows[:, None] < seqlen_q) & (j < seqlen_k))
    elif PER_ROW:
        at = dmask + (tl.cast(of_mask, tl.int64) * seqlen_q + rows) * key_block_count + key_block
        tl.store(at, tl.sum(acc, 1), mask=rows < seqlen_q)
    elif PER_KEY:
        at = dmask + (tl.cast(of_mask, tl.int64) * parts + part) * seqlen_k + keys
        tl.store(at, tl.sum(acc, 0), mask=keys < seqlen_k)
    else:
        tl.store(dmask + (tl.cast(of_mask, tl.int64) * parts + part) * key_block_count + key_block, tl.sum(acc))
