"""What reports do to the choice: tested is read from them, and a failed one keeps automatic choice away."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import flashdispatch
from flashdispatch_registry import BackendSpec, Code, HeadDims, Problem, Support, verdicts
from flashdispatch_registry.plan import Candidate, Forced, Plan
from flashdispatch_registry.select import Entry, select
from flashdispatch_registry.source import source_hash, source_of
from flashdispatch_registry.tile_store import cache_dir
from flashdispatch_registry.verdicts import Verdict, matches, minor, parse, verdicts_of

# The choice, as a pure function


def verdict(**changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "backend": "fast",
        "arch": "sm_90",
        "source": "0" * 64,
        "languages": {},
        "tier": "full",
        "word": "conformant",
        "file": Path("reports/fast-sm_90-full.json"),
    }
    return Verdict(**(fields | changes))


def chosen_among(spec: Any, problem: Any, *said: Verdict, forced: str = "", **changes: Any) -> Plan:
    entries = [
        Entry(one.name, one, "outside", "1.0")
        for one in (spec("fast", priority={"*": 9}, **changes), spec("slow", priority={"*": 1}))
    ]
    who = Forced((forced,), "backend argument") if forced else None
    return select(problem(arch="sm_90"), entries, forced=who, verdicts=said)


def state(plan: Plan) -> str:
    return plan.candidate("fast").arch_state


def test_without_a_report_a_backend_is_untested(spec: Any, problem: Any) -> None:
    plan = chosen_among(spec, problem)
    assert (state(plan), plan.candidate("fast").report) == ("untested", "")
    assert "untested on sm_90: no conformance report covers it here" in plan.table()


@pytest.mark.parametrize("tier", ["full", "deep"])
def test_a_conformant_report_makes_it_tested_and_is_named(tier: str, spec: Any, problem: Any) -> None:
    plan = chosen_among(spec, problem, verdict(tier=tier))
    assert (plan.chosen, state(plan)) == ("fast", "tested")
    assert plan.candidate("slow").arch_state == "untested"
    assert "conformant on sm_90, by reports/fast-sm_90-full.json" in plan.table()
    assert plan.to_json()["candidates"][0]["report"] == "reports/fast-sm_90-full.json"


@pytest.mark.parametrize(
    "changes", [{"tier": "smoke"}, {"word": "partial"}, {"arch": "sm_80"}, {"backend": "other"}], ids=str
)
def test_less_or_something_else_does_not(changes: dict[str, Any], spec: Any, problem: Any) -> None:
    plan = chosen_among(spec, problem, verdict(**changes))
    assert (state(plan), plan.candidate("fast").report) == ("untested", "")


def test_a_failed_one_keeps_automatic_choice_away(spec: Any, problem: Any) -> None:
    plan = chosen_among(spec, problem, verdict(word="nonconformant"))
    assert plan.chosen == "slow"
    fast: Candidate = plan.candidate("fast")
    assert (fast.arch_state, [reason.code for reason in fast.reasons]) == ("nonconformant", [Code.NONCONFORMANT])
    assert "reports/fast-sm_90-full.json" in fast.reasons[0].got
    assert 'backend="fast"' in fast.reasons[0].fix


def test_of_any_tier(spec: Any, problem: Any) -> None:
    assert chosen_among(spec, problem, verdict(word="nonconformant", tier="smoke")).chosen == "slow"


def test_by_name_it_runs_and_the_plan_says_so(spec: Any, problem: Any) -> None:
    plan = chosen_among(spec, problem, verdict(word="nonconformant"), forced="fast")
    assert plan.chosen == "fast"
    assert plan.notes == ("fast is nonconformant on sm_90, by reports/fast-sm_90-full.json",)


def test_one_that_failed_counts_before_one_that_passed(spec: Any, problem: Any) -> None:
    said = (verdict(), verdict(word="nonconformant", file=Path("mine.json")))
    for order in (said, said[::-1]):
        plan = chosen_among(spec, problem, *order)
        assert (plan.chosen, plan.candidate("fast").report) == ("slow", "mine.json")


def test_portable_code_needs_no_report_and_is_the_floor_whatever_one_says(spec: Any, problem: Any) -> None:
    for word in ("conformant", "nonconformant"):
        plan = chosen_among(spec, problem, verdict(word=word), portable=True)
        assert (plan.chosen, state(plan)) == ("fast", "portable")
        assert f"{word} on sm_90" in plan.table()


def test_on_another_architecture_a_failed_one_says_nothing(spec: Any, problem: Any) -> None:
    assert chosen_among(spec, problem, verdict(word="nonconformant", arch="sm_80")).chosen == "fast"


def test_the_impossible_is_not_tested(spec: Any, problem: Any) -> None:
    assert state(chosen_among(spec, problem, verdict(), min_arch="sm_100")) == "impossible"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("3.6.1+cu130", "3.6"),
        ("3.10", "3.10"),
        ("4", "4.0"),
        ("0.1.15", "0.1.15"),
        ("0.2+x", "0.2.0"),
        ("not installed", "not installed"),
    ],
)
def test_minor_versions(number: str, text: str) -> None:
    assert minor(number) == text


def test_a_report_speaks_of_one_source_and_one_minor_version() -> None:
    said = verdict(languages={"triton": "3.6"})
    assert matches(said, "0" * 64, {"triton": "3.6"})
    assert not matches(said, "1" * 64, {"triton": "3.6"})
    assert not matches(said, "0" * 64, {"triton": "3.7"})
    assert not matches(said, "0" * 64, {})


# Files


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose import ends the test, and a backend registered for it."""
    folder = tmp_path / "site" / "heavy_kernels"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported to make a plan')\n")
    (folder / "launch.py").write_text("raise RuntimeError('imported to make a plan')\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    support = Support(dtypes=frozenset({torch.float32}), head_dims=HeadDims(), devices=frozenset({"cpu"}))
    flashdispatch.register(
        BackendSpec(
            name="heavy",
            factory="heavy_kernels.launch:backend",
            support=support,
            requires=("numpy>=1",),
            priority={"*": 1000},
        )
    )
    flashdispatch.reload_settings()
    yield folder
    flashdispatch.unregister("heavy")


def document(kernels: Path, **changes: str) -> dict[str, Any]:
    said = {"arch": "cpu", "tier": "full", "verdict": "conformant", "numpy": version("numpy")}
    said |= {"name": "heavy", "source": source_hash(kernels)} | changes
    return {
        "schema_version": "1.0.0",
        "suite": {"tier": said["tier"]},
        "device": {"arch": said["arch"]},
        "backend": {
            "name": said["name"],
            "source_sha256": said["source"],
            "languages": {"numpy": said["numpy"]},
        },
        "summary": {"verdict": said["verdict"], "reasons": ["Grüße"]},
    }


def sealed(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps(
        content | {"seal": {"algorithm": "sha256", "value": hashlib.sha256(canonical.encode()).hexdigest()}}
    )


def write(text: str, name: str = "heavy-cpu-full.json", folder: Path | None = None) -> Path:
    path = (folder or cache_dir() / "reports") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    flashdispatch.reload_settings()
    return path


def heavy(arch: str = "cpu") -> Candidate:
    problem = Problem(
        arch=arch, dtype=torch.float32, batch=1, heads_q=1, heads_kv=1, seqlen_q=8, seqlen_k=8,
        head_dim=8, head_dim_v=8, scale=1.0,
    )  # fmt: skip
    return flashdispatch.explain(problem).candidate("heavy")


def test_a_report_in_the_cache_folder_is_found_and_nothing_is_imported(kernels: Path) -> None:
    path = write(sealed(document(kernels)))
    assert (heavy().arch_state, heavy().report) == ("tested", str(path))
    assert "heavy_kernels" not in sys.modules


def test_so_is_one_that_the_suite_ships(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "shipped_suite"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported to make a plan')\n")
    monkeypatch.setattr(verdicts, "SUITE", "shipped_suite")
    path = write(sealed(document(kernels)), folder=package / "reports")
    assert heavy().report == str(path)


def test_without_the_suite_the_cache_folder_is_enough(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "SUITE", "no_such_suite")
    write(sealed(document(kernels)))
    assert heavy().arch_state == "tested"


@pytest.mark.parametrize("changes", [{"source": "0" * 64}, {"numpy": "1.0.0"}], ids=str)
def test_one_of_other_code_or_another_compiler_counts_neither_way(changes: dict[str, str], kernels: Path) -> None:
    write(sealed(document(kernels, **changes)))
    assert heavy().arch_state == "untested"
    write(sealed(document(kernels, verdict="nonconformant", **changes)))
    assert heavy().arch_state == "untested"


def test_a_patch_version_is_no_other_compiler(kernels: Path) -> None:
    write(sealed(document(kernels, numpy=f"{minor(version('numpy'))}.999")))
    assert heavy().arch_state == "tested"


def test_a_kernel_that_changed_is_untested_again(kernels: Path) -> None:
    write(sealed(document(kernels)))
    assert heavy().arch_state == "tested"
    (kernels / "launch.py").write_text("BLOCK = 128\n")
    flashdispatch.reload_settings()
    assert heavy().arch_state == "untested"


def test_a_failed_report_reaches_the_call(kernels: Path) -> None:
    write(sealed(document(kernels, verdict="nonconformant")))
    q = torch.zeros(1, 8, 1, 8)
    plan = flashdispatch.explain(q, q, q)
    assert plan.chosen != "heavy"
    assert [reason.code for reason in plan.candidate("heavy").reasons] == [Code.NONCONFORMANT]
    assert flashdispatch.explain(q, q, q, backend="heavy").chosen == "heavy"


def test_only_files_of_the_architecture_asked_about_are_read(kernels: Path, caplog: pytest.LogCaptureFixture) -> None:
    write("{", "heavy-sm_80-full.json")
    write(sealed(document(kernels, arch="sm_90")), "heavy-sm_90-full.json")
    assert heavy("sm_90").arch_state == "tested"
    assert heavy().arch_state == "untested"
    assert not caplog.records


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda text: text[:-5], "Unterminated string"),
        (lambda _: "[]", "does not have the form of one"),
        (lambda text: text.replace('"conformant"', '"nonconformant"'), "its seal is broken"),
        (lambda text: text.replace('"summary"', '"sumary"'), "its seal is broken"),
        (lambda _: "not JSON", "Expecting value"),
    ],
)
def test_a_file_that_can_not_be_read_is_named_and_the_plan_goes_on(
    break_it: Any, why: str, kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(break_it(sealed(document(kernels))))
    with caplog.at_level(logging.WARNING, "flashdispatch"):
        assert heavy().arch_state == "untested"
        assert heavy().arch_state == "untested"
    (record,) = caplog.records  # once, not with each plan
    assert str(path) in record.getMessage()
    assert why in record.getMessage()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "other"}, "it is about other on cpu, not what its name says"),
        ({"arch": "sm_90"}, "it is about heavy on sm_90"),
        ({"verdict": "splendid"}, "its verdict is 'splendid', none of conformant"),
    ],
)
def test_a_report_that_says_something_else_than_its_name_is_no_report(
    changes: dict[str, str], why: str, kernels: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        parse(sealed(document(kernels, **changes)), Path("any.json"), "heavy", "cpu")


def test_without_a_report_no_source_is_read(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> str:
        raise AssertionError("hashed for nothing")

    monkeypatch.setattr(verdicts, "source_hash", never)
    flashdispatch.reload_settings()
    assert heavy().arch_state == "untested"


def test_files_are_read_once(kernels: Path) -> None:
    path = write(sealed(document(kernels)))
    assert heavy().arch_state == "tested"
    path.unlink()
    assert heavy().arch_state == "tested"
    flashdispatch.reload_settings()
    assert heavy().arch_state == "untested"


def test_code_that_comes_from_no_file_is_never_tested(spec: Any, kernels: Path) -> None:
    write(sealed(document(kernels, name="builtin", source="")), "builtin-cpu-full.json")
    assert verdicts_of([spec("builtin", factory="sys:path")], "cpu") == ()


def test_a_plan_loads_neither_the_suite_nor_a_kernel_language() -> None:
    code = (
        "import sys, torch, flashdispatch\n"
        "q = torch.zeros(1, 8, 1, 8)\n"
        "flashdispatch.explain(q, q, q, arch='sm_90')\n"
        "print(*(name for name in ('flashdispatch_conformance', 'triton', 'filelock') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


# Where a backend's source is


def test_a_package_is_found_without_importing_what_is_around_it(kernels: Path) -> None:
    assert source_of("heavy_kernels.launch:backend") == kernels
    assert source_of("heavy_kernels") == kernels
    assert "heavy_kernels" not in sys.modules


@pytest.mark.parametrize("factory", ["no_such_module", "heavy_kernels.nothing", "heavy_kernels.launch.deeper", "sys"])
def test_what_comes_from_no_file_has_none(factory: str, kernels: Path) -> None:
    assert source_of(factory) is None


def test_a_module_that_is_loaded_is_asked_itself() -> None:
    assert source_of("json.decoder:JSONDecoder") == Path(json.__file__).parent


def test_folders_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("")
    before = source_hash(tmp_path)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "one.json").write_text("{}")
    assert source_hash(tmp_path) != before
    assert source_hash(tmp_path, without={"reports"}) == before
