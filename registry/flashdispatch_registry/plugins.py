"""Discovery of plugins and the one registry of backends.

Requirements: one broken plugin never harms the rest, and what went wrong stays visible. pluggy's own
`load_setuptools_entrypoints` does neither (it lets an import error through and skips a duplicate name in silence), so
the loop is ours: each entry point is loaded, registered and asked for its records on its own, and whatever it raises is
kept with its traceback in its `PluginRecord`. Built-in backends come through the same door, first, so that their names
can't be taken.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, cast

import pluggy
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier

from flashdispatch_registry import hookspecs
from flashdispatch_registry.backend import API_VERSION, Backend, BackendSpec, KnownIssue
from flashdispatch_registry.errors import BackendLoadError, PluginError
from flashdispatch_registry.reasons import Code, Reason
from flashdispatch_registry.select import Entry
from flashdispatch_registry.versions import alternatives, installed

log = logging.getLogger("flashdispatch")

SLOW_IMPORT_SECONDS = 1.0
"""A plugin that takes longer to import is named in the log and in `doctor`: discovery waits for it."""

BUILT_IN = "flashdispatch"
"""The distribution whose plugins are built in."""

Status = Literal["loaded", "failed", "not allowed"]


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """Which third-party plugins may load. Built-in ones always do."""

    allow: frozenset[str] | None = None
    """Names of entry points or distributions; None allows all."""
    autoload: bool = True
    """False: third-party plugins load only when `allow` names them."""
    strict: bool = False
    """True: the first broken plugin raises PluginError."""

    def allows(self, name: str, distribution: str) -> bool:
        """Whether a third-party plugin may load."""
        if self.allow is None:
            return self.autoload
        return name in self.allow or distribution in {normalised(allowed) for allowed in self.allow}


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRecord:
    """What became of one entry point, for `doctor`."""

    name: str
    distribution: str
    version: str
    value: str
    """The entry point's target, e.g. ``"flashdispatch_backends.torch_reference"``."""
    status: Status
    backends: tuple[str, ...] = ()
    seconds: float = 0.0
    """How long its import took."""
    problem: str = ""
    """One line on what went wrong; empty when nothing did."""
    traceback: str = ""

    @property
    def slow(self) -> bool:
        """True when importing it held up discovery."""
        return self.seconds > SLOW_IMPORT_SECONDS


class Registry:
    """All known backends: discovered from entry points once, or registered at run time.

    Thread-safe. `generation` rises with every change, so that a cached plan can tell that it is out of date.
    """

    def __init__(self, policy: PluginPolicy | None = None) -> None:
        self.generation = 0
        self._policy = policy or PluginPolicy()
        self._lock = threading.RLock()
        self._discovered = False
        self._discovering = False
        self._at_run_time: set[str] = set()
        self._plugins: list[PluginRecord] = []
        self._entries: dict[str, Entry] = {}
        self._issues: list[KnownIssue] = []
        self._loaded: dict[str, Backend] = {}
        self._tracebacks: dict[str, str] = {}

    def entries(self) -> tuple[Entry, ...]:
        """Every registered backend, also those that can't run, by name."""
        self._discover()
        with self._lock:
            return tuple(self._entries[name] for name in sorted(self._entries))

    def plugins(self) -> tuple[PluginRecord, ...]:
        """What became of every entry point, built-in ones first."""
        self._discover()
        return tuple(self._plugins)

    def known_issues(self) -> tuple[KnownIssue, ...]:
        """All plugins' known issues."""
        self._discover()
        return tuple(self._issues)

    def load_traceback(self, name: str) -> str:
        """The traceback of a backend whose code failed to import on first use; empty when it did not."""
        return self._tracebacks.get(name, "")

    def register(self, spec: BackendSpec, *, distribution: str = "registered at run time") -> None:
        """Adds a backend without packaging.

        Raises PluginError when the name is taken or the spec was written for another version of the contract.
        """
        self._discover()
        with self._lock:
            entry = self._entry(spec, distribution, "")
            if spec.name in self._entries:
                owner = self._entries[spec.name]
                raise PluginError(
                    f"backend name {spec.name!r} is taken by {owner.distribution} {owner.version}".rstrip()
                )
            for fault in entry.faults:
                if fault.code is Code.API_VERSION:
                    raise PluginError(f"{spec.name}: {fault}")
            self._entries[spec.name] = entry
            self._at_run_time.add(spec.name)
            self.generation += 1

    def unregister(self, name: str) -> None:
        """Takes out a backend that `register` added.

        Raises KeyError when there is none of that name, PluginError when it came from an installed plugin.
        """
        with self._lock:
            entry = self._entries[name]
            if name not in self._at_run_time:
                raise PluginError(
                    f"{name} was not registered at run time, it comes from {entry.distribution} {entry.version}; "
                    f"FLASHDISPATCH_DISABLE={name} keeps it from being used"
                )
            self._at_run_time.remove(name)
            del self._entries[name]
            self._loaded.pop(name, None)
            self._tracebacks.pop(name, None)
            self.generation += 1

    def load(self, name: str) -> Backend:
        """The backend object, imported on first use.

        Raises BackendLoadError when its code can't be imported or lacks a function of the contract; from then on the
        backend carries the reason LOAD_FAILED and auto-selection passes it over.
        """
        backend = self._loaded.get(name)
        if backend is not None:
            return backend
        self._discover()
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:  # unregistered since the plan was made
                raise BackendLoadError(f"{name} is not registered any more")
            if entry.spec is None:
                raise BackendLoadError(f"{name} can't be loaded: " + "; ".join(map(str, entry.faults)))
            try:
                backend = _import_backend(entry.spec)
            except (Exception, SystemExit) as error:  # a module may call sys.exit() when it is imported
                self._tracebacks[name] = traceback.format_exc()
                got = _said(error)
                fix = "; ".join(_notes(error)) or entry.spec.install
                fault = Reason(Code.LOAD_FAILED, "factory", got, "an importable backend", fix)
                if fault not in entry.faults:
                    self._entries[name] = replace(entry, faults=(*entry.faults, fault))
                    self.generation += 1
                raise BackendLoadError(f"{name} ({entry.spec.factory}) failed to load: {got}") from error
            self._loaded[name] = backend
            return backend

    def _discover(self) -> None:
        with self._lock:
            if self._discovered or self._discovering:
                return  # a plugin that asks while it is imported sees those before it
            self._discovering = True
            try:
                self._load_plugins()
            finally:
                self._discovering = False
            self._discovered = True
            self.generation += 1

    def _load_plugins(self) -> None:
        # A strict discovery that raised must not leave half of itself for the next one.
        self._plugins, self._entries, self._issues, self._at_run_time = [], {}, [], set()
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        for point in sorted(entry_points(group=hookspecs.PROJECT), key=_built_in_first):
            record = self._load_plugin(point)
            self._plugins.append(record)
            if record.problem:
                log.warning("plugin %s (%s): %s", record.name, record.distribution, record.problem)
            if record.slow:
                log.warning(
                    "plugin %s (%s) took %.1f s to import; FLASHDISPATCH_PLUGINS can leave it out",
                    record.name,
                    record.distribution,
                    record.seconds,
                )

    def _load_plugin(self, point: EntryPoint) -> PluginRecord:
        distribution, number = _owner(point)
        record = PluginRecord(
            name=point.name, distribution=distribution, version=number, value=point.value, status="loaded"
        )
        if distribution != BUILT_IN and not self._policy.allows(point.name, distribution):
            fix = "FLASHDISPATCH_PLUGINS says which plugins may load, FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD whether any"
            self._stand_in(record, Reason(Code.NOT_ALLOWED, "plugin", "not allowed to load", "allowed plugins", fix))
            return replace(record, status="not allowed")
        start = time.perf_counter()
        try:
            specs, issues = self._ask(point)
        except (Exception, SystemExit) as error:  # whatever a third party's import does, the others must still load
            if self._policy.strict:
                what = f"{type(error).__name__}: {error}"
                raise PluginError(f"plugin {point.name} ({distribution} {number}) failed to load: {what}") from error
            return self._failed(record, error, time.perf_counter() - start)
        record = replace(record, seconds=time.perf_counter() - start)
        taken = [self._add(spec, distribution, number) for spec in specs]
        self._issues += issues
        problem = "; ".join(text for text in taken if text)
        if problem and self._policy.strict:
            raise PluginError(f"plugin {point.name} ({distribution} {number}): {problem}")
        return replace(record, backends=tuple(spec.name for spec in specs), problem=problem)

    def _ask(self, point: EntryPoint) -> tuple[list[BackendSpec], list[KnownIssue]]:
        """Imports one plugin and takes its records; nothing of it stays registered when anything is wrong."""
        plugin = point.load()
        owner = f"{point.name}@{_owner(point)[0]}"
        try:
            self._manager.register(plugin, name=owner)
            self._check_hooks(plugin, point)
            specs = self._records(plugin, "flashdispatch_backends", BackendSpec)
            issues = self._records(plugin, "flashdispatch_known_issues", KnownIssue)
        except (Exception, SystemExit):
            # By name: an older pluggy keeps half of a plugin that it refused.
            self._manager.unregister(name=owner)
            raise
        return specs, issues

    def _check_hooks(self, plugin: object, point: EntryPoint) -> None:
        self._manager.check_pending()
        if not self._manager.get_hookcallers(plugin):
            raise TypeError(f"{point.value} implements no hook; mark flashdispatch_backends() with @hookimpl")

    def _records(self, plugin: object, hook: str, kind: type[Any]) -> list[Any]:
        impls = [impl for impl in getattr(self._manager.hook, hook).get_hookimpls() if impl.plugin is plugin]
        records = [record for impl in impls for record in impl.function()]
        for record in records:
            if not isinstance(record, kind):
                raise TypeError(f"{hook}() yielded {record!r}, which is no {kind.__name__}")
        return records

    def _failed(self, record: PluginRecord, error: BaseException, seconds: float) -> PluginRecord:
        text = _said(error)
        fix = "see `flashdispatch doctor`"
        self._stand_in(record, Reason(Code.LOAD_FAILED, "plugin", text, "a plugin that imports", fix))
        trace = "".join(traceback.format_exception(error))
        return replace(record, status="failed", seconds=seconds, problem=text, traceback=trace)

    def _stand_in(self, record: PluginRecord, fault: Reason) -> None:
        """An entry under the plugin's own name, so that asking for it says why it is missing."""
        if record.name not in self._entries:
            self._entries[record.name] = Entry(record.name, None, record.distribution, record.version, (fault,))

    def _add(self, spec: BackendSpec, distribution: str, number: str) -> str:
        """Registers one spec; what is wrong with it when its name is taken or its contract another, else nothing."""
        owner = self._entries.get(spec.name)
        if owner is None or _stands_in(owner):
            entry = self._entries[spec.name] = self._entry(spec, distribution, number)
            return "; ".join(f"{spec.name}: {fault}" for fault in entry.faults if fault.code is Code.API_VERSION)
        if owner.distribution == BUILT_IN:
            return f"the name {spec.name!r} is built in and can't be taken"
        both = f"{owner.distribution} {owner.version}".rstrip() + f" and {distribution} {number}"
        fault = Reason(
            Code.DUPLICATE_NAME, "name", f"brought by {both}", "one distribution", "uninstall one of the two"
        )
        self._entries[spec.name] = Entry(spec.name, None, both, "", (fault,))
        return f"the name {spec.name!r} is brought by {both}; neither is used"

    def _entry(self, spec: BackendSpec, distribution: str, number: str) -> Entry:
        faults: list[Reason] = []
        if spec.api_version != API_VERSION:
            fix = "upgrade flashdispatch" if spec.api_version > API_VERSION else f"upgrade {distribution}"
            faults.append(Reason(Code.API_VERSION, "api_version", str(spec.api_version), str(API_VERSION), fix))
        faults += _missing(spec.requires, spec.install)
        return Entry(spec.name, spec, distribution, number, tuple(faults))


def _built_in_first(point: EntryPoint) -> tuple[bool, str, str]:
    distribution, _ = _owner(point)
    return distribution != BUILT_IN, distribution, point.name


def _stands_in(entry: Entry) -> bool:
    """True for the entry of a third party's plugin that did not load: it holds the name only until a backend has it."""
    absent = entry.spec is None and any(fault.code in (Code.LOAD_FAILED, Code.NOT_ALLOWED) for fault in entry.faults)
    return absent and entry.distribution != BUILT_IN


def _owner(point: EntryPoint) -> tuple[str, str]:
    """Distribution (normalised as PEP 503 says) and version of an entry point."""
    if point.dist is None:
        return "unknown", ""
    return normalised(point.dist.name), point.dist.version


def normalised(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it: ``My_Plugin`` is ``my-plugin``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _missing(requires: Sequence[str], install: str) -> Iterable[Reason]:
    """A reason for each requirement that the environment does not meet, read from metadata without importing."""
    for text in requires:
        wanted = alternatives(text)
        if not wanted or any(_met(requirement) for requirement in wanted):
            continue
        there = [requirement for requirement in wanted if installed(requirement.name)]
        got = ", ".join(
            f"{one.name if len(wanted) > 1 else ''} {installed(one.name)} installed".strip() for one in there
        )
        name = " or ".join(requirement.name for requirement in wanted)
        yield Reason(Code.DEP_MISSING, name, got or "not installed", text, install or f"pip install '{wanted[0]}'")


def _met(requirement: Requirement) -> bool:
    have = installed(requirement.name)
    try:
        return bool(have) and requirement.specifier.contains(have, prereleases=True)
    except InvalidSpecifier:
        return False


def _said(error: BaseException) -> str:
    """The exception in one text, also where a third party's ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as another:  # noqa: BLE001  it must not break the others' choice
        return f"{type(error).__name__}, whose text raises {type(another).__name__}"


def _notes(error: BaseException) -> list[str]:
    """What was added to the exception with ``add_note``, without what says nothing."""
    notes = getattr(error, "__notes__", None)
    if not isinstance(notes, list):
        return []
    return [note.strip() for note in notes if isinstance(note, str) and note.strip()]


def _import_backend(spec: BackendSpec) -> Backend:
    module_name, _, attribute = spec.factory.partition(":")
    module = importlib.import_module(module_name)
    backend = getattr(module, attribute) if attribute else module
    if isinstance(backend, type):
        backend = backend()
    absent = [name for name in ("forward", "backward", "prepare") if not callable(getattr(backend, name, None))]
    if absent:
        raise TypeError(f"{spec.factory} lacks {', '.join(absent)}")
    return cast("Backend", backend)
