"""How times are taken: interleaved rounds, CUDA events around single calls, a cold L2 cache, and a host that is ahead.

All providers of a case are timed in one run: every round visits them in a new random order, and a visit times a few
calls in a row. Clock and temperature drift then hits all of them alike, which separate runs can't promise.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

VISIT_US = 20_000.0
"""GPU time that one visit takes, about."""
FEWEST, MOST = 3, 300
"""Calls of a visit."""


@dataclass(frozen=True, slots=True)
class Visit:
    """The times of a few calls in a row, in microseconds."""

    times: tuple[float, ...]
    late: int = 0
    """How many of `times` may hold launch cost because the GPU had caught up with the host."""


class Clock(Protocol):
    """Times single calls."""

    def visit(self, call: Call, iterations: int) -> Visit:
        """Times `iterations` calls, one by one."""
        ...


class GpuClock:
    """GPU time of single calls, between two CUDA events on the current stream.

    The L2 cache is flushed before each call, by writing a buffer four times its size: otherwise small cases would be
    timed with their inputs in the cache, which a model's next layer never finds there.

    The host must be ahead. If the GPU reaches the start event before the host has launched the call's last kernel, it
    waits for the host inside the timed span, and the time is that of Python. So a visit begins with a spin kernel, the
    **lead**, during which the host fills the queue; the flushes keep it ahead from there on. Whether it was is not
    assumed but asked: once a call's end event is in the queue, its start event must not have happened yet. A call that
    fails this is dropped; when more than a few fail, the visit is repeated with a lead twice as long.
    """

    FLUSH_BYTES = 256 * 2**20
    FIRST_LEAD_US, LONGEST_LEAD_US = 2_000.0, 128_000.0
    CYCLES_PER_US = 2_000
    """torch.cuda._sleep counts SM cycles; near 2 GHz at boost, and a lower clock only makes the lead longer."""

    def __init__(self) -> None:
        self._buffer = torch.empty(self.FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._leads: dict[Call, float] = {}

    def visit(self, call: Call, iterations: int) -> Visit:
        """Times `iterations` calls; fewer come back when some of them were late."""
        lead = self._leads.get(call, self.FIRST_LEAD_US)
        while True:
            self._leads[call] = lead
            times, late = self._once(call, iterations, lead)
            good = tuple(time for time, was_late in zip(times, late, strict=True) if not was_late)
            if len(good) >= max(min(FEWEST, iterations), 0.8 * iterations):
                return Visit(good)
            if lead >= self.LONGEST_LEAD_US:
                # It synchronises, or its host time is beyond any lead: the times are true for it, and marked.
                return Visit(tuple(times), sum(late))
            lead *= 2

    def forget(self) -> None:
        """Drops what it knows of calls, and with it their tensors."""
        self._leads.clear()

    def _once(self, call: Call, iterations: int, lead_us: float) -> tuple[list[float], list[bool]]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            for _ in range(iterations)
        ]
        late = []
        torch.cuda.synchronize()
        with _no_collection():
            torch.cuda._sleep(int(lead_us * self.CYCLES_PER_US))  # type: ignore[no-untyped-call]
            for start, end in events:
                self._buffer.zero_()
                start.record()
                call()
                end.record()
                late.append(bool(start.query()))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events], late


class HostClock:
    """Time until a call returns. On a GPU with a queue that is never full, since a full one makes the host wait."""

    SYNCHRONISE_EVERY = 64

    def visit(self, call: Call, iterations: int) -> Visit:
        """Times `iterations` calls. The garbage collector is off, and results are dropped outside the timed span."""
        synchronise = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
        counter = time.perf_counter_ns
        times = []
        with _no_collection():
            for index in range(iterations):
                if index % self.SYNCHRONISE_EVERY == 0:
                    synchronise()
                before = counter()
                result = call()
                after = counter()
                result = None  # noqa: F841 (freed here, and not in the next call's time)
                times.append((after - before) / 1e3)
        synchronise()
        return Visit(tuple(times))


def _nothing() -> None: ...


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector off: one of its passes is thousands of launches long."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def clock_for(device: torch.device) -> GpuClock | HostClock:
    """What times kernels on `device`. On a CPU a call is done when it returns."""
    return GpuClock() if device.type == "cuda" else HostClock()


def iterations_for(median_us: float) -> int:
    """Calls per visit, so that it takes about `VISIT_US`."""
    return min(max(FEWEST, math.ceil(VISIT_US / max(median_us, 0.1))), MOST)


@dataclass(frozen=True, slots=True)
class Timing:
    """All visits of one provider. Microseconds."""

    median: float
    """Over all calls of all rounds."""
    lowest: float
    """The smallest median of a round."""
    highest: float
    rounds: int
    iterations: int
    late: int


def interleave(
    visits: Mapping[str, Callable[[int], Visit]], iterations: Mapping[str, int], *, rounds: int, order: random.Random
) -> dict[str, Timing]:
    """Visits everybody once per round, in a random order; `visits[name](n)` times n calls."""
    seen: dict[str, list[Visit]] = {name: [] for name in visits}
    for _ in range(rounds):
        for name in order.sample(list(visits), len(visits)):
            seen[name].append(visits[name](iterations[name]))
    return {name: _timing(own) for name, own in seen.items()}


def _timing(visits: list[Visit]) -> Timing:
    times = [time for visit in visits for time in visit.times]
    medians = [statistics.median(visit.times) for visit in visits]
    late = sum(visit.late for visit in visits)
    return Timing(statistics.median(times), min(medians), max(medians), len(visits), len(times), late)
