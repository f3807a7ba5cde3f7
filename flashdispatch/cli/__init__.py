"""The command line: ``flashdispatch doctor | explain | source | tune | matrix | demo``, and what `mounted` finds.

For people by default; ``--json`` on each command prints one JSON document, and nothing else, on stdout. Exit codes:

    0   the answer is good
    1   the answer is bad: nothing can run this problem, the doctor found something broken, README.md is out of date; or
        one of our errors, whose message goes to stderr without a Python traceback
    2   the command was not understood
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashdispatch import __version__
from flashdispatch.cli import demo, doctor, explain, matrix, source, tune
from flashdispatch.cli.command import add
from flashdispatch.cli.mounted import mounted
from flashdispatch_registry.errors import FlashDispatchError


class _Commands(TyperGroup):
    """Our commands, and those of `mounted` once one is asked for that is not ours.

    Prints our own errors as what they are: messages. Anything else is a bug and keeps its traceback.
    """

    def _mount(self) -> None:
        if not self._mounted:
            self._mounted = True
            self.commands.update(mounted(self.commands))

    _mounted = False

    def list_commands(self, ctx: Any) -> list[str]:
        self._mount()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._mount()
        return super().get_command(ctx, cmd_name)

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


add(app, "doctor", doctor.run, doctor.EXAMPLES)
add(app, "explain", explain.run, explain.EXAMPLES)
add(app, "source", source.run, source.EXAMPLES)
_tune = typer.Typer(rich_markup_mode="rich", no_args_is_help=True, add_completion=False)
add(_tune, "tiles", tune.tiles, tune.EXAMPLES)
app.add_typer(_tune, name="tune", help="Measure on this GPU what can be chosen there, and keep it.")
add(app, "matrix", matrix.run, matrix.EXAMPLES)
add(app, "demo", demo.run, demo.EXAMPLES)
