"""Where a command's answer goes: to a terminal as it is, to a file or a pipe without the blanks that pad its lines."""

from __future__ import annotations

import typer
from rich.console import Console, RenderableType


def show(view: RenderableType) -> None:
    """Prints a rich renderable on stdout."""
    console = Console()
    if console.is_terminal:
        console.print(view)
        return
    with console.capture() as capture:
        console.print(view)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))
