"""The choice, as a pure function: (problem, backends, who asked for what) -> Plan. No GPU, no environment, no state.

Order of preference among the backends that can run: static priority for the architecture, then name. The same inputs
always give the same plan.
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
    NoBackendError,
    UnknownBackendError,
)
from flashdispatch_registry.plan import Adapter, ArchState, Candidate, Forced, Plan
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.reasons import Code, Reason
from flashdispatch_registry.support import declared_reasons
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
    adapters: tuple[Adapter, ...] = (),
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan for `problem`; `Plan.chosen` is None when nothing can run (see `require`).

    Raises UnknownBackendError for a forced name that is not registered, DisabledBackendError when every forced name is
    disabled.
    """
    if forced is not None:
        _check_names(forced, entries, disabled, problem)
    candidates = [_candidate(problem, entry, forced, disabled, issues) for entry in entries]
    candidates.sort(key=lambda c: _rank(c, forced))
    chosen = next((c for c in candidates if c.can_run and (forced is None or c.name in forced.names)), None)
    if chosen is not None:
        candidates.remove(chosen)
        candidates.insert(0, chosen)
    fallback = None
    if chosen is not None and forced is None and problem.device_type == "cuda":
        fallback = _fallback(chosen)
    if chosen is not None and forced is not None:
        notes += tuple(f"known issue with {chosen.name}: {i.reason} ({i.url})" for i in _hits(problem, chosen, issues))
    return Plan(
        problem=problem,
        chosen=chosen.name if chosen else None,
        candidates=tuple(candidates),
        forced=forced,
        adapters=adapters,
        fallback=fallback,
        notes=notes,
    )


def require(plan: Plan) -> str:
    """The chosen backend's name. Raises BackendUnsupportedError (forced) or NoBackendError (auto) with all reasons."""
    if plan.chosen is not None:
        return plan.chosen
    if plan.forced is not None:
        asked_for = [c for c in plan.candidates if c.name in plan.forced.names]
        head = f"{plan.forced} can't run this problem."
        able = [c.name for c in plan.candidates if c.can_run]
        help_ = f"can run it: {', '.join(able)}" if able else "no other backend can run it either"
        raise BackendUnsupportedError(_message(head, plan.problem, asked_for, help_), plan=plan)
    raise NoBackendError(_message("No backend can run this problem.", plan.problem, plan.candidates, ""), plan=plan)


def nearest(name: str, names: Iterable[str]) -> str:
    """A "did you mean" for a misspelt name: `` Did you mean 'x'?``, or nothing when none is near."""
    close = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def _check_names(forced: Forced, entries: Sequence[Entry], disabled: frozenset[str], problem: Problem) -> None:
    names = [entry.name for entry in entries]
    for name in forced.names:
        if name not in names:
            raise UnknownBackendError(
                f"no backend is called {name!r} (asked for by {forced.source}).{nearest(name, names)}\n"
                f"  registered: {', '.join(sorted(names)) or 'none'}\n"
                f"  asked: {problem.describe()}\n"
                "  `flashdispatch doctor` lists the plugins and why one may be missing",
                problem=problem,
            )
    if disabled.issuperset(forced.names):
        raise DisabledBackendError(
            f"{','.join(forced.names)} is asked for by {forced.source} and disabled by FLASHDISPATCH_DISABLE="
            f"{','.join(sorted(disabled))}, which beats everything. Drop it from one of the two.\n"
            f"  asked: {problem.describe()}",
            problem=problem,
        )


def _candidate(
    problem: Problem, entry: Entry, forced: Forced | None, disabled: frozenset[str], issues: Sequence[KnownIssue]
) -> Candidate:
    reasons = list(entry.faults)
    if entry.name in disabled:
        reasons.append(Reason(Code.DISABLED, "FLASHDISPATCH_DISABLE", entry.name, "other backends", "unset it"))
    spec = entry.spec
    if spec is None:
        return Candidate(
            name=entry.name,
            distribution=entry.distribution,
            version=entry.version,
            reasons=tuple(reasons),
            arch_state="unknown",
            priority=0,
            memory=None,
            fused=None,
            numerics=None,
        )
    reasons += declared_reasons(spec.support, problem)
    reasons += _own_reasons(spec, problem)
    candidate = Candidate(
        name=spec.name,
        distribution=entry.distribution,
        version=entry.version,
        reasons=tuple(reasons),
        arch_state=_arch_state(spec, problem.arch),
        priority=spec.priority_on(problem.arch),
        memory=spec.memory,
        fused=spec.fused,
        numerics=spec.numerics,
    )
    if forced is not None:
        return candidate
    for issue in _hits(problem, candidate, issues):
        reasons.append(Reason(Code.KNOWN_ISSUE, "problem", issue.reason, "what is known to be right", issue.url))
    if spec.numerics != "exact":
        fix = f'ask for it with backend="{spec.name}"'
        reasons.append(Reason(Code.NOT_AUTO, "numerics", spec.numerics, "exact, when chosen automatically", fix))
    return replace(candidate, reasons=tuple(reasons))


def _own_reasons(spec: BackendSpec, problem: Problem) -> list[Reason]:
    """What the backend's own `why_not` adds. One that raises rejects its backend, and nobody else."""
    if spec.why_not is None:
        return []
    try:
        return list(_checked(spec.why_not(problem)))
    except Exception as error:  # noqa: BLE001  a third party's code must not break the choice among the others
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


def _applies(issue: KnownIssue, problem: Problem) -> bool:
    try:
        return issue.when(problem)
    except Exception:  # noqa: BLE001  a predicate that can't answer leaves the warning standing
        return True


def _arch_state(spec: BackendSpec, arch: str) -> ArchState:
    if spec.portable:
        return "portable"
    return "untested" if spec.support.impossible_on(arch) is None else "impossible"


def _rank(candidate: Candidate, forced: Forced | None) -> tuple[int, bool, int, str]:
    named = forced is not None and candidate.name in forced.names
    turn = forced.names.index(candidate.name) if forced is not None and named else len(forced.names) if forced else 0
    return turn, not candidate.can_run, -candidate.priority, candidate.name


def _fallback(chosen: Candidate) -> str | None:
    if chosen.memory == "quadratic":
        return f"{chosen.name} needs O(S^2) memory"
    if not chosen.fused:
        return f"{chosen.name} is not a fused kernel: many times slower than one"
    return None


def _message(head: str, problem: Problem, candidates: Sequence[Candidate], help_: str) -> str:
    lines = [head, f"  asked: {problem.describe()}"]
    for candidate in candidates:
        owner = f"{candidate.distribution} {candidate.version}".rstrip()
        lines.append(f"  {candidate.name} ({owner}):")
        lines += [f"    {reason}" for reason in candidate.reasons]
    if not candidates:
        lines.append("  no backend is registered; a plain clone needs `pip install -e .` (see `flashdispatch doctor`)")
    fewest = min((c for c in candidates if c.reasons), key=lambda c: len(c.reasons), default=None)
    fixes = [reason.fix for reason in fewest.reasons if reason.fix] if fewest else []
    if fixes and fewest is not None:
        lines.append(f"  what would help: for {fewest.name}, {'; '.join(dict.fromkeys(fixes))}")
    if help_:
        lines.append(f"  {help_}")
    lines.append(f"  versions: {versions_line()}")
    return "\n".join(lines)
