"""A plan for people: everything that was decided is on the page, in text, rich and HTML, at any width."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from flashdispatch_registry import BackendSpec, Code, HeadDims, Problem, Reason
from flashdispatch_registry.plan import Adapter, Forced, Plan
from flashdispatch_registry.render import human_bytes, plan_html, plan_text, plan_view
from flashdispatch_registry.select import Entry, select

NASTY = "<script>alert('[red]&\"')</script>"

MakeProblem = Callable[..., Problem]
MakeSpec = Callable[..., BackendSpec]


@pytest.fixture
def entries(spec: MakeSpec) -> list[Entry]:
    missing = Reason(Code.DEP_MISSING, "fastlang", "not installed", "fastlang>=3", "pip install 'vendor[fastlang]'")
    broken = Reason(Code.LOAD_FAILED, "plugin", NASTY, "a plugin that imports", "see `flashdispatch doctor`")
    floor = spec("floor", portable=True, fused=False, memory="quadratic", priority={"*": -100})
    fast = spec("fast", head_dims=HeadDims(16, 128, 16), priority={"*": 10})
    return [
        Entry("floor", floor, "flashdispatch", "0.1.0"),
        Entry("fast", fast, "vendor", "3.2", (missing,)),
        Entry("steady", spec("steady"), "vendor", "3.2"),
        Entry("broken", None, "acme", "2.0", (broken,)),
    ]


@pytest.fixture
def plan(problem: MakeProblem, entries: list[Entry]) -> Plan:
    asked = problem(arch="sm_90", head_dim=20, head_dim_v=20)
    adapters = (Adapter("copy", "k", 12 << 20, "stride 2 in the last dim"), Adapter("cast", "v", 900, "autocast"))
    return select(asked, entries, adapters=adapters, notes=("the first note", "the second note"))


def words(text: str) -> str:
    """Text without its line breaks, so that wrapping does not matter."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_text_says_everything_at_every_width(plan: Plan, width: int) -> None:
    text = plan_text(plan, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    for reason in (reason for candidate in plan.candidates for reason in candidate.reasons):
        for part in (reason.code, *reason.got.split(), *reason.allowed.split(), *reason.fix.split()):
            # A long word may be folded over two lines.
            assert part in text or part in "".join(text.split()), part
    for said in ("B2 Hq4 Hkv4", "steady, automatically by static priority", "12.0 MiB", "900 bytes", "the second note"):
        assert said in words(text)


def test_candidates_stand_in_the_plans_order_with_their_verdicts(plan: Plan) -> None:
    lines = plan_text(plan, 200).splitlines()
    rows = [line for name in ("steady", "floor", "fast", "broken") for line in lines if line.startswith(f"{name} ")]
    assert [" ".join(row.split()[:3]) for row in rows] == [
        "steady chosen untested",
        "floor can run",
        "fast can't run",
        "broken can't run",
    ]
    assert rows == sorted(rows, key=lines.index)


def test_text_of_a_chosen_untested_backend_warns(plan: Plan) -> None:
    assert "untested on sm_90" in plan.table()


def test_fallback_is_shown(problem: MakeProblem, entries: list[Entry]) -> None:
    assert "fallback  floor needs O(S^2) memory" in select(problem(arch="sm_90"), entries[:1]).table()


@pytest.mark.parametrize("render", [plan_text, plan_html])
def test_forced_plan_names_who_forced_it_and_who_lost(
    problem: MakeProblem, entries: list[Entry], render: Callable[[Plan], str]
) -> None:
    forced = Forced(("fast",), "backend argument", (("FLASHDISPATCH_BACKEND", "floor"),))
    text = words(render(select(problem(), entries, forced=forced)))
    assert "none: fast can" in text
    assert "fast by backend argument" in text
    assert "floor by FLASHDISPATCH_BACKEND" in text


@pytest.mark.parametrize("render", [plan_text, plan_html])
def test_plan_without_candidates_says_what_to_type(problem: MakeProblem, render: Callable[[Plan], str]) -> None:
    text = render(select(problem(), []))
    assert "none: no backend can run this" in text
    assert "pip install -e ." in text


def test_texts_from_plugins_are_never_markup(plan: Plan) -> None:
    console = Console(file=StringIO(), width=200, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(plan)
    assert "pip install 'vendor[fastlang]'" in capture.get()
    assert "'[red]&\"'" in "".join(capture.get().split())


class Page(HTMLParser):
    """Collects tags and text, and fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        del attrs
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_html_escapes_closes_its_tags_and_brings_its_styles(plan: Plan) -> None:
    html = plan._repr_html_()
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    assert set(page.tags) <= {"div", "span", "b", "br", "table", "thead", "tbody", "tr", "th", "td"}
    assert NASTY in page.text
    assert "pip install 'vendor[fastlang]'" in page.text
    assert "class=" not in html


def test_html_takes_its_text_and_background_from_the_page(plan: Plan) -> None:
    html = plan_html(plan)
    assert "color: inherit" in html
    backgrounds = {part.split(";")[0].split('"')[0].strip() for part in html.split("background:")[1:]}
    assert backgrounds == {"transparent"}


def test_text_and_html_say_the_same(plan: Plan) -> None:
    page = Page()
    page.feed(plan_html(plan))
    text = "".join(plan_text(plan, 400).split())
    for said in page.text.splitlines():
        assert "".join(said.split()) in text, said


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (12 << 20, "12.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_view_is_what_a_console_prints_for_a_plan(plan: Plan) -> None:
    console = Console(file=StringIO(), width=120, color_system=None)
    with console.capture() as by_plan:
        console.print(plan)
    with console.capture() as by_view:
        console.print(plan_view(plan))
    assert by_plan.get() == by_view.get()


def test_the_registry_loads_rich_only_when_somebody_looks() -> None:
    code = (
        "import sys, flashdispatch_registry.plan, flashdispatch_registry.plugins;"
        "sys.exit(any(name in sys.modules for name in ('rich', 'typer')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
