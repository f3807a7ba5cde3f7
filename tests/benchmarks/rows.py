"""The row: what every benchmark reports, as one frozen record; JSON lines in and out, and the summary of many rows.

    pytest tests/benchmarks/... --rows rows.jsonl      # adds to that file; --benchmark-json has them as extra_info

`Row` is the only schema. Add a field here rather than a second record elsewhere; what is not understood raises.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from rich import box
from rich.console import Console
from rich.table import Table

Direction = Literal["fwd", "bwd", "host_fwd", "host_fwd_grad", "host_bwd", "fwd_memory", "bwd_memory"]
Unit = Literal["TFLOP/s", "GB/s", "us", "bytes"]

BASELINES = ("sdpa_flash", "sdpa_efficient", "sdpa_default")
"""Whom the geometric means compare with: the first of them that ran. Host times: always `sdpa_default`."""

WIDTH = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One provider on one case in one direction, with everything needed to judge the number later."""

    case: str
    """Stable id, as `Case.id` makes it: ``bf16-B4-H16-S4096-D128-causal``."""
    grid: str
    line: str
    """Where the summary shows it: the line, all of the case but dtype and length (``D128 causal``) ..."""
    column: str
    """... and the column, the length (``S4096``)."""
    dtype: str
    provider: str
    direction: Direction
    value: float
    unit: Unit
    """TFLOP/s (causal counted half, bwd 2.5 x fwd), GB/s, microseconds (host time) or bytes (memory)."""
    median_us: float | None = None
    """Over all iterations of all rounds. None where no time was taken."""
    min_us: float | None = None
    """The smallest median of a round, and the largest."""
    max_us: float | None = None
    rounds: int = 1
    iterations: int = 1
    """Timed calls in all rounds together."""
    late: int = 0
    """Those among them whose time may hold launch cost, because the GPU had caught up with the host. Normally 0."""
    error: float | None = None
    """Relative Frobenius error against float64: of out, or of dq, dk and dv together; first sequence, first KV head."""
    note: str = ""
    """What `auto` chose, and the like."""
    gpu: str = ""
    sm_mhz: float | None = None
    """SM clock, power and temperature under this case's own load."""
    power_w: float | None = None
    temperature_c: float | None = None
    versions: dict[str, str]
    """driver, torch, triton, cuda, cudnn, python."""
    commit: str = ""
    """With ``+changes`` when the tree had any; empty when unknown."""
    command: str = ""
    timestamp: str

    def __post_init__(self) -> None:
        for name, allowed in (("direction", get_args(Direction)), ("unit", get_args(Unit))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Row.{name} is one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        numbers = {name: getattr(self, name) for name in ("value", "median_us", "min_us", "max_us", "error")}
        for name, number in numbers.items():
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise ValueError(f"Row.{name} must be finite and not negative, got {number}")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back to an equal Row."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """Reads what `to_json` wrote. Unknown keys raise ValueError, missing ones TypeError."""
        unknown = set(data).difference(field.name for field in fields(cls))
        if unknown:
            raise ValueError(f"unknown Row fields: {', '.join(sorted(unknown))}")
        return cls(**data)


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a JSON-lines file, so that a run which breaks off keeps what it had measured."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    """All rows of a JSON-lines file."""
    with path.open(encoding="utf-8") as file:
        return [Row.from_json(json.loads(line)) for line in file if line.strip()]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A provider that could not run a case: no row, but never silent."""

    case: str
    direction: str
    provider: str
    reason: str
    broken: bool = False
    """It should have run: one of our own backends raised something other than a refusal, or any result was wrong."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One provider's speed beside the baseline's, over the cases that both ran."""

    dtype: str
    direction: str
    provider: str
    baseline: str
    cases: int
    mean: float
    """Geometric mean of time(baseline) / time(provider): above 1 the provider is faster."""
    lowest: float
    highest: float
    worst_error: float | None


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Geometric means per dtype, direction and provider, in the order in which they were measured."""
    found = []
    for (dtype, direction), group in _grouped(rows, lambda row: (row.dtype, row.direction)).items():
        times = {(row.provider, row.case): row.median_us for row in group if row.median_us}
        names = dict.fromkeys(provider for provider, _ in times)
        wanted = ("sdpa_default",) if direction.startswith("host") else BASELINES
        baseline = next((name for name in wanted if name in names), None)
        if baseline is None:
            continue
        for name in names:
            cases = [case for provider, case in times if provider == name and (baseline, case) in times]
            if not cases:
                continue
            speeds = [times[baseline, case] / times[name, case] for case in cases]
            errors = [row.error for row in group if row.provider == name and row.error is not None]
            mean = math.exp(math.fsum(map(math.log, speeds)) / len(speeds))
            worst = max(errors, default=None)
            found.append(Ratio(dtype, direction, name, baseline, len(cases), mean, min(speeds), max(speeds), worst))
    return found


def summary(rows: Sequence[Row], refusals: Sequence[Refusal] = ()) -> str:
    """The tables of a run as text: geometric means, then values (one line per head dim and mask), then who refused."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=False, color_system=None, highlight=False)
    say = partial(console.print, soft_wrap=True, markup=False)
    for line in _conditions(rows):
        say(line)
    means = ratios(rows)
    if means:
        say("\nspeed beside the baseline (above 1: faster)")
        console.print(_ratio_table(means))
    for (dtype, direction, unit), group in _grouped(rows, lambda row: (row.dtype, row.direction, row.unit)).items():
        columns = sorted({row.column for row in group}, key=lambda text: (len(text), text))
        say(f"{dtype} {direction}, {'MB' if unit == 'bytes' else unit} at {' / '.join(columns)}")
        console.print(_value_table(unit, columns, group))
    late = sum(row.late for row in rows)
    if late:
        say(f"{late} timed calls may hold launch cost: see `late` in the rows")
    alike: dict[tuple[str, str, bool], list[Refusal]] = {}
    for refusal in refusals:
        alike.setdefault((refusal.provider, refusal.reason, refusal.broken), []).append(refusal)
    for (provider, reason, broken), same in alike.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        word = "BROKEN" if broken else "no row"
        say(f"{word}: {provider} on {same[0].case} {same[0].direction}{more}: {reason}")
    return out.getvalue()


def _grouped(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _conditions(rows: Sequence[Row]) -> list[str]:
    """The machine in one line, and the span of its clock and power over the run."""
    lines = [
        ", ".join(text for text in (gpu, *(f"{name} {number}" for name, number in versions)) if text)
        for gpu, versions in dict.fromkeys((row.gpu, tuple(row.versions.items())) for row in rows)
    ]
    for name, unit in (("sm_mhz", "MHz SM clock"), ("power_w", "W"), ("temperature_c", "°C")):
        seen = [value for row in rows if (value := getattr(row, name)) is not None]
        if seen:
            lines.append(f"{min(seen):.0f} to {max(seen):.0f} {unit}")
    return lines


def _ratio_table(means: Sequence[Ratio]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("dtype", "direction", "provider", "baseline"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "geo mean", "lowest", "highest", "worst error"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in means:
        error = "" if r.worst_error is None else f"{r.worst_error:.1e}"
        numbers = (str(r.cases), f"{r.mean:.3f}", f"{r.lowest:.3f}", f"{r.highest:.3f}", error)
        table.add_row(r.dtype, r.direction, r.provider, r.baseline, *numbers)
    return table


def _value_table(unit: str, columns: Sequence[str], rows: Sequence[Row]) -> Table:
    """One line per `Row.line`, one column per provider, and in a cell the values in the order of the lengths."""
    providers = dict.fromkeys(row.provider for row in rows)
    values = {(row.line, row.provider, row.column): row.value for row in rows}
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for name in providers:
        table.add_column(name, justify="right")
    for line in dict.fromkeys(row.line for row in rows):
        cells = [[_number(values.get((line, name, column)), unit) for column in columns] for name in providers]
        table.add_row(line, *(" ".join(cell) for cell in cells))
    return table


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    value = value / 1e6 if unit == "bytes" else value
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
