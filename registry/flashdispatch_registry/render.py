"""A plan for people: rich for terminals, plain text for logs, HTML for notebooks.

All three show the same words in the same order. Names, reasons and fixes come from plugins, so none of them is ever
read as markup: a fix like ``pip install 'x[triton]'`` keeps its brackets, and HTML is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Literal, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flashdispatch_registry.plan import Adapter, ArchState, Candidate, Plan
from flashdispatch_registry.reasons import Reason
from flashdispatch_registry.versions import versions_line

T = TypeVar("T")
Tone = Literal["good", "bad", "warn", "quiet", "plain"]
"""How a text is coloured. A tone never says what the words do not say too."""

STYLES: dict[Tone, str] = {"good": "bold green", "bad": "red", "warn": "yellow", "quiet": "dim", "plain": ""}

WIDE = 110
"""From this many columns on, reasons have room beside the facts of their backend; else they follow the table."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A labelled line; an empty label continues the line above."""

    label: str
    text: str
    tone: Tone = "plain"


def plan_view(plan: Plan) -> RenderableType:
    """The plan as a rich renderable."""
    return Group(facts_view(list(_head(plan))), _Candidates(plan), facts_view(list(_tail(plan))))


def plan_text(plan: Plan, width: int = 120) -> str:
    """The plan as plain text, at most `width` columns wide."""
    return plain(plan_view(plan), width)


def plan_html(plan: Plan) -> str:
    """The plan as one HTML element with its styles inside, readable on light and dark pages."""
    head = "".join(map(_html_fact, _head(plan)))
    names = "".join(f'<th style="{_TH}">{name}</th>' for name in (*COLUMNS, "reasons"))
    rows = "".join(_html_row(plan, candidate) for candidate in plan.candidates)
    tail = "".join(map(_html_fact, _tail(plan)))
    table = f'<table style="{_TABLE}"><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>' if rows else ""
    return f'<div style="{_DIV}">{head}{table}{tail}</div>'


def plain(view: RenderableType, width: int) -> str:
    """Any rich renderable as text: no colours, no trailing blanks."""
    console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(view)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def facts_view(facts: Sequence[Fact]) -> Table:
    """Facts under each other, texts aligned."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    for fact in facts:
        grid.add_row(Text(fact.label), Text(fact.text, STYLES[fact.tone]))
    return grid


def reasons_view(reasons: Sequence[Reason]) -> Group:
    """Each reason on its own line (code, what was asked, what is taken), and under it what would help."""
    lines: list[RenderableType] = []
    for reason in reasons:
        lines.append(Text.assemble((reason.code, STYLES["bad"]), f" {obstacle(reason)}"))
        if reason.fix:
            lines.append(Padding(Text.assemble(("fix: ", "bold"), reason.fix), (0, 0, 0, 2), expand=False))
    return Group(*lines)


def obstacle(reason: Reason) -> str:
    """What was asked and what is taken, without the code."""
    return f"{reason.field} is {reason.got}; takes {reason.allowed}"


def human_bytes(count: int) -> str:
    """``"12.0 MiB"``; plain bytes below 1 KiB."""
    if count < 1024:
        return f"{count} bytes"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def _head(plan: Plan) -> Iterator[Fact]:
    yield Fact("asked", plan.problem.describe())
    forced = plan.forced
    if plan.chosen is None:
        who = f"{', '.join(forced.names)} can't run this" if forced else "no backend can run this"
        yield Fact("chosen", f"none: {who}", "bad")
    elif forced is None:
        yield Fact("chosen", f"{plan.chosen}, automatically by {plan.ranking}", "good")
    else:
        yield Fact("chosen", plan.chosen, "good")
    if forced is not None:
        yield Fact("forced", f"{', '.join(forced.names)} by {forced.source}; nothing else is tried")
        for source, value in forced.overridden:
            yield Fact("over", f"{value} by {source}", "warn")
    if plan.chosen is not None:
        yield from _tested(plan.candidate(plan.chosen), plan.problem.arch)
    if not plan.candidates:
        yield Fact("", "no backend is registered; a plain clone needs `pip install -e .`", "bad")


def _tested(chosen: Candidate, arch: str) -> Iterator[Fact]:
    """What conformance reports say of the chosen backend."""
    if chosen.arch_state == "untested":
        yield Fact("", f"untested on {arch}: no conformance report covers it here", "warn")
    elif chosen.arch_state == "tested" or (chosen.arch_state == "portable" and chosen.report):
        yield Fact("", f"conformant on {arch}, by {chosen.report}")


def _tail(plan: Plan) -> Iterator[Fact]:
    for label, adapter in _labelled("adapters", plan.adapters):
        yield Fact(label, _cost(adapter), "warn")
    if plan.fallback:
        yield Fact("fallback", plan.fallback, "warn")
    for label, note in _labelled("notes", plan.notes):
        yield Fact(label, note)
    yield Fact("versions", versions_line(), "quiet")


def _labelled(label: str, items: Sequence[T]) -> Iterator[tuple[str, T]]:
    return ((label if at == 0 else "", item) for at, item in enumerate(items))


def _cost(adapter: Adapter) -> str:
    return f"{adapter.name} {adapter.tensor}: {human_bytes(adapter.bytes)} ({adapter.why})"


_STATE_TONES: dict[ArchState, Tone] = {"untested": "warn", "nonconformant": "bad"}

COLUMNS = ("backend", "verdict", "arch", "priority", "memory", "fused")


def _cells(plan: Plan, candidate: Candidate) -> tuple[tuple[str, Tone], ...]:
    """One text and tone for each of COLUMNS, after the backend's name."""
    known = candidate.arch_state != "unknown"
    return (
        _verdict(plan, candidate),
        (candidate.arch_state if known else "–", _STATE_TONES.get(candidate.arch_state, "plain")),
        (str(candidate.priority) if known else "–", "plain"),
        (candidate.memory or "–", "warn" if candidate.memory == "quadratic" else "plain"),
        ({True: "yes", False: "no", None: "–"}[candidate.fused], "warn" if candidate.fused is False else "plain"),
    )


def _verdict(plan: Plan, candidate: Candidate) -> tuple[str, Tone]:
    if candidate.name == plan.chosen:
        return "chosen", "good"
    return ("can run", "plain") if candidate.can_run else ("can't run", "bad")


def _owner(candidate: Candidate) -> str:
    return f"{candidate.distribution} {candidate.version}".rstrip()


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The table of a plan's candidates, in the plan's order."""

    plan: Plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan = self.plan
        yield Text()
        if not plan.candidates:
            return
        wide = options.max_width >= WIDE and any(candidate.reasons for candidate in plan.candidates)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        for column in COLUMNS:
            table.add_column(column, no_wrap=column != "backend", justify="right" if column == "priority" else "left")
        if wide:
            table.add_column("reasons", ratio=1, overflow="fold")
        for candidate in plan.candidates:
            name = Text.assemble((candidate.name, "bold"), "\n", (_owner(candidate), STYLES["quiet"]))
            cells: list[RenderableType] = [Text(text, STYLES[tone]) for text, tone in _cells(plan, candidate)]
            table.add_row(name, *cells, *([reasons_view(candidate.reasons)] if wide else []))
        yield table
        yield Text()
        for candidate in () if wide else plan.candidates:
            if candidate.reasons:
                yield Text.assemble((candidate.name, "bold"), " can't run this:")
                yield Padding(reasons_view(candidate.reasons), (0, 0, 1, 2), expand=False)


# Mid-tone colours and half-transparent lines: both are readable on white and on black, text keeps the page's colour.
_COLOURS: dict[Tone, str] = {"good": "#2f9e44", "bad": "#e03131", "warn": "#c77d00", "quiet": "#868e96", "plain": ""}
_DIV = "font-family: sans-serif; font-size: 13px; line-height: 1.45; color: inherit; max-width: 80em"
_TABLE = "border-collapse: collapse; margin: 0.6em 0; color: inherit; background: transparent"
_LINE = "1px solid rgba(128, 128, 128, 0.4)"
_TH = f"text-align: left; padding: 2px 10px 2px 0; border-bottom: {_LINE}; background: transparent"
_TD = f"text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: {_LINE}; background: transparent"
_LABEL = f"display: inline-block; min-width: 5.5em; color: {_COLOURS['quiet']}"


def _html_text(text: str, tone: Tone) -> str:
    colour = _COLOURS[tone]
    return f'<span style="color: {colour}">{escape(text)}</span>' if colour else escape(text)


def _html_fact(fact: Fact) -> str:
    return f'<div><span style="{_LABEL}">{escape(fact.label)}</span>{_html_text(fact.text, fact.tone)}</div>'


def _html_row(plan: Plan, candidate: Candidate) -> str:
    name = f"<b>{escape(candidate.name)}</b><br>{_html_text(_owner(candidate), 'quiet')}"
    reasons = "".join(map(_html_reason, candidate.reasons))
    cells = (name, *(_html_text(text, tone) for text, tone in _cells(plan, candidate)), reasons)
    return "<tr>" + "".join(f'<td style="{_TD}">{cell}</td>' for cell in cells) + "</tr>"


def _html_reason(reason: Reason) -> str:
    fix = f"<div><b>fix:</b> {escape(reason.fix)}</div>" if reason.fix else ""
    return f"<div>{_html_text(reason.code, 'bad')} {escape(obstacle(reason))}</div>{fix}"
