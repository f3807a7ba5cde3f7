"""How a function becomes a command: its docstring is the help, its examples stand at the end."""

from __future__ import annotations

from collections.abc import Callable

import typer


def add(
    group: typer.Typer, name: str, command: Callable[..., None], examples: str, *, panel: str | None = None
) -> None:
    """Makes `command` the command `name` of `group`, in the help's `panel` where there are several."""
    group.command(name, help=_paragraphs(command.__doc__), epilog=examples, rich_help_panel=panel)(command)


def _paragraphs(docstring: str | None) -> str:
    """A docstring's paragraphs, each on one line: the terminal's width, not the source's, breaks them."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (docstring or "").split("\n\n"))
