"""Which tile a backend's kernel uses: rows of a table, and what comes before what.

For backends whose tiles are these four numbers, in whatever language their kernels are written. Such a backend says
what it ships, which rows a problem reads and which tiles are legal; which one is in force is worked out here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flashdispatch_registry import tile_store
from flashdispatch_registry.arch import sm_number
from flashdispatch_registry.backend import BackendSpec
from flashdispatch_registry.kernels import Tile
from flashdispatch_registry.problem import Problem

log = logging.getLogger("flashdispatch")


class Shape(NamedTuple):
    """A tile: how many queries and keys a program works on, by how many warps, and how many blocks are copied ahead."""

    block_m: int
    """Queries."""
    block_n: int
    """Keys."""
    num_warps: int
    num_stages: int
    """Blocks of K and V (or Q and dO) in shared memory or on their way to it."""

    @classmethod
    def named(cls, tile: Tile) -> Shape:
        """A tile from elsewhere. Raises ValueError when it has other names, or what is no int."""
        if set(tile) != set(cls._fields) or not all(type(value) is int for value in tile.values()):
            raise ValueError(f"a tile has the ints {', '.join(cls._fields)}, got {dict(tile)}")
        return cls(**tile)


SHARED_BYTES: Mapping[str, int] = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Shared memory a block may have, by family. CUDA C++ Programming Guide, technical specifications per capability."""


def family(arch: str) -> str:
    """The rows that `arch` reads: one family has the same instructions and the same shared memory."""
    number = sm_number(arch) or 0
    if number in (80, 87):
        return "sm_80"
    if number == 90:
        return "sm_90"
    if 100 <= number < 120:
        return "sm_100"
    return "sm_86"  # 99 KiB of shared memory: sm_86, sm_89, sm_120, and the careful choice for what is not known


MASKS = ("window", "causal", "full")
"""Masks of position; a problem without a row of its own reads one further right."""


def masks(problem: Problem) -> Sequence[str]:
    """The masks of position whose rows serve `problem`, its own first."""
    if problem.band.is_full:
        return MASKS[2:]
    return MASKS[1:] if problem.band.left is None else MASKS


def look_up(rows: Iterable[str], *tables: Mapping[str, Shape]) -> Shape | None:
    """The tile of the first of `rows` that any table has, an earlier table first."""
    return next((table[row] for row in rows for table in tables if row in table), None)


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one backend: set in this process, else tuned on this GPU, else shipped, else a careful one."""

    spec: BackendSpec
    shipped: Mapping[str, Shape]
    rows: Callable[[Problem, str], Sequence[str]]
    """The rows that a problem's kernel may read, best first: its own, then those of plainer problems. The name of a row
    begins with its kernel's and a slash."""
    space: Callable[[Problem, str], Iterable[Shape]]
    """Those worth measuring."""
    careful: Callable[[Problem, str], Shape]
    """One that fits everywhere."""
    check: Callable[[str, Shape], None]
    """Raises ValueError for a kernel that has no tiles, and for a tile that the kernel must not be given."""
    _set: dict[str, Shape] = field(default_factory=dict)
    _tuned: dict[int, tuple[str, Mapping[str, Shape]]] = field(default_factory=dict)

    def key(self, problem: Problem, kernel: str) -> str:
        """The problem's own row."""
        return self.rows(problem, kernel)[0]

    def shape(self, problem: Problem, kernel: str) -> Shape:
        """The tile in force, of the problem's best row."""
        found = look_up(self.rows(problem, kernel), self._set, self._tuned_here(problem), self.shipped)
        return found or self.careful(problem, kernel)

    def worth_measuring(self, problem: Problem, kernel: str) -> Sequence[Shape]:
        """The tile in force, and the others of `space`."""
        return list(dict.fromkeys((self.shape(problem, kernel), *self.space(problem, kernel))))

    def checked(self, row: str, tile: Tile) -> Shape:
        """A tile from elsewhere for a row, or a kernel. Raises ValueError for one that must not be used."""
        shape = Shape.named(tile)
        self.check(row.partition("/")[0], shape)
        return shape

    def set(self, problem: Problem, kernel: str, tile: Tile | None) -> None:
        """Puts `tile` in force for the problem's row; None takes it back. Raises ValueError for what is no tile."""
        if tile is None:
            self._set.pop(self.key(problem, kernel), None)
        else:
            shape = Shape.named(tile)
            self.check(kernel, shape)
            self._set[self.key(problem, kernel)] = shape

    def legal(self, tuned: Mapping[str, Tile]) -> Mapping[str, Shape]:
        """What was kept on disk, without what is no tile: a warning says so, and the shipped one is used."""
        good = {}
        for row, tile in tuned.items():
            try:
                good[row] = self.checked(row, tile)
            except ValueError as error:
                log.warning("the tuned tile of %s for %s is not used: %s", self.spec.name, row, error)
        return good

    def _tuned_here(self, problem: Problem) -> Mapping[str, Shape]:
        """What was tuned on the current GPU; nothing for a problem of another architecture."""
        if problem.device_type != "cuda" or not torch.cuda.is_available():
            return {}
        index = torch.cuda.current_device()
        if index not in self._tuned:
            fingerprint = tile_store.fingerprint_of(self.spec, index)
            self._tuned[index] = (fingerprint["arch"], self.legal(tile_store.load(self.spec.name, fingerprint)))
        arch, tuned = self._tuned[index]
        return tuned if arch == problem.arch else {}
