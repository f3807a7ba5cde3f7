"""What a backend may offer beside the contract: its kernels, their tiles, and what they compile to.

`flashdispatch tune tiles` and `flashdispatch source` work for every backend that has these methods, whatever language
its kernels are written in. A backend without them runs just as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from flashdispatch_registry.problem import Problem

Tile = Mapping[str, int]
"""A kernel's tile and launch choice in the backend's own words: ``{"block_m": 128, "block_n": 64, "num_warps": 8}``."""


@runtime_checkable
class Tunable(Protocol):
    """A backend whose tiles are data that can be measured."""

    def kernels(self, problem: Problem) -> Sequence[str]:
        """The kernels that `problem` launches, forward ones first: ``("forward", "dq", "dkdv")``."""
        ...

    def tile_key(self, problem: Problem, kernel: str) -> str:
        """The row of the backend's tile table that `problem` reads: problems with one key share one tile.

        It names the kernel too (``"dq d128 bf16 causal"``): two kernels never have one key.
        """
        ...

    def tile_space(self, problem: Problem, kernel: str) -> Sequence[Tile]:
        """Every tile worth measuring on the problem's architecture, the table's own among them."""
        ...

    def tile(self, problem: Problem, kernel: str) -> Tile:
        """The tile in force: the one set by `set_tile`, else the one tuned on this GPU, else the table's."""
        ...

    def set_tile(self, problem: Problem, kernel: str, tile: Tile | None) -> None:
        """Uses `tile` for the problem's key in calls bound from now on in this process; None: what it was, again."""
        ...


@runtime_checkable
class PreparesTiles(Protocol):
    """A tunable backend that compiles many tiles faster at once than one after the other."""

    def prepare_tiles(self, problem: Problem, kernel: str, tiles: Sequence[Tile]) -> None:
        """Compiles `kernel` with each of `tiles` side by side, so that a run on dense tensors finds them done.

        Sets no tile. One that does not compile is passed over: its run says why.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """What one kernel compiles to."""

    kernel: str
    arch: str
    """The architecture it was compiled for."""
    tile: Tile
    registers: int
    """Per thread."""
    spill_bytes: int
    """Local memory per thread: registers that did not fit. 0 is what one wants."""
    shared_bytes: int
    """Shared memory per block, as launched."""
    threads: int
    """Per block."""
    variant: str = ""
    """What sets it apart where one call may launch a kernel in several forms: ``"mask float32"``."""
    instructions: Mapping[str, int] = field(default_factory=dict)
    """How often instructions that tell the hardware path occur: ``{"wgmma": 16, "mma.sync": 0, "cp.async": 8}``."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The stages of the compiler, in its order: ``{"ttgir": ..., "ptx": ..., "sass": ...}``."""


@runtime_checkable
class Inspectable(Protocol):
    """A backend that can compile without running, for any architecture."""

    def facts(self, problem: Problem) -> Sequence[KernelFacts]:
        """Compiles the kernels of `problem` for ``problem.arch``, one after the other; needs no GPU."""
        ...
