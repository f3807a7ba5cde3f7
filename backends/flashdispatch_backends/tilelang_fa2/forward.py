"""The forward kernel: FlashAttention-2, Algorithm 1 (arXiv 2307.08691, "FA-2"), in TileLang.

One program owns one block of queries of one head. Its Q stays in shared memory, K and V stream past, and a softmax row
is finished piece by piece (FA-2 section 2.3.1). Where the paper's symbols are:

    paper                                   here
    Q_i, K_j, V_j (on-chip SRAM)            Q, K, V: shared memory; K and V num_stages deep
    B_r, B_c (block sizes)                  block_m, block_n
    S_i^(j) = Q_i K_j^T        line 8       T.gemm(Q, K, S, transpose_B=True)
    m_i^(j)                    line 9       T.reduce_max(S, m): the largest score so far
    P~_i^(j) = exp(S - m)      line 9       S again, as exp2 with the scale folded in; P is its copy in 16 bit
    l_i^(j)                    line 9       l = alpha l + rowsum: the sum of exp(S - m) so far
    diag(exp(m_old - m_new))   line 10      alpha
    O_i^(j)                    line 10      acc = alpha acc + P V: T.gemm(P, V, acc)
    O_i = diag(l)^-1 O_i       line 12      once, after the loop
    L_i = m_i + log l_i        line 13      lse

program ids     One dimension, pid = (b * Hq + h) * blocks + block: the blocks of a head run side by side and find its K
                and V in the L2 cache. Under a causal mask the last block has the most work, so blocks count down, and a
                few heads take turns (`work_of_program`): heavy blocks first, and light ones fill the gaps at the end.
tiles           block_m queries by block_n keys, from `tiles.py`: S, P and acc lie in registers, in the accumulator
                layout of the matrix unit, block_m / 16 warps with 16 whole rows each (FullRow). The head dim is not
                split; it is padded with zeros to a multiple of 16 in shared memory, never in memory.
strides         q (B, Sq, Hq, D), k and v (B, Sk, Hkv, ·) have any strides with a contiguous last dim. Query head h
                reads key/value head h // group (GQA): nothing is expanded. Offsets are 64 bit.
the loop        One, over the key blocks that some query of the block sees, in order; never empty, because a program
                must not end while a tile is on its way to its shared memory. T.Pipelined copies num_stages - 1 blocks
                ahead, on sm_90 by a warp of its own.
masks           Position and tails only in blocks that the window's left edge, the diagonal or the end of the keys
                cuts; attn_mask, where there is one, in all. Hidden scores are -inf before exp. They are written after
                the product, not into the accumulator before it: a scale of 0 or below, or a softcap, would turn a -inf
                that is there before into something else. A row that has seen no key has m = -inf, and subtracts 0.
kept            m, l, acc on the chip; LSE for the backward, which recomputes P from it.
hardware        T.gemm becomes wgmma on sm_90, and mma.sync before and after. P goes to the second product in
                registers. K and V arrive by TMA on sm_90; what TMA can't take is loaded by all threads (`load`).
the tail        Rows past a sequence's length are stored as out = 0 and LSE = -inf; nothing is written past its end.
"""

from typing import Any

import tilelang.language as T

from flashdispatch_backends.tilelang_fa2.recipe import Recipe
from flashdispatch_backends.tilelang_fa2.scores import (
    FULL_ROW,
    INF,
    LOG2E,
    block_at,
    finish_scores,
    integers,
    key_blocks,
    load,
    mask_of,
    power,
    rows_of_heads,
    scaled,
    sequence,
    share_out_registers,
    staged,
    work_of_program,
)


def forward(recipe: Recipe) -> Any:
    """The kernel that fills out (B, Sq, Hq, Dv) and, where asked to, lse (B, Hq, Sq)."""
    block_m, block_n, num_warps, num_stages = recipe.shape
    D, DV, dtype, natural, packed = recipe.block_d, recipe.block_dv, recipe.dtype, recipe.natural, recipe.packed
    B, Sq, Sk, Hq, Hkv = T.dynamic("B, Sq, Sk, Hq, Hkv")

    @T.prim_func
    def forward_kernel(
        q: rows_of_heads("q", B, Sq, Hq, recipe.head_dim, dtype),
        k: rows_of_heads("k", B, Sk, Hkv, recipe.head_dim, dtype),
        v: rows_of_heads("v", B, Sk, Hkv, recipe.head_dim_v, dtype),
        out: rows_of_heads("out", B, Sq, Hq, recipe.head_dim_v, dtype),
        lse: T.Tensor([B, Hq, Sq], "float32") if recipe.lse else T.int32,
        mask: mask_of(recipe),
        q_lens: integers(recipe.q_lens),
        kv_lens: integers(recipe.kv_lens),
        q_starts: integers(packed),
        k_starts: integers(packed),
        batch: T.int32,
        seqlen_q: T.int32,
        seqlen_k: T.int32,
        group: T.int32,
        heads_at_once: T.int32,
        left: T.int32,
        right: T.int32,
        top_left: T.int32,
        scale: T.float32,
        softcap: T.float32,
    ):
        with T.Kernel(T.ceildiv(seqlen_q, block_m) * Hq * batch, threads=32 * num_warps) as pid:
            if recipe.tma:
                share_out_registers(num_warps, block_m * DV)
            Q = T.alloc_shared([block_m, D], dtype)
            K = T.alloc_shared([block_n, D], dtype)
            V = T.alloc_shared([block_n, DV], dtype)
            S = T.alloc_fragment([block_m, block_n], "float32")
            P = T.alloc_fragment([block_m, block_n], dtype)
            tanh = T.alloc_fragment([block_m, block_n], "float32") if recipe.softcap else None
            acc = T.alloc_fragment([block_m, DV], "float32")
            m = T.alloc_fragment([block_m], "float32")
            m_old = T.alloc_fragment([block_m], "float32")
            base = T.alloc_fragment([block_m], "float32")
            alpha = T.alloc_fragment([block_m], "float32")
            l = T.alloc_fragment([block_m], "float32")
            rowsum = T.alloc_fragment([block_m], "float32")

            blocks = T.alloc_var("int32", init=T.ceildiv(seqlen_q, block_m))
            block, b, h = work_of_program(pid, blocks, Hq, batch, heads_at_once)
            first = T.alloc_var("int32", init=(blocks - 1 - block) * block_m)
            kv = T.alloc_var("int32", init=T.truncdiv(h, group))
            q_start, q_len, q_end = sequence(q_starts, q_lens, packed, recipe.q_lens, b, seqlen_q)
            k_start, kv_len, _k_end = sequence(k_starts, kv_lens, packed, recipe.kv_lens, b, seqlen_k)
            b_at = T.alloc_var("int32", init=0 if packed else b)
            shift = T.alloc_var("int32", init=T.if_then_else(top_left != 0, 0, kv_len - q_len))
            last, begin, count = key_blocks(first, q_len, kv_len, shift, left, right, block_m, block_n)

            load(recipe, q, Q, b_at, q_start, first, h, q_len, recipe.head_dim)
            T.fill(acc, 0)  # FA-2 Algorithm 1 line 5
            T.fill(l, 0)
            T.fill(m, -INF)
            for n in T.Pipelined(count, num_stages=num_stages):
                edge = (begin + n) * block_n
                key = block_at(edge, kv_len, block_n)
                load(recipe, k, K, b_at, k_start, key, kv, kv_len, recipe.head_dim)
                T.gemm(Q, K, S, transpose_B=True, policy=FULL_ROW, clear_accum=True)  # line 8
                finish_scores(recipe, S, tanh, mask, b, h, first, key, False, scale, softcap)
                if (
                    (edge + block_n > kv_len)
                    | (edge + block_n - 1 > first + shift + right)
                    | (edge < last + shift - left)
                ):
                    for i, j in T.Parallel(block_m, block_n):
                        p = first + i + shift
                        visible = (key + j >= edge) & (key + j >= p - left) & (key + j <= p + right)
                        S[i, j] = T.if_then_else(visible, S[i, j], -INF)
                T.copy(m, m_old)
                T.reduce_max(S, m, dim=1, clear=False)  # line 9
                for i in T.Parallel(block_m):
                    # No key yet: -inf - 0, not -inf - -inf.
                    base[i] = T.if_then_else(m[i] == -INF, 0.0, scaled(recipe, m[i], scale))
                    alpha[i] = power(recipe, scaled(recipe, m_old[i], scale) - base[i])
                for i, j in T.Parallel(block_m, block_n):
                    S[i, j] = power(recipe, scaled(recipe, S[i, j], scale) - base[i])
                T.reduce_sum(S, rowsum, dim=1)
                for i in T.Parallel(block_m):
                    l[i] = l[i] * alpha[i] + rowsum[i]
                T.copy(S, P)
                for i, j in T.Parallel(block_m, DV):
                    acc[i, j] *= alpha[i]
                load(recipe, v, V, b_at, k_start, key, kv, kv_len, recipe.head_dim_v)
                T.gemm(P, V, acc, policy=FULL_ROW)  # line 10

            for i in T.Parallel(block_m):
                inside = (first + i < q_len) & (l[i] > 0.0)
                log_l = T.log2(l[i])
                base[i] = T.if_then_else(
                    inside, base[i] + log_l / LOG2E if natural else (base[i] + log_l) / LOG2E, -INF
                )  # line 13
                l[i] = T.if_then_else(inside, 1.0 / l[i], 0.0)
            for i, j in T.Parallel(block_m, DV):
                # Line 12. Not acc * 0 for a row without keys: past the length, acc may be NaN.
                acc[i, j] = T.if_then_else(l[i] > 0.0, acc[i, j] * l[i], 0.0)
            if staged(recipe) and D == DV:
                T.copy(acc, Q)  # Q has been read
                T.fence_proxy_async()
                T.copy(Q, out[b, first : first + block_m, h, 0:DV])
            else:
                for i, j in T.Parallel(block_m, DV):
                    if (first + i < q_end) & (j < recipe.head_dim_v):
                        out[b_at, q_start + first + i, h, j] = acc[i, j]
            if recipe.lse:
                for i in T.Parallel(block_m):
                    if first + i < q_end:
                        lse[b_at, h, q_start + first + i] = base[i]

    return forward_kernel
