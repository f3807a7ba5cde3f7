"""The suite's own test: it must pass what is right, and find what is wrong by the gate that is there for it.

The honest emulation of FlashAttention-2 has to be conformant on every unit of `units`, in several tile sizes; and every
mutant has to be flagged on the same units by the finding that it names. A survivor, or a mutant that only something
else flags, is a failure of the suite. It needs no GPU.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

import flashdispatch
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.case_check import check_case
from flashdispatch_conformance.catalogue import BY_ID
from flashdispatch_conformance.check import ALL_DTYPES, BF16, F32, Check, Unit
from flashdispatch_conformance.emulation import Emulation, LargeTiles, NarrowTiles, spec
from flashdispatch_conformance.mutants import MUTANTS, ONLY_ON_GPU, Mutant
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target

NAMED: tuple[str, ...] = (
    "named/length_1", "named/length_63", "named/length_64", "named/length_65", "named/no_keys", "named/cross_wide",
    "named/cross_tall", "named/keys_200_minus_120", "named/causal_wide", "named/causal_wide_top_left",
    "named/causal_tall", "named/d40", "named/d63", "named/d64_dv128", "named/gqa_8_2", "named/window_63",
    "named/window_64", "named/mask_bool_keys", "named/mask_bool_empty_rows", "named/mask_float_grad",
    "named/mask_float32_shared_grad", "named/mask_float_band", "named/mask_float_finfo_min_row", "named/lens_causal",
    "named/lens_kv_only", "named/alibi_causal", "named/softcap_peaked", "named/sinks_window_gqa",
    "named/sinks_empty_rows", "named/dropout", "named/dropout_lens_gqa", "named/scale_negative", "named/scale_one",
    "named/peaked", "named/all_equal", "named/lse_gradient", "named/forward_only", "named/deterministic",
    "named/view_transposed", "named/dout_every_other", "named/bhsd", "named/everything",
)  # fmt: skip
"""Cases that are run in every dtype, by id: every feature, and the first of every mutant."""

OTHERS: tuple[str, ...] = (
    "probe/counting_causal", "probe/counting_lens", "probe/counting_65536", "probe/address_gqa", "probe/integer_causal",
    "probe/zeros", "property/m02_shifted_keys", "property/m06_repeated_heads", "property/m08_causal_prefix",
    "property/m13_equal_keys", "property/m14_doubled_keys", "condition/second_shape", "condition/repeats",
)  # fmt: skip
"""Probes, properties and conditions that are run in bfloat16, by id."""

LONG: tuple[Case, ...] = (
    Case(
        id="selftest/keys_8192",
        why="a sum over keys so long that a low-precision accumulator shows",
        heads=(1, 1),
        seqlens=(8, 8192),
    ),
    Case(
        id="selftest/queries_8192",
        why="sums over queries so long that a low-precision accumulator of dK and dV shows",
        heads=(1, 1),
        seqlens=(8192, 8),
    ),
)
"""Cases of the self-test alone, run in bfloat16 and float32."""

HONEST: Mapping[str, type[Emulation]] = {
    "fa2_emulation": Emulation,
    "fa2_emulation_narrow": NarrowTiles,
    "fa2_emulation_large": LargeTiles,
}
"""The emulations that must be conformant, by the name they are registered under."""

Progress = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and what comes next."""

KINDS: Mapping[str, str] = {
    r"not bitwise (repeatable|that of the first)|is another one when": "repeatable",
    r"^inputs were written to": "inputs written",
    r"has (shape|dtype|device|strides|requires_grad)": "form",
    r"^the core took": "problem",
    r"refus|is not declared": "refusal",
    r"^backend \w+ returned": "contract",
}
"""What a message that is about no single tensor's values says, by how it reads."""


def units() -> tuple[Unit, ...]:
    """What everything is run on."""
    long = tuple(Check(id=case.id, why=case.why, run=partial(check_case, case)) for case in LONG)
    return (
        *(Unit(BY_ID[name], dtype) for name in NAMED for dtype in ALL_DTYPES),
        *(Unit(check, dtype) for check in long for dtype in (BF16, F32)),
        *(Unit(BY_ID[name], BF16) for name in OTHERS),
    )


def findings(result: Result) -> frozenset[str]:
    """What a result holds against a backend, in a small vocabulary.

    ``"<tensor>: <gate>"`` for a gate of `tolerance` that a tensor breaks (``"lse: max"``, ``"dq: finite"``); a word of
    `KINDS`; ``"raises"`` when the backend raised; and for any other message, as probes have them, the id of the check.
    """
    found = {f"{name.split()[0]}: {failure.gate}" for name, z in result.stats.items() for failure in z.failures}
    broken = [failure.message for z in result.stats.values() for failure in z.failures]
    if result.outcome == "error":
        return frozenset(found | {"raises"})
    for message in result.messages:
        if any(message.startswith(text) for text in broken):
            continue
        found.add(next((kind for pattern, kind in KINDS.items() if re.search(pattern, message)), result.check))
    return frozenset(found)


def gate_of(finding: str) -> str:
    """The gate of a finding, whatever tensor broke it: ``"lse: max"`` is ``"max"``."""
    return finding.rpartition(": ")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """An emulation that must be conformant."""

    name: str
    units: int
    """How many were run."""
    broken: tuple[str, ...]
    """Reports of the units that it did not pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trialled:
    """What came of one mutant."""

    mutant: Mutant
    units: int
    """How many were run: up to the first that has the named finding."""
    flagged: Mapping[str, tuple[str, ...]]
    """Findings by unit, of the units that had some."""

    @property
    def found(self) -> frozenset[str]:
        """All findings."""
        return frozenset(finding for each in self.flagged.values() for finding in each)

    @property
    def outcome(self) -> Literal["killed", "by another gate", "survived"]:
        """Whether the named finding was made, another one, or none."""
        if self.mutant.finding in self.found:
            return "killed"
        return "by another gate" if self.flagged else "survived"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCount:
    """What a gate is worth."""

    gate: str
    named: int
    """Mutants that name it and that it killed."""
    kills: int
    """Mutants that it flagged at all, on the units that were run."""
    alone: tuple[str, ...]
    """Those among them that no other gate flagged there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestReport:
    """The suite's own test."""

    honest: tuple[Honest, ...]
    mutants: tuple[Trialled, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Everything honest passed, and every mutant was flagged by its named finding."""
        honest = bool(self.honest) and not any(each.broken for each in self.honest)
        return honest and bool(self.mutants) and all(each.outcome == "killed" for each in self.mutants)

    def gates(self) -> tuple[GateCount, ...]:
        """What each gate has killed, the strongest first."""
        by_mutant = {each.mutant.name: {gate_of(finding) for finding in each.found} for each in self.mutants}
        named = [gate_of(each.mutant.finding) for each in self.mutants if each.outcome == "killed"]
        counts = [
            GateCount(
                gate=gate,
                named=named.count(gate),
                kills=sum(gate in gates for gates in by_mutant.values()),
                alone=tuple(name for name, gates in by_mutant.items() if gates == {gate}),
            )
            for gate in sorted({gate for gates in by_mutant.values() for gate in gates})
        ]
        return tuple(sorted(counts, key=lambda count: -count.kills))

    def table(self) -> str:
        """The report as text for a terminal or a log, 120 columns wide."""
        from rich.console import Console  # loaded where a table is asked for
        from rich.table import Table

        honest = Table("emulation", "units", "not passed", title="Honest: must pass", title_justify="left")
        for fair in self.honest:
            honest.add_row(fair.name, str(fair.units), str(len(fair.broken)))
        mutants = Table("mutant", "by", "on", "outcome", title="Mutants: must be flagged", title_justify="left")
        for each in self.mutants:
            unit = next((unit for unit, found in each.flagged.items() if each.mutant.finding in found), "")
            mutants.add_row(each.mutant.name, each.mutant.finding, unit, each.outcome)
        for missing in ONLY_ON_GPU:
            mutants.add_row(missing.name, "", "", "not run")
        gates = Table("gate", "named by", "kills", "kills alone", title="Gates", title_justify="left")
        for count in self.gates():
            gates.add_row(count.gate, str(count.named), str(count.kills), ", ".join(count.alone) or "none")
        console = Console(file=io.StringIO(), width=120, record=True)
        console.print(honest, mutants, gates, sep="\n", end="")
        return "\n".join((console.export_text(), *self._notes()))

    def _notes(self) -> Iterator[str]:
        """What the table has no room for, and the verdict."""
        for fair in self.honest:
            yield from fair.broken
        for each in self.mutants:
            if each.outcome != "killed":
                seen = ", ".join(sorted(each.found)) or f"nothing on {each.units} units"
                yield f"{each.mutant.name} must be flagged by {each.mutant.finding!r} but was by: {seen}"
        for missing in ONLY_ON_GPU:
            yield f"{missing.name} is not run: {missing.reason}"
        yield f"self-test {'ok' if self.ok else 'FAILED'}: {len(self.mutants)} mutants in {self.seconds:.0f} s"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ok": self.ok,
            "seconds": self.seconds,
            "honest": [{"name": fair.name, "units": fair.units, "broken": list(fair.broken)} for fair in self.honest],
            "mutants": [
                {
                    "name": each.mutant.name,
                    "fault": each.mutant.fault,
                    "named": each.mutant.finding,
                    "outcome": each.outcome,
                    "units": each.units,
                    "flagged": {unit: list(found) for unit, found in each.flagged.items()},
                }
                for each in self.mutants
            ],
            "not_run": [{"name": each.name, "fault": each.fault, "reason": each.reason} for each in ONLY_ON_GPU],
            "gates": [
                {"gate": count.gate, "named": count.named, "kills": count.kills, "alone": list(count.alone)}
                for count in self.gates()
            ],
        }


def run_selftest(
    progress: Progress | None = None,
    *,
    mutants: Sequence[Mutant] = MUTANTS,
    honest: Mapping[str, type[Emulation]] = HONEST,
    on: Sequence[Unit] | None = None,
) -> SelftestReport:
    """Runs the self-test on this machine's CPU, in one thread.

    `progress` hears of each emulation and mutant before it is run. Raises ValueError when a mutant names a first unit
    that is not among `on` (None: `units`), PluginError when one of the names is taken.
    """
    start, chosen, done = time.perf_counter(), units() if on is None else tuple(on), 0
    total = len(honest) + len(mutants)
    known = {unit.id for unit in chosen}
    for mutant in mutants:
        if mutant.first not in known:
            raise ValueError(f"mutant {mutant.name} is to be run on {mutant.first} first, which is not among the units")

    def step(name: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, total, name)
        done += 1

    fair, trialled = [], []
    with _one_thread():
        for name, backend in honest.items():
            step(name)
            fair.append(_run_honest(name, backend, chosen))
        for mutant in mutants:
            step(mutant.name)
            trialled.append(_run_mutant(mutant, chosen))
    if progress is not None:
        progress(total, total, "")
    return SelftestReport(honest=tuple(fair), mutants=tuple(trialled), seconds=time.perf_counter() - start)


def _run_honest(name: str, backend: type[Emulation], on: Iterable[Unit]) -> Honest:
    with _registered(name, backend):
        results = [_run(unit, name) for unit in on]
    broken = tuple(result.report() for result in results if result.outcome != "pass" or result.refused)
    return Honest(name=name, units=len(results), broken=broken)


def _run_mutant(mutant: Mutant, on: Sequence[Unit]) -> Trialled:
    """Runs the mutant until its named finding is made, its first unit first."""
    by_id = {unit.id: unit for unit in on}
    first = by_id.pop(mutant.first)
    flagged: dict[str, tuple[str, ...]] = {}
    count = 0
    name = f"mutant_{mutant.name}"
    with _registered(name, mutant.backend):
        for unit in (first, *by_id.values()):
            found = findings(_run(unit, name))
            count += 1
            if found:
                flagged[unit.id] = tuple(sorted(found))
            if mutant.finding in found:
                break
    return Trialled(mutant=mutant, units=count, flagged=flagged)


def _run(unit: Unit, backend: str) -> Result:
    return unit.check.run(Target(backend=backend, dtype=unit.dtype, device=torch.device("cpu")))


@contextmanager
def _registered(name: str, backend: type[Emulation]) -> Iterator[None]:
    flashdispatch.register(spec(name, backend))
    try:
        yield
    finally:
        flashdispatch.unregister(name)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors are so small that more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
