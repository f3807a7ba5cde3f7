"""From a call to its plan: the settings in force, the choice, the caches, and what happens around a choice."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashdispatch import _forcing, _settings
from flashdispatch._arguments import Arguments, check
from flashdispatch._forcing import Asked
from flashdispatch._registry import Names, registry
from flashdispatch_registry import verdicts
from flashdispatch_registry.arch import check_arch
from flashdispatch_registry.backend import Backend
from flashdispatch_registry.errors import BackendLoadError, FallbackWarning, InvalidTypeError
from flashdispatch_registry.plan import Adapter, Forced, Plan
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.select import Entry, nearest, require, select
from flashdispatch_registry.verdicts import Verdict

log = logging.getLogger("flashdispatch")

CACHE_LIMIT = 4096
"""Entries of a cache; beyond it the oldest half goes."""

cache: dict[Any, Any] = {}
"""An eager call's metadata, the registry's generation among it -> what runs it."""

traced_cache: dict[Any, Any] = {}
"""The same for calls out of a traced graph."""


def reload_settings() -> None:
    """Reads the environment and the conformance reports again, and forgets all cached plans.

    Needed only after changing FLASHDISPATCH_FALLBACK or FLASHDISPATCH_CHECK in a running process. Plugins stay as they
    were discovered.

    Raises SettingsError for a value that means nothing.
    """
    _settings.read()
    _settings.warn_unknown()
    verdicts.forget()
    cache.clear()
    traced_cache.clear()


def plan_for(
    problem: Problem,
    asked: Asked,
    disable: str | None,
    *,
    adapters: tuple[Adapter, ...] = (),
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan for a problem, given who asked for what. Pure but for reading the registry; `chosen` may be None."""
    known = registry()
    entries = known.entries()
    disabled = frozenset(_settings.names(disable or ""))
    _warn_unknown_disabled(disabled, entries)
    forced, overruled = _forcing.resolve(asked)
    return select(
        problem,
        entries,
        forced=forced,
        disabled=disabled,
        issues=known.known_issues(),
        verdicts=_verdicts(entries, problem.arch),
        refuse_fallback=_settings.read().fallback == "error",
        adapters=adapters,
        notes=notes + overruled,
    )


def commit(
    problem: Problem,
    asked: Asked,
    disable: str | None,
    *,
    adapters: tuple[Adapter, ...] = (),
    notes: tuple[str, ...] = (),
) -> tuple[Plan, Backend]:
    """The plan and its backend's code, for a call that will run.

    A backend whose code fails to import carries that as a reason from then on: auto-selection and a chain go on to the
    next one (the plan says why), a single forced one raises.

    Raises BackendUnsupportedError, NoBackendError, UnknownBackendError, DisabledBackendError, FallbackError,
    SettingsError.
    """
    _settings.warn_unknown()
    while True:
        plan = plan_for(problem, asked, disable, adapters=adapters, notes=notes)
        name = require(plan)
        try:
            backend = registry().load(name)
        except BackendLoadError as error:
            log.warning("%s", error)
            continue  # now it has the reason LOAD_FAILED, so the next plan is another one, or raises with it
        _fallback_event(plan)
        log.debug("%s for %s", name, problem.describe())
        return plan, backend


def commit_traced(problem: Problem, name: str) -> tuple[Plan, Backend]:
    """At run time of a traced call: the plan for the real sizes, on the backend that tracing chose and no other.

    Raises BackendUnsupportedError when it can't run these sizes.
    """
    known = registry()
    entries = known.entries()
    plan = select(
        problem,
        entries,
        forced=Forced((name,), "torch.compile"),
        issues=known.known_issues(),
        verdicts=_verdicts(entries, problem.arch),
    )
    return plan, known.load(require(plan))


def _verdicts(entries: Sequence[Entry], arch: str) -> tuple[Verdict, ...]:
    return verdicts.verdicts_of((entry.spec for entry in entries if entry.spec is not None), arch)


def remember(where: dict[Any, Any], key: Any, value: Any) -> None:
    """Keeps one entry in a bounded cache."""
    if len(where) >= CACHE_LIMIT:
        for old in list(where)[: CACHE_LIMIT // 2]:
            where.pop(old, None)
    where[key] = value


def explain(
    q: Tensor | Problem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    arch: str | None = None,
    backend: str | Names | None = None,
    **arguments: Any,
) -> Plan:
    """Says which backend `attention` with the same arguments would run, and why; nothing runs.

    Takes what `attention` takes (tensors or FakeTensors), or one `Problem`. With ``arch="sm_120"`` it answers for
    another architecture, on a machine that has none. `Plan.chosen` is None when nothing can run: reading reasons raises
    nothing.

    Raises what bad arguments raise in `attention`, UnknownBackendError, DisabledBackendError and SettingsError.
    """
    problem, adapters = _asked_about(q, k, v, arch, arguments)
    return plan_for(problem, *ask(backend), adapters=adapters)


def prepare(
    q: Tensor | Problem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    backend: str | Names | None = None,
    **arguments: Any,
) -> Plan:
    """Compiles ahead what `attention` with the same arguments will run, and returns the plan.

    After it such a call neither compiles nor tunes, so it may run while a CUDA graph is being captured. Takes what
    `attention` takes, for q's device, or one `Problem`, for the current one. A kernel may depend on strides that a
    Problem does not say, such as those of an expanded or transposed mask: run such a call once before capturing.

    Raises what `attention` raises when nothing can run.
    """
    if "arch" in arguments:
        raise InvalidTypeError("prepare() compiles for q's own device; explain(arch=...) answers for another")
    problem, adapters = _asked_about(q, k, v, None, arguments)
    plan, code = commit(problem, *ask(backend), adapters=adapters)
    with _device_of(q):
        code.prepare(problem)
    return plan


def _device_of(q: Tensor | Problem) -> AbstractContextManager[object]:
    """Makes a tensor's GPU the current one, as a call does."""
    if isinstance(q, Tensor) and q.device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.device(q.device)
    return nullcontext()


def _asked_about(
    q: Tensor | Problem, k: Tensor | None, v: Tensor | None, arch: str | None, arguments: dict[str, Any]
) -> tuple[Problem, tuple[Adapter, ...]]:
    """The problem of tensors with `attention`'s arguments, or the one given; on `arch`, where it is given."""
    if arch is not None:
        check_arch(arch)
    if isinstance(q, Problem):
        if k is not None or v is not None or arguments:
            raise InvalidTypeError("explain(problem) takes only arch= and backend= beside it: a Problem says the rest")
        return (q.with_arch(arch) if arch else q), ()
    if k is None or v is None:
        raise InvalidTypeError("explain() needs q, k and v, or one Problem")
    unknown = ", ".join(sorted(set(arguments).difference(Arguments._fields)))
    if unknown:
        raise InvalidTypeError(f"attention() has no argument {unknown}; it has {', '.join(Arguments._fields[3:])}")
    checked = check(Arguments(q, k, v, **arguments), arch=arch)
    return checked.problem, checked.adapters


def ask(backend: str | Names | None) -> tuple[Asked, str | None]:
    """Everybody who may name a backend, and FLASHDISPATCH_DISABLE, as of now."""
    asked = Asked(backend, os.environ.get(_settings.BACKEND), _forcing.context(), _forcing.default())
    return asked, os.environ.get(_settings.DISABLE)


_events: set[tuple[Any, ...]] = set()


def _fallback_event(plan: Plan) -> None:
    """FLASHDISPATCH_FALLBACK=warn: taking a slow path on a GPU is said, once per class of problem."""
    if plan.fallback is None or _settings.read().fallback != "warn":
        return
    problem = plan.problem
    # Sizes don't matter to whether a kernel exists: one warning, not one per sequence length.
    event = (plan.chosen, replace(problem, batch=0, seqlen_q=0, seqlen_k=0, scale=1.0, attn_mask_shape=None))
    if event in _events:
        return
    _events.add(event)
    warnings.warn(
        f"{plan.fallback}, and no fused backend can run this.\n"
        f"  asked: {problem.describe()}\n"
        + "".join(f"  {c.name}: {reason}\n" for c in plan.candidates for reason in c.reasons)
        + "  FLASHDISPATCH_FALLBACK=allow accepts it, =error refuses it; explain() shows the plan",
        FallbackWarning,
        stacklevel=2,
    )


_unknown_disabled: set[str] = set()


def _warn_unknown_disabled(disabled: frozenset[str], entries: Sequence[Entry]) -> None:
    names = [entry.name for entry in entries]
    for name in disabled.difference(names, _unknown_disabled):
        _unknown_disabled.add(name)
        log.warning("FLASHDISPATCH_DISABLE names %r, which is not registered.%s", name, nearest(name, names))
