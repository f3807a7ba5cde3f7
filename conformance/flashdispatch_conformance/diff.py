"""What changed from one report to another: outcomes, units, z-scores and times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flashdispatch_conformance.document import number
from flashdispatch_conformance.summary import size

MOVED = 0.2
"""A z-score counts as moved from this relative change on."""

NOISE = 0.1
"""z below this in both reports has not moved, whatever its ratio: it is far from every gate."""

SHOWN = 20
"""Lines of one kind in the text form; the JSON form has all."""


@dataclass(frozen=True, slots=True)
class Change:
    """A unit that ended otherwise."""

    unit: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Move:
    """A number of a tensor's z-scores that moved."""

    unit: str
    tensor: str
    gate: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of all units together."""

    wall_s: tuple[float, float]
    compile_s: tuple[float, float]
    run_s: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """From a first report to a second."""

    verdict: tuple[str, str]
    setting: tuple[str, ...]
    """What the two reports are not about alike, such as their devices or versions, in words."""
    outcomes: tuple[Change, ...]
    added: tuple[str, ...]
    """Units that only the second has."""
    removed: tuple[str, ...]
    moved: tuple[Move, ...]
    """The largest first."""
    times: Times

    @property
    def empty(self) -> bool:
        """True when both say the same of every unit; times always differ."""
        return self.verdict[0] == self.verdict[1] and not (self.outcomes or self.added or self.removed or self.moved)

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)

    def text(self) -> str:
        """For a terminal."""
        before, after = self.verdict
        lines = [f"verdict: {before}" if before == after else f"verdict: {before} -> {after}"]
        lines += [f"not alike: {text}" for text in self.setting]
        lines += _listed("outcomes", [f"{one.unit}: {one.before} -> {one.after}" for one in self.outcomes])
        lines += _listed("only in the second", self.added)
        lines += _listed("only in the first", self.removed)
        lines += _listed(
            f"z moved by more than {MOVED:.0%}",
            [f"{one.unit} {one.tensor} {one.gate}: {one.before:.3g} -> {one.after:.3g}" for one in self.moved],
        )
        for name, (first, second) in asdict(self.times).items():
            lines.append(f"{name.removesuffix('_s')} time: {first:.3g} s -> {second:.3g} s")
        return "\n".join(lines)


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> Diff:
    """From report `a` to report `b`. Both must have the form of a report (see `verify`)."""
    old = {entry["id"]: entry for entry in a["cases"]}
    new = {entry["id"]: entry for entry in b["cases"]}
    both = [unit for unit in old if unit in new]
    moved = [move for unit in both for move in _moves(old[unit], new[unit])]
    return Diff(
        verdict=(a["summary"]["verdict"], b["summary"]["verdict"]),
        setting=tuple(_setting(a, b)),
        outcomes=tuple(
            Change(unit, _said(old[unit]), _said(new[unit])) for unit in both if _said(old[unit]) != _said(new[unit])
        ),
        added=tuple(unit for unit in new if unit not in old),
        removed=tuple(unit for unit in old if unit not in new),
        moved=tuple(sorted(moved, key=lambda move: -_ratio(move.before, move.after))),
        times=Times(
            *((number(a["timings"][name]), number(b["timings"][name])) for name in ("wall_s", "compile_s", "run_s"))
        ),
    )


_SETTING = (
    ("backend", "name"), ("backend", "version"), ("backend", "source_sha256"), ("backend", "languages"),
    ("device", "name"), ("device", "arch"), ("device", "driver"), ("suite", "version"), ("suite", "tier"),
    ("suite", "seed"), ("suite", "gates"), ("host", "versions"),
)  # fmt: skip


def _setting(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for block, name in _SETTING:
        before, after = a[block][name], b[block][name]
        if isinstance(before, dict) and isinstance(after, dict):
            for key in sorted({*before, *after}):
                if before.get(key) != after.get(key):
                    yield f"{key} {before.get(key, 'missing')} -> {after.get(key, 'missing')}"
        elif before != after:
            yield f"{block} {name} {before} -> {after}"


def _said(entry: Mapping[str, Any]) -> str:
    return f"{entry['outcome']} ({entry['not_run']})" if "not_run" in entry else str(entry["outcome"])


def _moves(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Move]:
    for name, tensor in before.get("tensors", {}).items():
        other = after.get("tensors", {}).get(name)
        if other is None:
            continue
        for gate in ("rms", "row", "max", "bias"):
            first, second = number(tensor[gate]), number(other[gate])
            if max(size(first), size(second)) >= NOISE and _ratio(first, second) > MOVED:
                yield Move(before["id"], name, gate, first, second)


def _ratio(before: float, after: float) -> float:
    """The change relative to the larger of the two; 0 for two that are not finite alike."""
    if str(before) == str(after):
        return 0.0
    change = abs(after - before) / max(size(before), size(after))
    return 1.0 if math.isnan(change) else change  # NaN on one side, or two infinities


def _listed(title: str, items: tuple[str, ...] | list[str]) -> list[str]:
    if not items:
        return []
    lines = [f"{title}: {len(items)}", *(f"  {item}" for item in items[:SHOWN])]
    return lines if len(items) <= SHOWN else [*lines, f"  and {len(items) - SHOWN} more"]
