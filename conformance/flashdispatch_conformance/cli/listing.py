"""``flashdispatch conformance list`` and ``explain``: what the suite holds a backend to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from flashdispatch.cli.output import show
from flashdispatch_conformance.cli.options import DeviceName, Pattern, Plugin, TierName
from flashdispatch_conformance.cli.plugins import load
from flashdispatch_registry.problem import DTYPE_NAMES
from flashdispatch_registry.render import Fact, facts_view

if TYPE_CHECKING:
    import torch

    from flashdispatch_conformance.case import Case
    from flashdispatch_conformance.check import Check, Unit

LIST_EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance list[/] --tier smoke

[cyan]flashdispatch conformance list[/] -k gqa --json"""

EXPLAIN_EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance explain[/] named/length_65

[cyan]flashdispatch conformance explain[/] named/gqa_8_2-bfloat16 --backend mine"""


def list_checks(
    tier: Annotated[TierName, typer.Option(help="The tier.")] = TierName.full,
    match: Pattern = None,
    as_json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
) -> None:
    """List the checks of a tier: id, dtypes, and what each stands for."""
    from flashdispatch_conformance import catalogue, runner

    found: dict[Check, list[Unit]] = {}
    for unit in runner.chosen(catalogue.units(tier.value), match or ()):
        found.setdefault(unit.check, []).append(unit)
    if as_json:
        typer.echo(json.dumps([_listed(check, units) for check, units in found.items()], indent=2))
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)  # a name to be copied
    table.add_column("dtypes", no_wrap=True)
    table.add_column("why", overflow="fold")
    for check, units in found.items():
        table.add_row(Text(check.id), ", ".join(_short(unit.dtype) for unit in units), Text(check.why))
    show(table)
    count = sum(map(len, found.values()))
    typer.echo(f"\n{len(found)} checks, {count} units: a check in one dtype, CHECK-DTYPE, is a unit")


def explain(
    what: Annotated[str, typer.Argument(metavar="CHECK|UNIT", help="Its id.")],
    backend: Annotated[str | None, typer.Option(help="Say which of its calls this backend declares.")] = None,
    device: DeviceName = None,
    plugin: Plugin = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Explain a check: what it is, why it exists, what it is held to, and what a backend declares of it."""
    from flashdispatch_conformance import cases, environment, replay
    from flashdispatch_conformance.tolerance import GATES

    load(plugin)
    check = replay.check_of(what)
    case = cases.BY_ID.get(check.id)
    declared: list[dict[str, Any]] = []
    if backend is not None:
        (name, *others), _ = environment.backends(backend)
        if others:
            raise typer.BadParameter("one backend by its name", param_hint="--backend")
        if case is not None:
            dtypes = [dtype for dtype in check.dtypes if what in (check.id, f"{check.id}-{DTYPE_NAMES[dtype]}")]
            where = environment.device(device)
            declared = [_declared(case, name, dtype, where) for dtype in dtypes]
    if as_json:
        answer = _listed(check, [])
        answer |= {"case": None if case is None else case.to_json(), "declared": declared}
        typer.echo(json.dumps({key: value for key, value in answer.items() if key != "units"}, indent=2))
        return
    facts = [Fact("check", check.id), Fact("why", check.why), Fact("tier", check.tier)]
    facts.append(Fact("dtypes", ", ".join(DTYPE_NAMES[dtype] for dtype in check.dtypes)))
    if check.smoke_dtypes:
        facts.append(Fact("", f"in the smoke tier {', '.join(DTYPE_NAMES[dtype] for dtype in check.smoke_dtypes)}"))
    if check.deep_dtypes:
        facts.append(Fact("", f"only in the deep tier {', '.join(DTYPE_NAMES[dtype] for dtype in check.deep_dtypes)}"))
    if check.alone:
        facts.append(Fact("runs", "alone: it needs the machine to itself"))
    if case is not None:
        facts += [Fact("case" if at == 0 else "", line) for at, line in enumerate(_arguments(case))]
        gates = f"rms <= {GATES.rms}, worst row <= {GATES.row}, max <= {GATES.max}, |bias| <= {GATES.bias}"
        facts.append(Fact("held to", f"z = (got - truth) / sigma of every tensor: {gates}"))
        facts.append(Fact("", "shapes, strides and dtypes; repeatable bits; inputs untouched; padding unread"))
    facts += list(_declared_facts(backend, case, declared))
    unit = what if what != check.id else f"{check.id}-{DTYPE_NAMES[check.dtypes[0]]}"
    facts.append(Fact("run it", f"flashdispatch conformance replay {unit} --backend {backend or 'NAME'}"))
    show(facts_view(facts))


def _declared(case: Case, backend: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Which of the case's calls `backend` declares, with the reasons for those that it does not."""
    from flashdispatch_conformance.case import Part
    from flashdispatch_conformance.trial import Target, Trial

    trial = Trial(Target(backend=backend, dtype=dtype, device=device))
    inputs = trial.inputs(case)
    parts = [part for part in get_args(Part) if part != "gradients" or case.needs_grad]
    plans = {part: trial.plan(inputs, part).candidate(backend).reasons for part in parts}
    calls = {part: [str(reason.code) for reason in reasons] for part, reasons in plans.items()}
    return {"dtype": DTYPE_NAMES[dtype], "calls": calls}


def _declared_facts(backend: str | None, case: Case | None, declared: list[dict[str, Any]]) -> Iterator[Fact]:
    if backend is None:
        return
    if case is None:
        yield Fact(backend, "which calls this check makes shows when it is run")
    for at, line in enumerate(declared):
        said = [f"{part} {'declared' if not codes else ', '.join(codes)}" for part, codes in line["calls"].items()]
        yield Fact(backend if at == 0 else "", f"{line['dtype']}: {'; '.join(said)}")


def _arguments(case: Case) -> Iterator[str]:
    for name, value in case.to_json().items():
        if name not in ("id", "why"):
            yield f"{name} = {json.dumps(value)}"


def _listed(check: Check, units: list[Unit]) -> dict[str, Any]:
    return {
        "id": check.id,
        "why": check.why,
        "tier": check.tier,
        "dtypes": [DTYPE_NAMES[dtype] for dtype in check.dtypes],
        "units": [unit.id for unit in units],
    }


def _short(dtype: torch.dtype) -> str:
    return {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}[DTYPE_NAMES[dtype]]
