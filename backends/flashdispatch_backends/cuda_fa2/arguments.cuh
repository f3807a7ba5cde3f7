// What every kernel is launched with: one struct, passed by value, whose fields and order `arguments.py` repeats.
//
// What is compiled in are macros, given as -D options by `recipe.py`:
//
//     BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES   the tile
//     SIDES                                     warps that share rows in the backward
//     BLOCK_D, BLOCK_DV                         D and Dv on the chip, multiples of 16 SIDES
//     BFLOAT16                                  1: bfloat16, 0: float16
//     ALIGNED                                   1: rows of q, k, v, out and dout begin at multiples of 16 bytes
//     MASK, PAIRED_MASK                         attn_mask's kind, and whether two neighbours are read at once
//     SOFTCAP, NATURAL, PLAIN                   what a score is: see scores.cuh
//     DQ                                        which kernel of backward.cu: 1: dq_kernel, 0: dkdv_kernel
//     MAKES_DK, MAKES_DV                        the gradients that dkdv_kernel makes
//     ARGUMENT_BYTES                            what `arguments.py` takes this struct's size to be
#pragma once

using u16 = unsigned short;  // a float16 or bfloat16 number
using u32 = unsigned int;
using i64 = long long;

struct Strides {  // in elements, of (B, S, H, D); the last dim's is 1
    i64 b, s, h;
};

struct Arguments {
    const u16 *q, *k, *v;      // (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv)
    u16 *out;                  // (B, Sq, Hq, Dv)
    float *lse;                // (B, Hq, Sq), or null
    const void *mask;          // (B, Hq, Sq, Sk) with stride 0 where it is broadcast, or null
    const int *q_lens, *kv_lens;      // (B,), or null
    const int *q_starts, *k_starts;   // (B,), or null: sequences lie packed behind each other
    const u16 *dout;           // (B, Sq, Hq, Dv)
    const float *dlse;         // (B, Hq, Sq), or null
    float *rows;               // (2 or 3, B, Hq, Sq): LSE in the scores' units, Delta, and the share (dq_kernel)
    u16 *dq, *dk, *dv;         // as q, k, v; each may be null
    Strides at_q, at_k, at_v, at_out, at_dout, at_dq, at_dk, at_dv;
    i64 rows_b, rows_h, rows_kind;              // of lse, dlse and rows
    i64 mask_b, mask_h, mask_m, mask_n;
    int heads, group, heads_at_once, seqlen_q, seqlen_k;
    int left, right, top_left;                  // the band, with numbers larger than any distance for no limit
    int head_dim, head_dim_v;                   // D and Dv in memory
    float scale, softcap, gradient_scale;
    int unused;                                 // the size is a multiple of 8
};

static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "arguments.py describes another struct");
