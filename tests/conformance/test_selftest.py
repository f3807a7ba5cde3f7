"""Every mutant is flagged by its named gate, on units that the honest emulation passes: so the suite finds faults."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import flashdispatch
from flashdispatch_conformance.check import Unit
from flashdispatch_conformance.emulation import Emulation
from flashdispatch_conformance.mutants import MUTANTS, ONLY_ON_GPU, Mutant
from flashdispatch_conformance.mutants.masks import ScaleOffByOnePercent
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.selftest import HONEST, findings, run_selftest, units
from flashdispatch_conformance.selftest_report import SelftestReport, gate_of
from flashdispatch_conformance.tolerance import Failure, Stats

HONEST_ALONE = {"fa2_emulation": Emulation}


@pytest.fixture(scope="module")
def whole() -> SelftestReport:
    return run_selftest()


@pytest.mark.timeout(900)
def test_the_honest_emulation_is_conformant_and_no_mutant_survives(whole: SelftestReport) -> None:
    assert whole.ok, whole.table()
    assert len(whole.mutants) >= 30
    assert {each.outcome for each in whole.mutants} == {"killed"}
    assert {each.name: each.broken for each in whole.honest} == dict.fromkeys(HONEST, ())


def test_every_gate_kills_a_mutant_that_nothing_else_flags(whole: SelftestReport) -> None:
    alone = {count.gate for count in whole.gates() if count.alone}
    gates = {"finite", "exact", "rms", "row", "max", "bias"}
    assert alone >= gates | {"repeatable", "inputs written", "raises", "contract"}, whole.table()


def test_float32_is_held_to_float32(whole: SelftestReport) -> None:
    float32 = {each.mutant.name: list(each.flagged) for each in whole.mutants if each.mutant.name.startswith("float32")}
    assert len(float32) >= 5
    assert all(unit.endswith("-float32") for flagged in float32.values() for unit in flagged)


def test_the_report_names_every_mutant_and_goes_to_json(whole: SelftestReport) -> None:
    table, data = whole.table(), json.loads(json.dumps(whole.to_json()))
    for mutant in MUTANTS:
        assert mutant.name in table
    for missing in ONLY_ON_GPU:
        assert missing.reason in table
    assert data["ok"] is True
    assert [each["name"] for each in data["mutants"]] == [mutant.name for mutant in MUTANTS]
    assert {each["name"] for each in data["not_run"]} == {"default_stream_launch", "lse_baked_into_a_graph"}


def test_nothing_stays_registered(whole: SelftestReport) -> None:
    names = {status.name for status in flashdispatch.backends()}
    assert names.isdisjoint({*HONEST, *(f"mutant_{mutant.name}" for mutant in MUTANTS)})


def few(*ids: str) -> tuple[Unit, ...]:
    return tuple(unit for unit in units() if unit.id in ids)


SURVIVOR = Mutant(
    name="does_nothing_wrong",
    fault="none",
    backend=Emulation,
    finding="lse: max",
    first="named/length_63-bfloat16",
)


def test_a_survivor_is_a_failure() -> None:
    heard: list[tuple[int, int, str]] = []
    on = few("named/length_63-bfloat16", "named/cross_wide-float32")
    report = run_selftest(lambda *step: heard.append(step), mutants=[SURVIVOR], honest=HONEST_ALONE, on=on)
    assert not report.ok
    assert report.mutants[0].outcome == "survived"
    assert report.mutants[0].units == 2
    assert "does_nothing_wrong must be flagged by 'lse: max' but was by: nothing on 2 units" in report.table()
    assert heard == [(0, 2, "fa2_emulation"), (1, 2, "does_nothing_wrong"), (2, 2, "")]


def test_a_mutant_that_only_another_gate_flags_is_a_failure() -> None:
    misnamed = replace(SURVIVOR, backend=ScaleOffByOnePercent, finding="out: exact")
    report = run_selftest(mutants=[misnamed], honest=HONEST_ALONE, on=few("named/length_63-bfloat16"))
    assert not report.ok
    assert report.mutants[0].outcome == "by another gate"
    assert "lse: max" in report.mutants[0].found


def test_a_wrong_backend_is_not_honest() -> None:
    report = run_selftest(
        mutants=[replace(SURVIVOR, backend=ScaleOffByOnePercent)],
        honest={"fa2_emulation": ScaleOffByOnePercent},
        on=few("named/length_63-bfloat16"),
    )
    assert not report.ok
    assert report.mutants[0].outcome == "killed"
    assert "named/length_63 on fa2_emulation in bfloat16: fail" in report.table()


def test_a_self_test_of_nothing_is_not_ok() -> None:
    report = run_selftest(mutants=[], honest=HONEST_ALONE, on=few("named/length_1-bfloat16"))
    assert not report.ok


def test_a_first_unit_that_is_not_run_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"does_nothing_wrong .* named/length_63-bfloat16"):
        run_selftest(mutants=[SURVIVOR], on=few("named/length_1-bfloat16"))


def test_mutants_have_names_and_faults_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.name.isidentifier() and mutant.name.islower() for mutant in MUTANTS)
    assert {mutant.first for mutant in MUTANTS} <= {unit.id for unit in units()}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"outcome": "pass"}, set()),
        ({"outcome": "not_run", "messages": ("no memory",)}, set()),
        ({"outcome": "error", "messages": ("Traceback",)}, {"raises"}),
        ({"messages": ("out is not bitwise repeatable",)}, {"repeatable"}),
        ({"messages": ("out is another one when the LSE is returned too",)}, {"repeatable"}),
        ({"messages": ("inputs were written to: k",)}, {"inputs written"}),
        ({"messages": ("lse of the lse call has strides (1, 2, 3), expected (3, 2, 1)",)}, {"form"}),
        ({"messages": ("the core took the out call's scale for 2.0, expected 1.0",)}, {"problem"}),
        ({"messages": ("out is not declared (CAUSAL) but the call ran",)}, {"refusal"}),
        ({"messages": ("backend fake returned lse (1, 2, 63) torch.bfloat16; the contract wants",)}, {"contract"}),
        ({"messages": ("row 3 counts 65 keys, not 64",)}, {"probe/counting"}),
        (
            {
                "messages": ("dq: max of z is 9 [gradients call]", "inputs were written to: k"),
                "stats": {"dq (gradients)": Stats(failures=(Failure("max", "dq: max of z is 9"),)), "out": Stats()},
            },
            {"dq: max", "inputs written"},
        ),
    ],
)
def test_findings(result: dict[str, object], expected: set[str]) -> None:
    fields: dict[str, object] = {"check": "probe/counting", "backend": "fake", "dtype": "bfloat16", "outcome": "fail"}
    assert findings(Result(**(fields | result))) == expected  # type: ignore[arg-type]  # a test's own keywords


def test_the_gate_of_a_finding() -> None:
    assert [gate_of(finding) for finding in ("lse: max", "repeatable", "probe/counting")] == [
        "max", "repeatable", "probe/counting",
    ]  # fmt: skip


def test_it_runs_in_one_thread_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    run_selftest(mutants=[], honest={}, on=())
    assert torch.get_num_threads() == before
