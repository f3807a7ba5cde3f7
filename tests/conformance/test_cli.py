"""``flashdispatch conformance``: what each command answers, and with which exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import flashdispatch
from flashdispatch.cli import app
from flashdispatch_conformance import catalogue, extra, journal, runner, surroundings
from flashdispatch_conformance import selftest as selftesting
from flashdispatch_conformance.check import BF16, Tier, Unit
from flashdispatch_conformance.cli import listing, replay, reports, run, selftest
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.verdict import MINIMUM
from flashdispatch_conformance.verify import verify

EXAMPLES = {
    "run": run.EXAMPLES,
    "replay": replay.EXAMPLES,
    "list": listing.LIST_EXAMPLES,
    "explain": listing.EXPLAIN_EXAMPLES,
    "selftest": selftest.EXAMPLES,
    "report": reports.REPORT_EXAMPLES,
    "verify": reports.VERIFY_EXAMPLES,
    "diff": reports.DIFF_EXAMPLES,
    "merge": reports.MERGE_EXAMPLES,
}

MINE = """
from dataclasses import replace
import flashdispatch
from flashdispatch_backends import torch_reference
from flashdispatch_registry import BackendSpec

class Mine:
    backward = staticmethod(torch_reference.backward)
    def prepare(self, problem):
        pass
    def forward(self, problem, *tensors):
        return torch_reference.forward(replace(problem, scale=problem.scale * {factor}), *tensors)

backend = Mine()
support = next(status.spec.support for status in flashdispatch.backends() if status.name == "torch_reference")
flashdispatch.register(BackendSpec(name="mine", factory="mine:backend", support=support, requires={requires}))
"""

UNIT = "named/length_65-bfloat16"


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return " ".join(self.out.split())


Command = Callable[..., Ran]
AddMine = Callable[..., None]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs ``flashdispatch conformance ARGS`` in an empty folder, wide enough that no id is broken."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str, width: int = 150) -> Ran:
        ran = CliRunner().invoke(app, ["conformance", *args], env={"COLUMNS": str(width)})
        if ran.exception is not None and not isinstance(ran.exception, SystemExit):
            raise ran.exception
        return Ran(ran.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", ran.stdout), re.sub(r"\x1b\[[0-9;]*m", "", ran.stderr))

    return run


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddMine]:
    """Writes the module "mine", which registers a backend of that name; right unless `factor` is another."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(factor: float = 1.0, requires: tuple[str, ...] = ()) -> None:
        (tmp_path / "mine.py").write_text(MINE.format(factor=factor, requires=requires))

    yield write
    sys.modules.pop("mine", None)
    if any(status.name == "mine" for status in flashdispatch.backends()):
        flashdispatch.unregister("mine")


HERE = ("--backend", "torch_reference", "--device", "cpu", "--in-process")


def document(folder: str = "conformance-report", name: str = "torch_reference-cpu-smoke-selected") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, f"{name}.json").read_text())
    assert verify(found) == []
    return found


def test_importing_the_command_line_and_the_runner_loads_nothing_that_only_a_part_of_it_needs() -> None:
    heavy = ("pytest", "hypothesis", "jsonschema", "jinja2", "matplotlib", "pebble")
    parts = ("cli", "cli.summary_view", "session", "runner", "worker", "replay", "environment", "pytest_plugin")
    modules = ", ".join(f"flashdispatch_conformance.{part}" for part in parts)
    code = f"import sys, {modules}; sys.exit(' '.join(set(sys.modules) & set({heavy!r})) or 0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


# Help


def test_help_names_every_command(command: Command) -> None:
    ran = command("--help")
    assert ran.code == 0
    assert all(name in ran.out for name in EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("width", [80, 120])
def test_help_of_each_command_has_its_examples_and_fits(command: Command, name: str, width: int) -> None:
    ran = command(name, "--help", width=width)
    assert ran.code == 0
    assert f"flashdispatch conformance {name}" in ran.out.split("Examples")[1]
    assert max(map(len, ran.out.splitlines())) <= width


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_fit_into_80_columns_so_that_they_can_be_copied(name: str) -> None:
    assert max(len(re.sub(r"\[/?\w*\]", "", line)) for line in EXAMPLES[name].splitlines()) <= 78


# run


def test_a_run_writes_its_report_in_three_forms_and_says_where(command: Command) -> None:
    ran = command("run", *HERE, "--tier", "smoke", "-k", "length_1-")
    assert ran.code == 4
    assert "verdict partial" in ran.words
    for suffix in ("json", "md", "html"):
        path = Path("conformance-report", f"torch_reference-cpu-smoke-selected.{suffix}")
        assert path.stat().st_size > 1000
        assert str(path) in ran.out
    found = document()
    assert found["summary"]["counts"]["pass"] == 1
    assert found["run"]["match"] == "length_1-"
    assert "an option of the run left them out" in ran.words


def test_json_is_one_document_on_stdout_and_nothing_else(command: Command) -> None:
    ran = command("run", *HERE, "--tier", "smoke", "-k", "length_1-", "--json")
    assert json.loads(ran.out) == document()


@pytest.fixture
def only_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full tier that has no more than a verdict needs, of a suite that nobody has changed."""

    def units(tier: Tier) -> tuple[Unit, ...]:
        return tuple(Unit(catalogue.BY_ID[check], BF16) for check in MINIMUM)

    monkeypatch.setattr(catalogue, "units", units)
    monkeypatch.setattr(surroundings, "suite_modified", lambda: False)


@pytest.mark.usefixtures("only_the_minimum")
def test_a_conformant_backend_exits_with_0(command: Command) -> None:
    ran = command("run", *HERE)
    assert ran.code == 0, ran.out
    assert "verdict conformant" in ran.words


@pytest.mark.usefixtures("only_the_minimum")
def test_of_several_backends_the_worst_verdict_is_the_exit_code(command: Command, mine: AddMine) -> None:
    mine(factor=1.01)
    ran = command("run", *HERE[2:], "--backend", "torch_reference,mine", "--plugin", "mine", "--json")
    assert ran.code == 1
    verdicts = {found["backend"]["name"]: found["summary"]["verdict"] for found in json.loads(ran.out)}
    assert verdicts == {"torch_reference": "conformant", "mine": "nonconformant"}


def test_a_failure_exits_with_1_and_says_how_to_see_it_again(command: Command, mine: AddMine) -> None:
    mine(factor=1.01)
    where = ("--backend", "mine", "--plugin", "mine", "--device", "cpu")
    ran = command("run", *where, "--in-process", "--tier", "smoke", "-k", UNIT)
    assert ran.code == 1
    assert f"fail: {UNIT}: " in ran.err
    assert re.search(rf"flashdispatch conformance replay '?{UNIT}'? --backend mine", ran.out)
    again = command("replay", UNIT, *where)
    assert again.code == 1
    assert "lse: " in again.out


def test_what_a_machine_without_a_gpu_can_not_run_is_named(command: Command) -> None:
    ran = command("run", *HERE, "--tier", "full", "-k", "condition/stream", "-k", "condition/graph")
    found = document(name="torch_reference-cpu-full-selected")
    count = found["summary"]["not_run"]["NO_CUDA"]
    assert count > 0
    assert f"{count} units (condition/" in ran.words
    assert "they need a CUDA GPU, and this machine has none" in ran.words


def test_a_plugin_is_known_to_the_child_processes(command: Command, mine: AddMine) -> None:
    mine()
    where = ("--backend", "mine", "--plugin", "mine", "--device", "cpu", "--workers", "1")
    assert command("run", *where, "--tier", "smoke", "-k", UNIT).code == 4
    assert document(name="mine-cpu-smoke-selected")["summary"]["counts"]["pass"] == 1


def test_the_dtypes_of_a_run_can_be_chosen(command: Command) -> None:
    command("run", *HERE, "--tier", "full", "-k", "named/length_1-", "--dtype", "float16", "--dtype", "bfloat16")
    passed = [
        unit["id"] for unit in document(name="torch_reference-cpu-full-selected")["cases"] if unit["outcome"] == "pass"
    ]
    assert passed == ["named/length_1-float16", "named/length_1-bfloat16"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--backend", "torch_referenze"), "Did you mean 'torch_reference'?"),
        (("--shard", "3/2"), "I from 1 to N"),
        (("--shard", "half"), "such as 2/4"),
        (("--dtype", "bfloat61"), "Did you mean 'bfloat16'?"),
        (("-k", "nothing is called so"), "no unit"),
        (("--tier", "huge"), "huge"),
        (("--device", "gpu0"), "'gpu0' is no device"),
        (("--waivers", "there_is_none.toml"), "can't be read"),
    ],
)
def test_what_is_not_understood_exits_with_2(command: Command, args: tuple[str, ...], said: str) -> None:
    ran = command("run", *HERE, *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())
    assert not Path("conformance-report").exists()


def test_a_folder_that_can_not_be_written_is_said_before_anything_runs(command: Command, tmp_path: Path) -> None:
    taken = tmp_path / "a_file"
    taken.write_text("mine", encoding="utf-8")
    ran = command("run", "--backend", "torch_reference", "--device", "cpu", "-k", UNIT, "-o", str(taken))
    assert ran.code == 2
    assert "can't write reports in" in " ".join((ran.out + ran.err).split())
    assert taken.read_text(encoding="utf-8") == "mine"


def test_what_is_not_here_exits_with_3_and_the_reasons(command: Command, mine: AddMine) -> None:
    mine(requires=("a-distribution-that-nobody-has>=1",))
    ran = command("run", "--backend", "mine", "--plugin", "mine")
    assert (ran.code, ran.out) == (3, "")
    assert "a-distribution-that-nobody-has" in ran.err
    ran = command("run", "--backend", "torch_reference", "--device", "cuda:99")
    assert (ran.code, ran.out) == (3, "")
    assert "there is no cuda:99 here" in ran.err
    ran = command("run", "--backend", "torch_reference", "--plugin", "there_is_no_such_module")
    assert ran.code == 3
    assert "--plugin there_is_no_such_module can't be imported: ModuleNotFoundError" in ran.err


def test_all_leaves_out_what_can_not_be_tested_and_says_so(command: Command, mine: AddMine) -> None:
    mine(requires=("a-distribution-that-nobody-has>=1",))
    ran = command("run", *HERE[2:], "--backend", "all", "--plugin", "mine", "--tier", "smoke", "-k", UNIT, "--json")
    assert "left out: mine can't be tested here" in ran.err
    assert "torch_reference" in {found["backend"]["name"] for found in json.loads(ran.out)}


@pytest.mark.parametrize("missing", ["pebble", "jinja2"])
def test_a_missing_package_is_said_before_anything_runs(
    command: Command, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda module: None if module == missing else object())
    ran = command("run", "--backend", "torch_reference", "--device", "cpu", "--tier", "smoke", "-k", UNIT)
    assert ran.code == 3
    assert f"needs {missing}" in ran.err
    assert "pip install 'flashdispatch[conformance]'" in ran.err


def test_fuzzing_reports_what_it_finds_with_a_line_that_runs_it_again(command: Command, mine: AddMine) -> None:
    mine(factor=2.0)
    where = ("--backend", "mine", "--plugin", "mine", "--device", "cpu")
    ran = command("run", *where, "--in-process", "--tier", "smoke", "-k", UNIT, "--fuzz-minutes", "0.2")
    assert ran.code == 1
    found = document(name="mine-cpu-smoke-selected")
    assert found["run"]["fuzz"] == {"minutes": 0.2, "rounds": 1, "found": 1}
    (extra,) = [entry for entry in found["cases"] if entry.get("extra")]
    assert (extra["id"], extra["outcome"]) == ("fuzz/0-float16", "fail")
    (line,) = re.findall(r"flashdispatch conformance replay --backend mine '(\{.*\})'", ran.out)
    again = command("replay", line, *where)
    assert again.code == 1
    assert "fuzz/case on mine in float16: fail" in again.out


# Interrupted, resumed, in shards


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Lets the first run end after two units, as Ctrl-C does; a list of what each run was given."""
    given: list[list[str]] = []
    whole = runner.run

    def run(units: Sequence[Unit], *args: Any) -> Iterator[Result]:
        given.append([unit.id for unit in units])
        for done, result in enumerate(whole(units, *args), 1):
            yield result
            if len(given) == 1 and done == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", run)
    return given


def options(*patterns: str) -> tuple[str, ...]:
    return tuple(word for pattern in patterns for word in ("-k", pattern))


FOUR = ("--tier", "smoke", *options(*(f"named/{n}-bfloat16" for n in ("length_1", "length_65", "d128", "gqa_8_2"))))


def test_a_resumed_run_runs_only_what_is_missing(command: Command, interrupted: list[list[str]]) -> None:
    ran = command("run", *HERE, *FOUR)
    assert ran.code == 130
    assert "--resume" in ran.err
    assert document()["summary"]["not_run"]["INTERRUPTED"] == 2
    first = {unit["id"]: unit for unit in document()["cases"] if unit["outcome"] == "pass"}

    ran = command("run", *HERE, *FOUR, "--resume")
    assert ran.code == 4
    assert "resumed: 2 of 4 units" in ran.err
    assert sorted(interrupted[0]) == sorted([*first, *interrupted[1]])
    second = {unit["id"]: unit for unit in document()["cases"] if unit["outcome"] == "pass"}
    assert len(second) == 4
    assert {unit: second[unit] for unit in first} == first
    assert list(Path("conformance-report").glob("*.jsonl")) == []


def test_another_run_is_not_resumed_and_says_why(command: Command, interrupted: list[list[str]]) -> None:
    command("run", *HERE, *FOUR)
    ran = command("run", *HERE, *FOUR, "--seed", "1", "--resume")
    assert "starting anew" in ran.err
    assert "seed was 0 and is 1" in ran.err
    assert len(interrupted[1]) == 4


def test_without_a_journal_everything_is_run(command: Command) -> None:
    ran = command("run", *HERE, "--tier", "smoke", "-k", UNIT, "--resume")
    assert ran.code == 4
    assert "nothing to resume" in ran.err


@pytest.mark.usefixtures("only_the_minimum")
@pytest.mark.parametrize("options", [("-k", MINIMUM[0]), ("--dtype", "bfloat16")])
def test_a_run_of_a_selection_leaves_report_pages_and_journal_of_a_whole_run_alone(
    command: Command, interrupted: list[list[str]], options: tuple[str, ...]
) -> None:
    assert command("run", *HERE).code == 130
    whole = {path: path.read_bytes() for path in Path("conformance-report").iterdir()}
    assert {path.suffix for path in whole} >= {".json", ".md", ".html", ".jsonl"}
    command("run", *HERE, *options)
    assert {path: path.read_bytes() for path in whole} == whole
    assert document(name="torch_reference-cpu-full-selected")["summary"]["counts"]["pass"] == len(interrupted[1])
    assert f"resumed: 2 of {len(MINIMUM)} units" in command("run", *HERE, "--resume").err


def test_a_second_run_into_the_same_files_is_refused_and_says_what_to_do(command: Command) -> None:
    args = ("run", *HERE, "--tier", "smoke", "-k", UNIT)
    with journal.claim(Path("conformance-report", "torch_reference-cpu-smoke-selected.journal.jsonl")):
        ran = command(*args)
        assert (ran.code, ran.out) == (2, "")
        assert "another run of torch_reference-cpu-smoke-selected is writing into conformance-report" in ran.err
        assert "-o OTHER" in ran.err
        assert command(*args, "-o", "other").code == 4
    assert command(*args).code == 4


def test_a_report_that_can_not_be_written_leaves_the_journal(
    command: Command, interrupted: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    args = ("run", *HERE, "--tier", "smoke", "-k", UNIT)
    with monkeypatch.context() as patch:
        patch.setattr(run, "write", full)
        with pytest.raises(OSError, match="no space left"):
            command(*args)
    assert "resumed: 1 of 1 units" in command(*args, "--resume").err
    assert sum(map(len, interrupted)) == 1


def test_shards_merge_to_the_whole(command: Command) -> None:
    for part in ("1/2", "2/2"):
        assert command("run", *HERE, *FOUR, "--shard", part, "-o", "shards").code == 4
    parts = sorted(map(str, Path("shards").glob("*.json")))
    assert len(parts) == 2
    ran = command("merge", *parts, "-o", "whole", "--json")
    assert ran.code == 4
    merged = document("whole")
    assert json.loads(ran.out) == merged
    assert merged["summary"]["counts"]["pass"] == 4
    assert "INTERRUPTED" not in merged["summary"]["not_run"]


# Reports


@pytest.fixture
def report(command: Command) -> Path:
    command("run", *HERE, "--tier", "smoke", "-k", UNIT, "-o", "here")
    return Path("here", "torch_reference-cpu-smoke-selected.json")


def test_a_report_is_verified_shown_and_compared(command: Command, report: Path) -> None:
    good = command("verify", str(report))
    assert good.code == 0
    assert f"{report}: holds: partial" in good.out
    assert "verdict partial" in command("report", str(report)).words
    assert command("report", str(report), "--md").out == report.with_suffix(".md").read_text()
    assert command("report", str(report), "--html", "-o", "page.html").out == ""
    assert Path("page.html").read_text() == report.with_suffix(".html").read_text()
    assert json.loads(command("report", str(report), "--json").out)["verdict"] == "partial"
    assert command("diff", str(report), str(report)).code == 0


def test_a_changed_report_is_found_out(command: Command, report: Path) -> None:
    changed = report.with_name("changed.json")
    changed.write_text(report.read_text().replace('"partial"', '"conformant"'))
    assert changed.read_text() != report.read_text()
    ran = command("verify", str(report), str(changed), "--json")
    assert ran.code == 1
    good, bad = json.loads(ran.out)
    assert (good["verdict"], good["findings"]) == ("partial", [])
    assert bad["verdict"] is None
    assert "seal" in {finding["where"] for finding in bad["findings"]}
    assert command("diff", str(report), str(changed)).code == 1


def test_what_is_no_report_is_refused(command: Command) -> None:
    Path("it.json").write_text('{"schema_version": "1.0.0"}')
    ran = command("diff", "it.json", "it.json")
    assert (ran.code, ran.out) == (2, "")
    assert "it.json has not the form of a report" in ran.err
    assert command("report", "there_is_none.json").code == 2


# list, explain, replay, selftest


def test_list_names_the_units_of_a_tier(command: Command) -> None:
    whole = json.loads(command("list", "--tier", "smoke", "--json").out)
    assert [unit for check in whole for unit in check["units"]] == [unit.id for unit in catalogue.units("smoke")]
    assert all(check["why"] for check in whole)
    ran = command("list", "-k", "named/length_6?-*")
    assert "named/length_63 f16, bf16, f32" in ran.words
    assert "3 checks, 9 units" in ran.out


def test_explain_says_what_a_check_is_and_what_a_backend_declares_of_it(command: Command) -> None:
    ran = command("explain", "named/gqa_8_2", "--backend", "torch_reference", "--device", "cpu")
    assert ran.code == 0
    assert catalogue.BY_ID["named/gqa_8_2"].why in ran.words
    assert "heads = [8, 2]" in ran.out
    assert "bfloat16: gradients declared; out declared; lse declared" in ran.words
    assert "rms <= 1.5" in ran.words
    answer = json.loads(command("explain", "named/gqa_8_2-float16", "--backend", "torch_reference", "--json").out)
    assert [declared["dtype"] for declared in answer["declared"]] == ["float16"]
    assert answer["case"]["heads"] == [8, 2]


@pytest.mark.parametrize("check", [check.id for check in catalogue.CHECKS if not check.id.startswith("named/")][::25])
def test_explain_knows_every_kind_of_check(command: Command, check: str) -> None:
    ran = command("explain", check)
    assert ran.code == 0
    assert check in ran.out


@pytest.mark.parametrize("args", [("explain", "named/lenght_65"), ("replay", "named/lenght_65", "--backend", "mine")])
def test_an_unknown_id_says_the_nearest(command: Command, args: tuple[str, ...]) -> None:
    ran = command(*args)
    assert (ran.code, ran.out) == (2, "")
    assert "Did you mean 'named/length_65'?" in ran.err


def test_replay_runs_a_unit_or_a_line_of_json_and_can_keep_its_tensors(command: Command) -> None:
    ran = command("replay", UNIT, *HERE[:4], "--dump", "it.pt")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("named/length_65 on torch_reference in bfloat16: pass\n")
    kept = torch.load("it.pt")
    assert set(kept) >= {"q", "k", "v", "dout", "out", "out: truth", "dq", "lse", "lse: truth"}
    assert kept["out"].dtype == torch.bfloat16
    assert (kept["out"].double() - kept["out: truth"]).abs().max() < 0.05
    case = {"id": "mine/one", "why": "to see", "seqlens": [3, 5], "causal": True}
    line = json.dumps({"case": case, "dtype": "float16", "seed": 7})
    assert "mine/one on torch_reference in float16: pass" in command("replay", line, *HERE[:4]).out
    Path("it.json").write_text(line)
    assert json.loads(command("replay", "it.json", *HERE[:4], "--json").out)["outcome"] == "pass"


@pytest.mark.parametrize(
    ("what", "said"),
    [("named/length_65", "add one of its dtypes"), ('{"case": 3}', "can't be replayed"), ("{", "not JSON")],
)
def test_what_can_not_be_replayed_says_why(command: Command, what: str, said: str) -> None:
    ran = command("replay", what, *HERE[:4])
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


class Selftest(NamedTuple):
    ok: bool

    def table(self) -> str:
        return "a table"

    def to_json(self) -> dict[str, bool]:
        return {"ok": self.ok}


@pytest.mark.parametrize("ok", [True, False])
def test_the_selftest_exits_with_1_when_a_fault_survives(
    command: Command, monkeypatch: pytest.MonkeyPatch, ok: bool
) -> None:
    monkeypatch.setattr(selftesting, "run_selftest", lambda _: Selftest(ok))
    assert command("selftest") == (int(not ok), "a table\n", "")
    assert json.loads(command("selftest", "--json").out) == {"ok": ok}
