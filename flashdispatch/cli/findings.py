"""What the doctor finds: machine, plugins, backends and settings, as a value with a verdict and advice.

It must answer even when much is wrong, so a setting or plugin that raises becomes a finding.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import flashdispatch
from flashdispatch import _settings
from flashdispatch._registry import registry
from flashdispatch.cli.machine import Machine, this_machine
from flashdispatch.cli.settings_faults import bad_values, forced_in_vain, names_nobody
from flashdispatch_registry.backend import KnownIssue
from flashdispatch_registry.errors import BackendLoadError, FlashDispatchError
from flashdispatch_registry.plugins import BUILT_IN, PluginRecord
from flashdispatch_registry.reasons import Code, Reason
from flashdispatch_registry.versions import versions


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything the doctor saw."""

    machine: Machine
    plugins: tuple[PluginRecord, ...]
    backends: tuple[flashdispatch.BackendStatus, ...]
    tracebacks: dict[str, str]
    """Backend -> traceback, for those whose code failed to load just now."""
    in_force: dict[str, str]
    """Our environment variables that are set, with their values."""
    unknown: dict[str, str]
    """Variables that look like ours and are not -> a "did you mean", or nothing."""
    issues: tuple[KnownIssue, ...]
    """Combinations known to be wrong, which auto-selection passes over."""
    raising: tuple[str, ...]
    """A line for each value of our variables that makes calls raise."""
    ineffective: tuple[str, ...]
    """A line for each name in our variables that names nobody."""
    unexamined: str
    """The setting or plugin error that kept plugins and backends from being examined; empty when nothing did."""

    @property
    def ready(self) -> tuple[str, ...]:
        """The backends that can run here."""
        return tuple(backend.name for backend in self.backends if backend.ready)

    @property
    def broken(self) -> tuple[str, ...]:
        """One line for each thing that is broken: the doctor exits with 1 when there is any."""
        lines = [*self.raising]
        if self.unexamined and self.unexamined not in lines:
            lines.append(self.unexamined)
        lines += [f"plugin {p.name} ({p.distribution}): {p.problem}" for p in self.plugins if p.problem]
        lines += [f"backend {name}: {fault.got}" for name, fault in self._failed_to_load()]
        if not self.unexamined and not self.ready:
            lines.append(f"no backend can run on this machine ({self.machine.arch})")
        return tuple(lines)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to type, or to change."""
        lines: list[str] = []
        if not self.unexamined and not any(plugin.distribution == BUILT_IN for plugin in self.plugins):
            lines.append(
                "no built-in backend is registered: `pip install -e .` in the clone, or reinstall flashdispatch"
            )
        if self.unexamined and self.unexamined not in self.raising:
            lines.append("`FLASHDISPATCH_STRICT_PLUGINS=0 flashdispatch doctor` passes it over and examines the rest")
        for plugin in self.plugins:
            if plugin.status == "failed":
                lines.append(
                    f"plugin {plugin.name} does not load: `pip install --upgrade {plugin.distribution}` or "
                    f"`pip uninstall {plugin.distribution}`; its traceback is for its authors"
                )
            if plugin.slow:
                lines.append(
                    f"plugin {plugin.name} makes every start wait {plugin.seconds:.1f} s: it should import its kernels "
                    "on first use (tell its authors)"
                )
        for backend in self.backends:
            missing = [reason for reason in backend.reasons if reason.code is Code.DEP_MISSING]
            if missing and len(missing) == len(backend.reasons):
                lines.append(f"{backend.name} is only missing packages: `{missing[0].fix}`")
        for name, fault in self._failed_to_load():
            lines.append(f"backend {name} does not load: {fault.fix}; its traceback is for its authors")
        lines += self.ineffective
        lines += [f"{name} is not a flashdispatch setting.{hint}" for name, hint in self.unknown.items()]
        return tuple(lines)

    def _failed_to_load(self) -> Iterator[tuple[str, Reason]]:
        """Backends whose code failed to load just now, and why; the fix is a text, or a command in backticks."""
        for backend in self.backends:
            fault = next((r for r in backend.reasons if r.code is Code.LOAD_FAILED), None)
            if fault is not None and backend.name in self.tracebacks:
                install = backend.spec.install if backend.spec else ""
                command = install or f"pip install --upgrade {backend.distribution}"
                yield backend.name, replace(fault, fix=fault.fix if fault.fix not in ("", install) else f"`{command}`")

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return {
            "ok": not self.broken,
            "broken": list(self.broken),
            "advice": list(self.advice),
            "unexamined": self.unexamined,
            "machine": asdict(self.machine) | {"arch": self.machine.arch},
            "versions": dict(versions()),
            "plugins": [asdict(plugin) | {"slow": plugin.slow} for plugin in self.plugins],
            "backends": [
                {
                    "name": backend.name,
                    "ready": backend.ready,
                    "distribution": backend.distribution,
                    "version": backend.version,
                    "reasons": [reason.to_json() for reason in backend.reasons],
                    "traceback": self.tracebacks.get(backend.name, ""),
                }
                for backend in self.backends
            ],
            "known_issues": [
                {
                    "backend": issue.backend,
                    "versions": issue.versions,
                    "reason": issue.reason,
                    "url": issue.url,
                    "priority": issue.priority,
                }
                for issue in self.issues
            ],
            "settings": {"in_force": self.in_force, "unknown": self.unknown},
        }


def examine() -> Findings:
    """Looks at everything; a plugin or setting that raises is a finding, not an end."""
    plugins: tuple[PluginRecord, ...] = ()
    backends: tuple[flashdispatch.BackendStatus, ...] = ()
    tracebacks: dict[str, str] = {}
    issues: tuple[KnownIssue, ...] = ()
    raising = list(bad_values())
    ineffective: list[str] = []
    unexamined = ""
    with _quiet():
        try:
            plugins = registry().plugins()
            issues = registry().known_issues()
            backends = flashdispatch.backends()
            tracebacks = _load([backend.name for backend in backends if backend.ready])
            backends = flashdispatch.backends()  # a backend that failed to load just now is not ready any more
            raising += forced_in_vain(backends)
            ineffective += names_nobody(backends, plugins)
        except FlashDispatchError as error:
            unexamined = str(error)
    return Findings(
        machine=this_machine(),
        plugins=plugins,
        backends=backends,
        tracebacks=tracebacks,
        in_force={name: os.environ[name] for name in _settings.KNOWN if name in os.environ},
        unknown=_settings.unknown(),
        issues=issues,
        raising=tuple(raising),
        ineffective=tuple(ineffective),
        unexamined=unexamined,
    )


def _load(names: list[str]) -> dict[str, str]:
    failed: dict[str, str] = {}
    for name in names:
        try:
            registry().load(name)
        except BackendLoadError as error:
            failed[name] = registry().load_traceback(name) or str(error)
    return failed


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines and warnings meanwhile: all they could say is in the findings."""
    log = logging.getLogger("flashdispatch")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
