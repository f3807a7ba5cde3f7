"""``flashdispatch conformance run``: the suite on one backend or several, with a report for each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flashdispatch_conformance.cli.options import DeviceName, Dtype, Pattern, Plugin, TierName, dtypes_of
from flashdispatch_conformance.extra import needs
from flashdispatch_registry.render import STYLES

if TYPE_CHECKING:
    from flashdispatch_conformance.session import Session
    from flashdispatch_conformance.waivers import Waivers

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance run[/] --backend mine --tier smoke

[cyan]flashdispatch conformance run[/] --backend mine --plugin my_package.backend

[cyan]flashdispatch conformance run[/] --backend all --device cuda:0 -o reports

[cyan]flashdispatch conformance run[/] --backend mine -k gqa -k 'named/window*'

[cyan]flashdispatch conformance run[/] --backend mine --shard 1/4

[cyan]flashdispatch conformance run[/] --backend mine --resume"""

EXIT = {"conformant": 0, "nonconformant": 1, "partial": 4}
"""Verdict -> exit code."""

WORST_FIRST = (1, 4, 0)
"""Of several backends, the exit code is the first of these that one has."""

INTERRUPTED = 130

_WHAT, _HOW, _OUT = "What is run", "How it is run", "Report"

BAD = ("fail", "error")


def run(
    backend: Annotated[str, typer.Option(metavar="NAME[,NAME]|all", help="Whom to test.", rich_help_panel=_WHAT)],
    tier: Annotated[
        TierName,
        typer.Option(help="smoke: first contact. full: for a verdict. deep: hours.", rich_help_panel=_WHAT),
    ] = TierName.full,
    device: DeviceName = None,
    match: Pattern = None,
    dtype: Dtype = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Only the I-th of N parts; see merge.", rich_help_panel=_WHAT),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the values.", rich_help_panel=_WHAT)] = 0,
    plugin: Plugin = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Child processes.", show_default="cores and memory", rich_help_panel=_HOW),
    ] = None,
    fuzz_minutes: Annotated[
        float, typer.Option(min=0.0, help="Minutes of random cases after all others.", rich_help_panel=_WHAT)
    ] = 0.0,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Seconds that one unit may take.",
            show_default="120 on a GPU, 900 on a CPU",
            rich_help_panel=_HOW,
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="No child processes: a crash ends the run. For debuggers.", rich_help_panel=_HOW
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same.", rich_help_panel=_HOW)
    ] = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder of the reports.", rich_help_panel=_OUT)
    ] = Path("conformance-report"),
    waivers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Known faults, as TOML.", rich_help_panel=_OUT)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON on stdout too.", rich_help_panel=_OUT)
    ] = False,
) -> None:
    """Run the suite on a backend and write its report: JSON, Markdown and HTML.

    Exits with 0 when the backend is conformant, 1 nonconformant, 4 partial, 3 when device or backend is not here.
    """
    from flashdispatch_conformance import environment
    from flashdispatch_conformance.cli.plugins import load
    from flashdispatch_conformance.runner import Settings, workers_for
    from flashdispatch_conformance.session import Selection, Session

    needs("jinja2", "writing the pages of a report")  # now, and not when everything has been run
    if fuzz_minutes:
        needs("hypothesis", "--fuzz-minutes")
    load(plugin)
    names, missing = environment.backends(backend)
    for name, reasons in missing.items():
        typer.echo(f"left out: {name} can't be tested here: {reasons}", err=True)
    where = environment.device(device)
    selection = Selection(
        tier=tier.value,
        patterns=tuple(match or ()),
        dtypes=dtypes_of(dtype) if dtype else None,
        shard=_shard(shard),
    )
    if not selection.units():
        raise typer.BadParameter("these options leave no unit of the tier: see `list -k`", param_hint="-k, --dtype")
    waived = _waivers(waivers)
    _writable(output)
    documents, codes = [], []
    for name in names:
        settings = Settings(
            backend=name,
            device=where,
            seed=seed,
            timeout=timeout,
            workers=workers_for(where) if workers is None else workers,  # now: the memory that is free changes
            plugins=tuple(plugin or ()),
            isolated=not in_process,
        )
        session = Session(
            settings=settings,
            selection=selection,
            folder=output,
            command=("flashdispatch", *map(_without_folders, sys.argv[1:])),
            waivers=waived,
            fuzz_minutes=fuzz_minutes,
        )
        with session.claimed():
            if resume:
                typer.echo(session.resume(), err=True)
            interrupted = _run(session)
            document = session.document()
            documents.append(document)
            paths = write(document, output)
            if not interrupted:
                session.forget()
        if not as_json:
            from flashdispatch_conformance.cli.summary_view import show_summary

            show_summary(document, paths)
        if interrupted:
            codes = [INTERRUPTED]
            typer.echo("interrupted; go on with the same command and --resume", err=True)
            break
        codes.append(EXIT[document["summary"]["verdict"]])
    if as_json:
        typer.echo(json.dumps(documents[0] if len(names) == 1 else documents, indent=2))
    code = codes[0] if codes[0] == INTERRUPTED else next(code for code in WORST_FIRST if code in codes)
    if code:
        raise typer.Exit(code)


def write(document: dict[str, Any], folder: Path) -> tuple[Path, ...]:
    """Writes the report, and the pages for people beside it."""
    from flashdispatch_conformance import document as documents

    path = documents.write(document, folder)  # before anything else that could go wrong: hours may be in it
    written = [path]
    from flashdispatch_conformance import pages

    for suffix, page in ((".md", pages.markdown), (".html", pages.html)):
        beside = path.with_suffix(suffix)
        beside.write_text(page(document), encoding="utf-8")
        written.append(beside)
    return tuple(written)


def _run(session: Session) -> bool:
    """Runs the session under a progress bar; True when it was interrupted."""
    total = len(session.units())
    console = Console(stderr=True)
    with _progress(console) as progress:
        task = progress.add_task("starting", total=total, completed=len(session.results), bad=_bad(session))

        def watch(running: Sequence[str]) -> None:
            if running:
                more = f" and {len(running) - 1} more" if len(running) > 1 else ""
                progress.update(task, description=f"{running[0]}{more}")

        with closing(session.run(watch)) as results:
            try:
                for result in results:
                    progress.update(task, completed=len(session.results), bad=_bad(session))
                    if result.outcome in BAD:
                        said = result.messages[0].strip().partition("\n")[0] if result.messages else ""
                        progress.console.print(
                            Text(f"{result.outcome}: {result.id}: {said}", STYLES["bad"]), soft_wrap=True
                        )
            except KeyboardInterrupt:
                return True
    return False


def _bad(session: Session) -> str:
    count = sum(result.outcome in BAD for result in session.results.values())
    return f"{count} failed" if count else ""


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("[red]{task.fields[bad]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise typer.BadParameter(f"I/N with I from 1 to N, such as 2/4; got {text!r}", param_hint="--shard")
    return int(found[1]), int(found[2])


def _waivers(path: Path | None) -> Waivers:
    from flashdispatch_conformance import waivers

    if path is None:
        return ()
    try:
        return waivers.read(path)
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be read: {error.strerror or error}", param_hint="--waivers") from error


def _writable(folder: Path) -> None:
    """Says before anything runs that no report can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"can't write reports in {folder}: {error.strerror}", param_hint="-o") from error


def _without_folders(argument: str) -> str:
    """Of an absolute path its last part: a report is for others, and the folders of whoever made it are not."""
    return Path(argument).name if Path(argument).is_absolute() else argument
