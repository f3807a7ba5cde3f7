"""The command line: ``flashdispatch doctor | explain | source | tune | matrix | demo``.

For people by default; ``--json`` on each command prints one JSON document, and nothing else, on stdout. Exit codes:

    0   the answer is good
    1   the answer is bad: nothing can run this problem, the doctor found something broken, README.md is out of date; or
        one of our errors, whose message goes to stderr without a Python traceback
    2   the command was not understood
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashdispatch import __version__
from flashdispatch.cli import demo, doctor, explain, matrix, source, tune
from flashdispatch_registry.errors import FlashDispatchError


class _Commands(TyperGroup):
    """Prints our own errors as what they are: messages. Anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlashDispatchError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        except typer.BadParameter as error:
            # How a value is checked is nobody's business: newer typers let pydantic's words through.
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with [bold]flashdispatch doctor[/]: what is here, what is ready, and what to type next.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashdispatch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact attention on the fastest kernel that is proven right for this problem on this GPU, and why that one."""


def _paragraphs(docstring: str | None) -> str:
    """A docstring's paragraphs, each on one line: the terminal's width, not the source's, breaks them."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (docstring or "").split("\n\n"))


def _add(group: typer.Typer, name: str, command: Callable[..., None], examples: str) -> None:
    group.command(name, help=_paragraphs(command.__doc__), epilog=examples)(command)


_add(app, "doctor", doctor.run, doctor.EXAMPLES)
_add(app, "explain", explain.run, explain.EXAMPLES)
_add(app, "source", source.run, source.EXAMPLES)
_tune = typer.Typer(rich_markup_mode="rich", no_args_is_help=True, add_completion=False)
_add(_tune, "tiles", tune.tiles, tune.EXAMPLES)
app.add_typer(_tune, name="tune", help="Measure on this GPU what can be chosen there, and keep it.")
_add(app, "matrix", matrix.run, matrix.EXAMPLES)
_add(app, "demo", demo.run, demo.EXAMPLES)
