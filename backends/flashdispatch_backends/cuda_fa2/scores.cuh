// What the kernels share: which block is whose, where a sequence lies, who sees whom, what a score is.
//
// A warp's tile of scores has queries as rows in the forward and the dQ kernel, and keys as rows (TRANSPOSED) in the
// dK/dV kernel. Lane 4 g + t holds rows g and g + 8 of each 16, in columns 2 t and 2 t + 1 of each 8 (mma.cuh).
//
// Units. exp2 is one instruction, exp is two, so scores are kept in units of log 2: the host multiplies the scale (with
// a softcap: the softcap) by log2(e), the kernels what they load of the LSE, and exp(S - m) becomes exp2(S - m). With a
// float mask that would overflow (finfo.min * log2(e) is -inf, and finfo.min is just a number), so there, and where the
// call's own scale is as large, scores stay natural and the difference is multiplied: NATURAL. A PLAIN score is q.k all
// the way, scale > 0 is all that is missing, and it is folded into the exponential's argument.
#pragma once

#include "tile.cuh"

#define INF __int_as_float(0x7f800000)
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr int NO_MASK = 0, BOOL_MASK = 1, MASK_16_BIT = 2, MASK_32_BIT = 3;  // values of MASK

__device__ __forceinline__ int blocks_in(int length, int block) { return (max(length, 0) + block - 1) / block; }

struct Work {
    int block, b, head;
};

// What this program works on. A few heads take turns: the first block of each, the second of each, and so on; then
// those of the next heads. `heads` is how many there are in each sequence.
__device__ __forceinline__ Work work_of_program(int blocks, int heads, int heads_at_once) {
    const int pid = blockIdx.x;
    const int heads_before = pid / (blocks * heads_at_once) * heads_at_once;
    const int heads_here = min(heads_at_once, int(gridDim.x) / blocks - heads_before);  // the last may be fewer
    const int index = pid - heads_before * blocks;
    const int bh = heads_before + index % heads_here;
    return {index / heads_here, bh / heads, bh % heads};
}

struct Sequence {
    i64 start;   // rows into its tensor
    int length;  // rows
    int end;     // its own rows
};

// Where sequence b lies. Padded batches have a stride per sequence instead of starts, and own their padding, which
// results fill with zeros. Sequences packed behind each other own nothing past their length. Lengths are clamped.
__device__ __forceinline__ Sequence sequence(const int *starts, const int *lengths, int b, int limit) {
    const int length = lengths ? min(max(lengths[b], 0), limit) : limit;
    return starts ? Sequence{starts[b], length, length} : Sequence{0, length, limit};
}

// Who sees whom by position: query i sees the keys i + lowest .. min(i + highest, kv_len - 1).
struct Band {
    int lowest, highest, q_len, kv_len;

    __device__ __forceinline__ Band(const Arguments &args, int q_len, int kv_len) : q_len(q_len), kv_len(kv_len) {
        const int shift = args.top_left ? 0 : kv_len - q_len;  // p(i) - i
        lowest = shift - args.left;
        highest = shift + args.right;
    }

    // Key blocks begin .. end - 1 hold what the queries `first`, first + 1, ... of a block see.
    __device__ __forceinline__ void key_blocks(int first, int &begin, int &end) const {
        const int last = min(first + BLOCK_M, q_len) - 1;
        begin = max(first + lowest, 0) / BLOCK_N;
        end = first < q_len ? blocks_in(min(kv_len, last + highest + 1), BLOCK_N) : 0;
    }

    // Query blocks begin .. end - 1 see a key of the block that begins at `first`.
    __device__ __forceinline__ void query_blocks(int first, int &begin, int &end) const {
        const int last = min(first + BLOCK_N, kv_len) - 1;
        begin = max(first - highest, 0) / BLOCK_M;
        end = first < kv_len ? blocks_in(min(q_len, last - lowest + 1), BLOCK_M) : 0;
    }

    // Whether some query of a block does not see some key of a block. A query past the end sees none, which matters where
    // a mask may make a large number of its score.
    __device__ __forceinline__ bool cuts(int row, int key) const {
        const int last = min(row + BLOCK_M, q_len) - 1;
        if (MASK != NO_MASK && row + BLOCK_M > q_len) return true;
        return key + BLOCK_N > kv_len || key + BLOCK_N - 1 > row + highest || key < last + lowest;
    }
};

// The exp of a score difference, in the scores' units.
__device__ __forceinline__ float power(float difference) { return exp2_fast(NATURAL ? difference * LOG2E : difference); }

// exp(S - base) of a score, and of a PLAIN one, which is still q.k.
__device__ __forceinline__ float weight(float S, float base, float scale) {
    return power(PLAIN ? fmaf(S, scale, -base) : S - base);
}

// tanh in float32, right to a few last digits everywhere: a large softcap lives from small arguments.
__device__ __forceinline__ float tanh_fast(float x) {
    const float from_exp = 1.0f - __fdividef(2.0f, exp2_fast(x * (2.0f * LOG2E)) + 1.0f);  // near 0: loses as 1 - 1
    const float x2 = x * x;
    const float series = x * (1.0f + x2 * (-1.0f / 3 + x2 * (2.0f / 15 + x2 * (-17.0f / 315 + x2 * (62.0f / 2835)))));
    return fabsf(x) < 0.25f ? series : from_exp;
}

__device__ __forceinline__ float with_mask(float S, const void *mask, i64 at) {
    if (MASK == BOOL_MASK) return static_cast<const unsigned char *>(mask)[at] ? S : -INF;
    if (MASK == MASK_16_BIT) return S + to_float(static_cast<const u16 *>(mask)[at]);
    return S + static_cast<const float *>(mask)[at];
}

// Two neighbours along the keys, read at once.
__device__ __forceinline__ void with_mask_pair(float &first, float &second, const void *mask, i64 at) {
    if (MASK == BOOL_MASK) {
        const uchar2 pair = *reinterpret_cast<const uchar2 *>(static_cast<const unsigned char *>(mask) + at);
        first = pair.x ? first : -INF;
        second = pair.y ? second : -INF;
    } else if (MASK == MASK_16_BIT) {
        const ushort2 pair = *reinterpret_cast<const ushort2 *>(static_cast<const u16 *>(mask) + at);
        first += to_float(pair.x);
        second += to_float(pair.y);
    } else {
        const float2 pair = *reinterpret_cast<const float2 *>(static_cast<const float *>(mask) + at);
        first += pair.x;
        second += pair.y;
    }
}

// Adds attn_mask to a tile of scores, or hides what it hides. Every lane loads whatever it asks for, so that no load waits
// for another: an index past the end of the mask is moved back, and what it reads is hidden later (Band::cuts). CLAMPED:
// that may happen along the columns.
template <bool TRANSPOSED, bool CLAMPED, int MT, int N>
__device__ __forceinline__ void add_mask(Accumulator<MT, N> &S, const Arguments &args, i64 base, int row, int key) {
    const int size = TRANSPOSED ? args.seqlen_q : args.seqlen_k;  // along the columns
    const i64 step = TRANSPOSED ? args.mask_m : args.mask_n;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * mt + 8 * half + lane_id() / 4;
            const i64 along_row = base + (TRANSPOSED ? min(key + r, args.seqlen_k - 1) * args.mask_n
                                                     : min(row + r, args.seqlen_q - 1) * args.mask_m);
#pragma unroll
            for (int n = 0; n < N / 8; ++n) {
                const int column = (TRANSPOSED ? row : key) + 8 * n + lane_id() % 4 * 2;
                float &first = S[mt][n][2 * half], &second = S[mt][n][2 * half + 1];
                if (PAIRED_MASK && !TRANSPOSED) {
                    with_mask_pair(first, second, args.mask, along_row + (CLAMPED ? min(column, size - 2) : column));
                } else {
                    first = with_mask(first, args.mask, along_row + (CLAMPED ? min(column, size - 1) : column) * step);
                    second = with_mask(
                        second, args.mask, along_row + (CLAMPED ? min(column + 1, size - 1) : column + 1) * step);
                }
            }
        }
}

// q.k to S, in the contract's order: scale, softcap, attn_mask. The tile begins at query `row` and key `key`; `mask` is
// where its head's begins. A PLAIN tile is left as it is. With a softcap and tanh != nullptr, tanh is kept for its
// derivative.
template <bool TRANSPOSED, int MT, int N>
__device__ __forceinline__ void finish_scores(
    Accumulator<MT, N> &S, Accumulator<MT, N> *tanh, const Arguments &args, i64 mask, int row, int key) {
    if constexpr (PLAIN) return;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                S[mt][n][e] *= args.scale;
                if (SOFTCAP) {
                    const float t = tanh_fast(S[mt][n][e]);
                    if (tanh) (*tanh)[mt][n][e] = t;
                    S[mt][n][e] = t * args.softcap;
                }
            }
    if constexpr (MASK != NO_MASK) {
        if (TRANSPOSED ? row + N <= args.seqlen_q : key + N <= args.seqlen_k) {
            add_mask<TRANSPOSED, false, MT, N>(S, args, mask, row, key);
        } else {
            add_mask<TRANSPOSED, true, MT, N>(S, args, mask, row, key);
        }
    }
}

// Scores of keys that position hides, or past the end, become -inf; those of queries past the end do not matter, or
// (TRANSPOSED, where they share a warp's products with others) become -inf, too.
template <bool TRANSPOSED, int MT, int N>
__device__ __forceinline__ void hide(Accumulator<MT, N> &S, const Band &band, int row, int key) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * mt + 8 * half + lane_id() / 4;
            int lowest, highest;  // columns of this row that stay
            if (TRANSPOSED) {
                lowest = key + r - band.highest - row;
                highest = key + r < band.kv_len ? min(key + r - band.lowest, band.q_len - 1) - row : -1;
            } else {
                lowest = row + r + band.lowest - key;
                highest = min(row + r + band.highest, band.kv_len - 1) - key;
            }
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int c = 8 * n + lane_id() % 4 * 2 + e;
                    if (c < lowest || c > highest) S[mt][n][2 * half + e] = -INF;
                }
        }
}
