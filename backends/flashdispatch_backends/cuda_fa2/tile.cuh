// Blocks of rows in shared memory: how they lie there, how they get there and back, and the two products made from them.
//
// ldmatrix reads 16 bytes (a chunk: 8 numbers) from each of eight rows at a time, and shared memory gives 128 bytes a
// cycle, 16 from each of eight groups of banks. Rows that begin in the same bank would queue eight deep. So chunk c of
// row r is kept at chunk c XOR (r % 8), and any eight neighbouring rows have any one chunk in eight different groups.
// Rows of 64 (32) bytes, or an odd multiple, fill the banks two (four) at a time, and need two (one) bits of it.
#pragma once

#include "mma.cuh"

constexpr int THREADS = 32 * NUM_WARPS;

__device__ __forceinline__ u32 shared_address(const void *pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// 16 bytes from global to shared memory without passing through registers; zeros where there is nothing to read.
__device__ __forceinline__ void copy_chunk_async(u32 target, const void *source, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_number_async(u32 target, const float *source, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(there ? 4 : 0) : "memory");
}

// Waits for the warps of one group; groups are numbered from 0.
template <int WARPS>
__device__ __forceinline__ void wait_for_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * WARPS) : "memory");  // barrier 0 is __syncthreads
}

// The copies issued since the last call are one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last LEFT groups of this thread's copies have arrived.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

union Chunk {
    uint4 all;
    u32 pair[4];
    u16 number[8];
};

__device__ __forceinline__ Chunk load_chunk(const u16 *source) {
    Chunk chunk;
#if ALIGNED
    chunk.all = *reinterpret_cast<const uint4 *>(source);
#else
#pragma unroll
    for (int e = 0; e < 8; ++e) chunk.number[e] = source[e];
#endif
    return chunk;
}

template <int ROWS, int WIDTH>
struct Tile {
    static_assert(ROWS % 16 == 0 && WIDTH % 16 == 0, "a tile is made of matrices of 16 x 16");
    static constexpr int CHUNKS = WIDTH / 8, PITCH = 2 * WIDTH, BYTES = ROWS * PITCH;
    static constexpr int SPREAD = WIDTH % 64 == 0 ? 7 : WIDTH % 32 == 0 ? 3 : 1;
    static constexpr int SHIFT = WIDTH % 64 == 0 ? 0 : WIDTH % 32 == 0 ? 1 : 2;

    // The place of a chunk, in bytes.
    static __device__ __forceinline__ u32 offset(int row, int chunk) {
        return row * PITCH + ((chunk ^ ((row >> SHIFT) & SPREAD)) << 4);
    }

    // A lane's address for ldmatrix of 16 rows by 16 columns, at row 0 and column 16 `side`: the four 8 x 8 matrices in
    // the order of an A tile, or of a transposed B tile.
    static __device__ __forceinline__ u32 lane_a(u32 tile, int side = 0) {
        return tile + offset(lane_id() & 15, 2 * side + (lane_id() >> 4));
    }

    // The same in the order of two B tiles that lie as rows.
    static __device__ __forceinline__ u32 lane_b(u32 tile) {
        return tile + offset((lane_id() & 7) + (lane_id() >> 4 << 3), (lane_id() >> 3) & 1);
    }

    // The address that a lane has further down and to the right, by rows and columns known when this is compiled: 8 rows
    // further on the XOR is the same, and no bit of a chunk may be set in both columns.
    static __device__ __forceinline__ u32 moved(u32 lane, int row, int column) {
        const int chunk = column / 8;
        return (lane ^ ((chunk & SPREAD) << 4)) + ((chunk & ~SPREAD) << 4) + row * PITCH;
    }

    // Fills the tile with rows of `source`, `stride` numbers apart: zeros past `rows_left` rows and `width` numbers.
    static __device__ __forceinline__ void load(u32 tile, const u16 *source, i64 stride, int rows_left, int width) {
        constexpr int AT_ONCE = THREADS / CHUNKS;  // rows that the threads copy together
        const int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        if (THREADS % CHUNKS != 0 && first >= AT_ONCE) return;
        const u16 *from = source + (first * stride + chunk * 8);
        const i64 step = AT_ONCE * stride;
        const int left = WIDTH == 16 || chunk * 8 < width ? rows_left - first : 0;
#pragma unroll
        for (int pass = 0; pass < (ROWS + AT_ONCE - 1) / AT_ONCE; ++pass, from += step) {
            const int row = first + pass * AT_ONCE;
            if (ROWS % AT_ONCE != 0 && row >= ROWS) break;
            const bool there = pass * AT_ONCE < left;
#if ALIGNED
            copy_chunk_async(tile + offset(row, chunk), from, there);  // reads nothing where there is nothing
#else
            Chunk loaded;
            loaded.all = make_uint4(0, 0, 0, 0);
            if (there) loaded = load_chunk(from);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tile + offset(row, chunk)),
                         "r"(loaded.pair[0]), "r"(loaded.pair[1]), "r"(loaded.pair[2]), "r"(loaded.pair[3]) : "memory");
#endif
        }
    }

    // Writes a warp's 16 MT rows of a result, from row `first` on, to the tile, rounding once. Its columns begin at
    // `column`, or are those of one of several sides: see multiply_add.
    template <int MT, int N, int EVERY = 1>
    static __device__ __forceinline__ void put(
        u32 tile, int first, const float (&c)[MT][N / 8][4], int column = 0, int side = 0) {
        const u32 lane = tile + offset(first + lane_id() / 4, column / 8 + 2 * side) + lane_id() % 4 * 4;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    asm volatile("st.shared.b32 [%0], %1;" ::
                                 "r"(moved(lane, 16 * mt + 8 * half, 16 * EVERY * (n / 2) + n % 2 * 8)),
                                 "r"(pack(c[mt][n][2 * half], c[mt][n][2 * half + 1])) : "memory");
    }

    // The way back of `load`, into rows that begin at multiples of 16 bytes.
    static __device__ __forceinline__ void store(u32 tile, u16 *target, i64 stride, int rows_left, int width) {
        for (int index = threadIdx.x; index < ROWS * CHUNKS; index += THREADS) {
            const int row = index / CHUNKS, chunk = index % CHUNKS;
            if (row >= rows_left || chunk * 8 >= width) continue;
            u32 x, y, z, w;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(tile + offset(row, chunk)) : "memory");
            *reinterpret_cast<uint4 *>(target + row * stride + chunk * 8) = make_uint4(x, y, z, w);
        }
    }
};

template <int MT, int N>
using Accumulator = float[MT][N / 8][4];  // 16 MT rows by N columns of one warp

template <int MT, int N>
__device__ __forceinline__ void clear(Accumulator<MT, N> &c) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[mt][n][e] = 0.0f;
}

// C = A B^T: 16 MT rows of a tile by the N rows of another, over WIDTH. `a` and `b` are lanes' addresses.
template <int MT, int N, int WIDTH>
__device__ __forceinline__ void multiply_rows(Accumulator<MT, N> &c, u32 a, u32 b) {
    using T = Tile<16, WIDTH>;
    clear<MT, N>(c);
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        u32 A[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) ldmatrix(A[mt], T::moved(a, 16 * mt, k));
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            u32 B[4];
            ldmatrix(B, T::moved(b, n, k));
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                mma(c[mt][n / 8], A[mt], B[0], B[1]);
                mma(c[mt][n / 8 + 1], A[mt], B[2], B[3]);
            }
        }
    }
}

// One step of C += P B: A is a fragment of P, 16 columns wide; B is a tile, read from row k on. With EVERY > 1, a warp
// makes the 16 columns of its own side of every 16 EVERY, and `b` is its address there.
template <int MT, int WIDTH, int EVERY>
__device__ __forceinline__ void multiply_add_step(
    Accumulator<MT, WIDTH / EVERY> &c, const u32 (&A)[MT][4], u32 b, int k) {
#pragma unroll
    for (int n = 0; n < WIDTH / EVERY; n += 16) {
        u32 B[4];
        ldmatrix_transposed(B, Tile<16, WIDTH>::moved(b, k, n * EVERY));
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
            mma(c[mt][n / 8], A[mt], B[0], B[1]);
            mma(c[mt][n / 8 + 1], A[mt], B[2], B[3]);
        }
    }
}

// C += P B: P, 16 MT rows by K columns, is another product's result in registers, rounded here to 16 bit.
template <int MT, int K, int WIDTH, int EVERY = 1>
__device__ __forceinline__ void multiply_add(Accumulator<MT, WIDTH / EVERY> &c, const Accumulator<MT, K> &p, u32 b) {
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 A[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
            const auto &left = p[mt][k / 8], &right = p[mt][k / 8 + 1];
            A[mt][0] = pack(left[0], left[1]);
            A[mt][1] = pack(left[2], left[3]);
            A[mt][2] = pack(right[0], right[1]);
            A[mt][3] = pack(right[2], right[3]);
        }
        multiply_add_step<MT, WIDTH, EVERY>(c, A, b, k);
    }
}

// The same with P in a tile of shared memory, at a lane's address `a`.
template <class PTile, int MT, int K, int WIDTH, int EVERY>
__device__ __forceinline__ void multiply_add_shared(Accumulator<MT, WIDTH / EVERY> &c, u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 A[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) ldmatrix(A[mt], PTile::moved(a, 16 * mt, k));
        multiply_add_step<MT, WIDTH, EVERY>(c, A, b, k);
    }
}
