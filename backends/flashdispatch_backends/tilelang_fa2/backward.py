"""The backward kernels: FlashAttention-2, Algorithm 2 (arXiv 2307.08691, "FA-2"), as two passes without atomics.

P is not stored by the forward. Every backward kernel makes it again, already normalised, from S and the LSE; with
Delta = rowsum(dO * O), which equals rowsum(P * dP) (FlashAttention, arXiv 2205.14135, appendix B.2):

    paper                                   here
    D = rowsum(dO o O)         line 4       Delta, by delta; minus dLSE where the LSE has a gradient of its own
    S_i^(j) = Q_i K_j^T        line 11      S in dq; S^T = K Q^T in dkdv
    P_i^(j) = exp(S - L)       line 12      S again (S^T), as exp2 with the scale folded in; P^T is its copy in 16 bit
    dV_j += P^T dO             line 13      acc_v: T.gemm(PT, dO, acc_v)
    dP_i^(j) = dO_i V_j^T      line 14      dP; dP^T = V dO^T in dkdv
    dS = P o (dP - D)          line 15      dS, dS^T
    dQ_i += dS K_j             line 16      acc in dq, scaled once at the end
    dK_j += dS^T Q_i           line 17      acc_k in dkdv, scaled once at the end

FA-2 runs over key blocks and adds dQ up in memory, with atomics, whose order is nobody's. Here dQ has a pass of its
own: seven products instead of five (eight where dK and dV have a pass each), and in return the gradients are bitwise
repeatable, always, and no float32 accumulator of the size of Q is kept in memory.

delta           Delta, a warp for each row. It lies beside the LSE in `rows`, which the other kernels read: in the
                scores' units, and rounded up to whole blocks, so that a block's numbers come in one copy.
total           Only with natural scores (scores.py: a float mask). A mask may put all scores of a row near finfo.min,
                where a float32 LSE has no digits left for log(l), and exp(S - LSE) is as many times too large as there
                are keys: total = 1 / rowsum(exp(S - LSE)) makes up for it.
dq              One program per query block, as in the forward (heavy blocks first); Q, dO and acc = dQ stay, K and V
                stream.
dkdv            One program per key block of a key/value head; K, V, dK and dV stay, Q and dO stream, for one query head
                of the group after the other (GQA: the sum over the group costs nothing). It works on the transposed
                tile, so that P^T and dS^T are left operands of the next product as they are, in registers. Where dK and
                dV are too wide to be accumulated side by side it runs once for each, and makes S twice.
program ids     As in the forward; in dkdv of key/value heads. Under a causal mask a few of them take turns, and key
                blocks count up, since the first one has the most work.
tiles           block_m by block_n from `tiles.py`, each kernel with its own.
strides         As in the forward; dout has any strides with a contiguous last dim. Offsets are 64 bit.
the loop        As in the forward; dkdv goes through the query blocks of each head of the group in one loop.
masks           Hidden scores are -inf before exp, key tails too: exp(0 - LSE) overflows when every score is about -120.
kept            From the forward: q, k, v, out, LSE. Beside them in memory: rows, 8 bytes for each of Sq rounded up to a
                multiple of 128; with natural scores 12.
empty rows      LSE = -inf (no key, or past q_lens) is +inf in rows, so that P = exp(S - inf) = 0; Delta is 0 there.
hardware        As in the forward.
the tail        The last block of a stream moves back to end with its sequence (`block_at`). What a program owns past
                the end is computed from whatever lies there, row by row, and stored as 0.
"""

from typing import Any

import tilelang.language as T

from flashdispatch_backends.tilelang_fa2.recipe import Recipe
from flashdispatch_backends.tilelang_fa2.scores import (
    FULL_ROW,
    INF,
    LOG2E,
    block_at,
    blocks_in,
    finish_scores,
    integers,
    key_blocks,
    load,
    mask_of,
    numbers_of_rows,
    power,
    query_blocks,
    rows_of_heads,
    scaled,
    sequence,
    share_out_registers,
    staged,
    work_of_program,
)


def delta(recipe: Recipe) -> Any:
    """The kernel that fills rows (B, Hq, 2 or 3, Sq rounded up): LSE, Delta and room for total."""
    block_m, _, num_warps, _ = recipe.shape
    dtype, packed, natural = recipe.dtype, recipe.packed, recipe.natural
    B, Sq, Hq = T.dynamic("B, Sq, Hq")

    @T.prim_func
    def delta_kernel(
        out: rows_of_heads("out", B, Sq, Hq, recipe.head_dim_v, dtype),
        dout: rows_of_heads("dout", B, Sq, Hq, recipe.head_dim_v, dtype),
        lse: T.Tensor([B, Hq, Sq], "float32"),
        dlse: T.Tensor([B, Hq, Sq], "float32") if recipe.dlse else T.int32,
        rows: numbers_of_rows(recipe, B, Hq),
        q_lens: integers(recipe.q_lens),
        q_starts: integers(packed),
        batch: T.int32,
        seqlen_q: T.int32,
    ):
        with T.Kernel(blocks_in(rows.shape[3], block_m) * Hq * batch, threads=32 * num_warps) as pid:
            lane = T.truncmod(T.get_thread_binding(), 32)
            warp = T.truncdiv(T.get_thread_binding(), 32)
            h = T.alloc_var("int32", init=T.truncmod(pid, Hq))  # heads of a row lie side by side
            block = T.alloc_var("int32", init=T.truncdiv(pid, Hq))
            blocks = T.alloc_var("int32", init=blocks_in(rows.shape[3], block_m))
            b = T.alloc_var("int32", init=T.truncdiv(block, blocks))
            first = T.alloc_var("int32", init=T.truncmod(block, blocks) * block_m)
            q_start, q_len, _q_end = sequence(q_starts, q_lens, packed, recipe.q_lens, b, seqlen_q)
            q_end = T.alloc_var("int32", init=q_len if packed else rows.shape[3])
            b_at = T.alloc_var("int32", init=0 if packed else b)
            Delta = T.alloc_var("float32")
            LSE = T.alloc_var("float32")
            for index in T.serial(block_m // num_warps):
                i = first + index * num_warps + warp
                row = q_start + i
                Delta = 0.0
                if i < q_len:
                    for part in T.unroll((recipe.head_dim_v + 63) // 64):
                        for other in T.unroll(2):
                            c = part * 64 + lane * 2 + other
                            if c < recipe.head_dim_v:
                                O = T.cast(out[b_at, row, h, c], "float32")
                                Delta = Delta + T.cast(dout[b_at, row, h, c], "float32") * O  # FA-2 Algorithm 2 line 4
                Delta = T.warp_reduce_sum(Delta)
                if (lane == 0) & (i < q_end):
                    LSE = -INF
                    if i < q_len:
                        LSE = lse[b_at, h, row]
                        if recipe.dlse:
                            Delta = Delta - dlse[b_at, h, row]
                    # A row without keys, or past the end: exp(S - inf) is 0, and a gradient of its LSE means nothing.
                    rows[b_at, h, 0, row] = T.if_then_else(LSE == -INF, INF, LSE if natural else LSE * LOG2E)
                    rows[b_at, h, 1, row] = T.if_then_else(LSE == -INF, 0.0, Delta)
                    if natural:
                        rows[b_at, h, 2, row] = 1.0

    return delta_kernel


def total(recipe: Recipe) -> Any:
    """The kernel that fills total in rows: the forward without V, for an LSE too coarse to normalise by."""
    block_m, block_n, num_warps, num_stages = recipe.shape
    D, dtype, packed = recipe.block_d, recipe.dtype, recipe.packed
    B, Sq, Sk, Hq, Hkv = T.dynamic("B, Sq, Sk, Hq, Hkv")

    @T.prim_func
    def total_kernel(
        q: rows_of_heads("q", B, Sq, Hq, recipe.head_dim, dtype),
        k: rows_of_heads("k", B, Sk, Hkv, recipe.head_dim, dtype),
        rows: numbers_of_rows(recipe, B, Hq),
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
                share_out_registers(num_warps, block_m * block_n)
            Q = T.alloc_shared([block_m, D], dtype)
            K = T.alloc_shared([block_n, D], dtype)
            S = T.alloc_fragment([block_m, block_n], "float32")
            tanh = T.alloc_fragment([block_m, block_n], "float32") if recipe.softcap else None
            LSE = T.alloc_fragment([block_m], "float32")
            l = T.alloc_fragment([block_m], "float32")
            rowsum = T.alloc_fragment([block_m], "float32")

            blocks = T.alloc_var("int32", init=T.ceildiv(seqlen_q, block_m))
            block, b, h = work_of_program(pid, blocks, Hq, batch, heads_at_once)
            first = T.alloc_var("int32", init=(blocks - 1 - block) * block_m)
            kv = T.alloc_var("int32", init=T.truncdiv(h, group))
            q_start, q_len, _q_end = sequence(q_starts, q_lens, packed, recipe.q_lens, b, seqlen_q)
            k_start, kv_len, _k_end = sequence(k_starts, kv_lens, packed, recipe.kv_lens, b, seqlen_k)
            b_at = T.alloc_var("int32", init=0 if packed else b)
            shift = T.alloc_var("int32", init=T.if_then_else(top_left != 0, 0, kv_len - q_len))
            _last, begin, count = key_blocks(first, q_len, kv_len, shift, left, right, block_m, block_n)

            for i in T.Parallel(block_m):
                LSE[i] = T.if_then_else(first + i < q_len, rows[b_at, h, 0, q_start + first + i], INF)
            load(recipe, q, Q, b_at, q_start, first, h, q_len, recipe.head_dim)
            T.fill(l, 0)
            for n in T.Pipelined(count, num_stages=num_stages):
                edge = (begin + n) * block_n
                key = block_at(edge, kv_len, block_n)
                load(recipe, k, K, b_at, k_start, key, kv, kv_len, recipe.head_dim)
                T.gemm(Q, K, S, transpose_B=True, policy=FULL_ROW, clear_accum=True)
                finish_scores(recipe, S, tanh, mask, b, h, first, key, False, scale, softcap)
                for i, j in T.Parallel(block_m, block_n):
                    p = first + i + shift
                    visible = (key + j >= edge) & (key + j >= p - left) & (key + j <= p + right)
                    S[i, j] = T.if_then_else(visible, power(recipe, S[i, j] - LSE[i]), 0.0)
                T.reduce_sum(S, rowsum, dim=1)
                for i in T.Parallel(block_m):
                    l[i] = l[i] + rowsum[i]
            for i in T.Parallel(block_m):
                l[i] = T.if_then_else(l[i] > 0.0, 1.0 / l[i], 1.0)
            for i in T.Parallel(block_m):
                if first + i < q_len:
                    rows[b_at, h, 2, q_start + first + i] = l[i]

    return total_kernel


def dq(recipe: Recipe) -> Any:
    """The kernel that fills dq (B, Sq, Hq, D)."""
    block_m, block_n, num_warps, num_stages = recipe.shape
    D, DV, dtype, natural, packed = recipe.block_d, recipe.block_dv, recipe.dtype, recipe.natural, recipe.packed
    B, Sq, Sk, Hq, Hkv = T.dynamic("B, Sq, Sk, Hq, Hkv")

    @T.prim_func
    def dq_kernel(
        q: rows_of_heads("q", B, Sq, Hq, recipe.head_dim, dtype),
        k: rows_of_heads("k", B, Sk, Hkv, recipe.head_dim, dtype),
        v: rows_of_heads("v", B, Sk, Hkv, recipe.head_dim_v, dtype),
        dout: rows_of_heads("dout", B, Sq, Hq, recipe.head_dim_v, dtype),
        rows: numbers_of_rows(recipe, B, Hq),
        dq: rows_of_heads("dq", B, Sq, Hq, recipe.head_dim, dtype),
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
        gradient_scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(seqlen_q, block_m) * Hq * batch, threads=32 * num_warps) as pid:
            if recipe.tma:
                share_out_registers(num_warps, block_m * D)
            Q = T.alloc_shared([block_m, D], dtype)
            dO = T.alloc_shared([block_m, DV], dtype)
            K = T.alloc_shared([block_n, D], dtype)
            V = T.alloc_shared([block_n, DV], dtype)
            S = T.alloc_fragment([block_m, block_n], "float32")
            tanh = T.alloc_fragment([block_m, block_n], "float32") if recipe.softcap else None
            dP = T.alloc_fragment([block_m, block_n], "float32")
            dS = T.alloc_fragment([block_m, block_n], dtype)
            acc = T.alloc_fragment([block_m, D], "float32")
            LSE = T.alloc_fragment([block_m], "float32")
            Delta = T.alloc_fragment([block_m], "float32")
            share = T.alloc_fragment([block_m], "float32") if natural else None

            blocks = T.alloc_var("int32", init=T.ceildiv(seqlen_q, block_m))
            block, b, h = work_of_program(pid, blocks, Hq, batch, heads_at_once)
            first = T.alloc_var("int32", init=(blocks - 1 - block) * block_m)
            kv = T.alloc_var("int32", init=T.truncdiv(h, group))
            q_start, q_len, q_end = sequence(q_starts, q_lens, packed, recipe.q_lens, b, seqlen_q)
            k_start, kv_len, _k_end = sequence(k_starts, kv_lens, packed, recipe.kv_lens, b, seqlen_k)
            b_at = T.alloc_var("int32", init=0 if packed else b)
            shift = T.alloc_var("int32", init=T.if_then_else(top_left != 0, 0, kv_len - q_len))
            last, begin, count = key_blocks(first, q_len, kv_len, shift, left, right, block_m, block_n)

            for i in T.Parallel(block_m):
                LSE[i] = T.if_then_else(first + i < q_len, rows[b_at, h, 0, q_start + first + i], INF)
                Delta[i] = T.if_then_else(first + i < q_len, rows[b_at, h, 1, q_start + first + i], 0.0)
            if natural:
                for i in T.Parallel(block_m):
                    share[i] = T.if_then_else(first + i < q_len, rows[b_at, h, 2, q_start + first + i], 0.0)
            load(recipe, q, Q, b_at, q_start, first, h, q_len, recipe.head_dim)
            load(recipe, dout, dO, b_at, q_start, first, h, q_len, recipe.head_dim_v)
            T.fill(acc, 0)
            for n in T.Pipelined(count, num_stages=num_stages):
                edge = (begin + n) * block_n
                key = block_at(edge, kv_len, block_n)
                load(recipe, k, K, b_at, k_start, key, kv, kv_len, recipe.head_dim)
                T.gemm(Q, K, S, transpose_B=True, policy=FULL_ROW, clear_accum=True)  # FA-2 Algorithm 2 line 11
                load(recipe, v, V, b_at, k_start, key, kv, kv_len, recipe.head_dim_v)
                T.gemm(dO, V, dP, transpose_B=True, policy=FULL_ROW, clear_accum=True)  # line 14
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
                for i, j in T.Parallel(block_m, block_n):
                    S[i, j] = power(recipe, scaled(recipe, S[i, j], scale) - LSE[i])  # line 12
                if natural:
                    for i, j in T.Parallel(block_m, block_n):
                        S[i, j] = S[i, j] * share[i]
                for i, j in T.Parallel(block_m, block_n):
                    dP[i, j] = S[i, j] * (dP[i, j] - Delta[i])  # line 15
                if recipe.softcap:
                    for i, j in T.Parallel(block_m, block_n):
                        dP[i, j] = dP[i, j] * (1.0 - tanh[i, j] * tanh[i, j])
                T.copy(dP, dS)
                T.gemm(dS, K, acc, policy=FULL_ROW)  # line 16
            for i, c in T.Parallel(block_m, D):
                acc[i, c] = T.if_then_else(first + i < q_len, acc[i, c] * gradient_scale, 0.0)
            if staged(recipe):
                T.copy(acc, Q)
                T.fence_proxy_async()
                T.copy(Q, dq[b, first : first + block_m, h, 0:D])
            else:
                for i, c in T.Parallel(block_m, D):
                    if (first + i < q_end) & (c < recipe.head_dim):
                        dq[b_at, q_start + first + i, h, c] = acc[i, c]

    return dq_kernel


def dkdv(recipe: Recipe) -> Any:
    """The kernel that fills dk (B, Sk, Hkv, D) and dv (B, Sk, Hkv, Dv), or one of them."""
    block_m, block_n, num_warps, num_stages = recipe.shape
    D, DV, dtype, natural, packed = recipe.block_d, recipe.block_dv, recipe.dtype, recipe.natural, recipe.packed
    with_dk, with_dv = "dk" in recipe.outputs, "dv" in recipe.outputs
    moves = recipe.tma and recipe.q_lens  # what TMA reads past a given length may be NaN
    copied = recipe.tma and not moves  # TMA takes a block of numbers whose first is at a multiple of 16 bytes
    numbers = 3 if natural else 2
    B, Sq, Sk, Hq, Hkv = T.dynamic("B, Sq, Sk, Hq, Hkv")

    @T.prim_func
    def dkdv_kernel(
        q: rows_of_heads("q", B, Sq, Hq, recipe.head_dim, dtype),
        k: rows_of_heads("k", B, Sk, Hkv, recipe.head_dim, dtype),
        v: rows_of_heads("v", B, Sk, Hkv, recipe.head_dim_v, dtype),
        dout: rows_of_heads("dout", B, Sq, Hq, recipe.head_dim_v, dtype),
        rows: numbers_of_rows(recipe, B, Hq),
        dk: rows_of_heads("dk", B, Sk, Hkv, recipe.head_dim, dtype) if with_dk else T.int32,
        dv: rows_of_heads("dv", B, Sk, Hkv, recipe.head_dim_v, dtype) if with_dv else T.int32,
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
        gradient_scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(seqlen_k, block_n) * Hkv * batch, threads=32 * num_warps) as pid:
            if recipe.tma:
                share_out_registers(num_warps, block_n * max(D if with_dk else 0, DV if with_dv else 0))
            K = T.alloc_shared([block_n, D], dtype)
            V = T.alloc_shared([block_n, DV], dtype) if with_dk else None
            Q = T.alloc_shared([block_m, D], dtype)
            dO = T.alloc_shared([block_m, DV], dtype)
            ST = T.alloc_fragment([block_n, block_m], "float32")
            tanh = T.alloc_fragment([block_n, block_m], "float32") if recipe.softcap else None
            PT = T.alloc_fragment([block_n, block_m], dtype) if with_dv else None
            dPT = T.alloc_fragment([block_n, block_m], "float32") if with_dk else None
            dST = T.alloc_fragment([block_n, block_m], dtype) if with_dk else None
            acc_k = T.alloc_fragment([block_n, D], "float32") if with_dk else None
            acc_v = T.alloc_fragment([block_n, DV], "float32") if with_dv else None
            of_rows = T.alloc_shared([numbers, block_m], "float32") if copied else None
            LSE = None if copied else T.alloc_fragment([block_m], "float32")
            Delta = None if copied or not with_dk else T.alloc_fragment([block_m], "float32")
            share = T.alloc_fragment([block_m], "float32") if natural and not copied else None

            blocks = T.alloc_var("int32", init=T.ceildiv(seqlen_k, block_n))
            block, b, kv = work_of_program(pid, blocks, Hkv, batch, heads_at_once)
            first = T.alloc_var("int32", init=block * block_n)
            q_start, q_len, _q_end = sequence(q_starts, q_lens, packed, recipe.q_lens, b, seqlen_q)
            k_start, kv_len, k_end = sequence(k_starts, kv_lens, packed, recipe.kv_lens, b, seqlen_k)
            b_at = T.alloc_var("int32", init=0 if packed else b)
            shift = T.alloc_var("int32", init=T.if_then_else(top_left != 0, 0, kv_len - q_len))
            begin, count = query_blocks(first, q_len, kv_len, shift, left, right, block_m, block_n)

            load(recipe, k, K, b_at, k_start, first, kv, kv_len, recipe.head_dim)
            if with_dk:
                load(recipe, v, V, b_at, k_start, first, kv, kv_len, recipe.head_dim_v)
                T.fill(acc_k, 0)
            if with_dv:
                T.fill(acc_v, 0)
            for n in T.Pipelined(count * group, num_stages=num_stages):
                h = kv * group + T.truncdiv(n, count)
                edge = (begin + T.truncmod(n, count)) * block_m
                row = block_at(edge, q_len, block_m) if moves else edge
                if copied:
                    T.copy(rows[b, h, 0:numbers, row : row + block_m], of_rows)
                else:
                    for i in T.Parallel(block_m):  # before the products, which hide how long it takes
                        inside = (row + i >= 0) & (row + i < q_len)
                        LSE[i] = T.if_then_else(inside, rows[b_at, h, 0, q_start + row + i], INF)
                    if with_dk:
                        for i in T.Parallel(block_m):
                            inside = (row + i >= 0) & (row + i < q_len)
                            Delta[i] = T.if_then_else(inside, rows[b_at, h, 1, q_start + row + i], 0.0)
                    if natural:
                        for i in T.Parallel(block_m):
                            inside = (row + i >= 0) & (row + i < q_len)
                            share[i] = T.if_then_else(inside, rows[b_at, h, 2, q_start + row + i], 0.0)
                load(recipe, q, Q, b_at, q_start, row, h, q_len, recipe.head_dim)
                T.gemm(K, Q, ST, transpose_B=True, policy=FULL_ROW, clear_accum=True)  # FA-2 Algorithm 2 line 11
                load(recipe, dout, dO, b_at, q_start, row, h, q_len, recipe.head_dim_v)
                if with_dk:
                    T.gemm(V, dO, dPT, transpose_B=True, policy=FULL_ROW, clear_accum=True)  # line 14
                finish_scores(recipe, ST, tanh, mask, b, h, row, first, True, scale, softcap)
                if (
                    (edge + block_m > q_len)
                    | (first + block_n > kv_len)
                    | (first + block_n - 1 > edge + shift + right)
                    | (first < edge + block_m - 1 + shift - left)
                ):
                    for j, i in T.Parallel(block_n, block_m):
                        p = row + i + shift
                        inside = (row + i >= edge) & (row + i < q_len) & (first + j < kv_len)
                        visible = inside & (first + j >= p - left) & (first + j <= p + right)
                        ST[j, i] = T.if_then_else(visible, ST[j, i], -INF)
                for j, i in T.Parallel(block_n, block_m):
                    at = of_rows[0, i] if copied else LSE[i]
                    ST[j, i] = power(recipe, scaled(recipe, ST[j, i], scale) - at)  # line 12
                if natural:
                    for j, i in T.Parallel(block_n, block_m):
                        ST[j, i] = ST[j, i] * (of_rows[2, i] if copied else share[i])
                if with_dv:
                    T.copy(ST, PT)
                    T.gemm(PT, dO, acc_v, policy=FULL_ROW)  # line 13
                if with_dk:
                    for j, i in T.Parallel(block_n, block_m):
                        at = of_rows[1, i] if copied else Delta[i]
                        dPT[j, i] = ST[j, i] * (dPT[j, i] - at)  # line 15
                    if recipe.softcap:
                        for j, i in T.Parallel(block_n, block_m):
                            dPT[j, i] = dPT[j, i] * (1.0 - tanh[j, i] * tanh[j, i])
                    T.copy(dPT, dST)
                    T.gemm(dST, Q, acc_k, policy=FULL_ROW)  # line 17
            if with_dk:
                for j, c in T.Parallel(block_n, D):
                    acc_k[j, c] = T.if_then_else(first + j < kv_len, acc_k[j, c] * gradient_scale, 0.0)
                if staged(recipe):
                    T.copy(acc_k, K)
                    T.fence_proxy_async()
                    T.copy(K, dk[b, first : first + block_n, kv, 0:D])
                else:
                    for j, c in T.Parallel(block_n, D):
                        if (first + j < k_end) & (c < recipe.head_dim):
                            dk[b_at, k_start + first + j, kv, c] = acc_k[j, c]
            if with_dv:
                for j, c in T.Parallel(block_n, DV):
                    acc_v[j, c] = T.if_then_else(first + j < kv_len, acc_v[j, c], 0.0)
                if staged(recipe) and with_dk:
                    T.copy(acc_v, V)
                    T.fence_proxy_async()
                    T.copy(V, dv[b, first : first + block_n, kv, 0:DV])
                elif staged(recipe) and D == DV:
                    T.copy(acc_v, K)
                    T.fence_proxy_async()
                    T.copy(K, dv[b, first : first + block_n, kv, 0:DV])
                else:
                    for j, c in T.Parallel(block_n, DV):
                        if (first + j < k_end) & (c < recipe.head_dim_v):
                            dv[b_at, k_start + first + j, kv, c] = acc_v[j, c]

    return dkdv_kernel
