"""What the kernels share: which block is whose, where a sequence lies, who sees whom, what a score is, what is dropped.

A tile of scores is (block_m, block_n) in the forward, the dQ and the mask kernel, and its transpose in the dK/dV
kernel. Nothing here knows which way it lies: `i` are the query numbers and `j` the key numbers of a tile, as a column
and a row or the reverse, and everything broadcasts.

Units. exp2 is one instruction, exp is two, so scores are kept in units of log 2: the host multiplies the scale (with a
softcap: the softcap) by log2(e), the kernels what they load of ALiBi slopes, sinks and LSE, and exp(S - m) becomes
exp2(S - m). With a float mask that would overflow (finfo.min * log2(e) is -inf, and finfo.min is just a number), so
there, and where the call's own scale or softcap is as large, scores stay natural and the difference is multiplied:
NATURAL.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def work_of_program(blocks, heads_at_once):
    """(block, bh) of this program: one head after the other or, where `heads_at_once` is given, a few heads in turns.

    In turns: the first block of each of these heads, the second of each, and so on; then those of the next heads.
    """
    pid = tl.program_id(0)
    heads_before = pid // blocks
    heads_here = 1
    if heads_at_once is not None:
        heads_before = pid // (blocks * heads_at_once) * heads_at_once
        heads_here = tl.minimum(heads_at_once, tl.num_programs(0) // blocks - heads_before)  # the last may be fewer
    index = pid - heads_before * blocks
    return index // heads_here, heads_before + index % heads_here


@triton.jit
def sequence(starts, lengths, b, limit):
    """(start, length, end) of sequence b: `start` rows into its tensor, `length` rows long, its own up to row `end`.

    Padded batches have a stride per sequence instead of starts, and own their padding, which results fill with zeros.
    Sequences packed behind each other own nothing past their length. Lengths outside 0..limit are clamped.
    """
    start = 0
    length = limit
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), limit)
    end = limit
    if starts is not None:
        start = tl.load(starts + b)
        end = length
    return start, length, end


@triton.jit
def diagonal(q_len, kv_len, TOP_LEFT: tl.constexpr):
    """p(i) - i: where the position of a query starts."""
    if TOP_LEFT:
        shift = 0
    else:
        shift = kv_len - q_len
    return shift


@triton.jit
def key_blocks(first, last, shift, kv_len, left, right, BLOCK_N: tl.constexpr):
    """Key blocks that the queries first..last (inclusive) see: (start, whole_start, whole_end, end).

    Blocks in [whole_start, whole_end) need no mask of position. Those in [start, whole_start) and [whole_end, end) hold
    a key that some query does not see. All but `end` are multiples of BLOCK_N.
    """
    start = 0
    end = kv_len
    whole_start = 0
    whole_end = kv_len // BLOCK_N * BLOCK_N
    if left is not None:  # j >= p - left; Triton's // truncates, so its left side must not be negative
        start = tl.maximum(first + shift - left, 0) // BLOCK_N * BLOCK_N
        whole_start = tl.cdiv(tl.maximum(last + shift - left, 0), BLOCK_N) * BLOCK_N
    if right is not None:  # j <= p + right
        end = tl.minimum(end, last + shift + right + 1)
        whole_end = tl.minimum(whole_end, tl.maximum(first + shift + right + 1, 0) // BLOCK_N * BLOCK_N)
    return _in_order(start, whole_start, whole_end, end, BLOCK_N)


@triton.jit
def query_blocks(first, last, shift, q_len, kv_len, left, right, BLOCK_M: tl.constexpr):
    """Query blocks that see a key of first..last (inclusive): (start, whole_start, whole_end, end), as in `key_blocks`.

    Of a key block that the end of the keys cuts, no query block is whole.
    """
    start = 0
    end = q_len
    whole_start = 0
    whole_end = q_len // BLOCK_M * BLOCK_M
    if right is not None:  # p >= j - right
        start = tl.maximum(first - right - shift, 0) // BLOCK_M * BLOCK_M
        whole_start = tl.cdiv(tl.maximum(last - right - shift, 0), BLOCK_M) * BLOCK_M
    if left is not None:  # p <= j + left
        end = tl.minimum(end, tl.minimum(last, kv_len - 1) + left - shift + 1)
        whole_end = tl.minimum(whole_end, tl.maximum(first + left - shift + 1, 0) // BLOCK_M * BLOCK_M)
    if last >= kv_len:
        whole_end = 0
    return _in_order(start, whole_start, whole_end, end, BLOCK_M)


@triton.jit
def _in_order(start, whole_start, whole_end, end, BLOCK: tl.constexpr):
    """The four edges, none before the one to its left: a band may be narrower than a block, or miss it."""
    end = tl.maximum(end, start)
    whole_start = tl.minimum(tl.maximum(whole_start, start), tl.cdiv(end, BLOCK) * BLOCK)
    whole_end = tl.maximum(whole_end, whole_start)
    return start, whole_start, whole_end, end


@triton.jit
def count_blocks(edges, CUT: tl.constexpr, BLOCK: tl.constexpr):
    """How many blocks are whole, or CUT."""
    if CUT:
        count = (edges[1] - edges[0]) // BLOCK + tl.cdiv(tl.maximum(edges[3] - edges[2], 0), BLOCK)
    else:
        count = (edges[2] - edges[1]) // BLOCK
    return count


@triton.jit
def block_start(edges, index, CUT: tl.constexpr, BLOCK: tl.constexpr):
    """Where the block number `index` of those `count_blocks` counts begins."""
    if CUT:
        before = edges[1] - edges[0]
        start = index * BLOCK
        start = tl.where(start < before, edges[0] + start, edges[2] + start - before)
    else:
        start = edges[1] + index * BLOCK
    return start


@triton.jit
def load_tile(
    base, first, stride, end, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr
):
    """Rows first, first + 1, ... of a (S, D) matrix as a (BLOCK, BLOCK_D) tile; zero past D, and past `end` when TAIL.

    A row past the end may hold NaN, and 0 * NaN is NaN: masking the scores is not enough.
    """
    row = tl.arange(0, BLOCK)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    # 64 bit, and split so that a loop over `first` adds one scalar an iteration.
    at = (base + tl.cast(first, tl.int64) * stride) + (row.to(tl.int64) * stride + dim)
    if TAIL and D != BLOCK_D:
        tile = tl.load(at, mask=(row < end - first) & (dim < D), other=0.0)
    elif TAIL:
        tile = tl.load(at, mask=row < end - first, other=0.0)
    elif D != BLOCK_D:
        tile = tl.load(at, mask=dim < D, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_tile(base, tile, first, stride, end, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr):
    """The way back of `load_tile`, rounding once; nothing is written past `end` or D."""
    row = tl.arange(0, BLOCK)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    at = (base + tl.cast(first, tl.int64) * stride) + (row.to(tl.int64) * stride + dim)
    within = row < end - first
    if D != BLOCK_D:
        within = within & (dim < D)
    tl.store(at, tile.to(base.dtype.element_ty), mask=within)


@triton.jit
def in_units(x, NATURAL: tl.constexpr):
    """A natural logit in the scores' units."""
    if not NATURAL:
        x = x * LOG2E
    return x


@triton.jit
def exponential(x, NATURAL: tl.constexpr):
    """The exp of a score difference, in the scores' units."""
    if NATURAL:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def _tanh(x):
    """Tanh in float32, right to a few last digits everywhere: a large softcap lives from small arguments."""
    from_exp = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)  # near 0 it loses what 1 - 1 loses
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, from_exp)


@triton.jit
def scores(
    qk, i, j, row, key, shift, q_len, kv_len, left, right, scale, softcap, slope, mask, stride_mm, stride_mn,
    CUT: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """S and tanh from q.k, in the contract's order: scale, softcap, float mask and ALiBi, then what hides a key (-inf).

    The tile begins at query `row` and key `key`; `i` and `j` are the numbers of its queries and keys.
    CUT: the tile is cut by the band or by the end of the keys. tanh is needed for the softcap's derivative.
    """
    S = qk * scale
    tanh = S
    if softcap is not None:
        tanh = _tanh(S)
        S = tanh * softcap
    if MASK is not None:
        within = i < q_len
        if CUT:
            within = within & (j < kv_len)
        at = mask + (tl.cast(row, tl.int64) * stride_mm + tl.cast(key, tl.int64) * stride_mn)
        at = at + ((i - row) * stride_mm + (j - key) * stride_mn)
        if MASK == "float":
            S += tl.load(at, mask=within, other=0.0).to(tl.float32)
    if ALIBI:
        S -= slope * tl.abs(i + shift - j).to(tl.float32)
    if MASK == "bool":
        S = tl.where(tl.load(at, mask=within, other=0) != 0, S, float("-inf"))
    if CUT:
        visible = j < kv_len
        if left is not None:
            visible = visible & (j >= i + shift - left)
        if right is not None:
            visible = visible & (j <= i + shift + right)
        S = tl.where(visible, S, float("-inf"))
    return S, tanh


@triton.jit
def dropout_keep(seed, row, key, bh, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which weights dropout keeps, (block_m, block_n), for the tile that starts at query `row` and key `key`.

    Philox4x32-10 with counter (j // 4, i, b * Hq + h, offset), key (seed lo, seed hi) and lane j % 4: a function of the
    weight alone, so that every kernel, tile size and backend drops the same ones.
    """
    groups = (key // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    i = (row + tl.arange(0, BLOCK_M))[:, None]
    groups, i = tl.broadcast(groups, i)
    offset = tl.load(seed + 1).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(tl.load(seed), groups, i, bh, offset)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))  # (block_m, block_n / 4, 2, 2): lanes in order
    return tl.reshape(words, (BLOCK_M, BLOCK_N)) >= threshold
