"""Fuzzing as units: some seconds of it in one dtype, so that it is isolated, resumed and reported as all units are."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial

from flashdispatch_conformance import stage
from flashdispatch_conformance.case import Replay
from flashdispatch_conformance.check import ALL_DTYPES, Check, Unit
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target
from flashdispatch_registry.problem import DTYPE_NAMES

SECONDS = 20.0
"""Of one round; it ends with its first finding."""


def rounds(minutes: float, workers: int, seed: int) -> tuple[Unit, ...]:
    """As many rounds as `workers` have time for in `minutes`, each with a seed of its own, the dtypes in turns."""
    seconds = min(SECONDS, minutes * 60)
    count = math.ceil(minutes * 60 / seconds) * workers
    return tuple(
        Unit(_check(seed * 1_000_003 + number, seconds), ALL_DTYPES[number % len(ALL_DTYPES)])
        for number in range(count)
    )


def is_round(result: Result) -> bool:
    """Whether it is the result of such a unit."""
    return result.check.startswith("fuzz/")


def _check(seed: int, seconds: float) -> Check:
    name = f"fuzz/{seed}"
    return Check(id=name, why="cases drawn at random", run=partial(_run, name, seed, seconds))


def _run(name: str, seed: int, seconds: float, target: Target) -> Result:
    from flashdispatch_conformance.fuzz import command, fuzz

    start = time.perf_counter()

    def watch(replay: Replay) -> None:
        stage.draw(command(target.backend, replay))

    findings = fuzz(target.backend, target.dtype, target.device, seconds=seconds, seed=seed, watch=watch)
    found = next(findings, None)
    passed = Result(
        check=name,
        backend=target.backend,
        dtype=DTYPE_NAMES[target.dtype],
        outcome="pass",
        run_s=time.perf_counter() - start,
    )
    if found is None:
        return passed
    result = found.result
    return replace(passed, outcome=result.outcome, messages=(*result.messages, found.line()), stats=result.stats)
