"""The harness itself, on a CPU and in every test run: rows, grids, clocks, truth, and who gets a row. No time matters.

pytest tests/benchmarks/test_harness.py
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashdispatch

from . import truth
from .comparison import compare
from .grids import GRIDS, Case, grid
from .machine import Reading, Run, parse, reading
from .providers import Provider, Ready, Refused, chosen, leaves, provider
from .rows import Refusal, Row, append, ratios, read, summary
from .test_memory import LENGTHS, extra_memory, faster_than_linear
from .timing import GpuClock, HostClock, Timing, Visit, interleave, iterations_for
from .truth import Inputs, make_inputs, relative_error

CPU = torch.device("cpu")
RUN = Run("a GPU", {"torch": "2.11"}, "abc", "pytest")
SMOKE = [case for case, direction in grid("smoke") if direction == "fwd"]


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "case": "a", "grid": "main", "line": "D64 causal", "column": "S1024", "dtype": "bf16",
        "provider": "sdpa_flash", "direction": "fwd", "value": 300.0, "unit": "TFLOP/s", "median_us": 100.0,
        "versions": {"torch": "2.11"}, "timestamp": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return Row(**values | changes)


# ---------------------------------------------------------------- rows


def test_rows_survive_a_file(tmp_path: Path) -> None:
    rows = [row(error=1e-3, sm_mhz=1980.0), row(provider="µ", unit="bytes", direction="fwd_memory", median_us=None)]
    path = tmp_path / "rows.jsonl"
    append(path, rows[:1])
    append(path, rows[1:])
    assert read(path) == rows


def test_a_row_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="speed"):
        Row.from_json(row().to_json() | {"speed": 1})
    with pytest.raises(ValueError, match="direction"):
        row(direction="sideways")
    with pytest.raises(ValueError, match="error must be finite"):
        row(error=math.nan)


def test_ratios_are_geometric_means_over_the_cases_that_both_ran() -> None:
    rows = [
        row(case="a", median_us=100.0),
        row(case="b", median_us=100.0),
        row(case="a", provider="ours", median_us=50.0, error=1e-3),
        row(case="b", provider="ours", median_us=200.0, error=2e-3),
        row(case="c", provider="ours", median_us=1.0),
    ]
    ours = next(ratio for ratio in ratios(rows) if ratio.provider == "ours")
    assert (ours.cases, ours.lowest, ours.highest, ours.worst_error) == (2, 0.5, 2.0, 2e-3)
    assert ours.mean == pytest.approx(1.0)
    assert ours.baseline == "sdpa_flash"


def test_the_baseline_is_the_first_that_ran() -> None:
    kernels = [row(provider=name) for name in ("ours", "sdpa_default", "sdpa_efficient")]
    host = [row(provider=name, direction="host_fwd", unit="us") for name in ("sdpa_flash", "sdpa_default")]
    assert {ratio.baseline for ratio in ratios(kernels)} == {"sdpa_efficient"}
    assert {ratio.baseline for ratio in ratios(host)} == {"sdpa_default"}
    assert ratios([row(provider="ours")]) == []


def test_the_summary_has_one_line_per_head_dim_and_mask_and_names_who_refused() -> None:
    rows = [row(case=column, column=column, value=value) for column, value in (("S4096", 303.4), ("S1024", 284.2))]
    refusals = [Refusal("a", "fwd", "fa4", "no [softcap]"), Refusal("b", "fwd", "fa4", "no [softcap]")]
    text = summary([*rows, row(case="d", line="D128 full", value=8.5)], refusals)
    assert "TFLOP/s at S1024 / S4096" in text
    assert "284 303" in text
    assert "8.5 –" in text
    assert "no row: fa4 on a fwd and 1 more: no [softcap]" in text


# ---------------------------------------------------------------- grids


@pytest.mark.parametrize("name", GRIDS)
def test_ids_name_one_case_each(name: str) -> None:
    ids = [(case.id, direction) for case, direction in grid(name)]
    places = [(case.dtype, case.line, case.column, direction) for case, direction in grid(name)]
    assert len(set(ids)) == len(ids)
    assert len(set(places)) == len(places)


def test_the_main_grid_is_the_one_of_the_design() -> None:
    cases = [case for case, direction in grid("main") if direction == "bwd"]
    assert len(cases) == 18
    assert all(case.batch * case.seqlen_q == 16384 and case.heads_q * case.head_dim == 2048 for case in cases)
    assert cases[7].id == "bf16-B4-H16-S4096-D128-full"
    assert [case.dtype for case, _ in grid("fp16")] == ["fp16"] * 36
    assert len(grid("fp32")) == 16
    with pytest.raises(ValueError, match="main"):
        grid("design8")


def test_flops() -> None:
    case = Case.of("bf16", 4, 16, 4096, 128, causal=False)
    assert case.flops("fwd") == 4 * 4 * 16 * 4096 * 4096 * 128
    assert case.flops("bwd") == 2.5 * case.flops("fwd")
    assert replace(case, causal=True).flops("fwd") == case.flops("fwd") / 2
    assert replace(case, head_dim_v=64).flops("fwd") == case.flops("fwd") * 0.75
    assert replace(case, causal=True, seqlen_q=1024).pairs() == 4 * 1024 * (3072 + 512)
    assert replace(case, kv_lens=(1, 2, 3, 4096)).pairs() == 4096 * 4102


@pytest.mark.parametrize("window", [(15, 0), (3, None), (5, 7)])
def test_a_window_is_counted_exactly(window: tuple[int, int | None]) -> None:
    case = replace(Case.of("bf16", 2, 1, 40, 16, causal=False), window=window, seqlen_k=50)
    assert case.pairs() == 2 * int(case.band.dense(40, 50).sum())
    assert torch.equal(truth.inside_band(case, range(40), 50, 50, CPU), case.band.dense(40, 50))


# ---------------------------------------------------------------- timing


def test_a_visit_takes_about_twenty_milliseconds() -> None:
    assert [iterations_for(us) for us in (200.0, 5_000.0, 90_000.0, 1.0)] == [100, 4, 3, 300]


def test_providers_are_interleaved_in_a_random_order_that_repeats() -> None:
    def times_of(seed: int) -> tuple[list[str], dict[str, Timing]]:
        seen: list[str] = []
        values = {"a": iter([(1.0, 3.0), (5.0,), (9.0,)]), "b": iter([(2.0,)] * 3), "c": iter([(4.0,)] * 3)}

        def visit(name: str, iterations: int) -> Visit:
            seen.append(f"{name}{iterations}")
            return Visit(next(values[name]), late=1)

        visits = {name: partial(visit, name) for name in values}
        return seen, interleave(visits, {"a": 2, "b": 1, "c": 1}, rounds=3, order=random.Random(seed))

    seen, times = times_of(1)
    assert all(sorted(seen[first : first + 3]) == ["a2", "b1", "c1"] for first in (0, 3, 6))
    assert times["a"] == Timing(median=4.0, lowest=2.0, highest=9.0, rounds=3, iterations=4, late=3)
    assert seen == times_of(1)[0]
    assert len({tuple(times_of(seed)[0]) for seed in range(9)}) > 1


def test_the_host_clock_times_every_call_and_leaves_the_garbage_collector_as_it_was() -> None:
    import gc

    calls: list[bool] = []
    visit = HostClock().visit(lambda: calls.append(gc.isenabled()), 130)
    assert len(visit.times) == len(calls) == 130
    assert not any(calls)
    assert gc.isenabled()


class FakeGpu:
    """A host and a GPU with their own clocks, in microseconds: the host launches, the GPU works off its queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.gpu = 0.0
        self.leads: list[float] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = math.inf

            def record(self) -> None:
                gpu.launch(host=1.0, work=0.0)
                self.at = gpu.gpu

            def query(self) -> bool:
                return self.at <= gpu.host

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        class Buffer:
            def zero_(self) -> None:
                gpu.launch(host=5.0, work=65.0)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: Buffer())

    def launch(self, host: float, work: float) -> None:
        self.host += host
        self.gpu = max(self.gpu, self.host) + work

    def synchronize(self) -> None:
        self.host = self.gpu = max(self.host, self.gpu)

    def sleep(self, cycles: int) -> None:
        self.leads.append(cycles / 2_000)
        self.launch(host=1.0, work=cycles / 2_000)


@pytest.mark.parametrize(("host", "leads"), [(20.0, 1), (300.0, 4)])
def test_the_gpu_clock_never_times_the_host(monkeypatch: pytest.MonkeyPatch, host: float, leads: int) -> None:
    """A kernel of 50 µs is timed as one, also behind 300 µs of launching: the lead grows until the host is ahead."""
    fake = FakeGpu(monkeypatch)
    clock = GpuClock()
    call = partial(fake.launch, host=host, work=50.0)
    visit = clock.visit(call, 100)
    assert visit.late == 0
    assert len(visit.times) >= 80
    assert visit.times == pytest.approx([50.0] * len(visit.times))
    assert len(fake.leads) == leads
    clock.visit(call, 100)
    assert len(fake.leads) == leads + 1  # it remembers


def test_a_call_that_synchronises_is_timed_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu(monkeypatch)

    def call() -> None:
        fake.launch(host=10.0, work=50.0)
        fake.synchronize()

    visit = GpuClock().visit(call, 5)
    assert (len(visit.times), visit.late) == (5, 5)
    assert fake.leads[-1] == GpuClock.LONGEST_LEAD_US


# ---------------------------------------------------------------- truth


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.id)
def test_the_truth_is_attention(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(truth, "ROWS", 20)  # 48 queries: two whole blocks and a tail
    given = make_inputs(case, CPU)
    ready = provider("torch_reference").ready(case, given, True)
    out = ready.forward()
    gradients = torch.autograd.grad(out, ready.inputs, given.dout)
    assert relative_error(truth.part(case, out), truth.truth(case, given, gradients=False)) < 1e-6
    dq, dk, dv = gradients
    assert relative_error(truth.gradient_part(case, dq, dk, dv), truth.truth(case, given, gradients=True)) < 1e-6


def test_the_error_keeps_nan_and_refuses_another_shape() -> None:
    one = torch.ones(4)
    assert relative_error((one * 1.5,), (one,)) == pytest.approx(0.5)
    assert math.isnan(relative_error((one * math.nan,), (one,)))
    with pytest.raises(ValueError, match="shape"):
        relative_error((torch.ones(5),), (one,))


# ---------------------------------------------------------------- providers and comparison


def test_the_default_providers_are_fused_ones_and_peers(add_backend: Any) -> None:
    add_backend("fused_one")
    add_backend("slow_one", fused=False)
    names = [each.name for each in chosen()]
    assert "fused_one" in names
    assert "slow_one" not in names
    assert "torch_reference" not in names
    assert {"auto", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_default"}.issubset(names)
    assert [each.name for each in chosen(("torch_reference", "auto", "auto"))] == ["torch_reference", "auto"]
    with pytest.raises(ValueError, match="torch_refrence"):
        chosen(("torch_refrence",))


@pytest.mark.parametrize("name", ["torch_reference", "auto", "sdpa_default"])
@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.id)
def test_nobody_copies_an_input(name: str, case: Case) -> None:
    given = make_inputs(case, CPU)
    try:
        ready = provider(name).ready(case, given, True)
    except Refused as refused:
        assert "softcap" in str(refused)  # noqa: PT017 (refusing is allowed, for this reason)
        return
    originals = (given.q, given.k, given.v)
    for mine, original in zip(ready.inputs, originals, strict=True):
        assert mine.data_ptr() == original.data_ptr()
        assert ready.turned(mine).stride() == original.stride()
        assert mine.is_leaf
        assert mine.requires_grad


def fake(name: str, forward: Callable[..., torch.Tensor], *, ours: bool) -> Provider:
    def ready(case: Case, given: Inputs, grad: bool) -> Ready:
        inputs = leaves(given, grad, bhsd=True)
        return Ready(inputs, partial(forward, *inputs), bhsd=True, note=name)

    return Provider(name, ours, ready)


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v)


def crash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    warnings.warn("needs sm_120 (Triggered internally at x.cpp:7.)", stacklevel=1)
    raise RuntimeError("No available\n kernel")


def refuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flashdispatch.attention(q, k, v, layout="bhsd", causal=True, backend="half_only")


def nan_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return right(q, k, v) + 0 * torch.sqrt(q - q.detach())


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_only_right_results_get_a_row_and_nobody_is_left_out_in_silence(add_backend: Any, direction: Any) -> None:
    add_backend("half_only", dtypes=frozenset({torch.float16}))
    providers = [
        fake("right", right, ours=True),
        fake("wrong_peer", wrong, ours=False),
        fake("crashing_peer", crash, ours=False),
        fake("crashing", crash, ours=True),
        fake("refusing", refuse, ours=True),
        *([fake("nan", nan_gradient, ours=True)] if direction == "bwd" else []),
        provider("sdpa_default"),
    ]
    outcome = compare(
        SMOKE[0], direction, providers, grid="smoke", device=CPU, clock=HostClock(), rounds=3, run=RUN
    )  # fmt: skip
    assert [one.provider for one in outcome.rows] == ["right", "sdpa_default"]
    first = outcome.rows[0]
    assert first.error is not None
    assert first.error < 1e-5
    assert first.value == pytest.approx(SMOKE[0].flops(direction) / first.median_us / 1e6)  # type: ignore[operator]
    assert (first.rounds, first.note, first.gpu, first.grid) == (3, "right", "a GPU", "smoke")
    reasons = {refusal.provider: refusal for refusal in outcome.refusals}
    assert reasons["crashing_peer"].reason == "RuntimeError: No available kernel; needs sm_120"
    assert [name for name, refusal in reasons.items() if not refusal.broken] == ["crashing_peer", "refusing"]
    assert "relative error" in reasons["wrong_peer"].reason
    assert len(outcome.broken()) == (3 if direction == "bwd" else 2)


def test_auto_is_refused_where_it_would_take_a_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plan:
        chosen = "torch_reference"
        fallback = "not a fused kernel"

    monkeypatch.setattr(flashdispatch, "explain", lambda *_, **__: Plan)
    with pytest.raises(Refused, match="not a fused kernel"):
        provider("auto").ready(SMOKE[0], make_inputs(SMOKE[0], CPU), False)


# ---------------------------------------------------------------- machine, memory, and the whole


def test_nvidia_smi_is_read_for_our_gpu() -> None:
    text = "GPU-aa-1, 580.1, 345, 90.12, 30\nGPU-bb-2, 580.1, 1980, 650.5, [N/A]\n"
    assert parse(text, "bb-2") == Reading("580.1", 1980.0, 650.5, None)
    assert parse(text, "") == Reading()
    assert parse(text.splitlines()[0], "") == Reading("580.1", 345.0, 90.12, 30.0)
    assert parse("No devices were found\n", "bb-2") == Reading()


def test_the_gpu_is_read_while_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Properties:
        uuid = "bb-2"

    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nsleep 0.3\necho 'GPU-bb-2, 580.1, 1755, 612.5, 61'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    work: list[int] = []
    assert reading(lambda: work.append(1)) == Reading("580.1", 1755.0, 612.5, 61.0)
    assert work
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert reading() == Reading()
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reading() == Reading()


def test_memory_is_what_a_pass_takes_beside_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    case, levels = SMOKE[0], iter([100, 100] * 2)
    given = make_inputs(case, CPU)
    own = {"out": given.q.nbytes, "gradients": 3 * given.q.nbytes}
    peaks = iter([100 + own["out"] + 7, 100 + own["gradients"] + 11] * 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(levels))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    assert extra_memory(provider("sdpa_default"), case, given) == {"fwd_memory": 7.0, "bwd_memory": 11.0}


def test_memory_that_grows_with_the_square_is_noticed() -> None:
    def grown(name: str, power: int) -> list[Row]:
        return [
            row(case=f"S{n}", provider=name, direction="bwd_memory", unit="bytes", value=64.0 * n**power)
            for n in LENGTHS
        ]

    found = faster_than_linear([*grown("linear", 1), *grown("square", 2), *grown("refusing", 2)[:3]])
    assert [text.split()[0] for text in found] == ["square"]


def test_the_whole_on_a_cpu(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """As a user runs it: the rows file, pytest-benchmark's JSON and the summary agree."""
    rows, report = tmp_path / "rows.jsonl", tmp_path / "report.json"
    command = [
        sys.executable, "-m", "pytest", "tests/benchmarks/test_speed.py", "-k", "fwd", "-p", "no:cacheprovider",
        "--benchmark-enable", "--benchmark-only", "--benchmark-quiet", f"--benchmark-json={report}",
        "--grid", "smoke", "--rounds", "2", "--providers", "torch_reference,sdpa_default,sdpa_cudnn",
        "--rows", str(rows), "--commit", "1234",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = read(rows)
    assert len(written) >= 5
    assert {one.commit for one in written} == {"1234"}
    benchmarks = json.loads(report.read_text())["benchmarks"]
    assert [Row.from_json(one) for each in benchmarks for one in each["extra_info"]["rows"]] == written
    assert f"{len(written)} rows added" in done.stdout
