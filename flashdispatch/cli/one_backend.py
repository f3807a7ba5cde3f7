"""One backend that a command is about, and what it must offer beside the contract."""

from __future__ import annotations

from typing import TypeVar

import typer

from flashdispatch._registry import AUTO, registry
from flashdispatch_registry.errors import BackendLoadError, BackendUnsupportedError

T = TypeVar("T")


def one_name(text: str) -> str:
    """`text`, when it can be one backend's name. BadParameter for a chain and for "auto"."""
    if "," in text or text in AUTO:
        raise typer.BadParameter(f"one backend by its name, got {text!r}", param_hint="--backend")
    return text


def offering(name: str, protocol: type[T], purpose: str) -> T:
    """The code of the backend `name`, which must have the methods of `protocol`.

    Raises BackendUnsupportedError that names the backends which have them, BackendLoadError when it can't be imported.
    """
    code = registry().load(name)
    if isinstance(code, protocol):
        return code
    able, unknown = [], []
    for entry in registry().entries():
        try:
            if not entry.faults and isinstance(registry().load(entry.name), protocol):
                able.append(entry.name)
        except BackendLoadError:
            unknown.append(entry.name)
    said = f"backend {name} can't be {purpose}; "
    said += f"these can: {', '.join(able)}" if able else "none that is installed can"
    if unknown:
        said += f" (not known of {', '.join(unknown)}, which failed to load: see `flashdispatch doctor`)"
    raise BackendUnsupportedError(f"{said}\n  how a backend offers it: flashdispatch_registry/kernels.py")
