"""Which tile is the fastest one that is right. Knows no clock and no console: both come as functions.

One row of a backend's tile table at a time, the other kernels of the pass as they are (coordinate descent). A candidate
is compiled, its results are compared with those of the tile in force, and it is measured; the best few are measured
again, in turns with the tile in force, so that a GPU that got warmer meanwhile favours nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flashdispatch_registry.backend import Backend, Extras, Needs
from flashdispatch_registry.errors import FlashDispatchError
from flashdispatch_registry.kernels import PreparesTiles, Tile, Tunable
from flashdispatch_registry.problem import Problem

FINALISTS = 3
ROUNDS = 6
"""Even: as many in one order as in the other, so that a steady drift cancels in the medians."""
GAIN = 0.01
"""A new tile must be faster by this part: less is noise, and a table that changes with noise is none."""

LIMITS: Mapping[torch.dtype, float] = {
    torch.float16: 2e-2,
    torch.bfloat16: 2e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-10,
}
"""How far a right tile's results may be from another's, as relative Frobenius error: only the order of sums differs."""

Measure = Callable[[Callable[[], object]], float]
"""The seconds that a call of the function takes."""

Results = Mapping[str, Tensor | None]
Work = Callable[[], Results]
"""Runs one pass of one problem."""


@runtime_checkable
class TunableBackend(Backend, Tunable, Protocol):
    """A backend whose tiles can be measured."""


class TuningError(FlashDispatchError, RuntimeError):
    """A row that can't be tuned: there is nothing to compare with, or nothing that compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a backend's tile table, and the problems asked for that read it."""

    kernel: str
    key: str
    forward: bool
    """Whether the forward pass launches the kernel; else the backward pass does."""
    problems: tuple[Problem, ...]
    space: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A candidate that is out, and why."""

    tile: Tile
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a row."""

    row: Row
    before: Tile
    now: Tile
    seconds_before: float
    """Of one pass; the geometric mean over the row's problems. Measured in turns with `seconds_now`."""
    seconds_now: float
    failed: tuple[Dropped, ...]
    """Candidates that did not compile or launch."""
    wrong: tuple[Dropped, ...]
    """Candidates that ran and gave other results: faults of the backend."""

    @property
    def changed(self) -> bool:
        """True when another tile won."""
        return self.now != self.before

    @property
    def ratio(self) -> float:
        """How many times faster it is now."""
        return self.seconds_before / self.seconds_now


def rows(backend: Tunable, problems: Sequence[Problem], only: Collection[str] = ()) -> tuple[Row, ...]:
    """The rows that `problems` read, in the order of their kernels; of the kernels in `only`, or of all.

    A problem without gradients adds nothing to a row that the same problem with gradients reads too.

    Raises TuningError when two kernels have one key, under which no two tiles could be kept.
    """
    found: dict[str, Row] = {}
    for problem in problems:
        forward_only = replace(problem, needs_grad=())
        forward = backend.kernels(forward_only)
        for kernel in backend.kernels(problem):
            if only and kernel not in only:
                continue
            key = backend.tile_key(problem, kernel)
            row = found.get(key)
            if row is None:
                space = tuple(backend.tile_space(problem, kernel))
                found[key] = Row(kernel=kernel, key=key, forward=kernel in forward, problems=(problem,), space=space)
            elif row.kernel != kernel:
                raise TuningError(f"tile_key gives {key!r} for two kernels, {row.kernel} and {kernel}")
            elif all(replace(other, needs_grad=()) != forward_only for other in row.problems):
                found[key] = replace(row, problems=(*row.problems, problem))
    return tuple(found.values())


def work(backend: Backend, problem: Problem, *, forward: bool, device: torch.device) -> Work:
    """One pass of `problem` on random normal inputs; for a backward pass, its forward is done once, here.

    All tensors are dense and begin where torch's allocator puts them. A boolean mask hides a tenth.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(length: int, heads: int, dim: int) -> Tensor:
        shape = (problem.batch, length, heads, dim)
        return torch.randn(shape, generator=generator, dtype=problem.dtype, device=device)

    q = normal(problem.seqlen_q, problem.heads_q, problem.head_dim)
    k = normal(problem.seqlen_k, problem.heads_kv, problem.head_dim)
    v = normal(problem.seqlen_k, problem.heads_kv, problem.head_dim_v)

    extras = _extras(problem, generator)

    def run_forward() -> Results:
        out, lse, _ = backend.forward(problem, q, k, v, extras)
        return {"out": out, "lse": lse}

    if forward:
        return run_forward
    saved = backend.forward(problem, q, k, v, extras).saved
    dout = normal(problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    needs = Needs(*(name in problem.needs_grad for name in Needs._fields))

    def run_backward() -> Results:
        gradients = backend.backward(problem, saved, dout, None, needs)
        return {f"d{name}": gradient for name, gradient in gradients._asdict().items()}

    return run_backward


def _extras(problem: Problem, generator: torch.Generator) -> Extras:
    """What `problem` has beside q, k and v; sequences at full length."""
    device, heads = generator.device, problem.heads_q
    shape = problem.attn_mask_shape or ()

    def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    def full(length: int) -> Tensor:
        return torch.full((problem.batch,), length, dtype=torch.int32, device=device)

    mask = None
    if problem.attn_mask == "bool":
        mask = torch.rand(shape, generator=generator, device=device) < 0.9
    elif problem.attn_mask == "float":
        mask = normal(shape, problem.dtype)
    return Extras(
        attn_mask=mask,
        alibi_slopes=2.0 ** -torch.linspace(1, 8, heads, device=device) if problem.alibi else None,
        sinks=normal((heads,)) if problem.sinks else None,
        q_lens=full(problem.seqlen_q) if problem.q_lens else None,
        kv_lens=full(problem.seqlen_k) if problem.kv_lens else None,
        dropout_seed=torch.zeros(2, dtype=torch.int64, device=device) if problem.dropout_p else None,
    )


def steps(row: Row) -> int:
    """How often `tune` calls its `step`."""
    return 2 * len(row.space) + 1


def tune(
    backend: TunableBackend,
    row: Row,
    *,
    measure: Measure,
    device: torch.device,
    step: Callable[[], None] = lambda: None,
) -> Verdict:
    """Finds the row's best tile and leaves it in force; whatever goes wrong, the old one is.

    Raises TuningError when the tile in force does not run, or does no longer after a candidate has run, or when the
    candidates can't be compiled side by side.
    """
    at = row.problems[0], row.kernel
    before = dict(backend.tile(*at))
    search = _Search(backend, row, measure, before, step)
    winner: Tile = before
    with torch.no_grad():
        try:
            search.start(device)
            verdict = search.verdict()
            winner = verdict.now
        finally:
            backend.set_tile(*at, winner)
    return verdict


class _Search:
    """One row's search."""

    def __init__(
        self, backend: TunableBackend, row: Row, measure: Measure, before: Tile, step: Callable[[], None]
    ) -> None:
        self._backend, self._row, self._measure, self._before, self._step = backend, row, measure, before, step
        self._works: list[Work] = []
        self._wanted: list[Results] = []
        self._failed: list[Dropped] = []
        self._wrong: list[Dropped] = []

    def start(self, device: torch.device) -> None:
        """Runs the tile in force: what it gives is what others must give."""
        backend, row = self._backend, self._row
        try:
            self._use(self._before)
            self._works = [work(backend, problem, forward=row.forward, device=device) for problem in row.problems]
            self._wanted = [run() for run in self._works]
            _synchronise(device)
        except Exception as error:  # a backend may raise anything
            raise TuningError(
                f"{row.key}: the tile in force, {tile_text(self._before)}, does not run, so there is nothing to "
                f"compare others with: {_reason(error)}"
            ) from error

    def verdict(self) -> Verdict:
        """Measures all, then the best few again."""
        times = self._first_round(self._compiled())
        best = sorted(times, key=lambda pair: pair[1])[:FINALISTS]
        finalists = [self._before, *(tile for tile, _ in best)]
        rounds: list[list[float]] = []
        for number in range(ROUNDS):
            forth = number % 2 == 0  # and back
            turn = [self._time(tile) for tile in (finalists if forth else reversed(finalists))]
            rounds.append(turn if forth else turn[::-1])
        self._step()
        seconds = [median(column) for column in zip(*rounds, strict=True)]
        fastest = min(range(len(finalists)), key=seconds.__getitem__)
        if seconds[fastest] > (1 - GAIN) * seconds[0]:
            fastest = 0
        return Verdict(
            row=self._row,
            before=self._before,
            now=dict(finalists[fastest]),
            seconds_before=seconds[0],
            seconds_now=seconds[fastest],
            failed=tuple(self._failed),
            wrong=tuple(self._wrong),
        )

    def _compiled(self) -> list[Tile]:
        """The candidates that compile, all of them before the first is measured."""
        others = [tile for tile in self._row.space if dict(tile) != self._before]
        if isinstance(self._backend, PreparesTiles):
            try:
                for problem in self._row.problems:
                    self._backend.prepare_tiles(problem, self._row.kernel, others)
            except Exception as error:  # a compiler that dies takes its process along
                raise TuningError(f"{self._row.key}: compiling its tiles ended with {_reason(error)}") from error
            for _ in self._row.space:
                self._step()
            return others
        self._step()  # the tile in force is ready
        ready: list[Tile] = []
        for tile in others:
            self._step()
            try:
                self._use(tile)
                for problem in self._row.problems:
                    self._backend.prepare(problem)
            except Exception as error:  # noqa: BLE001  what does not compile is no candidate; the verdict says why
                self._failed.append(Dropped(tile, _reason(error)))
            else:
                ready.append(tile)
        return ready

    def _first_round(self, ready: Sequence[Tile]) -> list[tuple[Tile, float]]:
        for _ in range(len(self._row.space) - len(ready)):
            self._step()
        times: list[tuple[Tile, float]] = []
        for tile in ready:
            self._step()
            try:
                self._use(tile)
                off = self._off()
                if not off:
                    times.append((tile, self._time(tile)))
                    continue
                self._wrong.append(Dropped(tile, off))
                said = off
            except Exception as error:  # noqa: BLE001  what does not launch is no candidate; the verdict says why
                said = _reason(error)
                self._failed.append(Dropped(tile, said))
            self._check_nothing_is_broken(tile, said)
        return times

    def _use(self, tile: Tile) -> None:
        self._backend.set_tile(self._row.problems[0], self._row.kernel, tile)

    def _time(self, tile: Tile) -> float:
        self._use(tile)
        return geometric_mean([self._measure(run) for run in self._works])

    def _off(self) -> str:
        """What the tile in use gives that the one in force did not; empty when all is right."""
        for problem, run, wanted in zip(self._row.problems, self._works, self._wanted, strict=True):
            limit = LIMITS[problem.dtype]
            got = run()
            for name, tensor in wanted.items():
                error = relative_error(got.get(name), tensor)
                if not error < limit:  # NaN too
                    return f"{name} is off by {error:.1e}, relative; right is below {limit:.0e} ({problem.describe()})"
        return ""

    def _check_nothing_is_broken(self, culprit: Tile, said: str) -> None:
        """After a candidate that is out: wild writes may have hit the inputs, a fault may have ended the context."""
        self._use(self._before)
        try:
            off = self._off()
        except Exception as error:  # noqa: BLE001  a backend may raise anything
            off = _reason(error)
        if off:
            raise TuningError(
                f"{self._row.key}: since the tile {tile_text(culprit)} ran ({said}), the one in force fails too "
                f"({off}): that kernel writes where it must not, or has ended the GPU's context"
            )


def relative_error(got: Tensor | None, wanted: Tensor | None) -> float:
    """|got - wanted| / |wanted| in Frobenius norms, in float64; equal infinities count as equal."""
    if got is None or wanted is None:
        return 0.0 if got is wanted else float("inf")
    if got.shape != wanted.shape:
        return float("inf")
    far = torch.where(got == wanted, 0.0, got.double() - wanted.double())
    norm = torch.where(wanted.isfinite(), wanted, 0).double().norm()
    return float(far.norm() / norm) if norm else float(far.norm())


def tile_text(tile: Tile) -> str:
    """``"block_m 128, num_warps 8"``."""
    return ", ".join(f"{name} {value}" for name, value in tile.items())


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A JSON-able dict."""
    row = verdict.row
    return {
        "kernel": row.kernel,
        "key": row.key,
        "problems": [problem.describe() for problem in row.problems],
        "before": dict(verdict.before),
        "now": dict(verdict.now),
        "microseconds_before": verdict.seconds_before * 1e6,
        "microseconds_now": verdict.seconds_now * 1e6,
        "ratio": verdict.ratio,
        "changed": verdict.changed,
        "failed": [{"tile": dict(out.tile), "reason": out.reason} for out in verdict.failed],
        "wrong": [{"tile": dict(out.tile), "reason": out.reason} for out in verdict.wrong],
    }


def _reason(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
