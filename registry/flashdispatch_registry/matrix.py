"""The support table: what every backend declares, generated from its `Support`, so that no page can promise more.

Rows are features, columns are backends. A row is a label and the function that reads its cell from a `BackendSpec`; a
test holds that every field of `Support` is read by some row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashdispatch_registry.backend import BackendSpec
from flashdispatch_registry.masks import Align
from flashdispatch_registry.problem import DTYPE_NAMES, MaskKind
from flashdispatch_registry.select import Entry

Cell = Callable[[BackendSpec], str]

NO = "–"
"""A feature that is not declared. The core never gives such a problem to the backend."""


def _yes(flag: bool) -> str:
    return "yes" if flag else NO


def _flag(field: str) -> Cell:
    """A cell for a yes-or-no field of `Support`."""
    return lambda spec: _yes(getattr(spec.support, field))


def _causal(align: Align) -> Cell:
    return lambda spec: _yes(align in spec.support.causal)


def _mask(kind: MaskKind) -> Cell:
    return lambda spec: _yes(kind in spec.support.attn_mask)


def _dtypes(spec: BackendSpec) -> str:
    dtypes = sorted(spec.support.dtypes, key=lambda dtype: (dtype.itemsize, str(dtype)))
    return ", ".join(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes)


def _head_dims(spec: BackendSpec) -> str:
    return str(spec.support.head_dims)


def _head_dims_v(spec: BackendSpec) -> str:
    return NO if spec.support.head_dims_v is None else str(spec.support.head_dims_v)


def _backward(spec: BackendSpec) -> str:
    if spec.support.backward and spec.support.backward_head_dims is not None:
        return f"head dims {spec.support.backward_head_dims}"
    return _yes(spec.support.backward)


def _devices(spec: BackendSpec) -> str:
    return ", ".join(sorted(spec.support.devices))


def _oldest_arch(spec: BackendSpec) -> str:
    return spec.support.min_arch or "any"


def _impossible(spec: BackendSpec) -> str:
    return "; ".join(f"{arch}: {why}" for arch, why in sorted(spec.support.impossible.items())) or "none"


ROWS: tuple[tuple[str, Cell], ...] = (
    ("dtypes", _dtypes),
    ("head dims", _head_dims),
    ("Dv ≠ D", _head_dims_v),
    ("causal, bottom-right", _causal("bottom_right")),
    ("causal, top-left", _causal("top_left")),
    ("window", _flag("window")),
    ("bool attn_mask", _mask("bool")),
    ("float attn_mask", _mask("float")),
    ("float attn_mask gradient", _flag("attn_mask_grad")),
    ("ALiBi", _flag("alibi")),
    ("sinks", _flag("sinks")),
    ("sinks gradient", _flag("sinks_grad")),
    ("q_lens, kv_lens", _flag("lengths")),
    ("softcap", _flag("softcap")),
    ("dropout", _flag("dropout")),
    ("GQA", _flag("gqa")),
    ("LSE", _flag("lse")),
    ("LSE gradient", _flag("lse_grad")),
    ("backward", _backward),
    ("deterministic backward", _flag("deterministic")),
    ("devices", _devices),
    ("oldest GPU architecture", _oldest_arch),
    ("impossible on", _impossible),
    ("extra memory", lambda spec: spec.memory),
    ("fused", lambda spec: "yes" if spec.fused else "no"),
    ("numerics", lambda spec: spec.numerics.replace("_", " ")),
    ("needs", lambda spec: ", ".join(spec.requires).replace(" | ", " or ") or "nothing more"),
)


def matrix_rows(entries: Iterable[Entry]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table. Entries whose plugin gave no spec declare nothing and have no column."""
    specs = _specs(entries)
    header = ("feature", *(spec.name for spec in specs))
    return header, [(label, *(cell(spec) for spec in specs)) for label, cell in ROWS]


def matrix_markdown(entries: Iterable[Entry]) -> str:
    """The table in Markdown, columns padded so that the source reads well too. No trailing newline."""
    (_, *names), rows = matrix_rows(entries)
    header = ("", *(f"`{name}`" for name in names))
    table = [tuple(map(_markdown_cell, row)) for row in (header, *rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in table
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def matrix_json(entries: Iterable[Entry]) -> dict[str, dict[str, str]]:
    """Backend -> feature -> what it declares, in the words of the table."""
    header, rows = matrix_rows(entries)
    return {name: {row[0]: row[at] for row in rows} for at, name in enumerate(header) if at}


def matrix_view(entries: Iterable[Entry]) -> RenderableType:
    """The table as a rich renderable, and under it who has no column."""
    entries = tuple(entries)
    header, rows = matrix_rows(entries)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for at, name in enumerate(header):
        table.add_column(Text(name), style="" if at else "dim", overflow="fold", min_width=len(name) if at else None)
    for label, *cells in rows:
        table.add_row(
            Text(label), *(Text(cell, "dim" if cell == NO else "green" if cell == "yes" else "") for cell in cells)
        )
    silent = [entry.name for entry in entries if entry.spec is None]
    if not silent:
        return table
    return Group(table, Text(), Text(f"{', '.join(silent)}: not loaded, see `flashdispatch doctor`", "yellow"))


def _specs(entries: Iterable[Entry]) -> Sequence[BackendSpec]:
    return [entry.spec for entry in entries if entry.spec is not None]


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
