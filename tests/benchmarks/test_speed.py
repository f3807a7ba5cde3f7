"""Speed of kernels: every provider on every case of a grid, forward and backward.

    pytest tests/benchmarks/test_speed.py --benchmark-enable --benchmark-only --benchmark-quiet \
        --grid main --providers triton_fa2,sdpa_flash,sdpa_cudnn --rounds 5 --rows rows.jsonl

One test is one case in one direction, with all providers interleaved, so pytest-benchmark's own time is that of the
whole comparison and says nothing about a kernel: read the rows. Nothing is asserted about speed. What fails is a
backend of ours that raises where it did not refuse, and a wrong result. On a CPU only `--grid smoke` runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .comparison import Outcome, compare
from .grids import Case, grid
from .options import Options
from .providers import chosen
from .rows import Direction
from .timing import clock_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    try:
        cases = [(name, *case) for name in Options.of(metafunc.config).grids for case in grid(name)]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    ids = [f"{case.id}-{direction}" for _, case, direction in cases]
    metafunc.parametrize(("name", "case", "direction"), cases, ids=ids)


@pytest.fixture(scope="module")
def clock() -> Any:
    """One for all cases: the buffer that flushes the cache is large."""
    return clock_for(DEVICE)


def test_speed(benchmark: Any, record: Any, clock: Any, name: str, case: Case, direction: Direction) -> None:
    if DEVICE.type == "cpu" and name != "smoke":
        pytest.skip("no CUDA device on this machine; --grid smoke runs anywhere")

    def whole() -> Outcome:
        providers = chosen(record.options.providers)
        return compare(
            case, direction, providers, grid=name, device=DEVICE, clock=clock, rounds=record.options.rounds,
            run=record.run,
        )  # fmt: skip

    record.close(benchmark, benchmark.pedantic(whole, rounds=1, iterations=1))
