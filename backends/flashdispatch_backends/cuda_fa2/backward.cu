// The backward kernels: FlashAttention-2, Algorithm 2 (arXiv 2307.08691, "FA-2"), as two passes without atomics.
//
// P is not stored by the forward. Every backward kernel makes it again, already normalised, from S and the LSE; with
// Delta = rowsum(dO * O), which equals rowsum(P * dP) (FlashAttention, arXiv 2205.14135, appendix B.2):
//
//     P = exp(S - LSE)    dV = P^T dO    dP = dO V^T    dS = P * (dP - Delta)    dQ = scale dS K    dK = scale dS^T Q
//
// FA-2 runs over key blocks and adds dQ up in memory, with atomics, whose order is nobody's. Here dQ has a pass of its
// own: seven products instead of five, and in return the gradients are bitwise
// repeatable, always, and no accumulator of the size of Q is kept in memory. A gradient of the LSE adds P * dLSE to dS:
// Delta - dLSE takes the place of Delta.
//
// dq_kernel       (DQ 1) One program per query block, as in the forward (heavy blocks first); Q, dO and acc = dQ stay, K
//                 and V stream. It also makes what the other kernel needs of each row: the LSE in the scores' units and
//                 Delta.
// dkdv_kernel     (DQ 0) One program per key block of a key/value head; K, V, dK and dV stay, Q and dO stream, for one
//                 query head of the group after the other (GQA: the sum over the group costs nothing). It works on the
//                 transposed tile, S^T = K Q^T, so that P^T and dS^T are left operands of the next product as they are.
// program ids     As in the forward; in dkdv_kernel of key/value heads, and key blocks count up: under a causal mask the
//                 first one has the most work.
// tiles           BLOCK_M by BLOCK_N, each kernel with its own. dK and dV are two accumulators, and registers bound them:
//                 of wide heads a warp alone has room for 16 rows, and each fragment that it reads from shared memory
//                 then serves one product. So there SIDES warps own rows together. Each makes its share of the columns of
//                 S and dP, and its share of the columns of the gradients: of P and dS it has its own share in registers,
//                 and reads the others' from shared memory, in the 16 bit that the next product takes anyway.
// strides         As in the forward; dout has any strides with a contiguous last dim. Offsets are 64 bit.
// the loop        One, as in the forward; with two stages the next block is copied meanwhile, with one there is no overlap
//                 inside a program.
// masks           Hidden scores are -inf before exp, key tails too: exp(0 - LSE) overflows when every score is about -120.
// kept            From the forward: q, k, v, out, LSE. Beside them in memory: `rows`, 8 bytes a row, 12 with natural
//                 scores.
// coarse LSE      A float mask may put all scores of a row near finfo.min, where a float32 LSE has no digits left for
//                 log(l), and exp(S - LSE) is as many times too large as there are keys. Where one of its rows is that
//                 far out, dq_kernel first sums P over the row, and leaves 1 / sum, the share, for both kernels.
// empty rows      LSE = -inf (no key, or past q_lens) reads as +inf, so that P = exp(S - inf) = 0; Delta is 0 there.
// hardware        As in the forward.
// the tail        Rows past the lengths are loaded as 0, and their gradients stored as 0.

#include "scores.cuh"

constexpr float COARSE_LSE = 4096.0f;  // beyond it float32's last digit is worth 2^-11 of P, and more further on
constexpr int GROUPS = NUM_WARPS / SIDES;
constexpr int ROW_KINDS = NATURAL ? 3 : 2;  // LSE, Delta, share

using QTile = Tile<BLOCK_M, BLOCK_D>;
using KTile = Tile<BLOCK_N, BLOCK_D>;
using VTile = Tile<BLOCK_N, BLOCK_DV>;
using OTile = Tile<BLOCK_M, BLOCK_DV>;

extern __shared__ __align__(1024) unsigned char shared[];

// dS = P * (dP - Delta), times the softcap's derivative.
__device__ __forceinline__ float score_gradient(float P, float dP, float Delta, float tanh) {
    const float dS = P * (dP - Delta);
    return SOFTCAP ? dS * (1.0f - tanh * tanh) : dS;
}

#if DQ

constexpr int MT = BLOCK_M / (16 * GROUPS);
static_assert(BLOCK_M == 16 * MT * GROUPS && BLOCK_N % (16 * SIDES) == 0, "SIDES warps own 16 MT queries");
using Exchange = Tile<BLOCK_M, BLOCK_N>;
constexpr int EXCHANGE_BYTES = SIDES > 1 ? Exchange::BYTES : 0;
constexpr int N = BLOCK_N / SIDES;  // keys of a warp's tile of scores

// LSE and Delta of a block's rows: to `rows` for the other kernel, and to shared memory for this one. Four lanes a row,
// and no load waits for another: what is past an end is read from before it, and not counted. Returns whether an LSE is
// coarse.
__device__ __forceinline__ bool prepare_rows(
    const Arguments &args, float *LSE, float *Delta, const u16 *out, const u16 *dout, i64 base, int first, int q_len) {
    constexpr int AT_ONCE = THREADS / 4, PASSES = (BLOCK_M + AT_ONCE - 1) / AT_ONCE;
    const int own = threadIdx.x / 4, part = threadIdx.x % 4;
    float lse[PASSES], dlse[PASSES], delta[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) lse[pass] = -INF, dlse[pass] = delta[pass] = 0.0f;
    if (first < q_len) {
        const float *const gradient = args.dlse ? args.dlse : args.lse;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int row = min(own + pass * AT_ONCE, q_len - 1 - first);
            lse[pass] = args.lse[base + first + row];
            dlse[pass] = gradient[base + first + row];
#pragma unroll
            for (int d = 0; d < BLOCK_DV; d += 32) {
                const int column = d + 8 * part, from = min(column, args.head_dim_v - 8);
                const Chunk o = load_chunk(out + row * args.at_out.s + from);
                const Chunk g = load_chunk(dout + row * args.at_dout.s + from);
                float sum = 0.0f;
#pragma unroll
                for (int e = 0; e < 8; ++e) sum = fmaf(to_float(o.number[e]), to_float(g.number[e]), sum);
                delta[pass] += column < args.head_dim_v ? sum : 0.0f;
            }
        }
    }
    bool coarse = false;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int row = own + pass * AT_ONCE;
        const bool there = row < BLOCK_M && first + row < q_len, sees = there && lse[pass] != -INF;
        const float sum = row_sum(delta[pass]) - (args.dlse ? dlse[pass] : 0.0f);  // FA-2 Algorithm 2 line 4
        coarse |= sees && fabsf(lse[pass]) > COARSE_LSE;
        if (part != 0 || row >= BLOCK_M) continue;
        LSE[row] = sees ? lse[pass] * (NATURAL ? 1.0f : LOG2E) : INF;
        Delta[row] = sees ? sum : 0.0f;
        if (there) {
            args.rows[base + first + row] = LSE[row];
            args.rows[args.rows_kind + base + first + row] = Delta[row];
        }
    }
    return coarse;
}

extern "C" __global__ void __launch_bounds__(THREADS) dq_kernel(const __grid_constant__ Arguments args) {
    const int blocks = blocks_in(args.seqlen_q, BLOCK_M);
    const Work work = work_of_program(blocks, args.heads, args.heads_at_once);
    const int first = (blocks - 1 - work.block) * BLOCK_M, b = work.b, h = work.head, kv = h / args.group;
    const Sequence queries = sequence(args.q_starts, args.q_lens, b, args.seqlen_q);
    const Sequence keys = sequence(args.k_starts, args.kv_lens, b, args.seqlen_k);
    const Band band(args, queries.length, keys.length);
    const u16 *q = args.q + b * args.at_q.b + h * args.at_q.h + (queries.start + first) * args.at_q.s;
    const u16 *k = args.k + b * args.at_k.b + kv * args.at_k.h + keys.start * args.at_k.s;
    const u16 *v = args.v + b * args.at_v.b + kv * args.at_v.h + keys.start * args.at_v.s;
    const u16 *out = args.out + b * args.at_out.b + h * args.at_out.h + (queries.start + first) * args.at_out.s;
    const u16 *dout = args.dout + b * args.at_dout.b + h * args.at_dout.h + (queries.start + first) * args.at_dout.s;
    const i64 mask = b * args.mask_b + h * args.mask_h;
    const i64 row_base = b * args.rows_b + h * args.rows_h + queries.start;

    const u32 Q = shared_address(shared), dO = Q + QTile::BYTES, K = dO + OTile::BYTES;
    const u32 V = K + NUM_STAGES * KTile::BYTES, exchange = V + NUM_STAGES * VTile::BYTES;
    float *const row_LSE = reinterpret_cast<float *>(
        shared + QTile::BYTES + OTile::BYTES + NUM_STAGES * (KTile::BYTES + VTile::BYTES) + EXCHANGE_BYTES);
    float *const row_Delta = row_LSE + BLOCK_M;
    const int side = warp_id() % SIDES, group = warp_id() / SIDES;
    const int own = group * 16 * MT, row = first + own;  // this group's first row, in the block and in the sequence
    const int own_keys = side * N;  // this warp's first key in a block
    int begin, end;
    band.key_blocks(first, begin, end);
    const auto load = [&](int n) {
        const int stage = (n - begin) % NUM_STAGES, left = keys.length - n * BLOCK_N;
        KTile::load(K + stage * KTile::BYTES, k + i64(n) * BLOCK_N * args.at_k.s, args.at_k.s, left, args.head_dim);
        VTile::load(V + stage * VTile::BYTES, v + i64(n) * BLOCK_N * args.at_v.s, args.at_v.s, left, args.head_dim_v);
    };
    if (begin < end) {
        QTile::load(Q, q, args.at_q.s, queries.length - first, args.head_dim);
        OTile::load(dO, dout, args.at_dout.s, queries.length - first, args.head_dim_v);
    }
    if (NUM_STAGES > 1 && begin < end) load(begin);
    commit_copies();
    const bool coarse = prepare_rows(args, row_LSE, row_Delta, out, dout, row_base, first, queries.length);
    const bool any_coarse = __syncthreads_or(NATURAL && coarse);

    float LSE[MT][2], Delta[MT][2], share[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = own + 16 * mt + 8 * half + lane_id() / 4;
            LSE[mt][half] = row_LSE[r];
            Delta[mt][half] = row_Delta[r];
            share[mt][half] = 1.0f;
        }
    const u32 lane_q = QTile::lane_a(Q) + own * QTile::PITCH, lane_do = OTile::lane_a(dO) + own * OTile::PITCH;
    const u32 lane_k = KTile::lane_b(K) + own_keys * KTile::PITCH, lane_v = VTile::lane_b(V) + own_keys * VTile::PITCH;
    const u32 lane_k_transposed = KTile::lane_a(K, side);

    if constexpr (NATURAL) {
        if (any_coarse) {
            float sums[MT][2] = {};
#pragma unroll 1
            for (int n = begin; n < end; ++n) {
                wait_for_copies<0>();
                __syncthreads();  // nobody reads or fills a block of the ring
                KTile::load(K, k + i64(n) * BLOCK_N * args.at_k.s, args.at_k.s, keys.length - n * BLOCK_N, args.head_dim);
                commit_copies();
                wait_for_copies<0>();
                __syncthreads();
                Accumulator<MT, N> S;
                multiply_rows<MT, N, BLOCK_D>(S, lane_q, lane_k);
                finish_scores<false, MT, N>(S, nullptr, args, mask, row, n * BLOCK_N + own_keys);
                hide<false, MT, N>(S, band, row, n * BLOCK_N + own_keys);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int c = 0; c < N / 8; ++c)
#pragma unroll
                        for (int e = 0; e < 4; ++e) sums[mt][e / 2] += weight(S[mt][c][e], LSE[mt][e / 2], args.scale);
            }
            __syncthreads();  // K has been read, and makes room for the sums of the sides
            float *const sums_of_sides = reinterpret_cast<float *>(shared + QTile::BYTES + OTile::BYTES);
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float sum = row_sum(sums[mt][half]);
                    const int r = own + 16 * mt + 8 * half + lane_id() / 4;
                    if (lane_id() % 4 == 0) sums_of_sides[side * BLOCK_M + r] = sum;
                }
            __syncthreads();
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int r = own + 16 * mt + 8 * half + lane_id() / 4;
                    float sum = 0.0f;
#pragma unroll
                    for (int each = 0; each < SIDES; ++each) sum += sums_of_sides[each * BLOCK_M + r];
                    share[mt][half] = sum == 0.0f ? 1.0f : 1.0f / sum;
                }
            __syncthreads();
            if (NUM_STAGES > 1 && begin < end) load(begin);  // the ring again as it was
            commit_copies();
        }
        if (side == 0 && lane_id() % 4 == 0) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = row + 16 * mt + 8 * half + lane_id() / 4;
                    if (i < queries.length) args.rows[2 * args.rows_kind + row_base + i] = share[mt][half];
                }
        }
    }
    if (!args.dq) {
        wait_for_copies<0>();
        return;
    }

    Accumulator<MT, BLOCK_D / SIDES> acc;
    clear<MT, BLOCK_D / SIDES>(acc);
#pragma unroll 1
    for (int n = begin; n < end; ++n) {
        if (NUM_STAGES == 1) {
            __syncthreads();
            load(n);
            commit_copies();
        }
        wait_for_copies<0>();
        __syncthreads();  // this block is there, and no warp reads the one before any more
        if (NUM_STAGES > 1 && n + 1 < end) load(n + 1);
        commit_copies();
        const int stage = (n - begin) % NUM_STAGES, key = n * BLOCK_N;
        Accumulator<MT, N> S, dP, tanh;
        multiply_rows<MT, N, BLOCK_D>(S, lane_q, lane_k + stage * KTile::BYTES);
        finish_scores<false, MT, N>(S, &tanh, args, mask, row, key + own_keys);
        if (band.cuts(first, key)) hide<false, MT, N>(S, band, row, key + own_keys);
        multiply_rows<MT, N, BLOCK_DV>(dP, lane_do, lane_v + stage * VTile::BYTES);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int c = 0; c < N / 8; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float P = weight(S[mt][c][e], LSE[mt][e / 2], args.scale);
                    if (NATURAL) P *= share[mt][e / 2];
                    S[mt][c][e] = score_gradient(P, dP[mt][c][e], Delta[mt][e / 2], SOFTCAP ? tanh[mt][c][e] : 0.0f);
                }
        const u32 lane = lane_k_transposed + stage * KTile::BYTES;
        if (SIDES > 1) Exchange::put<MT, N>(exchange, own, S, own_keys);
        multiply_add<MT, N, BLOCK_D, SIDES>(acc, S, lane + own_keys * KTile::PITCH);
        if (SIDES > 1) wait_for_group<SIDES>(group);
#pragma unroll
        for (int step = 1; step < SIDES; ++step) {
            const int other = (side + step) % SIDES;
            multiply_add_shared<Exchange, MT, N, BLOCK_D, SIDES>(
                acc, Exchange::lane_a(exchange, other * N / 16) + own * Exchange::PITCH, lane + other * N * KTile::PITCH);
        }
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < BLOCK_D / SIDES / 8; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[mt][c][e] *= args.gradient_scale;
    wait_for_copies<0>();
    __syncthreads();  // Q has been read
    QTile::put<MT, BLOCK_D / SIDES, SIDES>(Q, own, acc, 0, side);
    __syncthreads();
    u16 *dq = args.dq + b * args.at_dq.b + h * args.at_dq.h + (queries.start + first) * args.at_dq.s;
    QTile::store(Q, dq, args.at_dq.s, queries.end - first, args.head_dim);
}

#else

constexpr int MT = BLOCK_N / (16 * GROUPS);
static_assert(BLOCK_N == 16 * MT * GROUPS && BLOCK_M % (16 * SIDES) == 0, "SIDES warps own 16 MT keys");
constexpr int N = BLOCK_M / SIDES;  // queries of a warp's tile of scores
using Exchange = Tile<BLOCK_N, BLOCK_M>;
constexpr int EXCHANGE_BYTES = SIDES > 1 ? Exchange::BYTES : 0;
constexpr int ROW_BYTES = ROW_KINDS * BLOCK_M * 4;

extern "C" __global__ void __launch_bounds__(THREADS) dkdv_kernel(const __grid_constant__ Arguments args) {
    const int blocks = blocks_in(args.seqlen_k, BLOCK_N);
    const Work work = work_of_program(blocks, args.heads / args.group, args.heads_at_once);
    const int first = work.block * BLOCK_N, b = work.b, kv = work.head;
    const Sequence queries = sequence(args.q_starts, args.q_lens, b, args.seqlen_q);
    const Sequence keys = sequence(args.k_starts, args.kv_lens, b, args.seqlen_k);
    const Band band(args, queries.length, keys.length);
    const u16 *k = args.k + b * args.at_k.b + kv * args.at_k.h + (keys.start + first) * args.at_k.s;
    const u16 *v = args.v + b * args.at_v.b + kv * args.at_v.h + (keys.start + first) * args.at_v.s;

    const u32 K = shared_address(shared), V = K + KTile::BYTES, Q = V + VTile::BYTES;
    const u32 dO = Q + NUM_STAGES * QTile::BYTES, exchange_p = dO + NUM_STAGES * OTile::BYTES;
    const u32 exchange_ds = exchange_p + EXCHANGE_BYTES, rows = exchange_ds + EXCHANGE_BYTES;
    const float *const row_numbers = reinterpret_cast<const float *>(
        shared + KTile::BYTES + VTile::BYTES + NUM_STAGES * (QTile::BYTES + OTile::BYTES) + 2 * EXCHANGE_BYTES);
    const int side = warp_id() % SIDES, group = warp_id() / SIDES;
    const int own = group * 16 * MT, key = first + own;  // this group's first key, in the block and in the sequence
    const int own_rows = side * N;  // this warp's first query in a block
    int begin, end;
    band.query_blocks(first, begin, end);
    const int count = max(end - begin, 0), total = count * args.group;

    // What is copied next: Q, dO and numbers of rows, of one query head of the group after the other.
    int next = 0, next_block = begin;
    const i64 before = queries.start + i64(begin) * BLOCK_M;
    const u16 *next_q = args.q + b * args.at_q.b + kv * args.group * args.at_q.h + before * args.at_q.s;
    const u16 *next_do = args.dout + b * args.at_dout.b + kv * args.group * args.at_dout.h + before * args.at_dout.s;
    const int kind = threadIdx.x / BLOCK_M, number = threadIdx.x % BLOCK_M;  // this thread's row
    const float *next_rows =
        args.rows + b * args.rows_b + kv * args.group * args.rows_h + before + kind * args.rows_kind + number;
    const auto load_next = [&]() {
        if (next < total) {
            const int stage = next % NUM_STAGES, left = queries.length - next_block * BLOCK_M;
            QTile::load(Q + stage * QTile::BYTES, next_q, args.at_q.s, left, args.head_dim);
            OTile::load(dO + stage * OTile::BYTES, next_do, args.at_dout.s, left, args.head_dim_v);
#pragma unroll
            for (int pass = 0; pass < ROW_KINDS; pass += THREADS / BLOCK_M)  // as many kinds as there are threads for
                if (kind + pass < ROW_KINDS)
                    copy_number_async(rows + stage * ROW_BYTES + 4 * (threadIdx.x + pass * BLOCK_M),
                                      next_rows + pass * args.rows_kind, number < left);
            const int back = ++next_block == end ? count : 0;  // to the first block of the next head
            next_block -= back;
            next_q += (1 - back) * BLOCK_M * args.at_q.s + (back ? args.at_q.h : 0);
            next_do += (1 - back) * BLOCK_M * args.at_dout.s + (back ? args.at_dout.h : 0);
            next_rows += (1 - back) * BLOCK_M + (back ? args.rows_h : 0);
        }
        ++next;
        commit_copies();
    };

    if (total) {
        KTile::load(K, k, args.at_k.s, keys.length - first, args.head_dim);
        if (MAKES_DK) VTile::load(V, v, args.at_v.s, keys.length - first, args.head_dim_v);
    }
    if (NUM_STAGES > 1) load_next();

    Accumulator<MT, BLOCK_D / SIDES> acc_k;
    Accumulator<MT, BLOCK_DV / SIDES> acc_v;
    if (MAKES_DK) clear<MT, BLOCK_D / SIDES>(acc_k);
    if (MAKES_DV) clear<MT, BLOCK_DV / SIDES>(acc_v);
    const u32 lane_k = KTile::lane_a(K) + own * KTile::PITCH, lane_v = VTile::lane_a(V) + own * VTile::PITCH;
    const u32 lane_q = QTile::lane_b(Q) + own_rows * QTile::PITCH, lane_do = OTile::lane_b(dO) + own_rows * OTile::PITCH;
    const u32 lane_q_transposed = QTile::lane_a(Q, side), lane_do_transposed = OTile::lane_a(dO, side);
    int member = 0, n = begin;
#pragma unroll 1
    for (int index = 0; index < total; ++index) {
        if (NUM_STAGES == 1) {
            __syncthreads();
            load_next();
        }
        wait_for_copies<0>();
        __syncthreads();  // this block is there, and no warp reads the one before any more
        if (NUM_STAGES > 1) load_next();
        const int stage = index % NUM_STAGES, row = n * BLOCK_M;
        const float *LSE = row_numbers + stage * ROW_KINDS * BLOCK_M + own_rows + lane_id() % 4 * 2;
        const float *Delta = LSE + BLOCK_M, *share = Delta + BLOCK_M;
        const i64 mask = b * args.mask_b + (kv * args.group + member) * args.mask_h;
        if (++n == end) n = begin, ++member;

        const u32 lane_do_now = lane_do_transposed + stage * OTile::BYTES;
        const u32 lane_q_now = lane_q_transposed + stage * QTile::BYTES;
        Accumulator<MT, N> S, dP, tanh;
        const auto multiply_dp = [&]() { multiply_rows<MT, N, BLOCK_DV>(dP, lane_v, lane_do + stage * OTile::BYTES); };
        multiply_rows<MT, N, BLOCK_D>(S, lane_k, lane_q + stage * QTile::BYTES);
        finish_scores<true, MT, N>(S, &tanh, args, mask, row + own_rows, key);
        if (band.cuts(row, first)) hide<true, MT, N>(S, band, row + own_rows, key);
        if (MAKES_DK && SIDES > 1) multiply_dp();  // the exponentials wait for no product, and overlap with this one
#pragma unroll
        for (int c = 0; c < N / 8; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int half = 0; half < 4; half += 2) {
                        S[mt][c][half + e] = weight(S[mt][c][half + e], LSE[8 * c + e], args.scale);
                        if (NATURAL) S[mt][c][half + e] *= share[8 * c + e];
                    }
        if (MAKES_DV) {
            if (SIDES > 1) Exchange::put<MT, N>(exchange_p, own, S, own_rows);
            multiply_add<MT, N, BLOCK_DV, SIDES>(acc_v, S, lane_do_now + own_rows * OTile::PITCH);
        }
        if (MAKES_DK) {
            if (SIDES == 1) multiply_dp();  // later: registers are short
#pragma unroll
            for (int c = 0; c < N / 8; ++c)
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                        for (int half = 0; half < 4; half += 2) {
                            const int at = half + e;
                            S[mt][c][at] = score_gradient(
                                S[mt][c][at], dP[mt][c][at], Delta[8 * c + e], SOFTCAP ? tanh[mt][c][at] : 0.0f);
                        }
            if (SIDES > 1) Exchange::put<MT, N>(exchange_ds, own, S, own_rows);
            multiply_add<MT, N, BLOCK_D, SIDES>(acc_k, S, lane_q_now + own_rows * QTile::PITCH);
        }
        if (SIDES > 1) wait_for_group<SIDES>(group);
#pragma unroll
        for (int step = 1; step < SIDES; ++step) {
            const int other = (side + step) % SIDES, from = own * Exchange::PITCH;
            if (MAKES_DV)
                multiply_add_shared<Exchange, MT, N, BLOCK_DV, SIDES>(
                    acc_v, Exchange::lane_a(exchange_p, other * N / 16) + from, lane_do_now + other * N * OTile::PITCH);
            if (MAKES_DK)
                multiply_add_shared<Exchange, MT, N, BLOCK_D, SIDES>(
                    acc_k, Exchange::lane_a(exchange_ds, other * N / 16) + from, lane_q_now + other * N * QTile::PITCH);
        }
    }

    wait_for_copies<0>();
    __syncthreads();  // K and V have been read
    if (MAKES_DK) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int c = 0; c < BLOCK_D / SIDES / 8; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc_k[mt][c][e] *= args.gradient_scale;
        KTile::put<MT, BLOCK_D / SIDES, SIDES>(K, own, acc_k, 0, side);
    }
    if (MAKES_DV) VTile::put<MT, BLOCK_DV / SIDES, SIDES>(V, own, acc_v, 0, side);
    __syncthreads();
    if (MAKES_DK) {
        u16 *dk = args.dk + b * args.at_dk.b + kv * args.at_dk.h + (keys.start + first) * args.at_dk.s;
        KTile::store(K, dk, args.at_dk.s, keys.end - first, args.head_dim);
    }
    if (MAKES_DV) {
        u16 *dv = args.dv + b * args.at_dv.b + kv * args.at_dv.h + (keys.start + first) * args.at_dv.s;
        VTile::store(V, dv, args.at_dv.s, keys.end - first, args.head_dim_v);
    }
}

#endif
