"""Whether a report holds: its form, its seal, and every sum and verdict in it worked out anew from its units.

It needs the document and this package, and nothing else. What can't be known from these two is in `unchecked`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from flashdispatch_conformance import cases, catalogue, summary, surroundings
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.document import SCHEMA, canonical, number, seal_of, sha256
from flashdispatch_conformance.result import NotRun
from flashdispatch_conformance.tolerance import GATES, Scores, broken
from flashdispatch_conformance.waivers import Waiver, faults
from flashdispatch_registry.arch import device_type_of
from flashdispatch_registry.errors import InvalidRequestError

SUITE_VERSION = "1.1.0"
"""Of the gates, the cases and the checks together. It rises when any of them changes, so that a report says by which
rules it was made; what only becomes clearer, faster or better shown leaves it as it is."""

ROUNDED = 5e-4
"""Largest relative error of a number with 4 digits: what the difference of two of them may be off by."""

DRIFT = 1.0
"""More than the drift of out, dq, dk or dv in 16 bits can be.

With c = 3 ceil(N / 8) cuts and w = 2^-24, drift <= w c 5/6 sqrt(X1^2 + X2), and sigma >= u sqrt(X1^2 + X2): so their
ratio is at most 5/6 c w / u, which in float16 (u = 2^-11) reaches 1 for sums of 26000 terms. The suite sums 8193 at
most in 16 bits (0.32). LSE, sinks and masks may be float32, whose u is w.
"""

CASE_KINDS = frozenset(case.partition("/")[0] for case in cases.BY_ID)
"""First words of the ids of those checks that are one case each, and always judge its output."""

TINY = 1e-150
"""Largest |z| whose square a float64 may not hold: the RMS of such numbers comes out too small, or as 0."""

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
    found = [*_seal(document), *_run(document), *_device(document), *_gates(document), *_case_list(document)]
    found += _limited([finding for entry in document["cases"] for finding in _unit(entry, document)])
    found += _limited(list(_scored(document)))
    return found + list(_derived(document))


def malformed(document: Mapping[str, Any]) -> list[Finding]:
    """Where `document` has not the form of a report; what is empty can be shown, compared and merged."""
    return list(_form(document))


def unchecked(document: Mapping[str, Any]) -> list[str]:
    """What `verify` can't tell of this document, in words."""
    found = ["whether the run took place: the seal shows a slip or an edit, and signs for nobody"]
    suite = document.get("suite")
    if not isinstance(suite, Mapping):
        return found
    version, tree = suite.get("version"), suite.get("source_tree_sha256")
    if version != SUITE_VERSION:
        others = f"the report is of suite {version}, this is {SUITE_VERSION}"
        found.append(
            f"the case list: {others}"
            if _gates_are_known(version)
            else f"the case list and the gates: {others}; units are held to the gates that it states, and not for bias"
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

    try:
        canonical(document)
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: also a text that has no UTF-8 form
        yield Finding("the document", f"it has no canonical JSON, so no seal can be one of it: {error}")
        return
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    wrong = list(jsonschema.Draft202012Validator(schema).iter_errors(document))
    for each in wrong[:SHOWN]:
        where = "/".join(map(str, each.absolute_path)) or "the document"
        yield Finding(where, each.message if len(each.message) < 300 else f"{each.message[:300]}...")
    if len(wrong) > SHOWN:
        yield Finding("the document", f"{len(wrong) - SHOWN} more places do not have the form of a report")
    if not wrong:
        yield from _values(document)


def _values(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Texts of the right form that mean nothing: days that no calendar has, and what waivers.toml may not say."""
    run = document["run"]
    spans = [("run", run), *((f"run/merged/{at}", part) for at, part in enumerate(run["merged"]))]
    for where, span in spans:
        for name in ("started", "ended"):
            try:
                datetime.fromisoformat(span[name])
            except ValueError as error:
                yield Finding(f"{where}/{name}", f"{span[name]!r} is no time: {error}")
    for at, waiver in enumerate(document["waivers"]):
        try:
            Waiver.of(waiver, f"waiver {waiver['id']!r}")
        except InvalidRequestError as error:
            yield Finding(f"waivers/{at}", str(error))


def _seal(document: Mapping[str, Any]) -> Iterator[Finding]:
    if document["seal"] != seal_of(document):
        yield Finding("seal", "it is not the hash of this document: something was changed after it was written")


def _run(document: Mapping[str, Any]) -> Iterator[Finding]:
    run = document["run"]
    for span in (run, *run["merged"]):
        if datetime.fromisoformat(span["ended"]) < datetime.fromisoformat(span["started"]):
            yield Finding("run", f"it ended at {span['ended']}, before it started at {span['started']}")
    for one, count in Counter(part["id"] for part in run["merged"]).items():
        if count > 1:
            yield Finding("run", f"it was merged from the run {one} {count} times")


def _device(document: Mapping[str, Any]) -> Iterator[Finding]:
    kind, arch = document["device"]["type"], document["device"]["arch"]
    if device_type_of(arch) != kind:
        yield Finding("device", f"its arch {arch} is one of {device_type_of(arch)}, but its type is {kind}")


def _gates(document: Mapping[str, Any]) -> Iterator[Finding]:
    version, gates = document["suite"]["version"], document["suite"]["gates"]
    if _gates_are_known(version) and gates != asdict(GATES):
        yield Finding("suite", f"its gates are {gates}; those of suite {version} are {asdict(GATES)}")


def _gates_are_known(version: object) -> bool:
    """True for this suite version and all before it, which had the same gates."""
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){2}", version):
        return False
    return _parts(version) <= _parts(SUITE_VERSION)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


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


def _scored(document: Mapping[str, Any]) -> Iterator[Finding]:
    """A case that passed was called, and each of its calls has an output, which is judged."""
    content = {check["id"]: check["case"] for check in document["checks"]}
    for entry in document["cases"]:
        unit, outcome, check = entry["id"], entry["outcome"], entry["check"]
        if outcome not in ("pass", "unexpected_pass") or check.partition("/")[0] not in CASE_KINDS:
            continue
        tensors = entry.get("tensors", {})
        if not any(summary.tensor_of(name) == "out" for name in tensors):
            yield Finding(unit, f"it is {outcome}, but has no scores of out")
        elif not any(tensor["numel"] for tensor in tensors.values()) and not _may_hide_all(content.get(check) or {}):
            yield Finding(unit, f"it is {outcome}, but no element was judged, and its case hides no key")


def _may_hide_all(case: Mapping[str, Any]) -> bool:
    """Whether a case can be one without any visible key, whose tensors are all exact by contract."""
    hides = any(name in case for name in ("mask", "window", "q_lens", "kv_lens"))
    return hides or case.get("batch") == 0 or 0 in case.get("seqlens", ())


def _silent(entry: Mapping[str, Any]) -> bool:
    """True for a unit that was never started: there is nothing to say of it but the reason."""
    return entry["outcome"] == "not_run" and entry.get("not_run") in (NotRun.FILTERED, NotRun.INTERRUPTED)


def _broken(name: str, tensor: Mapping[str, Any], entry: Mapping[str, Any], suite: Mapping[str, Any]) -> Iterator[str]:
    """The gates that a tensor's numbers break, and those it says it broke."""
    for failure in tensor.get("failures", ()):
        yield f"{name} says: {failure['message']}"
    scores = {gate: number(tensor[gate]) for gate in summary.NUMBERS}
    yield from _impossible(name, scores, entry["dtype"])
    if entry["dtype"] == "float64":
        if not scores["max"] <= 1.0:
            yield f"{name} is off by {scores['max']:g} times what float64 allows"
    elif _gates_are_known(suite["version"]):
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


def _impossible(name: str, scores: Mapping[str, float], dtype: str) -> Iterator[str]:
    """What numbers of one z can't be, whatever it is; `scores` are those of a tensor that is said to be good."""
    rms, row, most, bias, drift = (scores[gate] for gate in summary.NUMBERS)
    if not 0 <= rms <= _room(row) or not row <= _room(most):
        yield f"{name} has rms {rms:g}, row {row:g} and max {most:g}, and no z has: none is negative or above the next"
    if not abs(bias) <= _room(rms):
        yield f"{name} has bias {bias:g} and rms {rms:g}, and no z has: a mean is not above the root mean square"
    if not 0 <= drift < math.inf:
        yield f"{name} has drift {drift:g}, and it is finite and not negative"
    elif dtype in ("float16", "bfloat16") and summary.tensor_of(name) in ("out", "dq", "dk", "dv") and drift > DRIFT:
        yield f"{name} has drift {drift:g}, and in {dtype} it is at most {DRIFT:g}"


def _room(score: float) -> float:
    """What a number that is not larger than the one behind `score` can look like in a report."""
    return (1 + 2 * ROUNDED) * score + TINY


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
    yield from _histograms(document)
    if document["timings"] != summary.times(entries, wall_s(document["run"])):
        yield Finding("timings", "they are not what the units and the run say")


def _histograms(document: Mapping[str, Any]) -> Iterator[Finding]:
    """They count every judged element once; in a merged report as often as its shards ran the unit."""
    judged: Counter[tuple[str, str]] = Counter()
    for entry in document["cases"]:
        for name, tensor in entry.get("tensors", {}).items():
            judged[entry["dtype"], summary.tensor_of(name)] += tensor["numel"]
    counted: Counter[tuple[str, str]] = Counter()
    for one in document["z_histograms"]:
        counted[one["dtype"], one["tensor"]] += sum(one["counts"])
    often = max(1, len(document["run"]["merged"]))
    for key in sorted({*judged, *counted}):
        if not judged[key] <= counted[key] <= often * judged[key]:
            text = f"of {key[1]} in {key[0]} they count {counted[key]} elements, and the units judged {judged[key]}"
            yield Finding("z_histograms", text)


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
