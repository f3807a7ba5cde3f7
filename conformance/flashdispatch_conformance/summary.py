"""What a report says beyond its units and follows from them: counts, worst z-scores, the capability matrix, times.

`report` writes it and `verify` works it out again, both from the entries of ``cases`` alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flashdispatch_conformance.document import number, rounded
from flashdispatch_conformance.result import NotRun, Outcome, Result
from flashdispatch_conformance.tolerance import Stats
from flashdispatch_conformance.verdict import decide

Entry = dict[str, Any]
"""One unit in a document."""

OUTCOMES: tuple[Outcome, ...] = ("pass", "fail", "error", "unsupported", "waived", "unexpected_pass", "not_run")

SEVERITY: tuple[Outcome, ...] = ("error", "fail", "unexpected_pass", "waived", "pass", "unsupported", "not_run")
"""The worst first; those that say nothing about the backend last."""

DTYPES = ("float16", "bfloat16", "float32", "float64")
TENSORS = ("out", "lse", "dq", "dk", "dv", "dattn_mask", "dsinks")
"""In the order of lists; others follow by name."""

BINS = 34
"""Of a histogram of z: below -4, 32 of width 0.25, and from 4 on."""

NUMBERS = ("rms", "row", "max", "bias", "drift")
"""Of a tensor's scores, those that are rounded."""

SLOWEST = 10
MESSAGE_LIMIT = 4000


def entry_of(result: Result, *, extra: bool = False) -> Entry:
    """A result as it stands in a document; fields that say nothing are left out."""
    entry: Entry = {"id": result.id, "check": result.check, "dtype": result.dtype, "outcome": result.outcome}
    if extra:
        entry["extra"] = True
    if result.not_run is not None:
        entry["not_run"] = str(result.not_run)
    if result.waiver:
        entry["waiver"] = result.waiver
    if result.messages:
        entry["messages"] = [_shortened(message) for message in result.messages]
    if result.refused:
        entry["refused"] = {part: list(codes) for part, codes in result.refused.items()}
    if result.stats:
        entry["tensors"] = {name: _tensor(stats) for name, stats in result.stats.items()}
    entry |= {"compile_s": rounded(result.compile_s), "run_s": rounded(result.run_s)}
    if result.peak_bytes is not None:
        entry["peak_bytes"] = result.peak_bytes
    return entry


def result_of(entry: Mapping[str, Any], backend: str) -> Result:
    """The result behind an entry, without its numbers: what a verdict is made of."""
    return Result(
        check=entry["check"],
        backend=backend,
        dtype=entry["dtype"],
        outcome=entry["outcome"],
        messages=tuple(entry.get("messages", ())),
        not_run=NotRun(entry["not_run"]) if "not_run" in entry else None,
        waiver=entry.get("waiver", ""),
        refused={part: tuple(codes) for part, codes in entry.get("refused", {}).items()},
    )


def summarise(
    entries: Sequence[Entry],
    *,
    suite: Mapping[str, Any],
    backend: str,
    waiver_faults: Sequence[str],
) -> dict[str, Any]:
    """The verdict and why, all counts, and the worst z-scores of every tensor and dtype."""
    results = [result_of(entry, backend) for entry in entries]
    verdict = decide(results, tier=suite["tier"], modified=suite["modified"], waiver_faults=waiver_faults)
    counts = Counter(result.outcome for result in results)
    return {
        "verdict": verdict.word,
        "reasons": list(verdict.reasons),
        "minimum_set": verdict.minimum,
        "counts": {word: counts[word] for word in OUTCOMES},
        "not_run": _sorted(Counter(str(result.not_run) for result in results if result.not_run)),
        "unsupported": _sorted(
            Counter(
                code
                for result in results
                if result.outcome == "unsupported"
                for code in sorted({code for codes in result.refused.values() for code in codes})
            )
        ),
        "waiver_faults": list(waiver_faults),
        "worst": worst(entries, suite["gates"]),
    }


def worst(entries: Iterable[Entry], gates: Mapping[str, float]) -> list[dict[str, Any]]:
    """For each dtype and tensor the largest of each number; ``unit`` is where |z| is largest.

    The bias is what is held to the gate: less the tensor's drift, of tensors with enough elements and rows; else null.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        for name, tensor in entry.get("tensors", {}).items():
            if not tensor["numel"]:
                continue
            key = (entry["dtype"], tensor_of(name))
            line = found.setdefault(
                key,
                {"dtype": key[0], "tensor": key[1], "units": 0}
                | {"rms": 0.0, "row": 0.0, "max": 0.0, "bias": None, "unit": entry["id"]},
            )
            line["units"] += 1
            if size(tensor["max"]) > size(line["max"]):
                line["unit"] = entry["id"]
            for gate in ("rms", "row", "max"):
                line[gate] = max(line[gate], tensor[gate], key=size)
            if tensor["numel"] >= gates["bias_numel"] and tensor["rows"] >= gates["bias_rows"]:
                line["bias"] = max(0.0 if line["bias"] is None else line["bias"], held_bias(tensor), key=size)
    return [found[key] for key in sorted(found, key=_place)]


def held_bias(tensor: Mapping[str, Any]) -> float | str:
    """A tensor's bias beyond its drift, with its sign."""
    bias, drift = number(tensor["bias"]), number(tensor["drift"])
    return rounded(math.copysign(max(abs(bias) - drift, 0.0), bias))


def matrix(entries: Iterable[Entry], features: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """For each feature and dtype the worst outcome, how many units there are of each, and the largest |z|.

    `features` are the rows of each check, by its id.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        for feature in features[entry["check"]]:
            cell = found.setdefault(
                (feature, entry["dtype"]),
                {
                    "feature": feature,
                    "dtype": entry["dtype"],
                    "outcome": entry["outcome"],
                    "worst_z": None,
                    "counts": {},
                },
            )
            cell["outcome"] = min(cell["outcome"], entry["outcome"], key=SEVERITY.index)
            cell["counts"][entry["outcome"]] = cell["counts"].get(entry["outcome"], 0) + 1
            for tensor in entry.get("tensors", {}).values():
                z = tensor["max"]
                if tensor["numel"] and (cell["worst_z"] is None or size(z) > size(cell["worst_z"])):
                    cell["worst_z"] = z
    return list(found.values())


def times(entries: Sequence[Entry], wall_s: float) -> dict[str, Any]:
    """Seconds of all units together, and of the slowest."""

    def total(entry: Entry) -> float:
        return number(entry["compile_s"]) + number(entry["run_s"])

    slow = sorted((entry for entry in entries if total(entry) > 0), key=lambda entry: (-total(entry), entry["id"]))
    return {
        "wall_s": rounded(wall_s),
        "compile_s": rounded(math.fsum(number(entry["compile_s"]) for entry in entries)),
        "run_s": rounded(math.fsum(number(entry["run_s"]) for entry in entries)),
        "slowest": [{name: entry[name] for name in ("id", "compile_s", "run_s")} for entry in slow[:SLOWEST]],
    }


def histograms(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Counts of z by dtype and tensor, in bins of 0.25 from -4 to 4 with one more at each end."""
    return added(
        {"dtype": result.dtype, "tensor": tensor_of(name), "counts": list(stats.histogram)}
        for result in results
        for name, stats in result.stats.items()
        if stats.histogram
    )


def added(some: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Histograms of one dtype and tensor added to one."""
    sums: dict[tuple[str, str], list[int]] = {}
    for one in some:
        key = (one["dtype"], one["tensor"])
        before = sums.get(key, [0] * BINS)
        sums[key] = [a + b for a, b in zip(before, one["counts"], strict=True)]
    return [{"dtype": key[0], "tensor": key[1], "counts": sums[key]} for key in sorted(sums, key=_place)]


def _place(key: tuple[str, str]) -> tuple[int, int, str]:
    """Where a dtype's tensor stands in lists, whatever was run first."""
    dtype, tensor = key
    return DTYPES.index(dtype), TENSORS.index(tensor) if tensor in TENSORS else len(TENSORS), tensor


def tensor_of(name: str) -> str:
    """``"dq"`` for ``"dq (gradients call)"``: the tensor that a key of `Result.stats` is about."""
    return name.partition(" ")[0]


def size(value: float | str) -> float:
    """Magnitude of a report's number; NaN is larger than all."""
    magnitude = abs(number(value))
    return math.inf if math.isnan(magnitude) else magnitude


def _tensor(stats: Stats) -> dict[str, Any]:
    found: dict[str, Any] = {name: rounded(getattr(stats, name)) for name in NUMBERS}
    found |= {"numel": stats.numel, "rows": stats.rows, "worst_index": list(stats.worst_index)}
    if stats.failures:
        found["failures"] = [asdict(failure) for failure in stats.failures]
    return found


_IN_A_FOLDER = re.compile(r'File "[^"\n]*?/((?:[^/"\n]+/){0,2}[^/"\n]+)"')
"""A file in a traceback; of its folders a report keeps two, for the others are those of whoever made it."""


def _shortened(message: str) -> str:
    """A message as a report has it: no longer than it need be, and nothing that UTF-8 has no form for."""
    message = _IN_A_FOLDER.sub(r'File "\1"', message.encode(errors="backslashreplace").decode())
    if len(message) <= MESSAGE_LIMIT:
        return message
    half = MESSAGE_LIMIT // 2
    return f"{message[:half]}\n[{len(message) - 2 * half} characters left out]\n{message[-half:]}"


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
