"""Every public report of the collection is kept from coming back, or the reason why not is said."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from flashdispatch_conformance import catalogue
from flashdispatch_conformance.bug_reports import BUG_REPORTS, BugReport
from flashdispatch_conformance.cases import BY_ID, PINNED

ROOT = Path(__file__).parents[2]

COLLECTED = (
    1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35, 37, 38, 40, 41, 43, 44,
    46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67, 68, 70, 71, 73, 74, 76, 77, 79, 80, 82, 83, 85, 86, 88,
    89, 91, 92, 94, 95, 97, 98, 100, 101, 103, 104, 106, 107, 109, 110, 112, 113, 115, 116, 118, 119, 121, 122, 124,
    125, 127, 128, 130, 131, 133, 134, 136, 137, 139, 140, 142, 143, 145,
)  # fmt: skip
"""The numbers of the collection. None may be dropped."""


def test_none_is_dropped() -> None:
    assert [report.id for report in BUG_REPORTS] == [f"B{number:02}" for number in COLLECTED]


def test_a_report_is_named_as_its_project_names_it() -> None:
    for report in BUG_REPORTS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report.report)
        assert 5 < len(report.said) < 100
    assert len({report.report for report in BUG_REPORTS}) == len(BUG_REPORTS)


@cache
def functions(path: str) -> set[str]:
    """The names of all functions in a file of this repository, those of classes too."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("report", BUG_REPORTS, ids=[report.id for report in BUG_REPORTS])
def test_what_states_a_report_exists(report: BugReport) -> None:
    assert set(report.cases) <= set(BY_ID)
    for check in report.checks:
        path, separator, name = check.partition("::")
        if separator:
            assert name.startswith("test_")
            assert name in functions(path), check
        else:
            assert check in catalogue.BY_ID, check


def test_every_pinned_case_belongs_to_a_report() -> None:
    assert {case.id for case in PINNED} <= {case for report in BUG_REPORTS for case in report.cases}


def test_what_nothing_states_is_what_the_api_has_not() -> None:
    assert {report.id for report in BUG_REPORTS if report.not_yet} == {"B23", "B61", "B95", "B97", "B121"}


@pytest.mark.parametrize("given", [{}, {"cases": ("named/d8",), "not_yet": "later"}])
def test_a_report_has_exactly_one_answer(given: dict[str, tuple[str, ...] | str]) -> None:
    with pytest.raises(ValueError, match="exactly one of cases, checks and not_yet"):
        BugReport("B00", "owner/project#1", "a test", **given)  # type: ignore[arg-type]
