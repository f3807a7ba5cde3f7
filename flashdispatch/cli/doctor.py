"""``flashdispatch doctor``: what is on this machine, what is ready, what is broken, and what to type about it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from flashdispatch import BackendStatus, _settings
from flashdispatch.cli.findings import Findings, examine
from flashdispatch.cli.machine import Machine
from flashdispatch.cli.output import show
from flashdispatch_registry.plugins import SLOW_IMPORT_SECONDS, Status
from flashdispatch_registry.reasons import Code
from flashdispatch_registry.render import STYLES, Fact, Tone, facts_view, human_bytes, reasons_view
from flashdispatch_registry.versions import versions

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch doctor[/]

[cyan]flashdispatch doctor[/] --no-traceback --settings

[cyan]flashdispatch doctor[/] --json | jq '.backends[] | select(.ready) | .name'"""


def run(
    traceback: Annotated[
        bool, typer.Option("--traceback/--no-traceback", help="Show where broken plugins and backends broke.")
    ] = True,
    settings: Annotated[
        bool, typer.Option("--settings", help="Show the environment variables that are not set, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Examine this machine: which backends are ready, what is broken, and what to type about it.

    Backends that are ready are imported, to see that they can be; nothing runs on a GPU. Exits with 1 when a plugin, a
    backend or a setting is broken, or when no backend can run here.
    """
    findings = examine()
    if as_json:
        typer.echo(json.dumps(findings.to_json(), indent=2))
    else:
        show(view(findings, traceback=traceback, settings=settings))
    if findings.broken:
        raise typer.Exit(1)


def view(findings: Findings, *, traceback: bool = True, settings: bool = False) -> RenderableType:
    """The findings as a rich renderable, what matters most at the end, where a terminal leaves the eye."""
    parts: list[RenderableType] = [
        *_section("Machine", facts_view(list(_machine(findings.machine)))),
        *_section("Plugins", _plugins(findings)),
    ]
    if traceback:
        for plugin in findings.plugins:
            parts += _traceback(f"plugin {plugin.name}", plugin.traceback)
    parts += _section("Backends", _backends(findings))
    if traceback:
        for name, trace in findings.tracebacks.items():
            parts += _traceback(f"backend {name}", trace)
    if findings.issues:
        parts += _section("Known issues", facts_view(list(_issues(findings))))
    parts += _section("Settings", Group(*_settings_lines(findings, everything=settings)))
    parts += _section("Result", facts_view(list(_result(findings))))
    return Group(*parts)


def _section(title: str, body: RenderableType) -> list[RenderableType]:
    return [Rule(Text(title, "bold"), align="left", style="dim"), Padding(body, (0, 0, 1, 2), expand=False)]


def _machine(machine: Machine) -> Iterator[Fact]:
    yield Fact("system", machine.system)
    yield Fact("torch", f"{machine.torch}, built for {machine.runtime or 'CPU only'}")
    yield Fact("driver", machine.driver or "no NVIDIA driver", "plain" if machine.driver else "quiet")
    for gpu in machine.gpus:
        text = f"{gpu.index}: {gpu.name}, {gpu.arch}, {human_bytes(gpu.memory_bytes)}"
        yield Fact("GPU" if gpu.index == 0 else "", text, "good")
    if not machine.gpus:
        yield Fact("GPU", "none that torch can use: calls run on the CPU", "quiet")
    if machine.complaint:
        yield Fact("", machine.complaint, "warn")
    yield Fact("versions", ", ".join(f"{name} {number}" for name, number in versions().items() if name != "torch"))


_TONES: dict[Status, Tone] = {"loaded": "good", "failed": "bad", "not allowed": "warn"}


def _plugins(findings: Findings) -> RenderableType:
    if findings.unexamined:
        return _not_examined(findings)
    if not findings.plugins:
        return Text("none found", STYLES["bad"])
    table = _table("plugin", "import")
    for plugin in findings.plugins:
        owner = f"{plugin.distribution} {plugin.version}".rstrip()
        status = Text(plugin.status, STYLES[_TONES[plugin.status]])
        if plugin.status != "not allowed":
            status.append(f" in {plugin.seconds:.2f} s", STYLES["warn" if plugin.slow else "quiet"])
        if plugin.slow:
            status.append(f" (slow: over {SLOW_IMPORT_SECONDS:g} s)", STYLES["warn"])
        if plugin.problem:
            status.append(f": {plugin.problem}", STYLES["bad"])
        name = Text.assemble((plugin.name, "bold"), "\n", (owner, "dim"))
        table.add_row(name, Group(status, _Dotted(plugin.value)))
    return table


def _not_examined(findings: Findings) -> RenderableType:
    return Text(f"not examined: {findings.unexamined}", STYLES["bad"])


@dataclass(frozen=True, slots=True)
class _Dotted:
    """A dotted name that goes on in the next line after a dot, if it must: ``a.b`` is never cut inside a or b."""

    name: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self._parts():
            if line and len(line + part) > options.max_width:
                yield Text(line, STYLES["quiet"], overflow="fold")
                line = ""
            line += part
        yield Text(line, STYLES["quiet"], overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._parts())), len(self.name)).with_maximum(options.max_width)

    def _parts(self) -> list[str]:
        return re.findall(r"[^.:]*[.:]?", self.name)


def _backends(findings: Findings) -> RenderableType:
    if findings.unexamined:
        return _not_examined(findings)
    if not findings.backends:
        return Text("none registered", STYLES["bad"])
    table = _table("backend", f"on this machine ({findings.machine.arch})")
    for backend in findings.backends:
        owner = f"{backend.distribution} {backend.version}".rstrip()
        table.add_row(Text.assemble((backend.name, "bold"), "\n", (owner, "dim")), _verdict(backend))
    return table


def _verdict(backend: BackendStatus) -> RenderableType:
    if backend.ready:
        return Text("ready", STYLES["good"])
    if any(reason.code is Code.NOT_ALLOWED for reason in backend.reasons):
        return Text("not allowed: the settings below keep its plugin out", STYLES["warn"])
    # The stand-in for a plugin that failed sends people to the doctor; they are here already.
    stand_in = backend.spec is None
    return reasons_view(
        [
            replace(reason, fix="see its plugin above") if stand_in and reason.code is Code.LOAD_FAILED else reason
            for reason in backend.reasons
        ]
    )


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _traceback(title: str, trace: str) -> list[RenderableType]:
    if not trace:
        return []
    return [
        Padding(Text(f"Traceback of {title}:", "bold"), (0, 0, 0, 2), expand=False),
        Padding(Text(trace.rstrip(), overflow="fold"), (0, 0, 1, 4), expand=False),
    ]


def _issues(findings: Findings) -> Iterator[Fact]:
    for issue in findings.issues:
        then = "passed over automatically" if issue.priority is None else f"priority {issue.priority} at most"
        yield Fact(f"{issue.backend} {issue.versions}".rstrip(), f"{issue.reason} ({issue.url}): {then}")


def _settings_lines(findings: Findings, *, everything: bool) -> Iterator[RenderableType]:
    """Each variable with its meaning under it: names and values are long."""
    for name, meaning in _settings.KNOWN.items():
        value = findings.in_force.get(name)
        if value is not None or everything:
            yield Text(name, "dim") if value is None else Text(f"{name}={value}", STYLES["good"])
            yield Padding(Text(meaning), (0, 0, 0, 2), expand=False)
    for name, hint in findings.unknown.items():
        yield Text(name, STYLES["warn"])
        yield Padding(Text(f"not a flashdispatch setting.{hint}"), (0, 0, 0, 2), expand=False)
    if not everything and not findings.in_force:
        yield Text("none set (flashdispatch doctor --settings lists them)", "dim")


def _result(findings: Findings) -> Iterator[Fact]:
    if findings.ready:
        yield Fact("ready", ", ".join(findings.ready), "good")
    for at, line in enumerate(findings.broken):
        yield Fact("" if at else "broken", line, "bad")
    for at, line in enumerate(findings.advice):
        yield Fact("" if at else "to do", line, "warn")
