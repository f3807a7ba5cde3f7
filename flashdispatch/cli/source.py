"""``flashdispatch source``: what a backend's kernels compile to, for any architecture, without running them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashdispatch.cli.described_call import CHOICE, AsProblem, DescribedCall, describes_a_call, plan_of
from flashdispatch.cli.machine import this_machine
from flashdispatch.cli.one_backend import offering, one_name
from flashdispatch.cli.output import show
from flashdispatch.cli.tile_search import tile_text
from flashdispatch_registry.kernels import Inspectable, KernelFacts
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.render import STYLES, Fact, facts_view, human_bytes
from flashdispatch_registry.select import nearest

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch source[/] --backend triton_fa2 --causal --grad

[cyan]flashdispatch source[/] --backend triton_fa2 --arch sm_120 --head-dim 64

[cyan]flashdispatch source[/] --backend triton_fa2 --stage ptx > forward.ptx

[cyan]flashdispatch source[/] --backend triton_fa2 --grad --kernel dq --stage sass

[cyan]flashdispatch source[/] --backend triton_fa2 --json | jq '.kernels[].registers'"""

WITHOUT_A_GPU = "sm_90"
"""Compiled for, where nobody says for what and there is no GPU to ask."""


@describes_a_call
def run(
    ctx: typer.Context,
    call: DescribedCall,
    backend: Annotated[str, typer.Option(help="Whose kernels.", rich_help_panel=CHOICE)],
    arch: Annotated[
        str | None,
        typer.Option(
            help="GPU architecture.", show_default=f"this machine's, else {WITHOUT_A_GPU}", rich_help_panel=CHOICE
        ),
    ] = None,
    problem: AsProblem = None,
    kernel: Annotated[
        str | None, typer.Option(help="Only this one.", show_default="all", rich_help_panel=CHOICE)
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            metavar="STAGE",
            help="Print the text of this stage of the compiler: ttgir, ptx, sass, or what the backend has.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The facts as JSON, without the texts.", rich_help_panel=CHOICE)
    ] = False,
) -> None:
    """Show what the kernels of a call compile to: registers, spills, shared memory, instructions, text. Needs no GPU.

    Exits with 1 when the backend can't run the call.
    """
    if stage is not None and as_json:
        raise typer.BadParameter("--stage and --json exclude each other")
    name = one_name(backend)
    gpus = this_machine().gpus
    otherwise = gpus[0].arch if gpus else WITHOUT_A_GPU
    plan = plan_of(ctx, call, problem, arch=arch, otherwise=otherwise, backend=name)
    if plan.chosen is None:
        if as_json:
            typer.echo(json.dumps(plan.to_json(), indent=2))
        else:
            show(plan)
        raise typer.Exit(1)
    # mypy takes no Protocol for a type, although isinstance does.
    code = offering(name, Inspectable, "inspected")  # type: ignore[type-abstract]
    found = _of_kernel(code.facts(plan.problem), kernel, gradients=plan.problem.needs_backward)
    if stage is not None:
        text = _stage(found, stage)
        typer.echo(text, nl=not text.endswith("\n"))
    elif as_json:
        kernels = [_to_json(facts) for facts in found]
        typer.echo(json.dumps({"backend": name, "problem": plan.problem.to_json(), "kernels": kernels}, indent=2))
    else:
        show(view(name, plan.problem, found))


def view(name: str, problem: Problem, found: Sequence[KernelFacts]) -> RenderableType:
    """The facts as a rich renderable."""
    head = facts_view([Fact("asked", problem.describe()), Fact("backend", name)])
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("kernel", overflow="fold")
    for column in ("registers", "spills", "shared", "threads"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("instructions", overflow="fold")
    for facts in found:
        spills = Text(f"{facts.spill_bytes} bytes", STYLES["warn"]) if facts.spill_bytes else Text("none")
        table.add_row(
            Text.assemble(
                (facts.kernel, "bold"), f" {facts.variant}".rstrip(), "\n", (tile_text(facts.tile), STYLES["quiet"])
            ),
            str(facts.registers),
            spills,
            human_bytes(facts.shared_bytes),
            str(facts.threads),
            Text(", ".join(f"{what} {count}" for what, count in facts.instructions.items())),
        )
    stages = list(dict.fromkeys(stage for facts in found for stage in facts.texts))
    tail = facts_view([Fact("stages", f"{', '.join(stages) or 'none'} (--stage prints one)", "quiet")])
    return Group(head, Text(), table, Text(), tail)


def _of_kernel(found: Sequence[KernelFacts], kernel: str | None, *, gradients: bool) -> Sequence[KernelFacts]:
    if kernel is None:
        return found
    names = list(dict.fromkeys(facts.kernel for facts in found))
    if kernel not in names:
        raise typer.BadParameter(
            f"this call has no kernel {kernel!r}; it has {', '.join(names)}.{nearest(kernel, names)}"
            + ("" if gradients else " With --grad it has those of the backward too."),
            param_hint="--kernel",
        )
    return [facts for facts in found if facts.kernel == kernel]


def _stage(found: Sequence[KernelFacts], stage: str) -> str:
    names = list(dict.fromkeys(facts.kernel for facts in found))
    if len(names) != 1:
        raise typer.BadParameter(
            f"the text of which kernel? Add --kernel with one of {', '.join(names)}", param_hint="--stage"
        )
    stages = list(dict.fromkeys(name for facts in found for name in facts.texts))
    if stage not in stages:
        raise typer.BadParameter(
            f"{names[0]} has no stage {stage!r}; it has {', '.join(stages) or 'none'}.{nearest(stage, stages)}",
            param_hint="--stage",
        )
    # More than one where a kernel is compiled several times for one call.
    return "\n".join(facts.texts[stage] for facts in found if stage in facts.texts)


def _to_json(facts: KernelFacts) -> dict[str, Any]:
    plain = {field.name: getattr(facts, field.name) for field in fields(facts) if field.name != "texts"}
    return plain | {
        "tile": dict(facts.tile),
        "instructions": dict(facts.instructions),
        "stages": list(facts.texts),
    }
