"""Which tile each kernel uses: data per architecture, head dim, mask and what else a score needs.

A tile says how many queries and keys a program works on, by how many warps, and how many blocks are copied ahead. It
changes no result beyond rounding. A call reads it when its plan is made; nothing is tuned during a call.

    block_m, block_n   queries and keys of a tile
    num_warps          warps of a program
    num_stages         blocks of K and V (or Q and dO) in shared memory or on their way to it

`SHIPPED` says of each group whether it was measured or only compiled. A tile that ``flashdispatch tune tiles`` found on
this GPU (`flashdispatch_registry.tile_store`) comes before the shipped one of the same row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from flashdispatch_registry.problem import Problem
from flashdispatch_registry.tile_table import SHARED_BYTES, Shape, family, masks

ROW_UNIT = 16
"""Head dims are padded to multiples of it on the chip, for each side: the depth of one matrix product."""
WARP_ROWS = 16
"""Rows that one matrix instruction makes, of which all lie in one warp."""

KERNELS = ("forward", "dq", "dkdv")
"""Those that have tiles."""
KEY_KERNELS = frozenset({"dkdv"})
"""Kernels whose programs own keys, so that block_n stays on the chip and block_m streams."""

WIDTHS = (64, 96, 128, 192, 256)
"""Head dims that have rows; others read those of the next wider one."""


def width(problem: Problem) -> int:
    """The wider of D and Dv, as rows name it."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return next((size for size in WIDTHS if size >= widest), WIDTHS[-1])


def resident_and_streamed(kernel: str, shape: Shape) -> tuple[int, int]:
    """Rows of the block that a program owns, and of those that stream past it."""
    return (shape.block_n, shape.block_m) if kernel in KEY_KERNELS else (shape.block_m, shape.block_n)


def sides(kernel: str, widest: int, shape: Shape) -> int:
    """Warps that share rows in the backward: each makes its side of the scores' columns, and of the gradients'.

    Gradients of wide heads do not fit into the registers of one warp for more than 16 rows, and with 16 rows the warps
    read more from shared memory than it has to give. See backward.cu.
    """
    resident, streamed = resident_and_streamed(kernel, shape)
    wanted = {"forward": 1, "dq": 1 + (widest > 128), "dkdv": 1 + (widest > 64) + 2 * (widest > 128)}[kernel]
    return max(min(wanted, streamed // ROW_UNIT), _least_sides(resident, shape))


def _least_sides(resident: int, shape: Shape) -> int:
    """So many that every warp has rows."""
    return max(1, WARP_ROWS * shape.num_warps // resident)


def padded(head_dim: int, side_count: int = 1) -> int:
    """A head dim on the chip."""
    unit = ROW_UNIT * side_count
    return -(-head_dim // unit) * unit


def shared_bytes(kernel: str, head_dim: int, head_dim_v: int, shape: Shape, *, natural: bool = False) -> int:
    """What a tile takes of a block's shared memory: what stays, what streams, what sides exchange, numbers of rows."""
    side_count = sides(kernel, max(head_dim, head_dim_v), shape)
    d, dv = padded(head_dim, side_count), padded(head_dim_v, side_count)
    resident, streamed = resident_and_streamed(kernel, shape)
    stays = max(d, dv) if kernel == "forward" else d + dv
    tiles = 2 * (resident * stays + streamed * shape.num_stages * (d + dv))
    scores = 2 * shape.block_m * shape.block_n if side_count > 1 else 0
    if kernel == "forward":
        return tiles
    if kernel == "dq":
        return tiles + scores + 4 * 2 * shape.block_m
    return tiles + 2 * scores + 4 * (3 if natural else 2) * shape.block_m * shape.num_stages


def _row(problem: Problem, kernel: str, mask: str) -> str:
    return "/".join(filter(None, (kernel, family(problem.arch), f"d{width(problem)}", mask, _kind(problem))))


def _kind(problem: Problem) -> str:
    """What a score costs: "extra" where it takes more than a product and an exponential (attn_mask, softcap)."""
    return "extra" if problem.attn_mask or problem.softcap is not None else ""


def rows(problem: Problem, kernel: str) -> tuple[str, ...]:
    """The rows that a problem may read, best first: its own, then those of plainer masks."""
    return tuple(_row(problem, kernel, mask) for mask in masks(problem))


def careful(problem: Problem, kernel: str) -> Shape:
    """Fits the shared memory of every family, and mostly the registers, whatever else a score needs."""
    wide = width(problem)
    if kernel == "forward":
        return Shape(64, 64 if wide <= 128 else 32, 4, 1)
    if kernel == "dq":
        return Shape(64 if wide <= 128 else 32, 64 if wide <= 64 else 32, 4, 1)
    return Shape(32, 64 if wide <= 64 else 32, 4, 1)


def check(kernel: str, shape: Shape) -> None:
    """Raises ValueError for a tile of `kernel` that would not compile, or be wrong."""
    if kernel not in KERNELS:
        raise ValueError(f"cuda_fa2 has no kernel {kernel!r}; it has {', '.join(KERNELS)}")
    tile = shape._asdict()
    own, other = ("block_n", "block_m") if kernel in KEY_KERNELS else ("block_m", "block_n")
    resident, streamed = resident_and_streamed(kernel, shape)
    if shape.num_warps not in (4, 8) or shape.num_stages not in (1, 2) or streamed not in (16, 32, 64, 128):
        raise ValueError(f"num_warps is 4 or 8, num_stages 1 or 2, {other} a power of two from 16 to 128, got {tile}")
    if resident not in (32, 64, 128, 256):
        raise ValueError(f"{own} is a power of two from 32 to 256, got {tile}")
    least = _least_sides(resident, shape)
    if least > (1 if kernel == "forward" else min(4, streamed // ROW_UNIT)):
        raise ValueError(
            f"{own} has {WARP_ROWS} rows for each warp; in the backward up to four warps may share them, if {other} "
            f"has {ROW_UNIT} for each of these, got {tile}"
        )


ACCUMULATOR_REGISTERS = 256
"""Float32 numbers of a thread's tiles, at most. It has 255 registers, and the fastest tiles spill a few."""


def space(problem: Problem, kernel: str) -> Iterator[Shape]:
    """Tiles worth measuring: those whose blocks fit into shared memory, and their float32 tiles into registers."""
    limit = SHARED_BYTES[family(problem.arch)]
    for resident, streamed, num_warps, num_stages in product((32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2)):
        sizes = (streamed, resident) if kernel in KEY_KERNELS else (resident, streamed)
        shape = Shape(*sizes, num_warps, num_stages)
        try:
            check(kernel, shape)
        except ValueError:
            continue
        if _accumulators(problem, kernel, shape) > ACCUMULATOR_REGISTERS * 32 * num_warps:
            continue
        if shared_bytes(kernel, problem.head_dim, problem.head_dim_v, shape, natural=True) <= limit:
            yield shape


def _accumulators(problem: Problem, kernel: str, shape: Shape) -> int:
    """Float32 numbers that a program adds up at a time: tiles of scores and of their gradients, and its results."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    resident, streamed = resident_and_streamed(kernel, shape)
    tiles = 1 if kernel == "forward" else 2  # S, or S and dP
    return resident * (tiles * streamed + {"forward": dv, "dq": d, "dkdv": d + dv}[kernel])


SHIPPED: Mapping[str, Shape] = {
    # sm_90: measured on an H200 by `tune tiles`, bfloat16, 16k tokens, S = 4096, full and causal
    "forward/sm_90/d64/full": Shape(128, 128, 4, 2),
    "forward/sm_90/d96/full": Shape(128, 64, 4, 1),
    "forward/sm_90/d128/full": Shape(128, 64, 4, 2),
    "forward/sm_90/d192/full": Shape(128, 128, 8, 1),
    "forward/sm_90/d256/full": Shape(128, 128, 8, 1),
    "dq/sm_90/d64/full": Shape(128, 64, 4, 2),
    "dq/sm_90/d96/full": Shape(128, 32, 4, 2),
    "dq/sm_90/d128/full": Shape(128, 32, 4, 2),
    "dq/sm_90/d192/full": Shape(128, 64, 8, 2),
    "dq/sm_90/d256/full": Shape(128, 64, 8, 1),
    "dkdv/sm_90/d64/full": Shape(64, 128, 4, 2),
    "dkdv/sm_90/d96/full": Shape(128, 64, 4, 1),
    "dkdv/sm_90/d128/full": Shape(64, 64, 4, 2),
    "dkdv/sm_90/d192/full": Shape(128, 64, 8, 1),
    "dkdv/sm_90/d256/full": Shape(128, 64, 8, 1),
    # with a softcap, likewise; with masks these rows were not measured anew
    "forward/sm_90/d64/full/extra": Shape(64, 128, 4, 2),
    "forward/sm_90/d128/full/extra": Shape(128, 64, 4, 2),
    "forward/sm_90/d256/full/extra": Shape(128, 128, 8, 1),
    "dq/sm_90/d64/full/extra": Shape(64, 64, 4, 1),
    "dq/sm_90/d128/full/extra": Shape(128, 32, 4, 2),
    "dq/sm_90/d256/full/extra": Shape(128, 64, 8, 1),
    "dkdv/sm_90/d64/full/extra": Shape(32, 128, 4, 2),
    "dkdv/sm_90/d128/full/extra": Shape(64, 64, 4, 2),
    "dkdv/sm_90/d256/full/extra": Shape(128, 64, 8, 1),
}
