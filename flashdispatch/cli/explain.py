"""``flashdispatch explain``: which backend would run a call, and why, from a description of the call."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flashdispatch.cli.described_call import CHOICE, AsProblem, DescribedCall, describes_a_call, plan_of
from flashdispatch.cli.machine import this_machine
from flashdispatch.cli.output import show

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch explain[/] --head-dim 128 --seqlen 4096 --causal --grad

[cyan]flashdispatch explain[/] --arch sm_120 --heads 32 --heads-kv 8 --window 1023 0

[cyan]flashdispatch explain[/] --backend torch_reference --mask float --mask-grad

[cyan]flashdispatch explain[/] --kv-lens --q-lens --sinks --json > plan.json

[cyan]flashdispatch explain[/] --problem - --arch sm_80 < plan.json"""


@describes_a_call
def run(
    ctx: typer.Context,
    call: DescribedCall,
    arch: Annotated[
        str | None,
        typer.Option(help="GPU architecture (sm_90) or cpu.", show_default="this machine's", rich_help_panel=CHOICE),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Force one, or a chain a,b.", show_default="automatic", rich_help_panel=CHOICE)
    ] = None,
    problem: AsProblem = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.", rich_help_panel=CHOICE)] = False,
) -> None:
    """Show which backend would run a call, and why. Needs no GPU.

    Exits with 1 when nothing can run it.
    """
    plan = plan_of(ctx, call, problem, arch=arch, otherwise=this_machine().arch, backend=backend)
    if as_json:
        typer.echo(json.dumps(plan.to_json(), indent=2))
    else:
        show(plan)
    if plan.chosen is None:
        raise typer.Exit(1)
