"""``flashdispatch matrix``: what every backend declares, as a table; also the one that stands in README.md."""

from __future__ import annotations

import json
from difflib import unified_diff
from pathlib import Path
from typing import Annotated

import typer

from flashdispatch._registry import registry
from flashdispatch.cli.output import show
from flashdispatch_registry.matrix import matrix_json, matrix_markdown, matrix_view
from flashdispatch_registry.plugins import BUILT_IN
from flashdispatch_registry.select import Entry

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch matrix[/] --all

[cyan]flashdispatch matrix[/] --json | jq '.torch_reference.window'

[cyan]flashdispatch matrix[/] --check README.md

[cyan]flashdispatch matrix[/] --write README.md"""

START = "<!-- support-table:start -->"
END = "<!-- support-table:end -->"


def run(
    everyone: Annotated[bool, typer.Option("--all", help="Third-party backends too.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check", metavar="PATH", help="Exit with 1, and show a diff, when the table in this file is out of date."
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="PATH", help="Bring the table in this file up to date.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
) -> None:
    """Show what every backend declares. What is not declared is never given to a backend."""
    if sum((markdown, check is not None, write is not None, as_json)) > 1:
        raise typer.BadParameter("--markdown, --check, --write and --json exclude each other")
    entries = tuple(entry for entry in registry().entries() if everyone or built_in(entry))
    if check is not None:
        _check(check, entries)
    elif write is not None:
        _write(write, updated(_read(write), entries))
        typer.echo(f"{write}: up to date")
    elif markdown:
        typer.echo(matrix_markdown(entries))
    elif as_json:
        typer.echo(json.dumps(matrix_json(entries), indent=2, ensure_ascii=False))
    else:
        show(matrix_view(entries))


def built_in(entry: Entry) -> bool:
    """True for a backend that comes with flashdispatch."""
    return entry.distribution == BUILT_IN


def updated(text: str, entries: tuple[Entry, ...]) -> str:
    """`text` with the current table between its two markers. BadParameter when it has no such place."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise typer.BadParameter(f"the file needs these two lines around the table: {START} and {END}")
    return f"{before}{START}\n{matrix_markdown(entries)}\n{END}{after}"


def _check(path: Path, entries: tuple[Entry, ...]) -> None:
    have = _read(path)
    want = updated(have, entries)
    if have == want:
        typer.echo(f"{path}: up to date")
        return
    lines = unified_diff(have.splitlines(), want.splitlines(), str(path), "what the backends declare", lineterm="")
    typer.echo("\n".join(lines))
    typer.echo(f"{path} is out of date: flashdispatch matrix --write {path}", err=True)
    raise typer.Exit(1)


def _read(path: Path) -> str:
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path} is no UTF-8 text") from None
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be read: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} can't be written: {error.strerror}") from None
