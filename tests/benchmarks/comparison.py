"""One case, everybody side by side: trial and error against the truth first, then interleaved times, then rows."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashdispatch import BackendUnsupportedError, NoBackendError

from .grids import Case
from .machine import Reading, Run, now, reading
from .providers import Provider, Ready, Refused
from .rows import Direction, Refusal, Row
from .timing import Clock, GpuClock, Timing, Visit, interleave, iterations_for
from .truth import Inputs, gradient_part, make_inputs, part, relative_error, truth

WRONG = {"bf16": 3e-2, "fp16": 1e-2, "fp32": 2e-3}
"""Relative errors that no right kernel comes near; TF32 passes. The speed of a wrong result is no result."""

REASON = 500
"""Characters of a refusal that are kept."""

Gradients = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Contender:
    """A provider that ran the case and was right; `visit(n)` times n calls of it."""

    visit: Callable[[int], Visit]
    iterations: int
    error: float
    note: str


@dataclass(slots=True)
class Outcome:
    """The rows of a comparison, and who has none."""

    rows: list[Row] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def broken(self) -> list[str]:
        """What fails the benchmark: ours that raised, and wrong results."""
        return [f"{each.provider}: {each.reason}" for each in self.refusals if each.broken]


def compare(
    case: Case,
    direction: Direction,
    providers: Sequence[Provider],
    *,
    grid: str,
    device: torch.device,
    clock: Clock,
    rounds: int,
    run: Run,
) -> Outcome:
    """Measures everybody who can run this case in this direction."""
    given = make_inputs(case, device)
    true = truth(case, given, gradients=direction == "bwd")
    outcome = Outcome()
    contenders: dict[str, Contender] = {}
    for each in providers:
        with catching(outcome, case, direction, each):
            contenders[each.name] = _contender(each, case, direction, given, true, clock)
    order = random.Random(f"{case.id} {direction}")
    visits = {name: contender.visit for name, contender in contenders.items()}
    iterations = {name: contender.iterations for name, contender in contenders.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # pytest makes errors of them; here one would cost the whole case
        times = interleave(visits, iterations, rounds=rounds, order=order)
        look = reading(lambda: [visit(iterations[name]) for name, visit in visits.items()]) if visits else Reading()
    if isinstance(clock, GpuClock):
        clock.forget()
    seen = circumstances(run, look) | {"grid": grid}
    outcome.rows += [
        timed_row(case, direction, name, times[name], seen, error=contender.error, note=contender.note)
        for name, contender in contenders.items()
    ]
    return outcome


def timed_row(
    case: Case,
    direction: Direction,
    provider: str,
    timing: Timing,
    seen: dict[str, Any],
    *,
    error: float | None = None,
    note: str = "",
) -> Row:
    """A row of times: TFLOP/s for kernels, microseconds for host time. `seen`: its circumstances, and its grid."""
    kernel = direction in ("fwd", "bwd")
    return Row(
        **place(case),
        provider=provider,
        direction=direction,
        value=case.flops(direction) / timing.median / 1e6 if kernel else timing.median,
        unit="TFLOP/s" if kernel else "us",
        median_us=timing.median,
        min_us=timing.lowest,
        max_us=timing.highest,
        rounds=timing.rounds,
        iterations=timing.iterations,
        late=timing.late,
        error=error,
        note=note,
        **seen,
    )


def place(case: Case) -> dict[str, Any]:
    """What a row says of its case."""
    return {"case": case.id, "line": case.line, "column": case.column, "dtype": case.dtype}


def circumstances(run: Run, look: Reading) -> dict[str, Any]:
    """What a row says of the machine and the run."""
    said = {name: value for name, value in asdict(look).items() if name != "driver"}
    return asdict(run) | said | {"timestamp": now()}


@contextmanager
def catching(outcome: Outcome, case: Case, direction: str, provider: Provider) -> Iterator[None]:
    """Turns whatever a provider raises into a `Refusal`, with the warnings that torch gives as reasons."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except (Refused, BackendUnsupportedError, NoBackendError) as refused:
            broken, reason = False, str(refused)
        except WrongResultError as wrong:
            broken, reason = True, str(wrong)
        except Exception as error:  # noqa: BLE001 (a peer may raise anything; ours fails the test afterwards)
            broken, reason = provider.ours, f"{type(error).__name__}: {error}"
        else:
            return
    said = [str(warning.message).split(" (Triggered")[0] for warning in caught]
    text = "; ".join(" ".join(line.split()) for line in dict.fromkeys((reason, *said)))
    outcome.refusals.append(Refusal(case.id, direction, provider.name, text[:REASON], broken))


class WrongResultError(Exception):
    """The result is not what it must be."""


def backward_call(ready: Ready, dout: Tensor) -> Callable[[], Gradients]:
    """The backward alone, as a call that can be repeated; the output is made once, here."""
    with ready.around():
        out = ready.forward()
    mine = ready.turned(dout)
    # Not inside `around`: which backward runs was settled when the forward ran.
    return partial(torch.autograd.grad, out, ready.inputs, mine, retain_graph=True)


def _contender(
    provider: Provider, case: Case, direction: Direction, given: Inputs, true: Sequence[Tensor], clock: Clock
) -> Contender:
    """Runs it once, compares with the truth, and finds how many calls a visit takes. Compiling happens here."""
    ready = provider.ready(case, given, direction == "bwd")
    if direction == "bwd":
        backward = backward_call(ready, given.dout)
        dq, dk, dv = (ready.turned(gradient) for gradient in backward())
        got = gradient_part(case, dq, dk, dv)
        call: Callable[[], object] = backward
    else:
        with ready.around():
            got = part(case, ready.turned(ready.forward()))
        call = ready.forward
    error = relative_error(got, true)
    del got
    if not error <= WRONG[case.dtype]:  # also when it is NaN
        raise WrongResultError(f"wrong result: relative error {error:.2e}, at most {WRONG[case.dtype]:g} is right")

    def visit(iterations: int) -> Visit:
        with ready.around():
            return clock.visit(call, iterations)

    visit(3)  # warm: allocator, handles, whatever the second call still compiles
    times = sorted(visit(3).times)
    return Contender(visit, iterations_for(times[len(times) // 2]), error, ready.note)
