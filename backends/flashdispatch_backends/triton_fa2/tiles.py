"""Which tile each kernel uses: data per architecture and head dim, found by ``flashdispatch tune tiles``.

A tile says how many queries and keys a program works on, by how many warps, and how many blocks are copied ahead. It
changes no result beyond rounding. A call reads it when its plan is made; nothing is tuned during a call.

    block_m, block_n   queries and keys of a tile
    num_warps          warps of a program
    num_stages         blocks of K and V (or Q and dO) in shared memory or on their way to it

The rows below are what is shipped; a tile tuned on this GPU (see `flashdispatch_registry.tile_store`) comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from flashdispatch_registry.arch import sm_number
from flashdispatch_registry.problem import Problem


class Shape(NamedTuple):
    """A tile, by name."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _extra(problem: Problem) -> bool:
    """Whether a score costs more than a product and an exponential: more registers, and tiles of a mask to load."""
    return bool(problem.attn_mask or problem.alibi or problem.dropout_p or problem.softcap is not None)


SHARED_BYTES: Mapping[str, int] = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Shared memory a block may have, by family. CUDA C++ Programming Guide, technical specifications per capability."""


def family(arch: str) -> str:
    """The row of tables that `arch` reads: the same instructions and the same shared memory."""
    number = sm_number(arch) or 0
    if number in (80, 87):
        return "sm_80"
    if number == 90:
        return "sm_90"
    if 100 <= number < 120:
        return "sm_100"
    return "sm_86"  # 99 KiB of shared memory: sm_86, sm_89, sm_120, and the careful choice for what is not known


def padded(head_dim: int) -> int:
    """The head dim on the chip: a power of two, and at least 16, the shortest product of a tensor core."""
    return max(16, 1 << (head_dim - 1).bit_length())


def key(problem: Problem, kernel: str) -> str:
    """What a tile depends on: kernel, element size, head dims on the chip, mask of position, and extra work per score."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    dims = f"d{d}" if d == dv else f"d{d}x{dv}"
    band = "full" if problem.band.is_full else "window" if problem.band.left is not None else "causal"
    bits = 8 * problem.dtype.itemsize
    precision = f"{bits}bit" if bits == 16 else f"{bits}bit-{problem.fp32_precision}"
    return f"{kernel}/{family(problem.arch)}/{precision}/{dims}/{band}{'/extra' if _extra(problem) else ''}"


SPLIT_ABOVE = 128
"""Padded head dims above it: two accumulators of this width do not fit into registers beside each other."""


def key_passes(problem: Problem) -> tuple[str, ...]:
    """How dK and dV are made: together, or, where their accumulators are too wide, in a pass each (S is made twice)."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v)) > SPLIT_ABOVE
    return ("dk", "dv") if wide else ("dkdv",)


SHIPPED: Mapping[tuple[str, str, int, int], Shape] = {
    # (kernel, family, bits, padded head dim): the wider of D and Dv
    ("forward", "sm_90", 16, 64): Shape(128, 128, 8, 3),
    ("forward", "sm_90", 16, 128): Shape(128, 128, 8, 2),
    ("forward", "sm_90", 16, 256): Shape(128, 64, 8, 2),
    ("dq", "sm_90", 16, 64): Shape(128, 64, 8, 3),
    ("dq", "sm_90", 16, 128): Shape(128, 64, 8, 2),
    ("dq", "sm_90", 16, 256): Shape(64, 64, 8, 1),
    ("dkdv", "sm_90", 16, 64): Shape(64, 128, 8, 2),
    ("dkdv", "sm_90", 16, 128): Shape(64, 128, 8, 2),
    ("dk", "sm_90", 16, 256): Shape(64, 128, 8, 1),
    ("dv", "sm_90", 16, 256): Shape(64, 128, 8, 1),
}


def shipped(problem: Problem, kernel: str) -> Shape:
    """The table's tile, or, where nobody has measured one, a small one that fits everywhere."""
    d = max(64, padded(problem.head_dim), padded(problem.head_dim_v))
    row = SHIPPED.get((kernel, family(problem.arch), 8 * problem.dtype.itemsize, d))
    if row is not None and not _extra(problem):
        return row
    if problem.dtype is torch.float32:
        return Shape(32, 32, 4, 1) if d > 64 else Shape(64, 32, 4, 1)
    return Shape(32, 32, 4, 1) if d > 128 else Shape(64, 64, 4, 1) if kernel != "forward" else Shape(64, 64, 4, 2)


def space(problem: Problem, kernel: str) -> Iterator[Shape]:
    """Tiles worth measuring: those that leave room for one block of each operand in shared memory."""
    d = padded(problem.head_dim) + padded(problem.head_dim_v)
    limit = SHARED_BYTES[family(problem.arch)]
    for block_m in (16, 32, 64, 128, 256):
        for block_n in (16, 32, 64, 128, 256):
            for num_warps in (4, 8):
                for num_stages in (1, 2, 3, 4):
                    resident, streamed = (block_n, block_m) if kernel in ("dkdv", "dk", "dv") else (block_m, block_n)
                    if streamed > 128 or resident < 64 or block_m * block_n > 128 * 128:
                        continue
                    rows = resident + streamed * max(1, num_stages - 1)
                    if rows * d * problem.dtype.itemsize <= limit:
                        yield Shape(block_m, block_n, num_warps, num_stages)
