"""Whether a report holds: its form, its seal, and every sum and verdict in it worked out anew from its units.

It needs the document and this package, and nothing else. What can't be known from these two is in `unchecked`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from flashdispatch_conformance import cases, catalogue, summary, surroundings
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.document import SCHEMA, number, seal_of, sha256
from flashdispatch_conformance.result import NotRun
from flashdispatch_conformance.tolerance import GATES, Scores, broken
from flashdispatch_conformance.waivers import Waiver, faults

SUITE_VERSION = "1.0.0"
"""Of the gates, the cases and the checks together. It rises when any of them changes, so that a report says by which
rules it was made; what only becomes clearer, faster or better shown leaves it as it is."""

ROUNDED = 5e-4
"""Largest relative error of a number with 4 digits: what the difference of two of them may be off by."""

SHOWN = 20
"""Findings of one kind before the rest is only counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a report that does not hold."""

    where: str
    """A block of the document, or a unit's id."""
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def verify(document: Mapping[str, Any]) -> list[Finding]:
    """What does not hold in `document`; empty when all does. With a wrong form nothing else is looked at."""
    form = list(_form(document))
    if form:
        return form
    found = [*_seal(document), *_run(document), *_gates(document), *_case_list(document)]
    found += _limited([finding for entry in document["cases"] for finding in _unit(entry, document)])
    return found + list(_derived(document))


def malformed(document: Mapping[str, Any]) -> list[Finding]:
    """Where `document` has not the form of a report; what is empty can be shown, compared and merged."""
    return list(_form(document))


def unchecked(document: Mapping[str, Any]) -> list[str]:
    """What `verify` can't tell of this document, in words."""
    found = ["whether the run took place: the seal shows a slip or an edit, and signs for nobody"]
    suite = document.get("suite", {})
    version, tree = suite.get("version"), suite.get("source_tree_sha256")
    if version != SUITE_VERSION:
        found.append(
            f"the case list and the gates: the report is of suite {version}, this is {SUITE_VERSION}; "
            "units are held to the gates that the report states, and not for bias"
        )
    same = tree == surroundings.source_tree_sha256()
    if version == SUITE_VERSION and not same:
        found.append(f"whether its checks are these: it was made by another source of suite {version} than this one")
    if suite.get("modified") is None and not same:
        found.append("whether the suite was modified: it was run from no repository and no wheel")
    return found


def content_of(case: Case | None) -> dict[str, Any] | None:
    """What a case says beyond its id and why it exists, as JSON: the fields that are not at their defaults."""
    return None if case is None else {name: said for name, said in case.to_json().items() if name not in ("id", "why")}


def case_list_sha256(planned: Sequence[str], content: Mapping[str, dict[str, Any] | None]) -> str:
    """Of a tier's units and what their cases say. `content` is by check id, None where a check is no case."""
    checks = sorted({unit.rpartition("-")[0] for unit in planned})
    return sha256({"units": sorted(planned), "cases": [[check, content.get(check)] for check in checks]})


def _form(document: Mapping[str, Any]) -> Iterator[Finding]:
    import jsonschema

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    wrong = list(jsonschema.Draft202012Validator(schema).iter_errors(document))
    for error in wrong[:SHOWN]:
        where = "/".join(map(str, error.absolute_path)) or "the document"
        yield Finding(where, error.message if len(error.message) < 300 else f"{error.message[:300]}...")
    if len(wrong) > SHOWN:
        yield Finding("the document", f"{len(wrong) - SHOWN} more places do not have the form of a report")


def _seal(document: Mapping[str, Any]) -> Iterator[Finding]:
    if document["seal"] != seal_of(document):
        yield Finding("seal", "it is not the hash of this document: something was changed after it was written")


def _run(document: Mapping[str, Any]) -> Iterator[Finding]:
    run = document["run"]
    if datetime.fromisoformat(run["ended"]) < datetime.fromisoformat(run["started"]):
        yield Finding("run", f"it ended at {run['ended']}, before it started at {run['started']}")


def _gates(document: Mapping[str, Any]) -> Iterator[Finding]:
    suite = document["suite"]
    if suite["version"] == SUITE_VERSION and suite["gates"] != asdict(GATES):
        yield Finding("suite", f"its gates are {suite['gates']}; those of suite {SUITE_VERSION} are {asdict(GATES)}")


def _case_list(document: Mapping[str, Any]) -> Iterator[Finding]:
    suite, entries = document["suite"], document["cases"]
    content = {check["id"]: check["case"] for check in document["checks"]}
    ids = [entry["id"] for entry in entries]
    for unit in sorted({unit for unit in ids if ids.count(unit) > 1} if len(set(ids)) < len(ids) else ()):
        yield Finding(unit, "it is there twice")
    for entry in entries:
        if entry["id"] != f"{entry['check']}-{entry['dtype']}":
            yield Finding(entry["id"], f"it names the check {entry['check']} in {entry['dtype']}")
    absent = sorted({entry["check"] for entry in entries}.symmetric_difference(content))
    if absent:
        yield Finding("checks", f"these and the units' do not agree: {', '.join(absent[:SHOWN])}")
    planned = [entry["id"] for entry in entries if not entry.get("extra")]
    if suite["case_list_sha256"] != case_list_sha256(planned, content):
        yield Finding("suite", "case_list_sha256 is not the hash of the units and cases in the report")
    if suite["version"] != SUITE_VERSION:
        return
    expected = [unit.id for unit in catalogue.units(suite["tier"])]
    missing, more = set(expected).difference(planned), set(planned).difference(expected)
    for what, some in (("lacks", missing), ("has the unknown", more)):
        if some:
            yield Finding("cases", f"the {suite['tier']} tier {what} {len(some)} units: {', '.join(sorted(some)[:5])}")
    for check, said in content.items():
        case = cases.BY_ID.get(check)
        if check in catalogue.BY_ID and said != content_of(case):
            yield Finding(check, "its case is another one than that of this suite version")


def _unit(entry: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether one unit's outcome agrees with what stands beside it."""
    unit, outcome = entry["id"], entry["outcome"]
    suite = document["suite"]
    wrong = [text for name, tensor in entry.get("tensors", {}).items() for text in _broken(name, tensor, entry, suite)]
    if outcome in ("pass", "unexpected_pass", "unsupported") and wrong:
        yield Finding(unit, f"it is {outcome}, but {'; '.join(wrong)}")
    messages = entry.get("messages", [])
    if outcome in ("fail", "error", "waived", "not_run", "unexpected_pass") and not messages and not _silent(entry):
        yield Finding(unit, f"it is {outcome} and does not say why")
    if outcome in ("pass", "unsupported") and messages:
        yield Finding(unit, f"it is {outcome}, but says: {messages[0]}")
    if (outcome == "not_run") != ("not_run" in entry):
        yield Finding(unit, f"it is {outcome}, with {entry.get('not_run', 'no reason')} for not being run")
    if entry.get("not_run") == NotRun.NO_CUDA and document["device"]["type"] == "cuda":
        yield Finding(unit, "it was not run for want of a CUDA GPU, on a CUDA GPU")
    if outcome == "unsupported" and not entry.get("refused"):
        yield Finding(unit, "it is unsupported, but no call was refused")
    if (outcome in ("waived", "unexpected_pass")) != ("waiver" in entry):
        yield Finding(unit, f"it is {outcome}, with {entry.get('waiver', 'no waiver')}")
    if "waiver" in entry and not any(_waives(waiver, entry, document) for waiver in document["waivers"]):
        yield Finding(unit, f"no waiver {entry['waiver']} that holds covers it")


def _silent(entry: Mapping[str, Any]) -> bool:
    """True for a unit that was never started: there is nothing to say of it but the reason."""
    return entry["outcome"] == "not_run" and entry.get("not_run") in (NotRun.FILTERED, NotRun.INTERRUPTED)


def _broken(name: str, tensor: Mapping[str, Any], entry: Mapping[str, Any], suite: Mapping[str, Any]) -> Iterator[str]:
    """The gates that a tensor's numbers break, and those it says it broke."""
    for failure in tensor.get("failures", ()):
        yield f"{name} says: {failure['message']}"
    scores = {gate: number(tensor[gate]) for gate in summary.NUMBERS}
    if entry["dtype"] == "float64":
        if not scores["max"] <= 1.0:
            yield f"{name} is off by {scores['max']:g} times what float64 allows"
    elif suite["version"] == SUITE_VERSION:
        scores["drift"] += ROUNDED * (abs(scores["bias"]) + scores["drift"])
        held = Scores(
            rms=scores["rms"],
            row=scores["row"],
            max=scores["max"],
            bias=scores["bias"],
            drift=scores["drift"],
            numel=tensor["numel"],
            rows=tensor["rows"],
        )
        yield from (failure.message for failure in broken(name, held))
    else:
        for gate in ("rms", "row", "max"):
            if not scores[gate] <= suite["gates"][gate]:
                yield f"{name} has {gate} {scores[gate]:g}, allowed {suite['gates'][gate]:g}"


def _waives(waiver: Mapping[str, Any], entry: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    one = Waiver.of(waiver, f"waiver {waiver['id']!r}")
    backend, device = document["backend"], document["device"]
    return (
        one.id == entry["waiver"]
        and one.applies(backend["name"], backend["version"], device["arch"])
        and one.covers(entry["id"])
        and datetime.fromisoformat(document["run"]["ended"]).date() <= one.expires
    )


def _derived(document: Mapping[str, Any]) -> Iterator[Finding]:
    """What follows from the units, against what the report says of them."""
    entries, backend = document["cases"], document["backend"]
    rows = {check["id"]: check["features"] for check in document["checks"]}
    if any(entry["check"] not in rows for entry in entries):
        return  # said already, and nothing can be worked out
    wrong = faults(
        [Waiver.of(waiver, f"waiver {waiver['id']!r}") for waiver in document["waivers"]],
        [entry["id"] for entry in entries],
        backend=backend["name"],
        version=backend["version"],
        arch=document["device"]["arch"],
        today=datetime.fromisoformat(document["run"]["ended"]).date(),
        known=[unit.id for unit in catalogue.units("deep")],
    )
    derived = summary.summarise(entries, suite=document["suite"], backend=backend["name"], waiver_faults=wrong)
    for name, value in derived.items():
        said = document["summary"][name]
        if said != value:
            yield Finding("summary", f"{name} is {_short(said)}, but the units say {_short(value)}")
    if document["capability_matrix"] != summary.matrix(entries, rows):
        yield Finding("capability_matrix", "it is not what the units say")
    if document["timings"] != summary.times(entries, wall_s(document["run"])):
        yield Finding("timings", "they are not what the units and the run say")


def wall_s(run: Mapping[str, Any]) -> float:
    """Seconds that a run took; of merged shards, all of them together."""
    spans = run["merged"] or [run]
    return sum(
        (datetime.fromisoformat(span["ended"]) - datetime.fromisoformat(span["started"])).total_seconds()
        for span in spans
    )


def _limited(findings: list[Finding]) -> list[Finding]:
    if len(findings) <= SHOWN:
        return findings
    return [*findings[:SHOWN], Finding("cases", f"{len(findings) - SHOWN} more findings like these")]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]}..."
