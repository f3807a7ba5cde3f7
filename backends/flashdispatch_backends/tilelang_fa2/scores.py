"""What the kernels share: which block is whose, where a sequence lies, who sees whom, what a score is.

Everything here builds expressions or statements of a kernel while TileLang traces it; `recipe` says what is compiled
in. Numbers of a whole block live in ``T.alloc_var``: a plain assignment would be written out anew wherever it is used,
and computed in each turn of a loop.

Units. exp2 is one instruction, exp is two, so scores are kept in units of log 2: the host multiplies the scale (with a
softcap: the softcap) by log2(e), the kernels what they load of the LSE, and exp(S - m) becomes exp2(S - m). With a
float mask that would overflow (finfo.min * log2(e) is -inf, and finfo.min is just a number), so there, and where the
call's own scale is as large, scores stay natural and the difference is multiplied: ``recipe.natural``.

The last block. A key past the end of its sequence may hold NaN, and 0 * NaN is NaN: to hide its score is not enough.
So the last block of keys moves back until it ends with the sequence, and hides what the block before it has seen
(`block_at`). A sequence shorter than a block begins at a negative row; such rows are read as zeros.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from flashdispatch_backends.tilelang_fa2.recipe import Recipe

LOG2E = 1.4426950408889634
INF = T.infinity("float32")
ROUNDED = "rounded"
"""The size of a kernel's argument whose smallest is not 1: TMA wants rows of 16 bytes."""
FULL_ROW = T.GemmWarpPolicy.FullRow
"""A row of scores lies in one warp: its largest and its sum need no other."""


def rows_of_heads(name: str, batch: Any, seqlen: Any, heads: Any, head_dim: int, dtype: str) -> Any:
    """A (B, S, H, D) tensor of any strides but a contiguous last dim. Strides are 64 bit, and so are offsets."""
    strides = [T.dynamic(f"{name}_{dim}", "int64") for dim in "bsh"]
    return T.StridedTensor([batch, seqlen, heads, head_dim], [*strides, 1], dtype)


def mask_of(recipe: Recipe) -> Any:
    """attn_mask (B|1, Hq|1, Sq|1, Sk|1) of any strides, or a number nobody reads where the call has none."""
    if recipe.mask is None:
        return T.int32
    sizes = [T.dynamic(f"mask_size_{dim}") for dim in "bhmn"]
    return T.StridedTensor(sizes, [T.dynamic(f"mask_{dim}", "int64") for dim in "bhmn"], recipe.mask)


def numbers_of_rows(recipe: Recipe, batch: Any, heads: Any) -> Any:
    """A tensor (B, Hq, 2 or 3, Sq rounded up to `ROW_BLOCK`) float32: LSE in the scores' units, Delta, and total.

    LSE is +inf and Delta 0 for a row that sees no key, past a sequence's end, and for what was rounded up; behind a
    packed sequence is its neighbour.
    """
    return T.Tensor([batch, heads, 3 if recipe.natural else 2, T.dynamic(ROUNDED)], "float32")


def integers(given: bool) -> Any:
    """(B,) int32, or a number nobody reads."""
    return T.Tensor([T.dynamic("sequences")], "int32") if given else T.int32


def variable(value: Any) -> Any:
    """A number of the whole block, computed once."""
    return T.alloc_var("int32", init=value)[0]


def work_of_program(pid: Any, blocks: Any, heads: Any, batch: Any, heads_at_once: Any) -> Any:
    """(block, b, h) of this program: a few heads take turns, the first block of each, then the second, and so on."""
    heads_before = variable(T.truncdiv(pid, blocks * heads_at_once) * heads_at_once)
    heads_here = variable(T.min(heads_at_once, heads * batch - heads_before))  # the last may be fewer
    index = variable(pid - heads_before * blocks)
    block = variable(T.truncdiv(index, heads_here))
    bh = variable(heads_before + T.truncmod(index, heads_here))
    return block, variable(T.truncdiv(bh, heads)), variable(T.truncmod(bh, heads))


def sequence(starts: Any, lengths: Any, packed: bool, given: bool, b: Any, limit: Any) -> Any:
    """(start, length, end) of sequence b: `start` rows into its tensor, `length` rows long, its own up to row `end`.

    Padded batches have a stride per sequence instead of starts, and own their padding, which results fill with zeros.
    Sequences packed behind each other own nothing past their length. Lengths outside 0..limit are clamped.
    """
    length = variable(T.max(T.min(lengths[b], limit), 0) if given else limit)
    return variable(starts[b] if packed else 0), length, variable(length if packed else limit)


def key_blocks(
    first: Any, q_len: Any, kv_len: Any, shift: Any, left: Any, right: Any, block_m: int, block_n: int
) -> Any:
    """(last, begin, count): key blocks begin, begin + 1, ... hold what the queries first..last see; at least one block.

    `shift` is p(i) - i. A block that begins past q_len sees nothing, and goes through one block all the same.
    """
    last = variable(T.min(first + block_m, q_len) - 1)
    begin = variable(T.truncdiv(T.max(first + shift - left, 0), block_n))
    end = variable(blocks_in(T.min(kv_len, last + shift + right + 1), block_n))
    return last, begin, variable(T.max(T.if_then_else(first < q_len, end - begin, 0), 1))


def query_blocks(
    first: Any, q_len: Any, kv_len: Any, shift: Any, left: Any, right: Any, block_m: int, block_n: int
) -> Any:
    """(begin, count): the query blocks that see a key of the block that begins at `first`, as in `key_blocks`."""
    last = variable(T.min(first + block_n, kv_len) - 1)
    begin = variable(T.truncdiv(T.max(first - right - shift, 0), block_m))
    end = variable(blocks_in(T.min(q_len, last + left - shift + 1), block_m))
    return begin, variable(T.max(T.if_then_else(first < kv_len, end - begin, 0), 1))


def blocks_in(length: Any, block: int) -> Any:
    """Blocks that `length` rows need; 0 for a negative length."""
    return T.truncdiv(T.max(length, 0) + block - 1, block)


def block_at(edge: Any, length: Any, block: int) -> Any:
    """Where the block that begins at `edge` is read from: moved back if it would pass the end, below 0 if need be."""
    return T.min(edge, length - block)


def load(
    recipe: Recipe, source: Any, tile: Any, b: Any, start: Any, row: Any, head: Any, length: Any, width: int
) -> Any:
    """Rows row, row + 1, ... of a sequence that starts at row `start`, as a tile in shared memory.

    Zero past `width`, and where the row is below 0 or past the tensor. TMA does all of that by itself. What it can't
    take (strides or addresses that are no multiples of 16 bytes, packed sequences, GPUs before sm_90) is read one by
    one, and there rows past `length` are zero, too.
    """
    rows, columns = tile.shape
    if recipe.tma:
        return T.copy(source[b, row : row + rows, head, 0:columns], tile)
    return _load_one_by_one(source, tile, b, start, row, head, length, width)


@T.macro
def _load_one_by_one(source: Any, tile: Any, b: Any, start: Any, row: Any, head: Any, length: Any, width: int) -> None:
    for r, c in T.Parallel(tile.shape[0], tile.shape[1]):
        inside = (row + r >= 0) & (row + r < length) & (c < width)
        tile[r, c] = T.if_then_else(inside, source[b, start + row + r, head, c], T.cast(0, tile.dtype))


@T.macro
def share_out_registers(num_warps: int, accumulated: int) -> None:
    """Gives registers of the warps that copy to those that compute; `accumulated` are float32 numbers of one result.

    A multiprocessor has 65536 registers. With four warps that compute and four that copy, two programs fit side by
    side, unless one product alone needs more than the 128 a thread that each begins with.
    """
    two = num_warps == 4 and accumulated <= 64 * 128
    T.annotate_producer_reg_dealloc(24)
    T.annotate_consumer_reg_alloc(160 if num_warps == 12 else 232 if two else 240)
    if two:
        T.annotate_min_blocks_per_sm(2)


def staged(recipe: Recipe) -> bool:
    """Whether results leave by TMA from shared memory: whole rows at once, cut off at the end of the tensor.

    Not into packed sequences, where behind a sequence's end its neighbour begins.
    """
    return recipe.tma and not recipe.packed


def power(recipe: Recipe, difference: Any) -> Any:
    """The exp of a score difference, in the scores' units."""
    return T.exp2(difference * LOG2E if recipe.natural else difference)


def scaled(recipe: Recipe, score: Any, scale: Any) -> Any:
    """A score in its units. Plain ones are still q.k: the scale is folded into the exponential's argument."""
    return score * scale if recipe.plain else score


def _tanh(x: Any) -> Any:
    """Tanh in float32, right to a few last digits everywhere: a large softcap lives from small arguments."""
    from_exp = 1.0 - 2.0 / (T.exp2(x * (2.0 * LOG2E)) + 1.0)  # near 0 it loses what 1 - 1 loses
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    return T.if_then_else(T.abs(x) < 0.25, series, from_exp)


@T.macro
def finish_scores(
    recipe: Recipe, S: Any, tanh: Any, mask: Any, b: Any, h: Any, i: Any, j: Any, transposed: bool, scale: Any,
    softcap: Any,
) -> None:  # fmt: skip
    """q.k to S, in the contract's order: scale, softcap (tanh is kept for its derivative), attn_mask.

    The tile begins at query `i` and key `j`, and its rows are queries or, `transposed`, keys. A plain tile stays q.k.
    """
    if not recipe.plain:
        for r, c in T.Parallel(S.shape[0], S.shape[1]):
            if recipe.softcap:
                tanh[r, c] = _tanh(S[r, c] * scale)
                S[r, c] = tanh[r, c] * softcap
            else:
                S[r, c] = S[r, c] * scale
    if recipe.mask is not None:
        for r, c in T.Parallel(S.shape[0], S.shape[1]):
            # An index past the end is moved back: what it reads is hidden anyway. A dim of size 1 is broadcast by it.
            given = mask[
                T.min(b, mask.shape[0] - 1),
                T.min(h, mask.shape[1] - 1),
                T.max(T.min(i + (c if transposed else r), mask.shape[2] - 1), 0),
                T.max(T.min(j + (r if transposed else c), mask.shape[3] - 1), 0),
            ]
            if recipe.mask == "bool":
                S[r, c] = T.if_then_else(given, S[r, c], -INF)
            else:
                S[r, c] = S[r, c] + T.cast(given, "float32")
