"""The process-wide registry: who is registered, who is ready on this machine, and registering at run time."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashdispatch import _settings
from flashdispatch_registry.arch import arch_of, device_type_of
from flashdispatch_registry.backend import BackendSpec
from flashdispatch_registry.errors import InvalidTypeError, UnknownBackendError
from flashdispatch_registry.plugins import Registry
from flashdispatch_registry.reasons import Code, Reason
from flashdispatch_registry.select import Entry, disabled_reason, unknown_backend
from flashdispatch_registry.versions import versions_line

Names = tuple[str, ...]
"""Backend names, tried in order."""

AUTO: Names = ("auto",)
"""Stands for automatic choice where names may stand."""

_lock = threading.Lock()
_process: Registry | None = None


def registry() -> Registry:
    """The process's registry. Made on first use, so that importing flashdispatch discovers nothing."""
    global _process
    if _process is None:
        with _lock:
            if _process is None:
                _settings.warn_unknown()
                _process = Registry(_settings.plugin_policy())
    return _process


def register(spec: BackendSpec) -> None:
    """Adds a backend at run time, without packaging.

    Raises PluginError when the name is taken or the spec was written for another version of the contract,
    InvalidTypeError when it is no BackendSpec.
    """
    if not isinstance(spec, BackendSpec):
        raise InvalidTypeError(f"register() takes a BackendSpec, got {type(spec).__name__}")
    registry().register(spec)


def unregister(name: str) -> None:
    """Takes out a backend that `register` added.

    Raises UnknownBackendError when there is none of that name, PluginError when an installed plugin brings it.
    """
    try:
        registry().unregister(name)
    except KeyError:
        known = [entry.name for entry in registry().entries()]
        raise UnknownBackendError(unknown_backend(name, "unregister()", known)) from None


def check_registered(names: Names, source: str) -> None:
    """Raises UnknownBackendError when one of `names` is not registered; ``"auto"`` needs no registration."""
    known = [entry.name for entry in registry().entries()]
    for name in names:
        if name not in known and names != AUTO:
            raise UnknownBackendError(f"{unknown_backend(name, source, known)}\n  versions: {versions_line()}")


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend on this machine: ready, or why not."""

    name: str
    distribution: str
    version: str
    reasons: tuple[Reason, ...]
    spec: BackendSpec | None
    """What it declares; None when its plugin failed to load."""

    @property
    def ready(self) -> bool:
        """True when it can run something here."""
        return not self.reasons


def backends() -> tuple[BackendStatus, ...]:
    """Every registered backend, ready on this machine or with the reasons why not.

    Imports no kernel language and starts no CUDA context: until something else has started one, a GPU counts as one of
    unknown architecture.
    """
    arches = _arches()
    disabled = frozenset(_settings.names(os.environ.get(_settings.DISABLE) or ""))
    return tuple(
        BackendStatus(entry.name, entry.distribution, entry.version, _here(entry, arches, disabled), entry.spec)
        for entry in registry().entries()
    )


def _arches() -> list[str]:
    devices = [torch.device("cpu")]
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch ships it without types
    if started:
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    unknown = ["cuda"] if torch.cuda.is_available() and not started else []
    return [arch_of(device) for device in devices] + unknown


def _here(entry: Entry, arches: Sequence[str], disabled: frozenset[str]) -> tuple[Reason, ...]:
    reasons = list(entry.faults)
    if entry.name in disabled:
        reasons.append(disabled_reason(entry.name))
    if entry.spec is not None:
        support = entry.spec.support
        mine = [arch for arch in arches if device_type_of(arch) in support.devices]
        if not mine:
            wanted = " or ".join(sorted(support.devices))
            reasons.append(Reason(Code.DEVICE, "device", f"no {wanted} device here", wanted))
        elif all(support.impossible_on(arch) for arch in mine):
            reasons += [
                Reason(Code.ARCH_IMPOSSIBLE, "arch", arch, f"other architectures: {support.impossible_on(arch)}")
                for arch in mine
            ]
    return tuple(reasons)
