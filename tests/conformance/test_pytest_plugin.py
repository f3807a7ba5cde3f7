"""The suite as tests of pytest: each outcome is pytest's own, and the report is written at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# In this process before pytester runs pytest in it: what a run imports first, it takes with it when it ends.
from flashdispatch_conformance import pages as pages
from flashdispatch_conformance import pytest_items
from flashdispatch_conformance.journal import result_to_json
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.tolerance import Stats
from flashdispatch_conformance.verify import verify

pytest_plugins = ["pytester"]

CONFTEST = """
from dataclasses import replace
import flashdispatch
from flashdispatch_backends import torch_reference
from flashdispatch_registry import BackendSpec

class Right:
    forward = staticmethod(torch_reference.forward)
    backward = staticmethod(torch_reference.backward)
    def prepare(self, problem):
        pass

class Mutant(Right):
    def forward(self, problem, *tensors):
        return torch_reference.forward(replace(problem, scale=problem.scale * 1.01), *tensors)

class Raising(Right):
    def forward(self, problem, *tensors):
        raise ZeroDivisionError("by design")

backend = {kind}()
support = next(status.spec.support for status in flashdispatch.backends() if status.name == "torch_reference")
"""

REGISTER = """
def register():
    flashdispatch.register(BackendSpec(name="mine", factory="mine:backend", support=replace(support, {support})))
register()
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the suite's plugin in this process on a backend "mine" of one of the kinds above."""
    monkeypatch.syspath_prepend(str(pytester.path))
    pytester.makeini("[pytest]")

    def run(kind: str, *args: str, support: str = "", isolated: bool = False) -> pytest.RunResult:
        pytester.makepyfile(mine=CONFTEST.replace("{kind}", kind) + REGISTER.replace("{support}", support))
        where = ["--pyargs", "flashdispatch_conformance", "-c", str(pytester.path / "tox.ini"), "--fd-device", "cpu"]
        where += ["-p", "no:unraisableexception"]  # it collects garbage for seconds
        how = [] if isolated else ["--fd-in-process"]
        try:
            return pytester.runpytest(*where, *how, "--fd-backend", "mine", "--fd-plugin", "mine", *args)
        finally:
            sys.modules.pop("mine", None)
            import flashdispatch

            if any(status.name == "mine" for status in flashdispatch.backends()):
                flashdispatch.unregister("mine")

    return run


def test_a_right_backend_passes_and_its_report_is_written(run: Run, pytester: pytest.Pytester) -> None:
    ran = run("Right", "-k", "length_1-bfloat16 or d128-bfloat16", "--fd-report", "here")
    ran.assert_outcomes(passed=2, deselected=ran.parseoutcomes()["deselected"])
    ran.stdout.fnmatch_lines(["*conformance of mine: partial*", "*here/mine-cpu-smoke-selected.html"])
    document = json.loads((pytester.path / "here" / "mine-cpu-smoke-selected.json").read_text())
    assert verify(document) == []
    assert document["summary"]["counts"]["pass"] == 2
    assert document["summary"]["not_run"] == {"FILTERED": ran.parseoutcomes()["deselected"]}
    units = {entry["id"]: entry for entry in document["cases"]}
    assert units["named/d128-bfloat16"]["tensors"]["dq"]["rms"] > 0


def test_an_item_is_called_what_its_unit_is_called(run: Run) -> None:
    ran = run("Right", "--collect-only", "-q", "--fd-tier", "full", "-k", "length_63")
    ran.stdout.fnmatch_lines([f"*::named/length_63-{dtype}" for dtype in ("float16", "bfloat16", "float32")])


def test_a_mutant_fails_with_its_numbers(run: Run) -> None:
    ran = run("Mutant", "-k", "length_65-bfloat16")
    assert ran.parseoutcomes()["failed"] == 1
    ran.stdout.fnmatch_lines(["*named/length_65 on mine in bfloat16: fail", "*lse: *"])
    ran.stdout.no_fnmatch_line("*runtest*")
    assert ran.ret == 1


def test_an_error_fails(run: Run) -> None:
    ran = run("Raising", "-k", "length_65-bfloat16")
    assert ran.parseoutcomes()["failed"] == 1
    ran.stdout.fnmatch_lines(["*named/length_65 on mine in bfloat16: error", "*ZeroDivisionError: by design*"])


def test_what_is_not_declared_is_skipped_with_its_reason(run: Run) -> None:
    ran = run("Right", "-k", "gqa_8_2-bfloat16", "-rs", support="gqa=False")
    assert ran.parseoutcomes()["skipped"] == 1
    ran.stdout.fnmatch_lines(["*named/gqa_8_2 on mine in bfloat16: unsupported*"])
    assert ran.ret == 0


WAIVER = """
[[waiver]]
id = "known"
cases = ["named/length_65*"]
backend = "mine"
versions = ""
archs = []
url = "https://example.org/1"
reason = "one percent off"
expires = 2999-01-01
owner = "kernel team"
"""


@pytest.mark.parametrize(("kind", "outcome"), [("Mutant", "xfailed"), ("Right", "failed")])
def test_a_waived_failure_is_xfailed_and_an_unexpected_pass_fails(
    run: Run, pytester: pytest.Pytester, kind: str, outcome: str
) -> None:
    (pytester.path / "waivers.toml").write_text(WAIVER)
    ran = run(kind, "-k", "length_65-bfloat16", "--fd-waivers", "waivers.toml", "--fd-report", "here")
    assert ran.parseoutcomes()[outcome] == 1
    counts = json.loads((pytester.path / "here" / "mine-cpu-smoke-selected.json").read_text())["summary"]["counts"]
    assert counts["waived" if outcome == "xfailed" else "unexpected_pass"] == 1


def test_a_unit_runs_in_a_child_process(run: Run) -> None:
    ran = run("Right", "-k", "length_1-bfloat16 or gqa_8_2-bfloat16", isolated=True)
    assert ran.parseoutcomes()["passed"] == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--fd-backend", "nobodys"), "*no backend is called 'nobodys'*"),
        (("--fd-device", "cuda:99"), "*there is no cuda:99 here*"),
        (("--fd-plugin", "there_is_no_such_module"), "*--plugin there_is_no_such_module can't be imported*"),
        (("--fd-waivers", "there_is_no_such_file"), "*No such file*"),
    ],
)
def test_what_can_not_be_done_is_said_before_anything_runs(run: Run, args: tuple[str, ...], said: str) -> None:
    ran = run("Right", *args)
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines([said])


def test_without_a_backend_nothing_is_loaded_and_nothing_is_collected(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import sys\n"
        "def test_one():\n"
        "    assert 'flashdispatch_conformance.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'flashdispatch', 'flashdispatch_conformance.catalogue'} & set(sys.modules)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    args = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_one.py"]
    ran = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path, env=os.environ, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


def test_a_result_survives_the_way_from_a_worker_of_xdist() -> None:
    stats = {"out": Stats(rms=0.25, numel=8, worst_index=(0, 1))}
    result = Result(check="named/a", backend="mine", dtype="float16", outcome="pass", stats=stats)
    properties = [(pytest_items.PROPERTY, json.dumps(result_to_json(result)))]
    made = pytest.TestReport("a", ("a", None, "a"), {}, "passed", None, "call", user_properties=properties)
    sent = json.dumps(made._to_json())  # what pytest-xdist sends
    suite = object.__new__(pytest_items.Conformance)
    suite.results = {}
    suite.pytest_runtest_logreport(pytest.TestReport._from_json(json.loads(sent)))
    assert suite.results == {"named/a-float16": result}
