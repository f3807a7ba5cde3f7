"""The report: one JSON document for a backend on a device, from the results of a run, sealed.

Verdicts of the registry, the pages for people and the support table are made from such files alone. `make` and `merge`
write them; `verify` believes none of their sums.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import torch

from flashdispatch_conformance import cases, catalogue, summary, surroundings
from flashdispatch_conformance.check import Tier
from flashdispatch_conformance.diff import Diff, diff
from flashdispatch_conformance.document import SCHEMA_VERSION, Document, file_name, read, seal_of, sealed, write
from flashdispatch_conformance.features import features
from flashdispatch_conformance.result import NotRun, Result
from flashdispatch_conformance.summary import Entry
from flashdispatch_conformance.tolerance import GATES
from flashdispatch_conformance.verify import (
    SUITE_VERSION,
    Finding,
    case_list_sha256,
    content_of,
    unchecked,
    verify,
    wall_s,
)
from flashdispatch_conformance.waivers import Waiver, Waivers, apply, faults
from flashdispatch_registry.errors import InvalidRequestError

__all__ = [
    "SUITE_VERSION",
    "Diff",
    "Document",
    "Finding",
    "Run",
    "diff",
    "file_name",
    "make",
    "merge",
    "read",
    "unchecked",
    "verify",
    "write",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was run, when, where and with which options."""

    backend: str
    device: torch.device
    tier: Tier
    planned: tuple[str, ...]
    """Ids of all units that the tier has, whatever the options left of them."""
    started: str
    """ISO 8601, UTC."""
    ended: str
    command: Sequence[str]
    seed: int = 0
    shard: str = ""
    """``"2/4"``, or empty."""
    match: str = ""
    """The expression that ids had to match, or empty."""
    dtypes: tuple[str, ...] = ()
    """The only ones that were run; empty is all."""
    selected: tuple[str, ...] | None = None
    """Ids of units that the options left; None: all of `planned` if there are no such options, else unknown."""
    workers: int = 1
    fuzz: Mapping[str, Any] | None = None
    operator_label: str = ""


def make(run: Run, results: Sequence[Result], *, waivers: Waivers = ()) -> Document:
    """The sealed document of a run.

    Planned units without a result are not run: FILTERED when an option left them out, else INTERRUPTED. Results beyond
    the plan (fuzz) are marked ``extra``.

    Raises UnknownBackendError, and InvalidRequestError when results are another backend's or two are of one unit.
    """
    status = surroundings.status_of(run.backend)
    device = surroundings.device(run.device)
    _check(run, results)
    by_id = {result.id: result for result in results}
    planned = frozenset(run.planned)
    everything = [by_id.get(unit) or _missing(run, unit) for unit in run.planned]
    everything += [result for result in results if result.id not in planned]
    judged, wrong = apply(
        everything,
        waivers,
        backend=run.backend,
        version=status.version,
        arch=device["arch"],
        today=datetime.fromisoformat(run.ended).date(),
        known=[unit.id for unit in catalogue.units("deep")],
    )
    entries = [summary.entry_of(result, extra=result.id not in planned) for result in judged]
    checks = [_check_block(check) for check in dict.fromkeys(entry["check"] for entry in entries)]
    head: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "suite": {
            "name": surroundings.PACKAGE.name,
            "version": SUITE_VERSION,
            "tier": run.tier,
            "case_list_sha256": case_list_sha256(run.planned, {check["id"]: check["case"] for check in checks}),
            "source_tree_sha256": surroundings.source_tree_sha256(),
            "modified": surroundings.suite_modified(),
            "gates": asdict(GATES),
            "seed": run.seed,
        },
        "run": {
            "id": uuid.uuid4().hex,
            "started": run.started,
            "ended": run.ended,
            "command": list(run.command),
            "shard": run.shard,
            "match": run.match,
            "dtypes": list(run.dtypes),
            "workers": run.workers,
            "fuzz": None if run.fuzz is None else dict(run.fuzz),
            "operator_label": run.operator_label,
            "merged": [],
        },
        "host": surroundings.host(),
        "device": device,
        "backend": surroundings.backend(status),
        "waivers": [waiver.to_json() for waiver in waivers],
    }
    return _whole(
        head,
        entries,
        checks,
        summary.histograms(judged),
        wrong,
        wall_s({"started": run.started, "ended": run.ended, "merged": []}),
    )


def merge(documents: Sequence[Document]) -> Document:
    """One document from those of a run's shards.

    A unit has the outcome of the shard that ran it. Two shards may run the same unit with the same outcome; the
    histograms then count its z twice.

    Raises InvalidRequestError in words when they are not of one backend, source, device, driver, tier and suite and of
    the same versions, when a seal is broken, when a run is there twice, or when a unit has two outcomes.
    """
    if not documents:
        raise InvalidRequestError("nothing to merge: name the reports of the shards")
    first = documents[0]
    for at, document in enumerate(documents, 1):
        if seal_of(document) != document.get("seal"):
            raise InvalidRequestError(f"report {at} was changed after it was written: its seal is wrong. Run it again")
    _check_runs(documents)
    for block, name in _MUST_AGREE:
        values = [document[block] if name is None else document[block][name] for document in documents]
        for at, value in enumerate(values, 1):
            if value != values[0]:
                what = block if name is None else f"{name} of {block}"
                one, other = _apart(values[0], value)
                text = f"report 1 has {one!r}, report {at} has {other!r}. Merge shards of one run only"
                raise InvalidRequestError(f"the {what} is not the same: {text}")
    entries = _merged_entries(documents)
    run = first["run"] | {
        "id": uuid.uuid4().hex,
        "started": min(document["run"]["started"] for document in documents),
        "ended": max(document["run"]["ended"] for document in documents),
        "shard": "",
        "merged": [_part(document) for document in documents],
    }
    head = {name: first[name] for name in ("schema_version", "suite", "run", "host", "device", "backend", "waivers")}
    checks = {check["id"]: check for document in documents for check in document["checks"]}
    wrong = faults(
        [Waiver.of(waiver, f"waiver {waiver['id']!r}") for waiver in first["waivers"]],
        [entry["id"] for entry in entries],
        backend=first["backend"]["name"],
        version=first["backend"]["version"],
        arch=first["device"]["arch"],
        today=datetime.fromisoformat(run["ended"]).date(),
        known=[unit.id for unit in catalogue.units("deep")],
    )
    counts = summary.added(one for document in documents for one in document["z_histograms"])
    return _whole(head | {"run": run}, entries, list(checks.values()), counts, wrong, wall_s(run))


_MUST_AGREE: tuple[tuple[str, str | None], ...] = (
    ("schema_version", None),
    ("backend", "name"),
    ("backend", "version"),
    ("backend", "source_sha256"),
    ("backend", "languages"),
    ("backend", "capabilities"),
    ("device", "type"),
    ("device", "arch"),
    ("device", "name"),
    ("device", "driver"),
    ("host", "versions"),
    ("host", "cuda_runtime"),
    ("suite", "version"),
    ("suite", "tier"),
    ("suite", "case_list_sha256"),
    ("suite", "source_tree_sha256"),
    ("suite", "modified"),
    ("suite", "gates"),
    ("suite", "seed"),
    ("waivers", None),
)
"""Block and field that shards of one run share: the merged report has one value of each."""


def _check_runs(documents: Sequence[Document]) -> None:
    """Raises InvalidRequestError when two documents have a run in common."""
    seen: dict[str, int] = {}
    for at, document in enumerate(documents, 1):
        for run in document["run"]["merged"] or [document["run"]]:
            if (before := seen.setdefault(run["id"], at)) != at:
                text = f"report {before} and report {at} are the same report twice, or have it in them"
                raise InvalidRequestError(f"{text} (run {run['id']}). Name each shard once")


def _apart(one: Any, other: Any) -> tuple[Any, Any]:
    """The two values; of two dicts only what differs."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one, other
    same = {name for name in one if name in other and one[name] == other[name]}
    differing = [{name: value for name, value in some.items() if name not in same} for some in (one, other)]
    return differing[0], differing[1]


def _whole(
    head: Mapping[str, Any],
    entries: list[Entry],
    checks: list[dict[str, Any]],
    histograms: list[dict[str, Any]],
    waiver_faults: Sequence[str],
    seconds: float,
) -> Document:
    """The document, with all that follows from its units, sealed."""
    rows = {check["id"]: check["features"] for check in checks}
    return sealed(
        {
            **head,
            "summary": summary.summarise(
                entries, suite=head["suite"], backend=head["backend"]["name"], waiver_faults=waiver_faults
            ),
            "timings": summary.times(entries, seconds),
            "capability_matrix": summary.matrix(entries, rows),
            "z_histograms": histograms,
            "checks": checks,
            "cases": entries,
        }
    )


def _check(run: Run, results: Sequence[Result]) -> None:
    seen: set[str] = set()
    for result in results:
        if result.backend != run.backend:
            raise InvalidRequestError(f"{result.id} is a result of {result.backend}, in a report of {run.backend}")
        if result.id in seen:
            raise InvalidRequestError(f"two results of {result.id}: a unit is run once")
        seen.add(result.id)
    for name in ("started", "ended"):
        if datetime.fromisoformat(getattr(run, name)).tzinfo is None:
            raise InvalidRequestError(f"Run.{name} needs a time zone, such as {getattr(run, name)}+00:00")


def _missing(run: Run, unit: str) -> Result:
    check, _, dtype = unit.rpartition("-")
    if run.selected is None:
        left_out = bool(run.shard or run.match or (run.dtypes and dtype not in run.dtypes))
    else:
        left_out = unit not in run.selected
    why = NotRun.FILTERED if left_out else NotRun.INTERRUPTED
    return Result(check=check, backend=run.backend, dtype=dtype, outcome="not_run", not_run=why)


def _check_block(check: str) -> dict[str, Any]:
    known, case = catalogue.BY_ID.get(check), cases.BY_ID.get(check)
    return {
        "id": check,
        "why": known.why if known else "",
        "features": list(features(check, case)),
        "case": content_of(case),
    }


def _merged_entries(documents: Sequence[Document]) -> list[Entry]:
    found: dict[str, list[Entry]] = {}
    for document in documents:
        for entry in document["cases"]:
            found.setdefault(entry["id"], []).append(entry)
    return [_one_of(unit, entries) for unit, entries in found.items()]


_NEVER_STARTED = (str(NotRun.FILTERED), str(NotRun.INTERRUPTED))


def _one_of(unit: str, entries: Sequence[Entry]) -> Entry:
    """The entry of the shard that ran the unit, else one that says why it was not run."""
    ran = [entry for entry in entries if entry.get("not_run") not in _NEVER_STARTED]
    outcomes = sorted({entry["outcome"] for entry in ran})
    if len(outcomes) > 1:
        raise InvalidRequestError(f"{unit} has two outcomes in these reports: {', '.join(outcomes)}. Run it again")
    return ran[0] if ran else max(entries, key=lambda entry: _NEVER_STARTED.index(entry["not_run"]))


def _part(document: Document) -> dict[str, Any]:
    run = document["run"]
    return {name: run[name] for name in ("id", "shard", "started", "ended", "command")} | {
        "seal": document["seal"]["value"],
        "hostname_sha256": document["host"]["hostname_sha256"],
    }
