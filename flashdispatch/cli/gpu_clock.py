"""How long a GPU works on a call: CUDA events around it, a cold L2 before it, the median of many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

FLUSH_BYTES = 256 << 20
"""Written before each run, so that no run finds its inputs in L2: more than any GPU's L2 (H200 50 MB, B200 126 MB)."""

LEAD = 300
"""Flushes that a head start has at most: a GPU's queue takes about a thousand launches before the host must wait."""


class GpuClock:
    """Seconds that a function's launches take on one GPU, whatever the host needs to launch them."""

    def __init__(self, device: torch.device, *, budget: float = 0.05, fewest: int = 7, most: int = 100) -> None:
        """`budget` seconds of GPU time for one answer, within `fewest` and `most` runs."""
        self._device, self._budget, self._fewest, self._most = device, budget, fewest, most
        self._dirt = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._flush()
        self._flush_seconds = max(self._gpu_seconds(self._flush) for _ in range(3))

    def __call__(self, run: Callable[[], object]) -> float:
        """The median over several runs."""
        with torch.cuda.device(self._device):
            run()  # whatever happens only the first time
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            once = self._queued(run)
            host = time.perf_counter() - start
            torch.cuda.synchronize(self._device)
            gpu = _seconds(once)
            # A head start: were the GPU to wait for the host's next launch, the events would count the waiting.
            covered = int(LEAD * self._flush_seconds / host)
            wanted = round(self._budget / (gpu + self._flush_seconds))
            runs = max(min(wanted, covered, self._most), self._fewest)
            for _ in range(min(math.ceil(runs * host / self._flush_seconds), LEAD)):
                self._flush()
            pairs = [self._queued(run) for _ in range(runs)]
            torch.cuda.synchronize(self._device)
        return median(map(_seconds, pairs))

    def _flush(self) -> None:
        self._dirt.zero_()

    def _queued(self, run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        self._flush()
        start, end = (_event() for _ in range(2))
        start.record()
        run()
        end.record()
        return start, end

    def _gpu_seconds(self, run: Callable[[], object]) -> float:
        with torch.cuda.device(self._device):
            pair = self._queued(run)
            torch.cuda.synchronize(self._device)
        return _seconds(pair)


def _seconds(pair: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    start, end = pair
    return float(start.elapsed_time(end)) / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it without types
