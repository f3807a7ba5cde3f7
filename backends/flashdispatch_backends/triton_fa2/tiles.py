"""Which tile each kernel uses: data per architecture, dtype, head dim, mask and what else a score needs.

A tile says how many queries and keys a program works on, by how many warps, and how many blocks are copied ahead. It
changes no result beyond rounding. A call reads it when its plan is made; nothing is tuned during a call.

`SHIPPED` says of each group whether it was measured or only compiled. A tile that ``flashdispatch tune tiles`` found on
this GPU (`flashdispatch_registry.tile_store`) comes before the shipped one of the same row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

from flashdispatch_registry.problem import Problem
from flashdispatch_registry.tile_table import SHARED_BYTES, Shape, family, masks

KERNELS = ("forward", "dq", "dkdv", "dk", "dv", "dmask")
"""Those that have tiles. "dk" and "dv" are the dK/dV kernel when it makes one of them."""
KEY_KERNELS = frozenset({"dkdv", "dk", "dv"})
"""Kernels whose programs own keys, so that block_n stays on the chip and block_m streams."""

SPLIT_ABOVE = 256
"""Bytes of a row of K on the chip. Beyond it the accumulators of dK and dV do not fit into registers side by side."""


def padded(head_dim: int, arch: str) -> int:
    """The head dim on the chip: a power of two, and at least the width that the tensor cores' operands need.

    16 is the shortest product of mma.sync. wgmma reads V from shared memory, and Triton 3.6 lets it read past the end
    of a V tile that is 32 wide (compute-sanitizer on an H200, num_stages=1): there rows have 64 numbers, wgmma's width.
    """
    return max(64 if family(arch) in ("sm_90", "sm_100") else 16, 1 << (head_dim - 1).bit_length())


def padded_dims(problem: Problem) -> tuple[int, int]:
    """D and Dv on the chip."""
    return padded(problem.head_dim, problem.arch), padded(problem.head_dim_v, problem.arch)


def key_passes(problem: Problem) -> tuple[str, ...]:
    """How dK and dV are made: together, or, where that is too wide, in a pass each (S is made once more)."""
    wide = max(padded_dims(problem)) * problem.dtype.itemsize > SPLIT_ABOVE
    return ("dk", "dv") if wide else ("dkdv",)


def _row(problem: Problem, kernel: str, dims: str, mask: str) -> str:
    bits = 8 * problem.dtype.itemsize
    number = f"{bits}bit" if bits == 16 else f"{bits}bit-{problem.fp32_precision}"
    return "/".join(filter(None, (kernel, family(problem.arch), number, dims, mask, _kind(problem))))


def _kind(problem: Problem) -> str:
    """What makes a score cost more registers and shared memory than a product and an exponential do.

    "extra" is a boolean mask, ALiBi or a softcap; "bias" a float mask; "heavy" several of these, or one with dropout.
    """
    extra = problem.attn_mask == "bool" or problem.alibi or problem.softcap is not None
    if problem.dropout_p:
        return "heavy" if extra or problem.attn_mask else "dropout"
    if problem.attn_mask == "float":
        return "heavy" if problem.softcap is not None else "bias"
    return "extra" if extra else ""


MASK_BYTES: Mapping[str, int] = {"extra": 1, "bias": 4, "heavy": 4}
"""Of each score's mask, on its way in shared memory like K and V, at most: a tile serves every call of its row."""


def rows(problem: Problem, kernel: str) -> tuple[str, ...]:
    """The rows that a problem may read, best first: its own, that of the wider head dim, those of plainer masks."""
    d, dv = padded_dims(problem)
    own, wide = f"d{d}" if d == dv else f"d{d}x{dv}", f"d{max(64, d, dv)}"
    mask, *_ = plainer = masks(problem)
    return tuple(dict.fromkeys((_row(problem, kernel, own, mask), *(_row(problem, kernel, wide, x) for x in plainer))))


def careful(problem: Problem, kernel: str) -> Shape:
    """Fits the shared memory of every family, and mostly the registers, whatever else a score needs."""
    row_bytes = max(64, *padded_dims(problem)) * problem.dtype.itemsize
    resident, streamed = (64, 64) if row_bytes <= 128 else (64, 32) if row_bytes <= 256 else (32, 32)
    if row_bytes > 512:
        resident, streamed = 16, 16
    return Shape(streamed, resident, 4, 1) if kernel in KEY_KERNELS else Shape(resident, streamed, 4, 1)


def check(kernel: str, shape: Shape) -> None:
    """Raises ValueError for a tile with which `kernel` would read and write where it must not."""
    if kernel not in KERNELS:
        raise ValueError(f"triton_fa2 has no kernel {kernel!r}; it has {', '.join(KERNELS)}")
    sizes_fit = all(16 <= size <= 256 and size.bit_count() == 1 for size in shape[:2])
    if not sizes_fit or shape.num_warps not in (1, 2, 4, 8, 16) or not 1 <= shape.num_stages <= 8:
        raise ValueError(
            "block_m and block_n are powers of two from 16 to 256, num_warps one up to 16, num_stages 1 to 8, got "
            f"{shape._asdict()}"
        )


ACCUMULATOR_REGISTERS = 192
"""Of the 255 that a thread has, at most. Tiles beyond it spill, and compile for a minute."""


def space(problem: Problem, kernel: str) -> Iterator[Shape]:
    """Tiles worth measuring: those that leave room for what stays and for the blocks copied ahead.

    Shared memory must hold what stays and the blocks on their way; registers the accumulators, except on sm_100, where
    tensor memory does.
    """
    d, dv = padded_dims(problem)
    streamed_bytes = (d + dv) * problem.dtype.itemsize
    resident_bytes = d * problem.dtype.itemsize if kernel in ("forward", "dv") else streamed_bytes
    mask_bytes = MASK_BYTES.get(_kind(problem), 0)
    arch = family(problem.arch)
    limit = SHARED_BYTES[arch]
    registers = ACCUMULATOR_REGISTERS if arch != "sm_100" else math.inf
    sizes = (16, 32, 64, 128)
    for resident, streamed, num_warps, num_stages in product(sizes, sizes, (4, 8), (1, 2, 3, 4)):
        if num_warps == 8 and resident < 64:
            continue  # too few rows to share
        if resident < 64 and streamed_bytes <= 1024:
            continue  # only very wide rows want so few of them
        if _accumulators(problem, kernel, resident, streamed) > registers * 32 * num_warps:
            continue
        # wgmma reads a block from shared memory while num_stages - 1 others are on their way.
        blocks = num_stages if arch in ("sm_90", "sm_100") else max(1, num_stages - 1)
        block_bytes = streamed * (streamed_bytes + resident * mask_bytes)
        if resident * resident_bytes + blocks * block_bytes <= limit:
            block_m, block_n = (streamed, resident) if kernel in KEY_KERNELS else (resident, streamed)
            yield Shape(block_m, block_n, num_warps, num_stages)


def _accumulators(problem: Problem, kernel: str, resident: int, streamed: int) -> int:
    """Float32 numbers that a program adds up at a time: tiles of scores and of their gradients, and its results."""
    d, dv = padded_dims(problem)
    tiles = 1 if kernel in ("forward", "dv") else 2  # S, or S and dP
    width = {"forward": dv, "dq": d, "dkdv": d + dv, "dk": d, "dv": dv, "dmask": 0}[kernel]
    return tiles * resident * streamed + resident * width


SHIPPED: Mapping[str, Shape] = {
    # sm_90, 16 bit: measured on an H200, 16k tokens, S = 4096
    "forward/sm_90/16bit/d64/full": Shape(64, 64, 4, 3),
    "forward/sm_90/16bit/d128/full": Shape(128, 128, 8, 3),
    "forward/sm_90/16bit/d128/causal": Shape(64, 64, 4, 3),
    "forward/sm_90/16bit/d256/full": Shape(128, 64, 8, 2),
    "dq/sm_90/16bit/d64/full": Shape(64, 64, 4, 3),
    "dq/sm_90/16bit/d128/full": Shape(128, 64, 8, 3),
    "dq/sm_90/16bit/d256/full": Shape(128, 32, 8, 3),
    "dkdv/sm_90/16bit/d64/full": Shape(128, 64, 4, 2),
    "dkdv/sm_90/16bit/d64/causal": Shape(32, 128, 4, 2),
    "dkdv/sm_90/16bit/d128/full": Shape(64, 64, 4, 2),
    "dk/sm_90/16bit/d256/full": Shape(32, 128, 8, 3),
    "dv/sm_90/16bit/d256/full": Shape(64, 128, 8, 2),
    # with a boolean mask, softcap or ALiBi, the mean of the three; with a float mask, the mean of bfloat16 and float32;
    # with dropout: measured likewise
    "forward/sm_90/16bit/d64/full/extra": Shape(64, 64, 4, 3),
    "forward/sm_90/16bit/d128/full/extra": Shape(64, 64, 4, 3),
    "dq/sm_90/16bit/d64/full/extra": Shape(64, 32, 4, 3),
    "dq/sm_90/16bit/d128/full/extra": Shape(128, 64, 8, 3),
    "dkdv/sm_90/16bit/d64/full/extra": Shape(32, 128, 4, 2),
    "dkdv/sm_90/16bit/d128/full/extra": Shape(32, 64, 4, 2),
    "forward/sm_90/16bit/d64/full/bias": Shape(64, 32, 4, 3),
    "forward/sm_90/16bit/d128/full/bias": Shape(64, 64, 4, 2),
    "dq/sm_90/16bit/d64/full/bias": Shape(64, 32, 4, 3),
    "dq/sm_90/16bit/d128/full/bias": Shape(64, 32, 4, 3),
    "dkdv/sm_90/16bit/d64/full/bias": Shape(32, 128, 4, 2),
    "dkdv/sm_90/16bit/d128/full/bias": Shape(64, 64, 4, 2),
    "forward/sm_90/16bit/d64/full/dropout": Shape(64, 32, 4, 2),
    "forward/sm_90/16bit/d128/full/dropout": Shape(64, 64, 4, 2),
    "dq/sm_90/16bit/d64/full/dropout": Shape(64, 32, 4, 2),
    "dq/sm_90/16bit/d128/full/dropout": Shape(64, 32, 4, 2),
    "dkdv/sm_90/16bit/d64/full/dropout": Shape(64, 64, 4, 1),
    "dkdv/sm_90/16bit/d128/full/dropout": Shape(32, 128, 8, 1),
    # with several of them, and D = 256 with a mask, softcap or ALiBi: chosen by registers and spills
    "forward/sm_90/16bit/d256/full/bias": Shape(128, 32, 8, 1),
    "dq/sm_90/16bit/d256/full/bias": Shape(128, 32, 8, 1),
    "dk/sm_90/16bit/d256/full/bias": Shape(32, 128, 8, 1),
    "dv/sm_90/16bit/d256/full/bias": Shape(32, 128, 8, 1),
    "dq/sm_90/16bit/d64/full/heavy": Shape(64, 32, 4, 1),
    "dkdv/sm_90/16bit/d64/full/heavy": Shape(32, 64, 4, 1),
    "forward/sm_90/16bit/d256/full/extra": Shape(128, 32, 8, 1),
    "dq/sm_90/16bit/d256/full/extra": Shape(128, 32, 8, 1),
    "dk/sm_90/16bit/d256/full/extra": Shape(32, 128, 8, 1),
    "dv/sm_90/16bit/d256/full/extra": Shape(32, 128, 8, 1),
    # sm_90, float32 through bfloat16 parts: forward measured, backward of D = 64 and 128 measured (found with a causal
    # mask, checked without); that of D = 256 chosen by registers and spills
    "forward/sm_90/32bit-ieee/d64/full": Shape(128, 64, 8, 1),
    "forward/sm_90/32bit-ieee/d128/full": Shape(128, 64, 8, 1),
    "forward/sm_90/32bit-ieee/d256/full": Shape(64, 32, 8, 1),
    "dq/sm_90/32bit-ieee/d64/full": Shape(128, 128, 8, 1),
    "dq/sm_90/32bit-ieee/d128/full": Shape(128, 32, 8, 1),
    "dq/sm_90/32bit-ieee/d256/full": Shape(64, 16, 8, 1),
    "dkdv/sm_90/32bit-ieee/d64/full": Shape(64, 128, 8, 2),
    "dk/sm_90/32bit-ieee/d128/full": Shape(32, 128, 8, 1),
    "dv/sm_90/32bit-ieee/d128/full": Shape(64, 128, 8, 1),
    "dk/sm_90/32bit-ieee/d256/full": Shape(16, 64, 8, 1),
    "dv/sm_90/32bit-ieee/d256/full": Shape(16, 64, 8, 1),
    # sm_80, sm_86 and sm_100: compiled, not run; chosen by registers, spills and shared memory
    "forward/sm_80/16bit/d64/full": Shape(128, 64, 8, 2),
    "forward/sm_80/16bit/d128/full": Shape(128, 64, 8, 2),
    "forward/sm_80/16bit/d256/full": Shape(64, 32, 4, 2),
    "dq/sm_80/16bit/d64/full": Shape(64, 64, 4, 2),
    "dq/sm_80/16bit/d128/full": Shape(64, 64, 4, 2),
    "dkdv/sm_80/16bit/d64/full": Shape(64, 64, 8, 2),
    "dkdv/sm_80/16bit/d128/full": Shape(64, 64, 8, 2),
    "forward/sm_86/16bit/d64/full": Shape(64, 64, 4, 2),
    "forward/sm_86/16bit/d128/full": Shape(64, 32, 4, 2),
    "forward/sm_100/16bit/d64/full": Shape(128, 64, 8, 2),
    "forward/sm_100/16bit/d128/full": Shape(128, 64, 8, 2),
    "dq/sm_100/16bit/d64/full": Shape(64, 64, 4, 2),
    "dq/sm_100/16bit/d128/full": Shape(64, 64, 4, 2),
    "dkdv/sm_100/16bit/d64/full": Shape(64, 64, 4, 2),
    "dkdv/sm_100/16bit/d128/full": Shape(64, 64, 4, 2),
}
