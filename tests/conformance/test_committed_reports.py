"""The reports that the suite ships hold, and speak of the code beside them."""

from __future__ import annotations

from flashdispatch import backends
from flashdispatch_conformance import report
from flashdispatch_conformance.surroundings import PACKAGE
from flashdispatch_registry.source import source_hash, source_of

REPORTS = sorted((PACKAGE / "reports").glob("*.json"))


def test_there_is_nothing_else_in_their_folder() -> None:
    assert {path.name for path in (PACKAGE / "reports").iterdir()} == {"README.md", *(path.name for path in REPORTS)}


def test_each_holds_and_has_its_own_name() -> None:
    for path in REPORTS:
        document = report.read(path)
        assert path.name == report.file_name(document)
        assert report.verify(document) == [], path.name


def test_one_of_another_suite_version_says_that_its_list_is_not_checked() -> None:
    for path in REPORTS:
        document = report.read(path)
        others = [text for text in report.unchecked(document) if text.startswith("the case list:")]
        assert len(others) == (document["suite"]["version"] != report.SUITE_VERSION), path.name


def test_each_is_conformant_and_of_a_whole_tier() -> None:
    for path in REPORTS:
        summary = report.read(path)["summary"]
        assert (summary["verdict"], summary["counts"]["fail"], summary["counts"]["error"]) == ("conformant", 0, 0)


def test_each_is_of_the_source_that_is_here() -> None:
    """A kernel that was changed has to be run again before its report is one of it."""
    specs = {status.name: status.spec for status in backends()}
    for path in REPORTS:
        backend = report.read(path)["backend"]
        spec = specs[backend["name"]]
        assert spec is not None
        source = source_of(spec.factory)
        assert source is not None
        assert source_hash(source) == backend["source_sha256"], f"{path.name}: run the suite again"
