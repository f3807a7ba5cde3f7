"""One run of the suite on one backend: which units, what is known of them from before, and the report at the end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from flashdispatch_conformance import catalogue, journal, report, runner, surroundings
from flashdispatch_conformance.check import Tier, Unit
from flashdispatch_conformance.document import Document, stem
from flashdispatch_conformance.fuzz_round import is_round, rounds
from flashdispatch_conformance.journal import Journal
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.runner import Settings, Watch
from flashdispatch_conformance.waivers import Waivers
from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.problem import DTYPE_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a tier has, and what options leave of it."""

    tier: Tier
    patterns: tuple[str, ...] = ()
    """Parts of ids, or globs; empty is all."""
    dtypes: frozenset[torch.dtype] | None = None
    """None is all."""
    shard: tuple[int, int] | None = None
    """Which of how many, from 1."""

    def planned(self) -> tuple[Unit, ...]:
        """Everything that the tier has."""
        return catalogue.units(self.tier)

    def units(self) -> tuple[Unit, ...]:
        """What is to be run."""
        found = runner.chosen(self.planned(), self.patterns)
        found = tuple(unit for unit in found if self.dtypes is None or unit.dtype in self.dtypes)
        return runner.shard(found, *self.shard) if self.shard else found

    @property
    def is_filtered(self) -> bool:
        """Whether checks or dtypes were chosen; a shard has some of all."""
        return bool(self.patterns) or self.dtypes is not None

    @property
    def shard_text(self) -> str:
        """``"2/4"``, or empty."""
        return "/".join(map(str, self.shard)) if self.shard else ""


@dataclass(slots=True, kw_only=True)
class Session:
    """One run, from its start to its report."""

    settings: Settings
    selection: Selection
    folder: Path
    """Where journal and report go."""
    command: Sequence[str] = ()
    waivers: Waivers = ()
    fuzz_minutes: float = 0.0
    """How long random cases are run, after all others."""
    started: str = field(default_factory=lambda: _now())
    results: dict[str, Result] = field(default_factory=dict)
    """By unit, in the order in which they came."""

    @property
    def journal_path(self) -> Path:
        """The file that `resume` reads."""
        chosen, arch = self.selection, arch_of(self.settings.device)
        name = stem(self.settings.backend, arch, chosen.tier, selected=chosen.is_filtered, shard=chosen.shard_text)
        return self.folder / f"{name}{journal.SUFFIX}"

    def claimed(self) -> AbstractContextManager[None]:
        """A block in which no other run writes the same files: around all that this one does.

        Raises InvalidRequestError when another run is at it.
        """
        return journal.claim(self.journal_path)

    def resume(self) -> str:
        """Takes over the results of an interrupted run, and says how many, or why there are none to take over."""
        path = self.journal_path
        if not path.exists():
            return f"nothing to resume: there is no {path}"
        try:
            identity, results = journal.read(path)
        except (ValueError, KeyError, TypeError) as error:
            return f"starting anew: {path} can't be read ({error})"
        if different := journal.differences(identity, self.identity()):
            return f"starting anew, since this is another run than the one in {path}: {'; '.join(different)}"
        self.results = {result.id: result for result in results}
        return f"resumed: {len(self.results)} of {len(self.units())} units are in {path}"

    def units(self) -> tuple[Unit, ...]:
        """All that is to be run, in this order."""
        return (*self.selection.units(), *self._rounds())

    def run(self, watch: Watch = runner.nobody) -> Generator[Result]:
        """Runs what has no result yet, writes each to the journal and yields it."""
        with Journal(self.journal_path, self.identity(), tuple(self.results.values())) as log:
            for units in (self.selection.units(), self._rounds()):
                missing = [unit for unit in units if unit.id not in self.results]
                with closing(runner.run(missing, self.settings, watch)) as results:
                    for result in results:
                        self.results[result.id] = result
                        log.add(result)
                        yield result

    def forget(self) -> None:
        """Removes the journal, once the report of a finished run is written."""
        self.journal_path.unlink(missing_ok=True)

    def document(self) -> Document:
        """The report on what there is by now; units without a result are not run."""
        chosen = self.selection
        run = report.Run(
            backend=self.settings.backend,
            device=self.settings.device,
            tier=chosen.tier,
            planned=tuple(unit.id for unit in chosen.planned()),
            selected=tuple(unit.id for unit in chosen.units()),
            started=self.started,
            ended=_now(),
            command=tuple(self.command),
            seed=self.settings.seed,
            shard=chosen.shard_text,
            match=" or ".join(chosen.patterns),
            dtypes=()
            if chosen.dtypes is None
            else tuple(DTYPE_NAMES[dtype] for dtype in DTYPE_NAMES if dtype in chosen.dtypes),
            workers=runner.workers_of(self.settings),
            fuzz=self._fuzz(),
        )
        # Of fuzzing, a report has what was found.
        told = [result for result in self.results.values() if result.outcome != "pass" or not is_round(result)]
        return report.make(run, told, waivers=self.waivers)

    def _rounds(self) -> tuple[Unit, ...]:
        if not self.fuzz_minutes:
            return ()
        return rounds(self.fuzz_minutes, runner.workers_of(self.settings), self.settings.seed)

    def _fuzz(self) -> dict[str, Any] | None:
        if not self.fuzz_minutes:
            return None
        done = [result for result in self.results.values() if is_round(result)]
        return {"minutes": self.fuzz_minutes, "rounds": len(done), "found": sum(r.outcome != "pass" for r in done)}

    def identity(self) -> dict[str, Any]:
        """What results must be about to belong to this run."""
        status = surroundings.status_of(self.settings.backend)
        device = surroundings.device(self.settings.device)
        ids = "\n".join(unit.id for unit in self.selection.units())
        return {
            "backend": surroundings.backend(status),
            "suite": surroundings.source_tree_sha256(),
            "versions": surroundings.host()["versions"],
            "device": {name: device[name] for name in ("type", "arch", "name", "uuid_sha256")},
            "seed": self.settings.seed,
            "units": sha256(ids.encode()).hexdigest(),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
