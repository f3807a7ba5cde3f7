"""``flashdispatch conformance replay``: one unit again."""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from flashdispatch_conformance import environment
from flashdispatch_conformance.cli.options import DeviceName, Plugin
from flashdispatch_conformance.cli.plugins import load

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch conformance replay[/] named/gqa_8_2-bfloat16 --backend mine

[cyan]flashdispatch conformance replay[/] fuzz.json --backend mine --dump it.pt

The argument is a unit's id, the JSON that a report gives, or a file of it."""


def replay(
    what: Annotated[str, typer.Argument(metavar="UNIT_ID|JSON|FILE", help="The unit.")],
    backend: Annotated[str, typer.Option(help="The backend.")],
    device: DeviceName = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the values.", show_default="the unit's")] = None,
    dump: Annotated[
        Path | None, typer.Option(metavar="FILE.pt", help="Save inputs, outputs and the truth for torch.load.")
    ] = None,
    plugin: Plugin = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Run one unit again, in this process, and print all its numbers.

    Exits with 1 when it fails, and with 4 when it was not run.
    """
    from flashdispatch_conformance import replay as replaying
    from flashdispatch_conformance.journal import result_to_json

    load(plugin)
    text = Path(what).read_text() if what.endswith(".json") and Path(what).is_file() else what
    unit, own_seed = replaying.unit_of(text)
    (name, *others), _ = environment.backends(backend)
    if others:
        raise typer.BadParameter("one backend by its name", param_hint="--backend")
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a crash of the kernel ends this process: it shall say where
    result = replaying.run(
        unit, backend=name, device=environment.device(device), seed=own_seed if seed is None else seed, dump=dump
    )
    if as_json:
        typer.echo(json.dumps(result_to_json(result), indent=2))
    else:
        typer.echo(result.report())
        if dump is not None:
            typer.echo(f"  tensors in {dump}")
    if result.outcome in ("fail", "error"):
        raise typer.Exit(1)
    if result.outcome == "not_run":
        raise typer.Exit(4)
