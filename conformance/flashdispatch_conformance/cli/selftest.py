"""``flashdispatch conformance selftest``: does the suite find what is wrong, and pass what is right?"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance selftest[/]

[cyan]flashdispatch conformance selftest[/] --json > selftest.json"""


def selftest(
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON on stdout, progress on stderr.")] = False,
) -> None:
    """Test the suite itself: an honest kernel must pass it, and every planted fault must be found. Needs no GPU.

    Exits with 1 when a fault is not found by the gate that is there for it, or the honest kernel does not pass.
    """
    from flashdispatch_conformance.selftest import run_selftest

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")

        def step(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total, description=name)

        found = run_selftest(step)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else found.table())
    if not found.ok:
        raise typer.Exit(1)
