"""Waivers: strictly read, and never longer than their reasons."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from flashdispatch_conformance.result import NotRun, Result
from flashdispatch_conformance.waivers import Waiver, apply, read
from flashdispatch_registry.errors import InvalidRequestError

GOOD = """
[[waiver]]
id = "nan"
cases = ["named/length_704_*"]
backend = "mine"
versions = "<2.1"
archs = ["sm_90"]
url = "https://example.org/issues/7"
reason = "dQ is NaN when every score is near -120"
expires = 2027-03-31
owner = "kernel team"
"""

TODAY = date(2026, 11, 30)


def waiver(**changes: Any) -> Waiver:
    fields: dict[str, Any] = {
        "id": "nan",
        "cases": ("named/length_*",),
        "backend": "mine",
        "versions": "",
        "archs": (),
        "url": "https://example.org/issues/7",
        "reason": "NaN",
        "expires": date(2027, 3, 31),
        "owner": "kernel team",
    }
    return Waiver(**(fields | changes))


def result(check: str = "named/length_65", outcome: Any = "fail", **changes: Any) -> Result:
    return Result(check=check, backend="mine", dtype="float16", outcome=outcome, **changes)


def applied(results: list[Result], *waivers: Waiver, **changes: Any) -> tuple[list[str], tuple[str, ...]]:
    fields: dict[str, Any] = {"backend": "mine", "version": "2.0", "arch": "sm_90", "today": TODAY}
    found, faults = apply(results, waivers, **(fields | changes))
    return [one.outcome for one in found], faults


def write(folder: Path, text: str) -> Path:
    path = folder / "waivers.toml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    (found,) = read(write(tmp_path, GOOD))
    assert found == waiver(
        cases=("named/length_704_*",),
        versions="<2.1",
        archs=("sm_90",),
        reason="dQ is NaN when every score is near -120",
    )
    assert Waiver.of(found.to_json(), "the same") == found


def test_an_empty_file_has_none(tmp_path: Path) -> None:
    assert read(write(tmp_path, "# none so far\n")) == ()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('owner = "kernel team"\n', "", "waiver 'nan' lacks owner"),
        ("owner", "onwer", "waiver 'nan' lacks owner"),
        ('id = "nan"', 'id = "nan"\nnote = "x"', "has the unknown note"),
        ('id = "nan"', "id = 5", "id: a text, got 5"),
        ('reason = "dQ is NaN when every score is near -120"', 'reason = " "', "reason: a text, got ' '"),
        ('["named/length_704_*"]', "[]", "cases: name at least one"),
        ('["named/length_704_*"]', '"named/*"', r"cases: a list of texts, got 'named/\*'"),
        ('["sm_90"]', "[90]", r"archs: a list of texts, got \[90\]"),
        ('"<2.1"', '"before 2.1"', 'versions: a specifier such as "<2.1" or "", got \'before 2.1\''),
        ('"<2.1"', "2.1", "versions: a specifier"),
        ("2027-03-31", '"next spring"', "expires: a day such as 2027-03-31, got 'next spring'"),
        ("https://", "see ", "url: a link to the report"),
        ("[[waiver]]", "[waiver]", r"must hold \[\[waiver\]\] tables"),
        ("[[waiver]]", "[[waivers]]", r"must hold \[\[waiver\]\] tables and nothing else, got waivers"),
        ('id = "nan"', 'id = "nan', "is no TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(InvalidRequestError, match=said):
        read(write(tmp_path, GOOD.replace(old, new)))


def test_ids_are_unique(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="the ids nan are there twice"):
        read(write(tmp_path, GOOD + GOOD))


# Applied


@pytest.mark.parametrize("outcome", ["fail", "error"])
def test_what_fails_is_waived(outcome: str) -> None:
    (found,), faults = apply(
        [result(outcome=outcome, messages=("NaN",))], [waiver()], backend="mine", version="", arch="cpu", today=TODAY
    )
    assert (found.outcome, found.waiver, found.messages, faults) == ("waived", "nan", ("NaN",), ())


def test_what_passes_is_an_unexpected_pass() -> None:
    (found,), faults = apply([result(outcome="pass")], [waiver()], backend="mine", version="", arch="cpu", today=TODAY)
    assert (found.outcome, found.waiver, faults) == ("unexpected_pass", "nan", ())
    assert found.messages == (
        "the waiver nan says that it fails (https://example.org/issues/7), and it passes: take the waiver out",
    )


def test_what_was_refused_or_not_run_stays() -> None:
    results = [
        result(outcome="unsupported", refused={"out": ("GQA",)}),
        result("named/length_1", "not_run", not_run=NotRun.NO_CUDA),
    ]
    assert applied(results, waiver()) == (["unsupported", "not_run"], ())


@pytest.mark.parametrize(
    ("glob", "outcomes"),
    [
        ("named/length_65", ["waived", "fail"]),
        ("named/length_65-float16", ["waived", "fail"]),
        ("named/*-float16", ["waived", "waived"]),
        ("named/d?", ["fail", "waived"]),
    ],
)
def test_a_glob_is_on_a_units_or_a_checks_id(glob: str, outcomes: list[str]) -> None:
    assert applied([result(), result("named/d8")], waiver(cases=(glob,))) == (outcomes, ())


@pytest.mark.parametrize("scope", [{"backend": "other"}, {"versions": "<2.0"}, {"archs": ("sm_80", "cpu")}])
def test_outside_its_scope_it_says_nothing_and_is_not_idle(scope: dict[str, Any]) -> None:
    assert applied([result()], waiver(**scope, cases=("no/such",))) == (["fail"], ())


def test_a_version_that_nobody_knows_is_in_no_bound_from_below() -> None:
    assert applied([result()], waiver(versions=">=1"), version="") == (["fail"], ())


def test_on_its_last_day_it_holds_and_then_it_is_a_fault() -> None:
    assert applied([result()], waiver(expires=TODAY)) == (["waived"], ())
    outcomes, faults = applied([result()], waiver(expires=date(2026, 11, 29)))
    assert outcomes == ["fail"]
    assert faults == ("the waiver nan expired on 2026-11-29: fix https://example.org/issues/7, or renew it",)


def test_one_that_matches_nothing_is_a_fault() -> None:
    outcomes, faults = applied([result()], waiver(cases=("named/length_65", "named/lenght_1")))
    assert outcomes == ["waived"]
    assert faults == ("the waiver nan matches no check: named/lenght_1",)


def test_one_whose_check_the_run_did_not_plan_is_none() -> None:
    known = ["named/softcap-float16"]
    assert applied([result()], waiver(cases=("named/softcap",)), known=known) == (["fail"], ())
