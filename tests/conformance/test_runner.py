"""Units run in child processes: what one of them does to its process is its own outcome, and no other's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdispatch_conformance import catalogue, journal, runner
from flashdispatch_conformance.check import Check, Unit
from flashdispatch_conformance.journal import Journal
from flashdispatch_conformance.result import NotRun, Result
from flashdispatch_conformance.runner import RunnerError, Settings
from flashdispatch_conformance.tolerance import Failure, Stats
from flashdispatch_registry.errors import InvalidRequestError, UnknownBackendError

CPU = torch.device("cpu")

CHAOS = """
import ctypes, os, signal, time
import flashdispatch
from flashdispatch_backends import torch_reference
from flashdispatch_registry import BackendSpec

class Panic(BaseException):
    "No Exception, as a panic of Rust is none."

RAISED = {
    192: SystemExit(),
    45: Panic("index out of bounds\\nand more"),
    113: KeyboardInterrupt("by itself"),
    704: GeneratorExit("by itself"),
    101: flashdispatch.UnknownBackendError("of another library"),
}

class Chaos:
    def prepare(self, problem):
        pass

    def forward(self, problem, *tensors):
        if problem.seqlen_q == 137:
            print("the compiler gives up", flush=True)
            os._exit(7)
        if problem.seqlen_q == 63:
            ctypes.string_at(0)
        if problem.seqlen_q == 64:
            time.sleep(1000)
        if problem.seqlen_q == 65:
            raise ZeroDivisionError("an honest exception")
        if problem.seqlen_q in RAISED:
            raise RAISED[problem.seqlen_q]
        return torch_reference.forward(problem, *tensors)

    backward = staticmethod(torch_reference.backward)

backend = Chaos()
support = next(status.spec.support for status in flashdispatch.backends() if status.name == "torch_reference")
flashdispatch.register(BackendSpec(name="chaos", factory="chaos:backend", support=support))
"""

SEGFAULT, HANG, RAISE, LEAVE, EXIT, RIGHT = (
    f"named/{name}-bfloat16"
    for name in ("length_63", "length_64", "length_65", "length_192_d16", "length_137", "length_1")
)

RAISED = {
    RAISE: "ZeroDivisionError: an honest exception",
    LEAVE: "SystemExit",
    "named/cross_wide-bfloat16": "Panic: index out of bounds",
    "named/cross_tall-bfloat16": "KeyboardInterrupt: by itself",
    "named/length_704_minus_120-bfloat16": "GeneratorExit: by itself",
    "named/causal_tall-bfloat16": "UnknownBackendError: of another library",
}
"""What a backend raises -> the first line of what its unit says."""


def units(*ids: str) -> tuple[Unit, ...]:
    return tuple(map(catalogue.unit, ids))


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a run on the backend "chaos", which only children know."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "chaos.py").write_text(CHAOS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield Settings(backend="chaos", device=CPU, plugins=("chaos",), workers=2, timeout=10.0)


@pytest.fixture(scope="module")
def results(chaos: Settings) -> dict[str, Result]:
    """Of one run that has everything in it, and a unit that the catalogue has not."""
    everything = units(SEGFAULT, HANG, *RAISED, EXIT, RIGHT, "named/length_1-float16", "named/gqa_8_2-bfloat16")
    alone = replace(everything[-1].check, alone=True)
    return {result.id: result for result in runner.run([*everything, Unit(alone, torch.float16)], chaos)}


def test_a_cpu_gives_a_unit_more_time_than_a_gpu() -> None:
    assert runner.timeout_for(CPU) > runner.timeout_for(torch.device("cuda"))


def test_every_unit_has_one_result(results: dict[str, Result]) -> None:
    assert len(results) == 13


def test_units_beside_a_crash_pass(results: dict[str, Result]) -> None:
    for unit in (RIGHT, "named/length_1-float16", "named/gqa_8_2-bfloat16"):
        assert results[unit].outcome == "pass", results[unit].report()
        assert results[unit].stats["out"].numel > 0


def test_a_segfault_is_its_units_error_with_signal_stage_and_stack(results: dict[str, Result]) -> None:
    result = results[SEGFAULT]
    assert result.outcome == "error"
    assert "its process was ended by SIGSEGV while compiling or running" in result.report()
    assert "chaos.py" in result.report()


def test_an_exit_is_its_units_error_with_code_stage_and_what_it_said(results: dict[str, Result]) -> None:
    result = results[EXIT]
    assert result.outcome == "error"
    assert "its process exited with code 7 while compiling or running" in result.report()
    assert "the compiler gives up" in result.report()


def test_a_hang_is_ended_by_the_watchdog_and_says_where_it_hung(results: dict[str, Result]) -> None:
    result = results[HANG]
    assert result.outcome == "error"
    assert "no result within 10 s: its process was ended while compiling or running" in result.report()
    assert "chaos.py" in result.report()
    assert result.run_s == 10.0


@pytest.mark.parametrize(("unit", "said"), RAISED.items())
def test_whatever_is_raised_is_an_error_that_says_so_before_its_traceback(
    results: dict[str, Result], unit: str, said: str
) -> None:
    result = results[unit]
    assert (result.outcome, result.messages[0]) == ("error", said)
    assert result.messages[-1].startswith("Traceback")
    assert said in result.messages[-1]


def test_a_unit_that_asks_for_it_runs_after_all_others(results: dict[str, Result]) -> None:
    assert list(results)[-1] == "named/gqa_8_2-float16"
    assert results["named/gqa_8_2-float16"].outcome == "pass"


def test_a_unit_given_to_a_child_that_lost_its_device_is_tried_in_another(
    chaos: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from flashdispatch_conformance import worker\n"
        "import pathlib\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if not first.exists():\n"
        "    first.touch()\n"
        "    worker._lost = 'an illegal memory access'\n"
    )
    (tmp_path / "loses_its_device.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = replace(chaos, plugins=("chaos", "loses_its_device"), workers=1)
    (result,) = runner.run(units(RIGHT), settings)
    assert (tmp_path / "first").exists()
    assert result.outcome == "pass", result.report()


def test_children_that_do_not_know_the_backend_say_what_to_do(chaos: Settings) -> None:
    with pytest.raises(UnknownBackendError, match="--plugin"):
        list(runner.run(units(RIGHT), replace(chaos, plugins=(), workers=1)))


def test_children_that_can_not_start_end_the_run(chaos: Settings) -> None:
    with pytest.raises(RunnerError, match="before they have done anything"):
        list(runner.run(units(RIGHT), replace(chaos, plugins=("there_is_no_such_module",), workers=1)))


def test_closing_the_run_ends_its_children(chaos: Settings) -> None:
    import multiprocessing

    with closing(runner.run(units(RIGHT, HANG), replace(chaos, workers=1, timeout=1000.0))) as running:
        assert next(running).id == RIGHT
    assert multiprocessing.active_children() == []


def test_without_isolation_everything_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(target: object) -> Result:
        seen.append("here")
        raise ZeroDivisionError

    unit = Unit(Check(id="here/only", why="", run=run), torch.float32)
    settings = Settings(backend="torch_reference", device=CPU, isolated=False)
    (result,) = runner.run([unit], settings, watch=seen.extend)
    assert seen == ["here/only-float32", "here"]
    assert (result.outcome, result.messages[0]) == ("error", "ZeroDivisionError")


def test_without_isolation_the_operator_can_end_the_run() -> None:
    def run(target: object) -> Result:
        raise KeyboardInterrupt

    unit = Unit(Check(id="here/only", why="", run=run), torch.float32)
    with pytest.raises(KeyboardInterrupt):
        list(runner.run([unit], Settings(backend="torch_reference", device=CPU, isolated=False)))


def test_of_a_unit_with_many_cases_the_last_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "it.log"
    stack = "\n".join(f'  File "a.py", line {n}' for n in range(100))
    path.write_text(f"[stage] judging\n[case] replay 1\n[stage] running\n[case] replay 2\nsaid\n{stack}\n")
    log = runner._Log.read(path)
    assert log.stage == "running"
    said, case = log.tail
    assert case == "replay 2"
    assert said.splitlines()[-1] == '  File "a.py", line 99'
    assert len(said.splitlines()) == runner.LOG_TAIL
    assert runner._Log.read(tmp_path / "there is none") == runner._Log("", ())


# Choice and order


@pytest.mark.parametrize("count", [1, 3, 7])
def test_shards_part_the_units(count: int) -> None:
    whole = catalogue.units("full")
    parts = [runner.shard(whole, index, count) for index in range(1, count + 1)]
    assert sorted(unit.id for part in parts for unit in part) == sorted(unit.id for unit in whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("patterns", "ids"),
    [
        (["length_63"], ["named/length_63-float16", "named/length_63-bfloat16", "named/length_63-float32"]),
        (["named/length_6?-float16"], [f"named/length_{n}-float16" for n in (63, 64, 65)]),
        (["length_1-float16", "*/d128-float32"], ["named/length_1-float16", "named/d128-float32"]),
        (["nothing is called so"], []),
    ],
)
def test_a_pattern_is_a_part_of_an_id_or_a_glob(patterns: list[str], ids: list[str]) -> None:
    found = [unit.id for unit in runner.chosen(catalogue.units("full"), patterns)]
    assert sorted(found) == sorted(ids)


def test_each_kernel_comes_once_before_any_comes_twice() -> None:
    whole = catalogue.units("full")
    order = runner.compile_order(whole)
    assert sorted(unit.id for unit in order) == sorted(unit.id for unit in whole)
    kernels = [runner._kernel(unit) for unit in order]
    different = len(set(kernels))
    assert len(set(kernels[:different])) == different < len(whole)


# Journal


@pytest.fixture
def some() -> tuple[Result, ...]:
    stats = Stats(
        rms=0.5, max=2.0, numel=8, worst_index=(0, 1), histogram=(1, 2), failures=(Failure("max", "dq: max"),)
    )
    given: dict[str, Any] = {"backend": "mine", "dtype": "float16"}
    return (
        Result(check="named/a", outcome="fail", messages=("dq: max",), stats={"dq": stats}, compile_s=1.5, **given),
        Result(check="named/b", outcome="unsupported", refused={"lse": ("LSE", "DTYPE")}, **given),
        Result(check="named/c", outcome="not_run", not_run=NotRun.NO_MEMORY, messages=("no memory",), **given),
    )


def test_a_journal_gives_back_what_went_in(tmp_path: Path, some: tuple[Result, ...]) -> None:
    path = tmp_path / "new folder" / "it.jsonl"
    with Journal(path, {"seed": 3}, some[:1]) as log:
        log.add(some[1])
        log.add(some[2])
        assert journal.read(path) == ({"seed": 3}, some)


def test_a_line_that_was_being_written_does_not_count(tmp_path: Path, some: tuple[Result, ...]) -> None:
    path = tmp_path / "it.jsonl"
    with Journal(path, {"seed": 3}, some):
        pass
    path.write_text(path.read_text()[:-20])
    assert journal.read(path) == ({"seed": 3}, some[:2])


@pytest.mark.parametrize("text", ["", "[]\n", "{}"])
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"it\.jsonl"):
        journal.read(path)


def test_a_claimed_journal_says_how_far_its_run_is(tmp_path: Path, some: tuple[Result, ...]) -> None:
    path = tmp_path / "mine-cpu-full.journal.jsonl"
    with journal.claim(path), Journal(path, {"seed": 3}, some):
        with (
            pytest.raises(InvalidRequestError, match=r"run of mine-cpu-full is writing .* \(3 units so far\)"),
            journal.claim(path),
        ):
            pass
        with journal.claim(tmp_path / "mine-cpu-smoke.journal.jsonl"):
            pass
    with journal.claim(path):
        assert journal.read(path)[1] == some


def test_differences_say_what_has_changed() -> None:
    old = {"seed": 0, "backend": {"source_sha256": "a"}}
    assert journal.differences(old, {"seed": 0, "backend": {"source_sha256": "a"}}) == ()
    assert journal.differences(old, {"seed": 1, "backend": {"source_sha256": "a"}}) == ("seed was 0 and is 1",)
    (said,) = journal.differences(old, {"seed": 0, "backend": {"source_sha256": "b"}})
    assert said.startswith("backend was ")


@pytest.mark.gpu
def test_a_lost_device_costs_no_other_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = CHAOS.replace('"chaos', '"traps').replace(
        "ctypes.string_at(0)", "import torch; tensors[0].new_zeros(1)[torch.tensor([10**9], device='cuda')].sum()"
    )
    (tmp_path / "traps.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = Settings(backend="traps", device=torch.device("cuda", 0), plugins=("traps",), workers=1)
    bad, *good = runner.run(units(SEGFAULT, RIGHT, "named/gqa_8_2-bfloat16"), settings)
    assert bad.outcome == "error"
    assert "the device was lost to its process" in bad.report()
    assert [result.outcome for result in good] == ["pass", "pass"]
