"""The end of a run, for a terminal: what came of it, the worst numbers, what was not run, how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashdispatch.cli.output import show
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


def show_summary(document: dict[str, Any], paths: Sequence[Path]) -> None:
    """Prints the summary of a report that lies in `paths`; the verdict comes last, where a terminal leaves the eye."""
    summary, device = document["summary"], document["device"]
    head = [
        Fact("backend", f"{document['backend']['name']} on {device['arch']}, {device['name']}"),
        *_counts(document),
        *_not_run(document),
    ]
    show(Group(facts_view(head), Text(), _worst(document)))
    bad = [entry for entry in document["cases"] if entry["outcome"] in BAD]
    for entry in bad[:SHOWN]:
        typer.echo(f"{entry['outcome'].replace('_', ' ')}: {entry['id']}: {_gist(entry)}")
        typer.echo(f"  {replay_line(entry, document)}")  # as one line, which can be copied
    if len(bad) > SHOWN:
        typer.echo(f"and {len(bad) - SHOWN} more, in the report")
    if bad:
        typer.echo()
    end = [Fact("verdict", summary["verdict"], TONES[summary["verdict"]])]
    end += [Fact("", reason) for reason in summary["reasons"]]
    end += [Fact("report" if at == 0 else "", str(path)) for at, path in enumerate(paths)]
    show(facts_view(end))


def _gist(entry: dict[str, Any]) -> str:
    """One line of what a unit said: of a traceback the last one, which says what was raised."""
    first: str = entry.get("messages", [""])[0]
    lines = [line for line in first.splitlines() if line.strip()] or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


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
