"""A report as pages: the same facts in both forms, and nothing of it read as markup."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from flashdispatch_conformance import report
from flashdispatch_conformance.pages import duration, html, markdown, page_of, replay_line
from flashdispatch_conformance.result import NotRun
from flashdispatch_conformance.summary import DTYPES
from flashdispatch_conformance.tolerance import Stats
from flashdispatch_conformance.verdict import NOT_RUN_WORDS

Document = dict[str, Any]
VOID = {"meta", "line", "rect", "br"}


class Outline(HTMLParser):
    """Checks that tags are closed in their order, and keeps names, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def good(reported: Any) -> Document:
    return report.make(reported.run("full"), reported.all_passed("full"))


@pytest.fixture
def bad(reported: Any) -> Document:
    results = reported.all_passed()
    loud = Stats(rms=2.0, row=5.0, max=9.5, bias=0.0, numel=8192, rows=128)
    results[0] = reported.failed(results[0], "out: max of z is 9.5, allowed 8", stats={"out": loud})
    results[1] = reported.failed(
        results[1], 'Traceback (most recent call last):\n  ...\nRuntimeError: <b>`|`</b> "sticky"', outcome="error"
    )
    results[2] = replace(results[2], outcome="unsupported", stats={}, refused={"out": ("WINDOW",), "lse": ("LSE",)})
    results[3] = replace(results[3], outcome="not_run", stats={}, not_run=NotRun.NO_CUDA, messages=("no GPU",))
    return report.make(reported.run(seed=5), results)


def test_the_page_is_one_well_formed_document_that_needs_nothing_else(bad: Document, good: Document) -> None:
    for document in (bad, good):
        found = Outline(html(document))
        assert found.open == []
        names = {tag for tag, _ in found.tags}
        assert not names & {"script", "link", "iframe", "img", "object"}
        assert not [attributes for _, attributes in found.tags if {"src", "href"} & set(attributes)]
        assert "url(" not in html(document)
        assert "prefers-color-scheme: dark" in html(document)


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (["flashdispatch", "conformance", "run", "--plugin", "a.b", "--plugin=c"], " --plugin a.b --plugin c"),
        (["pytest", "--fd-plugin", "a.b"], " --plugin a.b"),
        (["flashdispatch", "conformance", "run"], ""),
    ],
)
def test_a_replay_line_names_the_plugins_and_the_cpu(bad: Document, command: list[str], more: str) -> None:
    document = bad | {"run": bad["run"] | {"command": command}}
    entry = next(entry for entry in document["cases"] if entry["outcome"] == "fail")
    said = f"flashdispatch conformance replay '{entry['id']}' --backend declared_only{more} --device cpu --seed 5"
    assert replay_line(entry, document) == said


@pytest.mark.parametrize("form", [markdown, html])
def test_failing_units_are_there_with_what_they_said_and_their_replay_line(form: Any, bad: Document) -> None:
    text = form(bad) if form is markdown else Outline(html(bad)).text
    for entry in bad["cases"][:2]:
        assert f"flashdispatch conformance replay '{entry['id']}' --backend declared_only --device cpu --seed 5" in text
        for message in entry["messages"]:
            assert message in text
    assert f"replay '{bad['cases'][4]['id']}'" not in text


@pytest.mark.parametrize("form", [markdown, html])
def test_verdict_reasons_and_what_was_not_run_are_there_in_words(form: Any, bad: Document) -> None:
    text = form(bad) if form is markdown else Outline(html(bad)).text
    assert "nonconformant" in text
    for reason in bad["summary"]["reasons"]:
        assert reason in text.replace("\\_", "_")
    assert f"1 unit (NO_CUDA): {NOT_RUN_WORDS[NotRun.NO_CUDA]}." in text
    assert "WINDOW" in text
    assert bad["seal"]["value"] in text
    assert bad["backend"]["source_sha256"] in text


@pytest.mark.parametrize("form", [markdown, html])
def test_when_nothing_failed_it_says_so(form: Any, good: Document) -> None:
    text = form(good)
    assert "Nothing." in text
    assert "Everything of the tier was run." in text
    assert "replay" not in text


def test_the_heat_map_has_a_cell_for_each_feature_and_dtype(bad: Document) -> None:
    page = page_of(bad)
    text = html(bad)
    assert page.dtypes == tuple(dtype for dtype in DTYPES if any(one["dtype"] == dtype for one in bad["cases"]))
    cells = [cell for _, row in page.heat for cell in row if cell is not None]
    assert len(cells) == len(bad["capability_matrix"])
    assert sum(attributes.get("class", "") == "o-fail" for tag, attributes in Outline(text).tags if tag == "td") == sum(
        cell.outcome == "fail" for cell in cells
    )
    for feature, _ in page.heat:
        assert f'<th scope="row">{feature}</th>' in text


def test_no_outcome_is_told_by_colour_alone(bad: Document) -> None:
    for _, row in page_of(bad).heat:
        for cell in row:
            assert cell is None or cell.mark


def test_the_worst_scores_are_measured_against_their_gates(bad: Document) -> None:
    loud = (bad["cases"][0]["dtype"], "out")
    first = next(one for one in page_of(bad).worst if (one.dtype, one.tensor) == loud)
    assert [score.text for score in first.scores] == ["2.00", "5.00", "9.50", "-0.01"]
    assert [score.share for score in first.scores] == [1.0, 1.0, 1.0, pytest.approx(0.04)]
    assert first.unit == bad["cases"][0]["id"]


def test_there_is_a_histogram_for_each_dtype_and_tensor(good: Document) -> None:
    found = Outline(html(good))
    assert sum(tag == "svg" for tag, _ in found.tags) == len(good["z_histograms"])
    assert sum(tag == "rect" for tag, _ in found.tags) == 2 * len(good["z_histograms"])  # the bins that have any


def test_what_lies_beyond_four_sigma_is_said(good: Document) -> None:
    good["z_histograms"] = [{"dtype": "float16", "tensor": "out", "counts": [1] + [0] * 15 + [198] + [0] * 16 + [1]}]
    (histogram,) = page_of(good).histograms
    assert (histogram.total, histogram.beyond) == ("200 elements", "0.01 of them beyond 4")
    assert histogram.bars[16] == 1.0


def test_what_a_backend_says_is_no_markup(bad: Document) -> None:
    bad["cases"][0]["messages"] = ["</pre><script>alert(1)</script>", "```\n# a heading"]
    bad["device"]["name"] = "a|b <i>_c_</i>"
    text = html(bad)
    assert Outline(text).open == []
    assert "<script>" not in text
    assert "<i>_c_" not in text
    written = markdown(bad)
    assert "````text\n" in written
    assert r"a\|b \<i\>\_c\_\</i\>" in written


def test_a_quote_in_an_id_stays_inside_the_argument(reported: Any) -> None:
    odd = reported.failed(reported.passed("fuzz/it's", "float16"))
    text = markdown(report.make(reported.run(), [*reported.all_passed(), odd]))
    assert """replay 'fuzz/it'"'"'s-float16' --backend declared_only --device cpu\n""" in text


def test_waived_units_are_apart_from_failing_ones(reported: Any) -> None:
    from flashdispatch_conformance.waivers import Waiver

    results = reported.all_passed()
    results[0] = reported.failed(results[0], "known to be wrong")
    data = {
        "id": "w", "cases": [results[0].check], "backend": "declared_only", "versions": "", "archs": [],
        "url": "https://example.org/7", "reason": "r", "expires": "2027-01-01", "owner": "us",
    }  # fmt: skip
    page = page_of(report.make(reported.run(), results, waivers=(Waiver.of(data, "it"),)))
    assert page.failing == ()
    assert [unit.first for unit in page.waived] == ["known to be wrong"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.96, "10.0 s"), (12.4, "12 s"), (185.0, "3 min 5 s"), (59.9, "1 min 0 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
