"""The pairwise cases: a covering array over everything that a problem is made of, loaded from a committed file.

Every two levels of two axes meet in a case, and every three of dtype, head dims and mask. Faults of combinations mostly
need two things at once (Kuhn, Wallace and Gallo, "Software fault interactions", IEEE TSE 30(6), 2004), and so some 260
cases stand for 10^12. What may not meet is ruled out by the contract (`case.contradictions`) and by `BUDGET`,
never by what some backend can run.

The list is generated once and committed, so that an id keeps its meaning: ``python -m
flashdispatch_conformance.pairwise`` writes it anew, which is right only with a new version of the suite.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flashdispatch_conformance.case import Case, Mask, contradictions

FILE = Path(__file__).with_name("pairwise.jsonl")

BUDGET = 1_400_000
"""Most pairs of query and key in a case, over batch and heads: what the float64 truth works out in some 0.3 s."""
HEADS = 64
"""Most (batch, head) pairs with a truth of their own, for the same reason."""

Row = dict[str, str]
"""The level of each axis, by name."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that varies: its levels by name, each the fields of the case that it sets. The first level is plain."""

    name: str
    levels: Mapping[str, Mapping[str, Any]]

    @property
    def plain(self) -> str:
        """The level that goes with everything else."""
        return next(iter(self.levels))


def _axis(name: str, levels: Mapping[str, Mapping[str, Any]]) -> Axis:
    return Axis(name, MappingProxyType(dict(levels)))


def _lengths(seqlen_q: int, seqlen_k: int) -> tuple[str, dict[str, Any]]:
    return f"({seqlen_q}, {seqlen_k})", {"seqlens": (seqlen_q, seqlen_k)}


def _views(**views: str) -> dict[str, Any]:
    return {f"{tensor}_view": view for tensor, view in views.items()}


AXES: tuple[Axis, ...] = (
    _axis("dtype", {name: {"dtypes": (name,)} for name in ("bfloat16", "float16", "float32")}),
    _axis(
        "dims",
        {
            f"D {d}" if d == dv else f"D {d}, Dv {dv}": {"dims": (d, dv)}
            for d, dv in ((64, 64), (128, 128), (16, 16), (40, 40), (96, 96), (256, 256), (192, 128), (64, 128))
        },
    ),
    _axis(
        "mask",
        {
            "no mask": {},
            "causal": {"causal": True},
            "top-left causal": {"causal": "top_left"},
            "window": {"window": (20, 9)},
            "causal window": {"causal": True, "window": (63, None)},
            "bool mask": {"mask": "bool"},
            "float mask": {"mask": "float"},
            "causal and float mask": {"causal": True, "mask": "float"},
            "window and bool mask": {"window": (40, 40), "mask": "bool"},
        },
    ),
    _axis(
        "mask form",
        {
            "one for all heads": {"mask_shape": "B1qk"},
            "a full one": {"mask_shape": "BHqk"},
            "one for the batch, with empty rows": {"mask_shape": "1Hqk", "mask_pattern": "empty_rows"},
            "of keys": {"mask_shape": "B11k"},
            "of rows": {"mask_shape": "1Hq1"},
            "of two dims that hides nothing": {"mask_shape": "qk", "mask_pattern": "all_true"},
            "float32 in padded rows": {"mask_shape": "11qk", "mask_view": "padded_rows", "mask_float32": True},
            "expanded over keys": {"mask_shape": "B1qk", "mask_view": "expanded"},
        },
    ),
    _axis(
        "lengths",
        dict(
            itertools.starmap(
                _lengths,
                (
                    (33, 65),
                    (1, 1),
                    (1, 239),
                    (2, 3),
                    (15, 17),
                    (16, 16),
                    (31, 33),
                    (63, 64),
                    (64, 63),
                    (65, 129),
                    (127, 128),
                    (129, 31),
                    (203, 113),
                    (113, 203),
                    (257, 255),
                    (1025, 1023),
                    (16, 8193),
                ),
            )
        ),
    ),
    _axis(
        "heads",
        {f"heads {q}/{kv}": {"heads": (q, kv)} for q, kv in ((1, 1), (3, 3), (4, 2), (8, 1), (6, 3), (32, 8))},
    ),
    _axis(
        "batch",
        {**{f"batch {count}": {"batch": count} for count in (1, 2, 5)}, "batch 60": {"batch": 60, "distinct": 5}},
    ),
    _axis("layout", {"bshd": {"layout": "bshd"}, "bhsd": {"layout": "bhsd"}}),
    _axis(
        "inputs",
        {
            "contiguous": {},
            "transposed": _views(q="transposed", k="transposed", v="transposed"),
            "slices of packed qkv": _views(q="sliced", k="sliced", v="sliced"),
            "padded and unaligned": _views(q="padded_rows", k="unaligned", v="padded_rows"),
            "unaligned and every other": _views(q="unaligned", k="every_other", v="unaligned"),
            "expanded": _views(q="expanded_batch", k="expanded_heads", v="expanded_batch"),
            "last dim strided": _views(q="last_dim_strided", v="last_dim_strided"),
            "sequence first": _views(q="sequence_first", k="sequence_first", v="sequence_first"),
        },
    ),
    _axis(
        "dout",
        {
            f"dout {view}": _views(dout=view)
            for view in (
                "contiguous",
                "transposed",
                "sliced",
                "every_other",
                "unaligned",
                "expanded_all",
                "last_dim_strided",
            )
        },
    ),
    _axis(
        "values",
        {
            name: {"values": name}
            for name in (
                "normal",
                "shifted_v",
                "peaked",
                "logits_minus_120",
                "all_equal",
                "needle",
                "subnormal",
                "outliers",
                "zeros",
                "uniform",
            )
        },
    ),
    _axis(
        "scale",
        {
            "default scale": {},
            "scale 1/D": {"scale": "1/D"},
            "scale 0.3": {"scale": 0.3},
            "negative scale": {"scale": -0.125},
            "scale 0": {"scale": 0.0},
        },
    ),
    _axis(
        "extra",
        {
            "nothing more": {},
            "softcap": {"softcap": 15.0},
            "ALiBi": {"alibi": "heads"},
            "ALiBi per sequence": {"alibi": "batch"},
            "sinks": {"sinks": True},
            "dropout": {"dropout_p": 0.17, "dropout_seed": (2**33 + 5, 11)},
        },
    ),
    _axis(
        "padding",
        {
            "all full": {},
            "q_lens and kv_lens": {"q_lens": "some", "kv_lens": "some"},
            "q_lens": {"q_lens": "some"},
            "kv_lens": {"kv_lens": "some"},
        },
    ),
    _axis(
        "gradients",
        {
            "all gradients": {"grads": ("q", "k", "v"), "all_grads": True},
            "forward only": {"grads": ()},
            "with dlse": {"grads": ("q", "k", "v"), "dlse": True, "all_grads": True},
            "dlse alone": {"grads": ("q", "k"), "dout": False, "dlse": True},
            "dK and dV": {"grads": ("k", "v")},
            "dQ alone": {"grads": ("q",), "dlse": True},
        },
    ),
    _axis("order", {"any order": {}, "deterministic": {"deterministic": True}}),
)
BY_NAME: Mapping[str, Axis] = MappingProxyType({axis.name: axis for axis in AXES})
MASK_FORM = BY_NAME["mask form"]

TRIPLE = ("dtype", "dims", "mask")
"""Axes of which every three levels meet."""

LONG: tuple[Row, ...] = tuple(
    {"dtype": dtype, "lengths": "(16, 8193)", "values": values, "dims": "D 64", "mask": "no mask"}
    for dtype in BY_NAME["dtype"].levels
    for values in ("normal", "shifted_v")
)
"""First rows: long sums show an accumulator of low precision by its spread, and by its bias where all have one sign."""


def plain_row(**chosen: str) -> Row:
    """A row with `chosen` levels, and the plain ones everywhere else."""
    return {axis.name: axis.plain for axis in AXES} | chosen


def case_of(row: Row, id: str) -> Case:  # noqa: A002  the field's name
    """The case that a row describes."""
    chosen: dict[str, Any] = {}
    for name, level in row.items():
        chosen |= BY_NAME[name].levels[level]
    batch, heads, (seqlen_q, seqlen_k) = chosen["batch"], chosen["heads"], chosen["seqlens"]
    form = {name: chosen.pop(f"mask_{name}", None) for name in ("shape", "pattern", "view", "float32")}
    all_grads = chosen.pop("all_grads", False) and "distinct" not in chosen
    if kind := chosen.pop("mask", None):
        sizes = {"B": batch, "H": heads[0], "q": seqlen_q, "k": seqlen_k, "1": 1}
        chosen["mask"] = Mask(
            shape=tuple(sizes[letter] for letter in form["shape"]),
            kind="float32" if kind == "float" and form["float32"] else kind,
            pattern=form["pattern"] or "random",
            view=form["view"] or "contiguous",
            grad=all_grads and kind == "float",
        )
    if all_grads and chosen.get("sinks"):
        chosen["grads"] = (*chosen["grads"], "sinks")
    if chosen["grads"]:
        chosen["calls"] = ("gradients", "lse")  # one forward kernel for both; that of the output alone is another
    if chosen.get("scale") == "1/D":
        chosen["scale"] = 1.0 / chosen["dims"][0]
    for name, length, shift in (("q_lens", seqlen_q, 0), ("kv_lens", seqlen_k, 2)):
        if name in chosen:
            some = (length, length // 2 + 1, 0, 1, length - 1)  # the first is full: an expanded tensor has its values
            chosen[name] = tuple(some[(b + shift) % 5 if b else 0] for b in (b % 5 for b in range(batch)))
    return Case(id=id, why=why_of(row), **chosen)


def why_of(row: Row) -> str:
    """What is not plain about a row."""
    has_mask = "mask" in BY_NAME["mask"].levels[row["mask"]]
    parts: list[str] = []
    for axis in AXES:
        level = row[axis.name]
        if axis.name == "mask form":
            if has_mask:
                parts[-1] += f" {level}" if level.startswith("of") else f" ({level})"
        elif axis.name in ("dtype", "dims", "lengths") or level != axis.plain:
            parts.append({"lengths": f"lengths {level}", "inputs": f"inputs {level}"}.get(axis.name, level))
    return ", ".join(parts)


def allowed(row: Row) -> bool:
    """Whether a whole row is a valid problem within `BUDGET`, and says nothing twice."""
    if "mask" not in BY_NAME["mask"].levels[row["mask"]] and row["mask form"] != MASK_FORM.plain:
        return False  # the form of no mask
    if row["gradients"] == "forward only" and (
        row["dout"] != BY_NAME["dout"].plain or row["order"] != BY_NAME["order"].plain
    ):
        return False  # the view of no dout, the order of no sum
    case = case_of(row, "pairwise/row")
    heads = case.sequences * case.heads[0]
    return heads <= HEADS and heads * case.seqlens[0] * case.seqlens[1] <= BUDGET and not contradictions(case)


Chosen = frozenset[tuple[str, str]]
"""Some axes with a level each."""


def completed(chosen: Mapping[str, str]) -> Row | None:
    """The allowed row with `chosen` and else plain levels; a mask's form brings a mask. None when there is none."""
    needs_mask = "mask" not in chosen and chosen.get("mask form", MASK_FORM.plain) != MASK_FORM.plain
    row = plain_row(**({"mask": "float mask"} if needs_mask else {}), **chosen)
    return row if allowed(row) else None


def goals() -> list[Chosen]:
    """Every pair of levels, and every three of `TRIPLE`, that can meet: those that can beside plain levels."""

    def together(names: Iterable[str]) -> Iterator[Chosen]:
        axes = [BY_NAME[name] for name in names]
        for levels in itertools.product(*(axis.levels for axis in axes)):
            chosen = dict(zip((axis.name for axis in axes), levels, strict=True))
            if completed(chosen):
                yield frozenset(chosen.items())

    pairs = itertools.combinations((axis.name for axis in AXES), 2)
    return [goal for names in (TRIPLE, *pairs) for goal in together(names)]


@dataclass
class _Progress:
    """Goals that no row meets yet."""

    open: dict[Chosen, None]
    """An ordered set."""
    of_item: dict[tuple[str, str], set[Chosen]] = field(default_factory=dict)
    """The same, by each (axis, level) in them."""

    def __post_init__(self) -> None:
        for goal in self.open:
            for item in goal:
                self.of_item.setdefault(item, set()).add(goal)

    def gain(self, chosen: set[tuple[str, str]], item: tuple[str, str]) -> int:
        """Goals that `item` completes, beside what is chosen."""
        return sum(goal - {item} <= chosen for goal in self.of_item.get(item, ()))

    def count(self, item: tuple[str, str]) -> int:
        return len(self.of_item.get(item, ()))

    def meet(self, row: Row) -> None:
        items = set(row.items())
        for goal in [goal for goal in self.open if goal <= items]:
            del self.open[goal]
            for item in goal:
                self.of_item[item].discard(goal)


def generate() -> list[Row]:
    """The rows, greedily: each starts from the first open goal and takes, axis by axis, the level that completes most.

    Nothing is drawn at random, and ties go to the level with more open goals, then to the earlier one. An axis where no
    level completes anything stays plain, so that no more kinds of kernel are compiled than the goals need.
    """
    progress = _Progress(dict.fromkeys(goals()))
    rows = [_filled(start, progress) for start in LONG]
    while progress.open:
        rows.append(_filled(dict(sorted(next(iter(progress.open)))), progress))
    return rows


def _filled(start: Row, progress: _Progress) -> Row:
    """`start` with a level for every axis. What it meets is no longer open."""
    fixed = dict(start)
    while len(fixed) < len(AXES):
        chosen = set(fixed.items())
        best: tuple[tuple[int, int], str, str] | None = None
        for axis in AXES:
            if axis.name in fixed:
                continue
            for level in axis.levels:
                item = (axis.name, level)
                gain = progress.gain(chosen, item)
                score = (gain, progress.count(item))
                if gain and (best is None or score > best[0]) and completed({**fixed, axis.name: level}):
                    best = (score, *item)
        if best is None:  # nothing left to gain
            break
        fixed[best[1]] = best[2]
    row = completed(fixed)
    if row is None:
        raise ValueError(f"no case has all of {fixed}")
    progress.meet(row)
    return row


def text_of(rows: Iterable[Row]) -> str:
    """The text of the committed file: one case a line."""
    cases = (case_of(row, f"pairwise/{number:03}") for number, row in enumerate(rows))
    return "".join(json.dumps(case.to_json()) + "\n" for case in cases)


PAIRWISE: tuple[Case, ...] = tuple(
    Case.from_json(json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()
)
"""All of them, in the order of the file."""

if __name__ == "__main__":
    FILE.write_text(text_of(generate()), encoding="utf-8")
