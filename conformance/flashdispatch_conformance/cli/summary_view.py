"""The end of a run, for a terminal: what came of it, the worst numbers, what was not run, how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashdispatch_conformance.document import number
from flashdispatch_conformance.pages import replay_line
from flashdispatch_conformance.result import NotRun
from flashdispatch_conformance.verdict import BAD, NOT_RUN_WORDS
from flashdispatch_registry.render import Fact, Tone, facts_view

TONES: dict[str, Tone] = {"conformant": "good", "partial": "warn", "nonconformant": "bad"}

SHOWN = 20
"""Failures that are listed; the report has them all."""

NAMED = 12
"""Checks that were not run, and are named one by one."""


def summary_view(document: dict[str, Any], paths: Sequence[Path]) -> RenderableType:
    """The summary of a report that lies in `paths`."""
    facts = [
        Fact("backend", f"{document['backend']['name']} on {document['device']['arch']}, {document['device']['name']}"),
        *_counts(document),
        *_not_run(document),
    ]
    verdict, reasons = document["summary"]["verdict"], document["summary"]["reasons"]
    end = [Fact("verdict", verdict, TONES[verdict]), *(Fact("", reason) for reason in reasons)]
    end += [Fact("report" if at == 0 else "", str(path)) for at, path in enumerate(paths)]
    failures = list(_failures(document))
    parts: list[RenderableType] = [facts_view(facts), Text(), _worst(document)]
    if failures:
        parts += [facts_view(failures), Text()]
    return Group(*parts, facts_view(end))


def _counts(document: dict[str, Any]) -> Iterator[Fact]:
    counts = {word: count for word, count in document["summary"]["counts"].items() if count}
    tone: Tone = "bad" if any(word in counts for word in BAD) else "plain"
    yield Fact("outcomes", ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in counts.items()), tone)
    times = document["timings"]
    yield Fact("seconds", f"{times['wall_s']} of the clock, {times['compile_s']} compiling, {times['run_s']} running")


def _not_run(document: dict[str, Any]) -> Iterator[Fact]:
    """What was left out: the checks by name, or their kinds where they are many."""
    for at, (why, count) in enumerate(document["summary"]["not_run"].items()):
        names = dict.fromkeys(entry["check"] for entry in document["cases"] if entry.get("not_run") == why)
        if len(names) > NAMED:
            names = dict.fromkeys(name.partition("/")[0] for name in names)
        text = f"{count} units ({', '.join(names)}): {NOT_RUN_WORDS[NotRun(why)]}"
        yield Fact("not run" if at == 0 else "", text, "warn")


def _worst(document: dict[str, Any]) -> Table:
    gates = document["suite"]["gates"]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    numbers = ("rms", "row", "max", "bias")
    for column in ("worst z of", "", *numbers, "largest in"):
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for line in document["summary"]["worst"]:
        values = ["" if line[name] is None else f"{number(line[name]):.2f}" for name in numbers]
        table.add_row(line["dtype"], line["tensor"], *values, line["unit"].removesuffix(f"-{line['dtype']}"))
    table.add_row("gates", "", *(str(gates[name]) for name in numbers), "", style="dim")
    return table


def _failures(document: dict[str, Any]) -> Iterator[Fact]:
    """Each failure with the line that runs it again."""
    bad = [entry for entry in document["cases"] if entry["outcome"] in BAD]
    for entry in bad[:SHOWN]:
        said = [line for line in entry.get("messages", [""])[0].strip().splitlines() if line.strip()]
        yield Fact(entry["outcome"].replace("_", " "), f"{entry['id']}: {said[-1] if said else ''}", "bad")
        own = [
            message for message in entry.get("messages", ()) if message.startswith("flashdispatch conformance replay")
        ]
        yield Fact("", own[0] if own else replay_line(entry["id"], document))
    if len(bad) > SHOWN:
        yield Fact("", f"and {len(bad) - SHOWN} more, in the report")
