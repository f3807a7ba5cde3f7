"""``flashdispatch demo``: the demo of `flashdispatch.demo`, with a console, a text and a device."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import torch
import typer
from rich.console import Console

import flashdispatch

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch demo[/]

[cyan]flashdispatch demo[/] --text my_notes.txt --seconds 60

[cyan]flashdispatch demo[/] --device cpu --json > demo.json"""

TEXT = Path(flashdispatch.__file__).resolve().parent.parent / "examples" / "tidepool.txt"
"""The text of a clone. An installed wheel has none."""


def run(
    text: Annotated[
        Path | None,
        typer.Option(
            help="The text that the language model learns.", show_default="examples/tidepool.txt of the clone"
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long the language model learns.")] = 8.0,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1.", show_default="cuda where there is one")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON on stdout, progress on stderr.")] = False,
) -> None:
    """See it work, on a real text: needs no network, and no GPU."""
    path = TEXT if text is None else text
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}; pass one with --text PATH", param_hint="--text")
    where = _device(device)
    from flashdispatch.demo import run_demo  # which imports this package in turn

    results = run_demo(Console(stderr=as_json), text=path, seconds=seconds, device=where)
    if as_json:
        typer.echo(json.dumps(results, indent=2))


def _device(text: str | None) -> torch.device:
    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint="--device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here", param_hint="--device")
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # what torch raises depends on the device
        reason = shorten(str(error), 100, placeholder=" ...")
        raise typer.BadParameter(f"torch can't use {text} here ({reason})", param_hint="--device") from error
    return device
