"""The choice, as a pure function: (problem, backends, who asked for what) -> Plan. No GPU, no environment, no state.

Order of preference among the backends that can run: static priority for the architecture, lowered where a known issue
says that a backend is slow, then name. The same inputs always give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from packaging.specifiers import SpecifierSet

from flashdispatch_registry.backend import BackendSpec, KnownIssue
from flashdispatch_registry.errors import (
    BackendUnsupportedError,
    DisabledBackendError,
    FallbackError,
    NoBackendError,
    UnknownBackendError,
)
from flashdispatch_registry.plan import Adapter, ArchState, Candidate, Forced, Plan
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.reasons import Code, Reason
from flashdispatch_registry.support import declared_reasons
from flashdispatch_registry.verdicts import CONFORMANT_TIERS, Verdict
from flashdispatch_registry.versions import versions_line


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered backend. `spec` is None when its plugin gave none (it failed to load, or the name is disputed)."""

    name: str
    spec: BackendSpec | None
    distribution: str
    version: str
    faults: tuple[Reason, ...] = ()
    """What is wrong with the installation, whatever the problem: DEP_MISSING, LOAD_FAILED, API_VERSION, ..."""


def select(
    problem: Problem,
    entries: Sequence[Entry],
    *,
    forced: Forced | None = None,
    disabled: frozenset[str] = frozenset(),
    issues: Sequence[KnownIssue] = (),
    verdicts: Sequence[Verdict] = (),
    refuse_fallback: bool = False,
    adapters: tuple[Adapter, ...] = (),
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan for `problem`; `Plan.chosen` is None when nothing can run (see `require`).

    `verdicts` are those of reports on the code that is installed here (see `verdicts.verdicts_of`): a conformant one
    makes a backend tested on its architecture, a nonconformant one keeps automatic choice from it. With
    `refuse_fallback` (FLASHDISPATCH_FALLBACK=error) automatic choice takes no unfused or quadratic backend for a
    GPU problem.

    Raises UnknownBackendError for a forced name that is not registered, DisabledBackendError when every forced name is
    disabled.
    """
    candidates = [_candidate(problem, entry, disabled, verdicts) for entry in entries]
    for at, candidate in enumerate(candidates):
        slow = _slow(problem, candidate, issues)
        if slow is not None:
            priority, issue = slow
            candidates[at] = replace(candidate, priority=priority)
            if forced is None and candidate.can_run:
                notes += (f"{candidate.name} has priority {priority} here: {issue.reason} ({issue.url})",)
    if forced is None:
        candidates = [
            _for_auto(problem, candidate, entry.spec, issues, refuse_fallback)
            for candidate, entry in zip(candidates, entries, strict=True)
        ]
    candidates.sort(key=lambda c: _rank(c, forced))
    chosen = next((c for c in candidates if c.can_run and (forced is None or c.name in forced.names)), None)
    if chosen is not None:
        candidates.remove(chosen)
        candidates.insert(0, chosen)
    fallback = None
    if chosen is not None and forced is None:
        fallback = _fallback(problem, chosen)
    if chosen is not None and forced is not None:
        notes += tuple(f"known issue with {chosen.name}: {i.reason} ({i.url})" for i in _hits(problem, chosen, issues))
    said = None if chosen is None else _said(chosen.name, problem.arch, verdicts)
    if chosen is not None and said is not None and said.word == "nonconformant":
        notes += (f"{chosen.name} is nonconformant on {problem.arch}, by {said.file}",)
    plan = Plan(
        problem=problem,
        chosen=chosen.name if chosen else None,
        candidates=tuple(candidates),
        forced=forced,
        adapters=adapters,
        fallback=fallback,
        notes=notes,
    )
    if forced is not None:
        _check_names(forced, disabled, plan)
    return plan


def require(plan: Plan) -> str:
    """The chosen backend's name.

    Raises BackendUnsupportedError (forced), FallbackError or NoBackendError (automatic), with all reasons.
    """
    if plan.chosen is not None:
        return plan.chosen
    if plan.forced is not None:
        asked_for = [c for c in plan.candidates if c.name in plan.forced.names]
        head = f"{plan.forced} can't run this problem."
        able = [c.name for c in plan.candidates if c.can_run]
        help_ = f"can run it: {', '.join(able)}" if able else "no other backend can run it either"
        if plan.forced.source == "torch.compile":
            help_ += "; the backend was fixed while tracing, with other sizes: compile with dynamic=False, or force one"
        raise BackendUnsupportedError(_message(head, plan.problem, asked_for, help_), plan=plan)
    if any([reason.code for reason in c.reasons] == [Code.FALLBACK] for c in plan.candidates):
        head = "Only a slow path can run this problem, and FLASHDISPATCH_FALLBACK=error refuses it."
        raise FallbackError(_message(head, plan.problem, plan.candidates, ""), plan=plan)
    raise NoBackendError(_message("No backend can run this problem.", plan.problem, plan.candidates, ""), plan=plan)


def nearest(name: str, names: Iterable[str]) -> str:
    """A "did you mean" for a misspelt name: `` Did you mean 'x'?``, or nothing when none is near."""
    close = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown_backend(name: object, source: str, known: Sequence[str]) -> str:
    """What to say about a name that is not registered."""
    return (
        f"no backend is called {name!r} (asked for by {source}).{nearest(str(name), known)}\n"
        f"  registered: {', '.join(sorted(known)) or 'none'}\n"
        "  `flashdispatch doctor` lists the plugins and why one may be missing"
    )


def disabled_reason(name: str) -> Reason:
    """The reason of a backend that FLASHDISPATCH_DISABLE names."""
    return Reason(Code.DISABLED, "FLASHDISPATCH_DISABLE", name, "other backends", "unset FLASHDISPATCH_DISABLE")


def _check_names(forced: Forced, disabled: frozenset[str], plan: Plan) -> None:
    names = [candidate.name for candidate in plan.candidates]
    asked = f"  asked: {plan.problem.describe()}\n"
    for name in forced.names:
        if name not in names:
            raise UnknownBackendError(
                f"{unknown_backend(name, forced.source, names)}\n{asked}  versions: {versions_line()}", plan=plan
            )
    if disabled.issuperset(forced.names):
        raise DisabledBackendError(
            f"{','.join(forced.names)} is asked for by {forced.source} and disabled by FLASHDISPATCH_DISABLE="
            f"{','.join(sorted(disabled))}, which beats everything. Drop it from one of the two.\n"
            f"{asked}  versions: {versions_line()}",
            plan=plan,
        )


def _candidate(problem: Problem, entry: Entry, disabled: frozenset[str], verdicts: Sequence[Verdict]) -> Candidate:
    reasons = list(entry.faults)
    if entry.name in disabled:
        reasons.append(disabled_reason(entry.name))
    spec = entry.spec
    if spec is not None:
        reasons += declared_reasons(spec.support, problem)
        reasons += _own_reasons(spec, problem)
    said = _said(entry.name, problem.arch, verdicts)
    state: ArchState = "unknown" if spec is None else _arch_state(spec, problem.arch, said)
    return Candidate(
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        reasons=tuple(reasons),
        arch_state=state,
        priority=0 if spec is None else spec.priority_on(problem.arch),
        memory=None if spec is None else spec.memory,
        fused=None if spec is None else spec.fused,
        numerics=None if spec is None else spec.numerics,
        report="" if said is None or (state == "portable" and said.word != "conformant") else str(said.file),
    )


def _for_auto(
    problem: Problem,
    candidate: Candidate,
    spec: BackendSpec | None,
    issues: Sequence[KnownIssue],
    refuse_fallback: bool,
) -> Candidate:
    """What speaks against a backend only when nobody named it."""
    reasons = [
        Reason(Code.KNOWN_ISSUE, "problem", issue.reason, "what is known to be right", f"see {issue.url}")
        for issue in _hits(problem, candidate, issues)
        if issue.priority is None
    ]
    fix = f'ask for it with backend="{candidate.name}"'
    if spec is not None and spec.by_name_only:
        reasons.append(Reason(Code.NOT_AUTO, "backend", "auto", f"its name only: {spec.by_name_only}", fix))
    if candidate.numerics not in (None, "exact"):
        reasons.append(Reason(Code.NOT_AUTO, "numerics", str(candidate.numerics), "exact, chosen automatically", fix))
    if candidate.arch_state == "nonconformant":
        fix_it = f"run the conformance suite again when it is fixed, or {fix}"
        got = f"nonconformant in {candidate.report}"
        reasons.append(Reason(Code.NONCONFORMANT, "conformance", got, "a backend that did not fail", fix_it))
    slow = _fallback(problem, candidate)
    if slow is not None and refuse_fallback:
        fix = f'FLASHDISPATCH_FALLBACK=warn, or ask for it with backend="{candidate.name}"'
        reasons.append(Reason(Code.FALLBACK, "FLASHDISPATCH_FALLBACK", f"error, and {slow}", "fused backends", fix))
    return replace(candidate, reasons=(*candidate.reasons, *reasons))


def _own_reasons(spec: BackendSpec, problem: Problem) -> list[Reason]:
    """What the backend's own `why_not` adds. One that raises rejects its backend, and nobody else."""
    if spec.why_not is None:
        return []
    try:
        return list(_checked(spec.why_not(problem)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  a third party's code must not break the others' choice
        got = f"{type(error).__name__}: {error}"
        return [
            Reason(Code.WHY_NOT_RAISED, "why_not", got, "reasons or nothing", f"report it to {spec.name}'s authors")
        ]


def _checked(given: Iterable[object]) -> Iterator[Reason]:
    for reason in given:
        if not isinstance(reason, Reason):
            raise TypeError(f"{reason!r} is no Reason")
        yield reason


def _hits(problem: Problem, candidate: Candidate, issues: Sequence[KnownIssue]) -> list[KnownIssue]:
    return [
        issue
        for issue in issues
        if issue.backend == candidate.name
        and SpecifierSet(issue.versions).contains(candidate.version or "0", prereleases=True)
        and _applies(issue, problem)
    ]


def _slow(problem: Problem, candidate: Candidate, issues: Sequence[KnownIssue]) -> tuple[int, KnownIssue] | None:
    """The lowest priority that a known issue leaves a backend, and that issue; None when none lowers it."""
    lower = [
        (issue.priority, issue)
        for issue in _hits(problem, candidate, issues)
        if issue.priority is not None and issue.priority < candidate.priority
    ]
    return min(lower, key=lambda pair: pair[0], default=None)


def _applies(issue: KnownIssue, problem: Problem) -> bool:
    try:
        return issue.when(problem)
    except (Exception, SystemExit):  # noqa: BLE001  a predicate that can't answer leaves the warning standing
        return True


def _said(name: str, arch: str, verdicts: Sequence[Verdict]) -> Verdict | None:
    """The report that decides: one that failed before one that passed. A partial one decides nothing."""
    mine = [verdict for verdict in verdicts if (verdict.backend, verdict.arch) == (name, arch)]
    failed = (verdict for verdict in mine if verdict.word == "nonconformant")
    passed = (verdict for verdict in mine if verdict.word == "conformant" and verdict.tier in CONFORMANT_TIERS)
    return next(failed, None) or next(passed, None)


def _arch_state(spec: BackendSpec, arch: str, said: Verdict | None) -> ArchState:
    if spec.portable:  # the floor: without it there would be nothing to fall back on
        return "portable"
    if said is not None and said.word == "nonconformant":
        return "nonconformant"
    if spec.support.impossible_on(arch) is not None:
        return "impossible"
    return "untested" if said is None else "tested"


def _rank(candidate: Candidate, forced: Forced | None) -> tuple[int, bool, int, str]:
    named = forced is not None and candidate.name in forced.names
    turn = forced.names.index(candidate.name) if forced is not None and named else len(forced.names) if forced else 0
    return turn, not candidate.can_run, -candidate.priority, candidate.name


def _fallback(problem: Problem, candidate: Candidate) -> str | None:
    """What taking this backend for a GPU problem would mean, if it is a slow path; on a CPU none is."""
    if problem.device_type != "cuda":
        return None
    if candidate.memory == "quadratic":
        return f"{candidate.name} needs O(S^2) memory"
    if candidate.fused is False:
        return f"{candidate.name} is not a fused kernel: many times slower than one"
    return None


def _message(head: str, problem: Problem, candidates: Sequence[Candidate], help_: str) -> str:
    lines = [head, f"  asked: {problem.describe()}"]
    for candidate in candidates:
        owner = f"{candidate.distribution} {candidate.version}".rstrip()
        lines.append(f"  {candidate.name} ({owner}):")
        lines += [f"    {reason}" for reason in candidate.reasons]
    if not candidates:
        lines.append("  no backend is registered; a plain clone needs `pip install -e .` (see `flashdispatch doctor`)")
    # Only where fixes for all of a backend's reasons are known: half of a way out is none.
    fixable = [c for c in candidates if c.reasons and all(reason.fix for reason in c.reasons)]
    nearest_ = min(fixable, key=lambda c: len(c.reasons), default=None)
    if nearest_ is not None:
        fixes = dict.fromkeys(reason.fix for reason in nearest_.reasons)
        lines.append(f"  what would help: for {nearest_.name}, {'; '.join(fixes)}")
    if help_:
        lines.append(f"  {help_}")
    lines.append(f"  versions: {versions_line()}")
    return "\n".join(lines)
