"""``flashdispatch tune``: measures on this GPU what can be chosen there, and keeps it for later calls.

``tune tiles``: the tiles of a backend's kernels, see `tile_search` for how one is chosen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flashdispatch._registry import registry
from flashdispatch.cli.described_call import Alibi, DescribedCall, Dropout, MaskKind, Softcap, Window
from flashdispatch.cli.gpu_clock import GpuClock
from flashdispatch.cli.machine import this_machine
from flashdispatch.cli.one_backend import offering, one_name
from flashdispatch.cli.output import show
from flashdispatch.cli.tile_search import (
    Dropped,
    Measure,
    Row,
    TunableBackend,
    TuningError,
    Verdict,
    rows,
    steps,
    tile_text,
    tune,
    verdict_json,
)
from flashdispatch_registry import tile_store
from flashdispatch_registry.errors import BackendUnsupportedError, FlashDispatchError, InvalidRequestError
from flashdispatch_registry.kernels import Tile
from flashdispatch_registry.plan import Plan
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.render import STYLES, Fact, facts_view, reasons_view
from flashdispatch_registry.select import nearest

EXAMPLES = """[bold]Examples[/]

[cyan]flashdispatch tune tiles[/] --backend triton_fa2 --dry-run

[cyan]flashdispatch tune tiles[/] --backend triton_fa2

[cyan]flashdispatch tune tiles[/] --backend triton_fa2 --head-dim 64 --head-dim 256

[cyan]flashdispatch tune tiles[/] --backend triton_fa2 --causal --kernel dq

[cyan]flashdispatch tune tiles[/] --backend triton_fa2 --window 1023 0 --softcap 50

[cyan]flashdispatch tune tiles[/] --backend triton_fa2 --no-grad --json > tiles.json"""

WITHOUT_A_GPU = "sm_90"
"""Whose space is stated, where nobody says and there is no GPU to ask."""

HEAD_DIMS, DTYPES, SEQLENS = (64, 128), ("bfloat16",), (4096,)
TOKENS, WIDTH = 16384, 2048
"""Tokens of a batch and heads times head dim, unless said otherwise: enough work to fill a GPU."""

_SHAPES, _WHAT = "Shapes", "What to tune, and output"


class NoGpuError(FlashDispatchError, RuntimeError):
    """There is no GPU to measure tiles on."""


@dataclass(frozen=True, slots=True)
class Space:
    """What is to be measured, stated before anything is."""

    backend: str
    arch: str
    rows: tuple[Row, ...]
    refused: tuple[Plan, ...]
    """For each shape asked for that the backend can't run, or not with gradients, why not."""


def tiles(
    backend: Annotated[str, typer.Option(help="Whose tiles.", rich_help_panel=_WHAT)],
    head_dim: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Head dim; more than once for several.", show_default="64, 128", rich_help_panel=_SHAPES
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", help="Dtype; likewise.", metavar="DTYPE", show_default="bfloat16", rich_help_panel=_SHAPES
        ),
    ] = None,
    seqlen: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Queries and keys of a sequence; likewise.", show_default="4096", rich_help_panel=_SHAPES
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences.", show_default=f"{TOKENS} / seqlen", rich_help_panel=_SHAPES)
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="Query heads.", show_default=f"{WIDTH} / head dim", rich_help_panel=_SHAPES),
    ] = None,
    heads_kv: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads.", show_default="--heads", rich_help_panel=_SHAPES)
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--no-causal",
            help="Only causal calls, or only others.",
            show_default="both",
            rich_help_panel=_SHAPES,
        ),
    ] = None,
    window: Window = None,
    mask: MaskKind = None,
    alibi: Alibi = False,
    softcap: Softcap = None,
    dropout: Dropout = 0.0,
    grad: Annotated[
        bool, typer.Option("--grad/--no-grad", help="Kernels of the backward too.", rich_help_panel=_WHAT)
    ] = True,
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="Only this one; more than once for several.", show_default="all", rich_help_panel=_WHAT),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="GPU architecture, for --dry-run.",
            show_default=f"this machine's, else {WITHOUT_A_GPU}",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="State what would be measured; needs no GPU.", rich_help_panel=_WHAT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Results as JSON on stdout, progress on stderr.", rich_help_panel=_WHAT)
    ] = False,
) -> None:
    """Find the fastest tile of each kernel on this GPU, and keep it: processes started later use it.

    Every candidate's results are compared with those of the tile in force, and a wrong one is never kept. Exits with 1
    when a candidate was wrong, or a row could not be tuned.
    """
    name = one_name(backend)
    gpus = this_machine().gpus
    here = gpus[0].arch if gpus else None
    if not dry_run and arch is not None and arch != here:
        raise typer.BadParameter(f"this machine's GPU is {here or 'none'}; add --dry-run", param_hint="--arch")
    plans = [
        DescribedCall(
            dtype=kind,
            batch=max(1, TOKENS // length) if batch is None else batch,
            heads=max(1, WIDTH // dim) if heads is None else heads,
            heads_kv=heads_kv,
            seqlen=length,
            head_dim=dim,
            causal=masked,
            window=window,
            mask=mask,
            alibi=alibi,
            softcap=softcap,
            dropout=dropout,
            grad=with_grad,
        ).plan(arch=arch or here or WITHOUT_A_GPU, backend=name)
        for kind, dim, length, masked in product(
            dtype or DTYPES, head_dim or HEAD_DIMS, seqlen or SEQLENS, (False, True) if causal is None else (causal,)
        )
        # Some rows may be read by calls without gradients only.
        for with_grad in ((True, False) if grad else (False,))
    ]
    problems = [plan.problem for plan in plans if plan.chosen is not None]
    refused = {replace(plan.problem, needs_grad=()): plan for plan in reversed(plans) if plan.chosen is None}
    space = Space(name, plans[0].problem.arch, (), tuple(refused.values()))
    if problems:
        # mypy takes no Protocol for a type, although isinstance does.
        code = offering(name, TunableBackend, "tuned")  # type: ignore[type-abstract]
        _check_kernels(code, problems, kernel or ())
        space = replace(space, rows=rows(code, problems, kernel or ()))
        gpu = None if dry_run else _gpu()
    if not as_json:
        show(space_view(space))
    elif dry_run or not problems:
        typer.echo(json.dumps(_space_json(space) | {"dry_run": dry_run}, indent=2))
    if not problems:
        raise typer.Exit(1)
    if gpu is not None:
        _measure(code, space, *gpu, as_json=as_json)


def _check_kernels(code: TunableBackend, problems: Sequence[Problem], asked: Sequence[str]) -> None:
    known = list(dict.fromkeys(kernel for problem in problems for kernel in code.kernels(problem)))
    for kernel in asked:
        if kernel not in known:
            raise typer.BadParameter(
                f"these calls have no kernel {kernel!r}; they have {', '.join(known)}.{nearest(kernel, known)}",
                param_hint="--kernel",
            )


def _measure(code: TunableBackend, space: Space, device: torch.device, measure: Measure, *, as_json: bool) -> None:
    """Measures the space and keeps what won, row by row: a tuning that is interrupted has not been in vain."""
    entry = next(entry for entry in registry().entries() if entry.name == space.backend)
    if entry.spec is None:
        raise BackendUnsupportedError(f"{space.backend} declares nothing")
    fingerprint = tile_store.fingerprint_of(entry.spec, device.index)
    path = _keep(space.backend, fingerprint, None)  # before minutes of measuring: can it be kept at all?
    verdicts: list[Verdict] = []
    errors: list[str] = []
    with _progress(sum(map(steps, space.rows))) as (progress, task):
        for row in space.rows:
            progress.update(task, description=row.key)
            try:
                verdict = tune(code, row, measure=measure, device=device, step=lambda: progress.advance(task))
            except TuningError as error:
                errors.append(str(error))
                progress.console.print(Text(f"error: {error}", STYLES["bad"]))
                continue
            verdicts.append(verdict)
            _keep(space.backend, fingerprint, verdict)
            for out in verdict.wrong:
                progress.console.print(Text(f"wrong: {row.key}, {tile_text(out.tile)}: {out.reason}", STYLES["bad"]))
    if as_json:
        content = _space_json(space) | {"path": str(path), "fingerprint": fingerprint, "errors": errors}
        typer.echo(json.dumps(content | {"rows": [verdict_json(verdict) for verdict in verdicts]}, indent=2))
    else:
        show(verdicts_view(verdicts, errors, path))
    if errors or any(verdict.wrong for verdict in verdicts):
        raise typer.Exit(1)


def _gpu() -> tuple[torch.device, Measure]:
    if not torch.cuda.is_available():
        complaint = this_machine().complaint
        raise NoGpuError(
            "tiles are measured on a GPU, and torch sees none here"
            + (f" ({complaint})" if complaint else "")
            + "; --dry-run states what would be measured"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    return device, GpuClock(device)


def _keep(backend: str, fingerprint: dict[str, str], verdict: Verdict | None) -> Path:
    tuned = {}
    if verdict is not None:
        tuned[verdict.row.key] = tile_store.Tuned(verdict.now, verdict.seconds_now * 1e6)
    try:
        return tile_store.save(backend, fingerprint, tuned)
    except OSError as error:
        where = tile_store.path_of(backend, fingerprint)
        raise InvalidRequestError(
            f"{where} can't be written ({error.strerror or error}); {tile_store.CACHE_DIR} names another folder"
        ) from error


@contextmanager
def _progress(total: int) -> Iterator[tuple[Progress, Any]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task("", total=total)


def space_view(space: Space) -> RenderableType:
    """What is to be measured."""
    candidates = sum(len(row.space) for row in space.rows)
    head = [
        Fact("backend", f"{space.backend} on {space.arch}"),
        Fact("space", f"{len(space.rows)} rows of the tile table, {candidates} tiles"),
    ]
    table = _table("kernel", "kept under", "tiles", "measured on")
    table.columns[1].no_wrap = True  # a name to be copied
    for row in space.rows:
        shapes = "\n".join(_shape(problem) for problem in row.problems)
        table.add_row(Text(row.kernel, "bold"), Text(row.key), str(len(row.space)), Text(shapes))
    parts: list[RenderableType] = [facts_view(head), Text(), *([table] if space.rows else [])]
    for plan in space.refused:
        reasons = plan.candidate(space.backend).reasons
        parts += [
            Text.assemble((space.backend, "bold"), f" can't run {plan.problem.describe()}:"),
            Padding(reasons_view(reasons), (0, 0, 0, 2), expand=False),
        ]
    return Group(*parts, Text())


def verdicts_view(verdicts: Sequence[Verdict], errors: Sequence[str], path: Path) -> RenderableType:
    """What was found, and where it is kept; faults at the end, where a terminal leaves the eye."""
    table = _table("kept under", "tile before", "tile now", "µs before", "µs now", "ratio")
    for verdict in verdicts:
        table.add_row(
            Text(verdict.row.key, "bold"),
            _tile(verdict.before),
            _tile(verdict.now) if verdict.changed else Text("the same", STYLES["quiet"]),
            f"{verdict.seconds_before * 1e6:.1f}",
            f"{verdict.seconds_now * 1e6:.1f}",
            Text(f"{verdict.ratio:.2f}", STYLES["good" if verdict.changed else "plain"]),
        )
    lines = [Fact("kept in", str(path))]
    for verdict in verdicts:
        lines += [Fact("skipped", f"{verdict.row.key}: {text}", "quiet") for text in _counted(verdict.failed)]
    for verdict in verdicts:
        for out in verdict.wrong:
            lines.append(Fact("WRONG", f"{verdict.row.key}, {tile_text(out.tile)}: {out.reason}", "bad"))
    lines += [Fact("error", error, "bad") for error in errors]
    return Group(table, Text(), facts_view(lines))


def _counted(failed: Sequence[Dropped]) -> Iterator[str]:
    """A line for each kind of failure: how many, and one of them in full, since the numbers in them differ."""
    kinds = Counter(out.reason.partition(":")[0] for out in failed)
    for kind, count in kinds.most_common():
        example = next(out for out in failed if out.reason.partition(":")[0] == kind)
        yield f"{count} × {kind}, such as {tile_text(example.tile)}: {example.reason}"


def _space_json(space: Space) -> dict[str, Any]:
    return {
        "backend": space.backend,
        "arch": space.arch,
        "rows": [
            {
                "kernel": row.kernel,
                "key": row.key,
                "problems": [problem.describe() for problem in row.problems],
                "space": [dict(tile) for tile in row.space],
            }
            for row in space.rows
        ],
        "refused": [
            {
                "problem": plan.problem.describe(),
                "reasons": [reason.to_json() for reason in plan.candidate(space.backend).reasons],
            }
            for plan in space.refused
        ],
    }


def _shape(problem: Problem) -> str:
    grad = "with gradients" if problem.needs_grad else "forward only"
    heads = f"Hq{problem.heads_q}" + (f" Hkv{problem.heads_kv}" if problem.heads_kv != problem.heads_q else "")
    words = [str(problem.band)]
    if problem.attn_mask:
        words.append(f"{problem.attn_mask} mask")
    if problem.alibi:
        words.append("ALiBi")
    if problem.softcap is not None:
        words.append(f"softcap {problem.softcap}")
    if problem.dropout_p:
        words.append(f"dropout {problem.dropout_p}")
    return f"B{problem.batch} {heads} S{problem.seqlen_q} D{problem.head_dim} {', '.join([*words, grad])}"


def _tile(tile: Tile) -> Text:
    return Text("\n".join(f"{name} {value}" for name, value in tile.items()))


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith("µs") or column in ("tiles", "ratio")
        table.add_column(column, overflow="fold", justify="right" if right else "left")
    return table
