// The forward kernel: FlashAttention-2, Algorithm 1 (arXiv 2307.08691, "FA-2"), on mma.sync.
//
// One program owns one block of queries of one head. Its Q stays in shared memory, K and V stream past, and a softmax
// row is finished piece by piece (FA-2 section 2.3.1). For each query three running values, all in float32:
//
//     m       the largest score so far                       m_new = max(m, rowmax(S))     P = exp(S - m_new)
//     l       the sum of exp(S - m) so far                   alpha = exp(m - m_new)        l = alpha l + rowsum(P)
//     acc     the sum of exp(S - m) V so far                                               acc = alpha acc + P V
//
//     O = acc / l  and  LSE = m + log l  are written once, at the end.
//
// program ids     One dimension, pid = (b * Hq + h) * blocks + block: the blocks of a head run side by side and find its
//                 K and V in the L2 cache. Under a causal mask the last block has the most work, so blocks count down,
//                 and a few heads take turns (`work_of_program`): heavy blocks first, light ones fill the gaps at the end.
// tiles           BLOCK_M queries by BLOCK_N keys. A warp owns 16 MT whole rows (FA-2 section 3.3): no row's maximum or
//                 sum needs another warp. The larger MT is, the more products a fragment of K or V read from shared
//                 memory serves. The head dim is not split; it is padded to a multiple of 16 on the chip.
// strides         q (B, Sq, Hq, D), k and v (B, Sk, Hkv, .) have any strides with a contiguous last dim. Query head h
//                 reads key/value head h / group (GQA): nothing is expanded. Offsets are 64 bit.
// the loop        One, over the key blocks that some query of the block sees. With two stages, block n + 1 of K and V is
//                 copied (cp.async) while block n is worked on, and one barrier a block suffices. With one stage V is
//                 copied while S is made, and the next K during softmax and P V.
// masks           Position and tails only in blocks that the window's left edge, the diagonal or the end of the keys cuts;
//                 attn_mask, where there is one, in all. Hidden scores are -inf before exp. A row that has seen no key
//                 has m = -inf, and subtracts 0.
// kept            m, l, acc in registers; LSE for the backward, which recomputes P from it.
// hardware        mma.sync on tensor cores of sm_80 and later, ldmatrix, cp.async. P goes from the registers where S was
//                 made into the second product's operands (mma.cuh).
// the tail        Rows past a sequence's length are stored as out = 0 and LSE = -inf; nothing is written past its end.

#include "scores.cuh"

constexpr int MT = BLOCK_M / (16 * NUM_WARPS);
static_assert(BLOCK_M == 16 * MT * NUM_WARPS, "a warp owns 16 MT queries");
using QTile = Tile<BLOCK_M, BLOCK_D>;
using KTile = Tile<BLOCK_N, BLOCK_D>;
using VTile = Tile<BLOCK_N, BLOCK_DV>;
using OTile = Tile<BLOCK_M, BLOCK_DV>;
constexpr int Q_BYTES = QTile::BYTES > OTile::BYTES ? QTile::BYTES : OTile::BYTES;  // O takes Q's place

extern __shared__ __align__(1024) unsigned char shared[];

extern "C" __global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ Arguments args) {
    const int blocks = blocks_in(args.seqlen_q, BLOCK_M);
    const Work work = work_of_program(blocks, args.heads, args.heads_at_once);
    const int first = (blocks - 1 - work.block) * BLOCK_M, b = work.b, h = work.head, kv = h / args.group;
    const Sequence queries = sequence(args.q_starts, args.q_lens, b, args.seqlen_q);
    const Sequence keys = sequence(args.k_starts, args.kv_lens, b, args.seqlen_k);
    const Band band(args, queries.length, keys.length);
    const u16 *q = args.q + b * args.at_q.b + h * args.at_q.h + (queries.start + first) * args.at_q.s;
    const u16 *k = args.k + b * args.at_k.b + kv * args.at_k.h + keys.start * args.at_k.s;
    const u16 *v = args.v + b * args.at_v.b + kv * args.at_v.h + keys.start * args.at_v.s;
    const i64 mask = b * args.mask_b + h * args.mask_h;

    const u32 Q = shared_address(shared), K = Q + Q_BYTES, V = K + NUM_STAGES * KTile::BYTES;
    const int row = first + warp_id() * 16 * MT;  // this warp's first
    int begin, end;
    band.key_blocks(first, begin, end);
    const auto load_k = [&](int n, int stage) {
        KTile::load(K + stage * KTile::BYTES, k + i64(n) * BLOCK_N * args.at_k.s, args.at_k.s, keys.length - n * BLOCK_N,
                    args.head_dim);
    };
    const auto load_v = [&](int n, int stage) {
        VTile::load(V + stage * VTile::BYTES, v + i64(n) * BLOCK_N * args.at_v.s, args.at_v.s, keys.length - n * BLOCK_N,
                    args.head_dim_v);
    };

    float m[MT][2], l[MT][2];
    Accumulator<MT, BLOCK_DV> acc;
    clear<MT, BLOCK_DV>(acc);  // FA-2 Algorithm 1 line 5
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) m[mt][half] = -INF, l[mt][half] = 0.0f;

    if (begin < end) {
        QTile::load(Q, q, args.at_q.s, queries.length - first, args.head_dim);
        load_k(begin, 0);
        if (NUM_STAGES > 1) load_v(begin, 0);
        commit_copies();
    }
    const u32 lane_q = QTile::lane_a(Q) + warp_id() * 16 * MT * QTile::PITCH;
    const u32 lane_k = KTile::lane_b(K), lane_v = VTile::lane_a(V);
    int stage = 0;
#pragma unroll 1
    for (int n = begin; n < end; ++n) {
        wait_for_copies<0>();
        __syncthreads();  // block n is there, and no warp reads block n - 1 any more
        if (NUM_STAGES == 1) {
            load_v(n, 0);
        } else if (n + 1 < end) {
            load_k(n + 1, stage ^ 1);
            load_v(n + 1, stage ^ 1);
        }
        commit_copies();

        Accumulator<MT, BLOCK_N> S;
        multiply_rows<MT, BLOCK_N, BLOCK_D>(S, lane_q, lane_k + stage * KTile::BYTES);  // line 8
        if (NUM_STAGES == 1) {
            wait_for_copies<0>();
            __syncthreads();  // V is there, and K may be overwritten
            if (n + 1 < end) load_k(n + 1, 0);
            commit_copies();
        }
        const int key = n * BLOCK_N;
        finish_scores<false, MT, BLOCK_N>(S, nullptr, args, mask, row, key);
        if (band.cuts(first, key)) hide<false, MT, BLOCK_N>(S, band, row, key);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // lines 9 and 10
                float largest = S[mt][0][2 * half];
#pragma unroll
                for (int c = 0; c < BLOCK_N / 8; ++c)
                    largest = fmaxf(largest, fmaxf(S[mt][c][2 * half], S[mt][c][2 * half + 1]));
                largest = row_max(largest);
                const float m_new = fmaxf(m[mt][half], PLAIN ? largest * args.scale : largest);
                const float base = m_new == -INF ? 0.0f : m_new;  // no key yet: -inf - 0, not -inf - -inf
                const float alpha = power(m[mt][half] - base);
                float rowsum = 0.0f;
#pragma unroll
                for (int c = 0; c < BLOCK_N / 8; ++c)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        S[mt][c][e] = weight(S[mt][c][e], base, args.scale);
                        rowsum += S[mt][c][e];
                    }
                m[mt][half] = m_new;
                l[mt][half] = l[mt][half] * alpha + rowsum;  // of this lane's columns
#pragma unroll
                for (int c = 0; c < BLOCK_DV / 8; ++c) acc[mt][c][2 * half] *= alpha, acc[mt][c][2 * half + 1] *= alpha;
            }
        multiply_add<MT, BLOCK_N, BLOCK_DV>(acc, S, lane_v + stage * VTile::BYTES);
        if (NUM_STAGES > 1) stage ^= 1;
    }

    // FA-2 Algorithm 1 lines 12 to 15. A row without keys has l = 0.
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + 16 * mt + 8 * half + lane_id() / 4;
            const float sum = row_sum(l[mt][half]);
            const bool sees = i < queries.length && sum > 0.0f;
            const float inverse = sees ? reciprocal(sum) : 0.0f;
#pragma unroll
            for (int c = 0; c < BLOCK_DV / 8; ++c)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) acc[mt][c][e] = sees ? acc[mt][c][e] * inverse : 0.0f;
            if (args.lse && lane_id() % 4 == 0 && i < queries.end) {
                const float log_l = log2_fast(sum);
                const float LSE = NATURAL ? m[mt][half] + log_l * LN2 : (m[mt][half] + log_l) * LN2;
                args.lse[b * args.rows_b + h * args.rows_h + queries.start + i] = sees ? LSE : -INF;
            }
        }
    wait_for_copies<0>();
    __syncthreads();  // Q has been read
    OTile::put<MT, BLOCK_DV>(Q, warp_id() * 16 * MT, acc);
    __syncthreads();
    u16 *out = args.out + b * args.at_out.b + h * args.at_out.h + (queries.start + first) * args.at_out.s;
    OTile::store(Q, out, args.at_out.s, queries.end - first, args.head_dim_v);
}
