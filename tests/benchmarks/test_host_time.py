"""Host time of a call: how long until it returns, for the core alone, for our backends, and for PyTorch.

    pytest tests/benchmarks/test_host_time.py --benchmark-enable --benchmark-only --benchmark-quiet --rows rows.jsonl

`nothing` is a backend that computes nothing: its time is the core's. PyTorch's and a real backend's hold their kernels'
launches too. On a GPU the shape is B1 H8 S128 D64, bfloat16, so that the queue never fills; on a CPU it is one
element, so that PyTorch's kernel hardly counts. Median of 10,000 calls a provider, in 20 chunks that alternate. Forced
SDPA backends are left out. The budget: without gradients at most what `sdpa_default` takes, in the same run.

| direction | timed |
|---|---|
| `host_fwd` | the call, inputs without gradients |
| `host_fwd_grad` | the call, inputs that require gradients |
| `host_bwd` | `torch.autograd.grad` on its output |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flashdispatch import explain
from flashdispatch_registry import Extras, Forward, Gradients, Needs, Problem

from .comparison import Outcome, backward_call, catching, circumstances, timed_row
from .grids import Case
from .machine import reading
from .providers import Ready, chosen, provider
from .rows import Direction
from .timing import HostClock, Visit, interleave
from .truth import make_inputs

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CHUNKS, CALLS = 20, 500


def case_of(*, causal: bool) -> Case:
    return Case.of("bf16", 1, 8, 128, 64, causal=causal) if GPU else Case.of("fp32", 1, 1, 1, 8, causal=causal)


class Nothing:
    """Returns ready-made values."""

    def __init__(self) -> None:
        case = case_of(causal=True)
        shape = (case.batch, case.seqlen_q, case.heads_q, case.head_dim)
        self.out = torch.zeros(shape, dtype=torch.bfloat16 if GPU else torch.float32, device=DEVICE)
        self.lse = torch.zeros(case.batch, case.heads_q, case.seqlen_q, device=DEVICE)

    def forward(self, problem: Problem, q: Any, k: Any, v: Any, extras: Extras) -> Forward:
        out, lse = self.out.detach(), self.lse.detach()  # fresh ones, or autograd would grow a chain of them
        return Forward(out, lse, (q, k, v, out, lse) if problem.needs_backward else ())

    def backward(self, problem: Problem, saved: Any, dout: Any, dlse: Any, needs: Needs) -> Gradients:
        return Gradients(self.out, self.out, self.out)

    def prepare(self, problem: Problem) -> None: ...


def call_of(ready: Ready, direction: Direction, dout: torch.Tensor) -> Callable[[], object]:
    """What is timed, once run: it must not compile later."""
    call = backward_call(ready, dout) if direction == "host_bwd" else ready.forward
    for _ in range(3):
        call()
    return call


@pytest.mark.parametrize("direction", ["host_fwd", "host_fwd_grad", "host_bwd"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_host_time(benchmark: Any, add_backend: Any, record: Any, causal: bool, direction: Direction) -> None:
    # On a CPU a backend's kernels run inside the call, so that only the core is of interest unless somebody asks.
    asked = chosen(record.options.providers) if GPU or record.options.providers else []
    asked = [each for each in asked if each.ours or each.name == "fa4"]  # a forced SDPA's context would be timed too
    add_backend("nothing", backend=Nothing(), priority={"*": -1000})  # `auto` must not choose it
    case = case_of(causal=causal)
    given = make_inputs(case, DEVICE)
    outcome = Outcome()
    visits: dict[str, Callable[[int], Visit]] = {}
    notes: dict[str, str] = {}
    clock = HostClock()
    for each in (*asked, provider("nothing"), provider("sdpa_default")):
        with catching(outcome, case, direction, each):
            ready = each.ready(case, given, direction != "host_fwd")
            visits[each.name] = partial(clock.visit, call_of(ready, direction, given.dout))
            notes[each.name] = ready.note

    def whole() -> Outcome:
        order = random.Random(f"{case.id} {direction}")
        times = interleave(visits, dict.fromkeys(visits, CALLS), rounds=CHUNKS, order=order)
        seen = circumstances(record.run, reading()) | {"grid": "host"}
        outcome.rows += [
            timed_row(case, direction, name, timing, seen, note=notes[name]) for name, timing in times.items()
        ]
        return outcome

    record.close(benchmark, benchmark.pedantic(whole, rounds=1, iterations=1))


def test_a_new_plan(benchmark: Any) -> None:
    case = case_of(causal=True)
    given = make_inputs(case, DEVICE)
    plan = benchmark(lambda: explain(given.q, given.k, given.v, causal=True))
    assert plan.chosen is not None
