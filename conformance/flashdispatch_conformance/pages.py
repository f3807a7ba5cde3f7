"""A report for people: Markdown for a pull request, and one HTML page that needs nothing from anywhere else.

Both say the same from the same `Page`. What backends and machines say of themselves is never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flashdispatch_conformance.document import number
from flashdispatch_conformance.features import FEATURES, KINDS
from flashdispatch_conformance.result import NotRun
from flashdispatch_conformance.summary import BINS, DTYPES, OUTCOMES, size
from flashdispatch_conformance.verdict import BAD, NOT_RUN_WORDS

TEMPLATES = Path(__file__).with_name("templates")

GATES = ("rms", "row", "max", "bias")

MEANING: Mapping[str, str] = {
    "conformant": "Everything this backend declares holds, as far as this machine can show.",
    "partial": "Nothing failed, but less was run than a verdict needs.",
    "nonconformant": "This backend does not do what it declares, or declares less than the minimum.",
}

LABELS: Mapping[str, str] = {
    "pass": "passed",
    "fail": "failed",
    "error": "error",
    "unsupported": "refused as declared",
    "waived": "waived",
    "unexpected_pass": "unexpected pass",
    "not_run": "not run",
}
MARKS: Mapping[str, str] = {
    "pass": "✓",
    "fail": "✗",
    "error": "✗",
    "unsupported": "–",
    "waived": "!",
    "unexpected_pass": "!",
    "not_run": "·",
}
"""Beside every colour stands a mark: nothing is said by colour alone."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of the heat map."""

    outcome: str
    mark: str
    z: str
    note: str
    """How many of the units say nothing, for an outcome that is about the others."""
    detail: str
    """All counts, for whoever asks."""


@dataclass(frozen=True, slots=True)
class Failing:
    """A unit that speaks against the backend, or is waived."""

    unit: str
    outcome: str
    why: str
    """What the check stands for."""
    first: str
    """The first line of what it said."""
    messages: tuple[str, ...]
    replay: str


@dataclass(frozen=True, slots=True)
class Score:
    """One number of z, and how far it is to its gate, from 0 to 1."""

    text: str
    share: float | None
    """None where there is no gate to hold it to."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst z-scores of one tensor in one dtype."""

    dtype: str
    tensor: str
    scores: tuple[Score, ...]
    unit: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """z of one tensor in one dtype: bars from 0 to 1, the two open ends first and last."""

    dtype: str
    tensor: str
    bars: tuple[float, ...]
    total: str
    beyond: str
    """Share of |z| above 4, in words; empty when there is none."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows."""

    backend: str
    arch: str
    device: str
    verdict: str
    meaning: str
    reasons: tuple[str, ...]
    counts: tuple[tuple[str, str, int], ...]
    """Outcome, its label, how many."""
    total: int
    not_run: tuple[str, ...]
    refused: tuple[tuple[str, int], ...]
    failing: tuple[Failing, ...]
    waived: tuple[Failing, ...]
    dtypes: tuple[str, ...]
    heat: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    gates: tuple[tuple[str, float], ...]
    worst: tuple[Worst, ...]
    histograms: tuple[Histogram, ...]
    times: tuple[tuple[str, str], ...]
    slowest: tuple[tuple[str, str, str], ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    """Titled groups: machine, versions, backend, suite, run."""
    capabilities: tuple[tuple[str, str], ...]
    seal: str


def markdown(document: Mapping[str, Any]) -> str:
    """The report as GitHub-flavoured Markdown."""
    return _render("report.md.j2", page_of(document))


def html(document: Mapping[str, Any]) -> str:
    """The report as one self-contained page, for light and dark screens, without scripts."""
    return _render("report.html.j2", page_of(document))


def page_of(document: Mapping[str, Any]) -> Page:
    """What both forms show of a report that has the form of one (see `verify`)."""
    summary, backend, device = document["summary"], document["backend"], document["device"]
    dtypes = [dtype for dtype in DTYPES if any(entry["dtype"] == dtype for entry in document["cases"])]
    return Page(
        backend=backend["name"],
        arch=device["arch"],
        device=device["name"],
        verdict=summary["verdict"],
        meaning=MEANING[summary["verdict"]],
        reasons=tuple(summary["reasons"]),
        counts=tuple((word, LABELS[word], summary["counts"][word]) for word in OUTCOMES),
        total=len(document["cases"]),
        not_run=tuple(_not_run(summary["not_run"])),
        refused=tuple(sorted(summary["unsupported"].items(), key=lambda pair: (-pair[1], pair[0]))),
        failing=tuple(_failing(document, BAD)),
        waived=tuple(_failing(document, ("waived",))),
        dtypes=tuple(dtypes),
        heat=tuple(_heat(document["capability_matrix"], dtypes)),
        gates=tuple((gate, document["suite"]["gates"][gate]) for gate in GATES),
        worst=tuple(_worst(document)),
        histograms=tuple(_histograms(document["z_histograms"])),
        times=tuple(
            (label, duration(number(document["timings"][name])))
            for label, name in (("from start to end", "wall_s"), ("compiling", "compile_s"), ("running", "run_s"))
        ),
        slowest=tuple(
            (one["id"], duration(number(one["compile_s"])), duration(number(one["run_s"])))
            for one in document["timings"]["slowest"]
        ),
        facts=tuple(_facts(document)),
        capabilities=tuple((name.replace("_", " "), _said(value)) for name, value in backend["capabilities"].items()),
        seal=document["seal"]["value"],
    )


def replay_line(entry: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """The command that runs one unit again; a finding of fuzzing, which is no unit of the suite, says its own."""
    said = [message for message in entry.get("messages", ()) if message.startswith("flashdispatch conformance replay ")]
    if said:
        return str(said[-1])
    quoted = "'" + entry["id"].replace("'", "'\"'\"'") + "'"
    parts = ["flashdispatch conformance replay", quoted, "--backend", document["backend"]["name"]]
    for plugin in _plugins(document["run"]["command"]):
        parts += ["--plugin", plugin]
    if document["device"]["type"] == "cpu":  # where there is a GPU, it would be taken
        parts += ["--device", "cpu"]
    if seed := document["suite"]["seed"]:
        parts += ["--seed", str(seed)]
    return " ".join(parts)


def _plugins(command: Sequence[str]) -> Iterator[str]:
    """The modules that a run was told to import, on the command line of the suite or of pytest."""
    names = ("--plugin", "--fd-plugin")
    for at, argument in enumerate(command):
        name, equals, value = argument.partition("=")
        if name in names and equals:
            yield value
        elif name in names and at + 1 < len(command):
            yield command[at + 1]


def duration(seconds: float) -> str:
    """``"0.4 s"``, ``"12 s"``, ``"3 min 5 s"``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _render(template: str, page: Page) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(("html.j2",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _table_cell
    environment.filters["fence"] = _fence
    return environment.get_template(template).render(page=page, marks=MARKS, labels=LABELS)


def _table_cell(text: object) -> str:
    """Text in a cell of a Markdown table: no line breaks, no column breaks, no markup."""
    plain = " ".join(str(text).split())
    for letter in "\\`*_[]<>|":
        plain = plain.replace(letter, f"\\{letter}")
    return plain


def _fence(text: str) -> str:
    """A block of code, whatever backticks the text has."""
    marks = "```"
    while marks in text:
        marks += "`"
    return f"{marks}text\n{text}\n{marks}"


def _not_run(counts: Mapping[str, int]) -> Iterator[str]:
    for why, count in counts.items():
        yield f"{count} {'unit' if count == 1 else 'units'} ({why}): {NOT_RUN_WORDS[NotRun(why)]}."


def _failing(document: Mapping[str, Any], outcomes: Sequence[str]) -> Iterator[Failing]:
    why = {check["id"]: check["why"] for check in document["checks"]}
    found = [entry for entry in document["cases"] if entry["outcome"] in outcomes]
    for entry in sorted(found, key=lambda entry: outcomes.index(entry["outcome"])):
        messages = tuple(entry.get("messages", ())) or ("it gave no message",)
        yield Failing(
            unit=entry["id"],
            outcome=entry["outcome"],
            why=why[entry["check"]],
            first=_gist(messages[0]),
            messages=messages,
            replay=replay_line(entry, document),
        )


def _gist(message: str) -> str:
    """One line of a message: of a traceback the last one, which says what was raised."""
    lines = [line for line in message.strip().splitlines() if line.strip()] or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def _heat(matrix: Sequence[Mapping[str, Any]], dtypes: Sequence[str]) -> Iterator[tuple[str, tuple[Cell | None, ...]]]:
    cells = {(one["feature"], one["dtype"]): _cell(one) for one in matrix}
    order = {name: at for at, name in enumerate([*FEATURES, *KINDS.values()])}
    for feature in sorted({one["feature"] for one in matrix}, key=lambda name: (order.get(name, len(order)), name)):
        yield feature, tuple(cells.get((feature, dtype)) for dtype in dtypes)


def _cell(one: Mapping[str, Any]) -> Cell:
    outcome = one["outcome"]
    told = ", ".join(f"{one['counts'][word]} {LABELS[word]}" for word in OUTCOMES if word in one["counts"])
    z = "" if one["worst_z"] is None else _number(one["worst_z"])
    silent = {"refused": one["counts"].get("unsupported"), "not run": one["counts"].get("not_run")}
    note = ", ".join(f"{count} {word}" for word, count in silent.items() if count)
    note = "" if outcome in ("unsupported", "not_run") else note
    return Cell(outcome, MARKS[outcome], z, note, f"{one['feature']}, {one['dtype']}: {told}")


def _worst(document: Mapping[str, Any]) -> Iterator[Worst]:
    gates = document["suite"]["gates"]
    for one in document["summary"]["worst"]:
        limits = {"max": 1.0} if one["dtype"] == "float64" else gates
        scores = []
        for gate in GATES:
            value = one[gate]
            share = min(size(value) / limits[gate], 1.0) if value is not None and gate in limits else None
            scores.append(Score("–" if value is None else _number(value), share))
        yield Worst(one["dtype"], one["tensor"], tuple(scores), one["unit"])


def _histograms(some: Sequence[Mapping[str, Any]]) -> Iterator[Histogram]:
    for one in some:
        counts = one["counts"]
        total, most = sum(counts), max(counts)
        if not total:
            continue
        beyond = counts[0] + counts[BINS - 1]
        text = f"{beyond / total:.2g} of them beyond 4" if beyond else ""
        bars = tuple(round(count / most, 4) for count in counts)
        yield Histogram(one["dtype"], one["tensor"], bars, f"{total:,} elements".replace(",", " "), text)


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    device, host, backend = document["device"], document["host"], document["backend"]
    suite, run = document["suite"], document["run"]
    memory = device["memory_bytes"]
    yield (
        "Device",
        _told(
            {
                "name": device["name"],
                "architecture": device["arch"],
                "multiprocessors": device["sm_count"],
                "memory": None if memory is None else f"{memory / 2**30:.1f} GiB",
                "driver": device["driver"],
                "ECC": device["ecc"],
                "MIG": device["mig"],
                "power limit": _with_unit(device["power_limit_w"], "W"),
                "largest SM clock": _with_unit(device["clock_sm_mhz"], "MHz"),
                "largest memory clock": _with_unit(device["clock_memory_mhz"], "MHz"),
            }
        ),
    )
    yield (
        "Machine",
        _told(
            {"system": f"{host['os']} {host['machine']}", "cores": host["cpu_count"], "CUDA": host["cuda_runtime"]}
            | {name: text for name, text in host["versions"].items() if name != "cuda"}
        ),
    )
    yield (
        "Backend",
        _told(
            {
                "name": backend["name"],
                "from": f"{backend['distribution']} {backend['version']}".strip(),
                "code": backend["factory"],
                "source SHA-256": backend["source_sha256"] or "comes from no file",
                **{f"{name} (required)": text for name, text in backend["languages"].items()},
                "numerics": backend["numerics"],
                "memory": backend["memory"],
                "fused": "yes" if backend["fused"] else "no",
                "by name only": backend["by_name_only"],
            }
        ),
    )
    yield (
        "Suite",
        _told(
            {
                "version": suite["version"],
                "tier": suite["tier"],
                "modified": {True: "yes", False: "no", None: "nobody can tell"}[suite["modified"]],
                "seed": suite["seed"],
                "case list SHA-256": suite["case_list_sha256"],
                "source SHA-256": suite["source_tree_sha256"],
            }
        ),
    )
    yield (
        "Run",
        _told(
            {
                "started": _moment(run["started"]),
                "ended": _moment(run["ended"]),
                "command": " ".join(run["command"]),
                "shard": run["shard"],
                "merged from": ", ".join(part["shard"] or part["id"] for part in run["merged"]),
                "only ids": run["match"],
                "only dtypes": ", ".join(run["dtypes"]),
                "workers": run["workers"],
                "fuzz": "" if run["fuzz"] is None else ", ".join(f"{k} {v}" for k, v in run["fuzz"].items()),
                "operator": run["operator_label"],
            }
        ),
    )


def _told(facts: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Facts that there are."""
    return tuple((name, str(value)) for name, value in facts.items() if value not in (None, ""))


def _with_unit(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{value:g} {unit}"


def _moment(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S %Z")


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"


def _said(value: object) -> str:
    """A declared capability in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping) and {"minimum", "maximum", "multiple"} == set(value):
        span = (
            f"{value['minimum']} or more" if value["maximum"] is None else f"{value['minimum']} to {value['maximum']}"
        )
        return span if value["multiple"] == 1 else f"{span} in steps of {value['multiple']}"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {text}" for key, text in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not said" if value is None else str(value)
