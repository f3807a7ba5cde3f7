"""Which tile each kernel uses: data per architecture, head dim, mask and what else a score needs.

A tile says how many queries and keys a program works on, by how many warps, and how many blocks are copied ahead. It
changes no result beyond rounding. A call reads it when its plan is made; nothing is tuned during a call.

    block_m, block_n   queries and keys of a tile
    num_warps          warps that compute; on sm_90 TileLang adds four that copy
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
"""Head dims are padded to multiples of it on the chip: the depth of one matrix product."""
ROW_BLOCK = 128
"""What the backward keeps of query rows is rounded up to multiples of it; a block_m of the dK/dV kernel divides it."""
WARP_ROWS = 16
"""Rows of a tile that one warp's matrix instruction makes; a row never lies in two warps."""


KERNELS = ("forward", "total", "dq", "dkdv", "dk", "dv")
"""Those that have tiles. "dk" and "dv" are the dK/dV kernel when it makes one of them."""
KEY_KERNELS = frozenset({"dkdv", "dk", "dv"})
"""Kernels whose programs own keys, so that block_n stays on the chip and block_m streams."""

BARRIER_BYTES = 1024
"""Of them, for barriers: some bytes, and tiles begin at multiples of 1 KiB."""

WIDTHS = (64, 128, 192, 256)
"""Head dims that have rows; others read those of the next wider one."""


def padded(head_dim: int) -> int:
    """A head dim on the chip."""
    return -(-head_dim // ROW_UNIT) * ROW_UNIT


def width(problem: Problem) -> int:
    """The wider of D and Dv, as rows name it."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return next((size for size in WIDTHS if size >= widest), WIDTHS[-1])


def splits(head_dim: int, head_dim_v: int) -> bool:
    """Whether dK and dV are too wide to be accumulated side by side."""
    return max(head_dim, head_dim_v) > 128


def key_passes(problem: Problem) -> tuple[str, ...]:
    """How dK and dV are made: together, or, where that is too wide, in a pass each (S is made once more)."""
    return ("dk", "dv") if splits(problem.head_dim, problem.head_dim_v) else ("dkdv",)


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
    streamed = 64 if width(problem) <= 64 else 32 if width(problem) <= 128 else 16
    return Shape(streamed, 64, 4, 1) if kernel in KEY_KERNELS else Shape(64, streamed, 4, 1)


def check(kernel: str, shape: Shape) -> None:
    """Raises ValueError for a tile of `kernel` that would not compile, or be wrong."""
    if kernel not in KERNELS:
        raise ValueError(f"tilelang_fa2 has no tiles for a kernel {kernel!r}; it has {', '.join(KERNELS)}")
    tile = shape._asdict()
    resident, streamed = (shape.block_n, shape.block_m) if kernel in KEY_KERNELS else shape[:2]
    if shape.num_warps not in (4, 8, 12) or not 1 <= shape.num_stages <= 8 or streamed not in (16, 32, 64, 128):
        raise ValueError(
            "num_warps is 4, 8 or 12, num_stages 1 to 8, the block that streams a power of two from 16 to 128, got "
            f"{tile}"
        )
    if kernel in KEY_KERNELS and streamed == 16 and shape.num_stages > 1:
        raise ValueError(f"blocks of 16 queries are too short for TMA to copy ahead, got {tile}")
    if resident > 256 or resident < 1 or resident % (WARP_ROWS * shape.num_warps):
        raise ValueError(
            f"a program's own block has {WARP_ROWS} rows for each warp, or a multiple, up to 256, got {tile}"
        )


def shared_bytes(problem: Problem, kernel: str, shape: Shape) -> int:
    """What a tile takes of a block's shared memory."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    resident, streamed = (shape.block_n, shape.block_m) if kernel in KEY_KERNELS else (shape.block_m, shape.block_n)
    stays = d if kernel in ("forward", "total", "dv") else d + dv
    flows = d if kernel == "total" else d + dv
    numbers = 4 * 3 * shape.block_m * shape.num_stages if kernel in KEY_KERNELS else 0  # of rows, float32
    return 2 * (resident * stays + streamed * shape.num_stages * flows) + numbers + BARRIER_BYTES


ACCUMULATOR_REGISTERS = 192
"""Of the 240 that a computing thread has on sm_90, at most, for float32 tiles."""


def space(problem: Problem, kernel: str) -> Iterator[Shape]:
    """Tiles worth measuring: those whose blocks fit into shared memory, and their float32 tiles into registers."""
    arch = family(problem.arch)
    for resident, streamed, num_warps in product((64, 128, 192), (32, 64, 128), (4, 8, 12)):
        rows_fit = resident == num_warps * WARP_ROWS or (resident == 128 and num_warps == 4)
        if not rows_fit or _accumulators(problem, kernel, resident, streamed) > ACCUMULATOR_REGISTERS * 32 * num_warps:
            continue
        for num_stages in (1, 2, 3) if arch in ("sm_90", "sm_100") else (1,):
            sizes = (streamed, resident) if kernel in KEY_KERNELS else (resident, streamed)
            shape = Shape(*sizes, num_warps, num_stages)
            if shared_bytes(problem, kernel, shape) <= SHARED_BYTES[arch]:
                yield shape


def _accumulators(problem: Problem, kernel: str, resident: int, streamed: int) -> int:
    """Float32 numbers that a program adds up at a time: tiles of scores and of their gradients, and its results."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    tiles = 1 if kernel in ("forward", "total", "dv") else 2  # S, or S and dP
    results = {"forward": dv, "total": 0, "dq": d, "dkdv": d + dv, "dk": d, "dv": dv}[kernel]
    return tiles * resident * streamed + resident * results


SHIPPED: Mapping[str, Shape] = {
    # sm_90: measured on an H200, bfloat16, 16k tokens, S = 1024 and 4096, full and causal, and a window of 513
    "forward/sm_90/d64/full": Shape(128, 128, 4, 1),
    "forward/sm_90/d128/full": Shape(64, 128, 4, 1),
    "forward/sm_90/d192/full": Shape(128, 128, 8, 1),
    "forward/sm_90/d256/full": Shape(128, 64, 8, 2),
    "dq/sm_90/d64/full": Shape(64, 128, 4, 2),
    "dq/sm_90/d128/full": Shape(64, 64, 4, 2),
    "dq/sm_90/d192/full": Shape(128, 64, 8, 2),
    "dq/sm_90/d256/full": Shape(128, 32, 8, 2),
    "dkdv/sm_90/d64/full": Shape(128, 64, 4, 2),
    "dkdv/sm_90/d128/full": Shape(64, 128, 8, 2),
    "dk/sm_90/d192/full": Shape(64, 128, 8, 2),
    "dv/sm_90/d192/full": Shape(128, 128, 8, 1),
    "dk/sm_90/d256/full": Shape(32, 128, 8, 2),
    "dv/sm_90/d256/full": Shape(64, 128, 8, 2),
    # the mean over a softcap, a boolean mask and a bfloat16 one of Sq by Sk: measured likewise
    "forward/sm_90/d64/full/extra": Shape(64, 128, 4, 1),
    "forward/sm_90/d128/full/extra": Shape(64, 128, 4, 1),
    "forward/sm_90/d192/full/extra": Shape(128, 64, 8, 1),
    "forward/sm_90/d256/full/extra": Shape(128, 64, 8, 1),
    "total/sm_90/d64/full/extra": Shape(128, 64, 8, 2),
    "total/sm_90/d128/full/extra": Shape(128, 64, 8, 2),
    "total/sm_90/d192/full/extra": Shape(128, 64, 8, 2),
    "total/sm_90/d256/full/extra": Shape(128, 64, 8, 2),
    "dq/sm_90/d64/full/extra": Shape(64, 64, 4, 2),
    "dq/sm_90/d128/full/extra": Shape(128, 64, 8, 2),
    "dq/sm_90/d192/full/extra": Shape(128, 64, 8, 2),
    "dq/sm_90/d256/full/extra": Shape(128, 32, 8, 2),
    "dkdv/sm_90/d64/full/extra": Shape(64, 64, 4, 2),
    "dkdv/sm_90/d128/full/extra": Shape(64, 128, 8, 2),
    "dk/sm_90/d192/full/extra": Shape(64, 128, 8, 2),
    "dk/sm_90/d256/full/extra": Shape(32, 128, 8, 2),
    "dv/sm_90/d192/full/extra": Shape(64, 128, 8, 2),
    "dv/sm_90/d256/full/extra": Shape(64, 128, 8, 2),
}
