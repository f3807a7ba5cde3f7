"""What came of the self-test: which mutants were flagged and by what, and what each gate is worth."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flashdispatch_conformance.mutants import ONLY_ON_GPU, Mutant


def gate_of(finding: str) -> str:
    """The gate of a finding, whatever tensor broke it: ``"lse: max"`` is ``"max"``."""
    return finding.rpartition(": ")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class HonestResult:
    """An emulation that must be conformant."""

    name: str
    units: int
    """How many were run."""
    broken: tuple[str, ...]
    """Reports of the units that it did not pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantResult:
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

    honest: tuple[HonestResult, ...]
    mutants: tuple[MutantResult, ...]
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
