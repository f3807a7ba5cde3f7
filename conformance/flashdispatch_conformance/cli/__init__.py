"""``flashdispatch conformance``: runs the suite, says what it holds a backend to, and reads its reports.

For people by default; ``--json`` prints one JSON document, and nothing else, on stdout. Exit codes:

    0   conformant, or the answer is good
    1   nonconformant, or the answer is bad
    2   the command was not understood
    3   the device, the backend or a package that is needed is not here
    4   partial: nothing failed, but less was run than a verdict needs
    130 interrupted
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from flashdispatch.cli.command import add
from flashdispatch_conformance.cli import listing, replay, reports, run, selftest
from flashdispatch_registry.errors import FlashDispatchError, InvalidRequestError, UnknownBackendError

USAGE, ENVIRONMENT = 2, 3


class _Commands(TyperGroup):
    """Gives our own errors the exit codes above."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlashDispatchError as error:
            typer.echo(f"error: {error}", err=True)
            usage = isinstance(error, UnknownBackendError | InvalidRequestError)
            raise typer.Exit(USAGE if usage else ENVIRONMENT) from error


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Prove that a backend computes what the contract says, on this machine.",
    epilog="Start with [bold]flashdispatch conformance run --backend NAME --tier smoke[/].",
)

_RUN, _CHECKS, _REPORTS = "Run", "What is checked", "Reports"

add(app, "run", run.run, run.EXAMPLES, panel=_RUN)
add(app, "replay", replay.replay, replay.EXAMPLES, panel=_RUN)
add(app, "list", listing.list_checks, listing.LIST_EXAMPLES, panel=_CHECKS)
add(app, "explain", listing.explain, listing.EXPLAIN_EXAMPLES, panel=_CHECKS)
add(app, "selftest", selftest.selftest, selftest.EXAMPLES, panel=_CHECKS)
add(app, "report", reports.report, reports.REPORT_EXAMPLES, panel=_REPORTS)
add(app, "verify", reports.verify, reports.VERIFY_EXAMPLES, panel=_REPORTS)
add(app, "diff", reports.diff, reports.DIFF_EXAMPLES, panel=_REPORTS)
add(app, "merge", reports.merge, reports.MERGE_EXAMPLES, panel=_REPORTS)
