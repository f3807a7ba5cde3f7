"""Packages of the extra ``flashdispatch[conformance]``, which only some parts of the suite need."""

from __future__ import annotations

from importlib.util import find_spec

from flashdispatch_registry.errors import FlashDispatchError

INSTALL = "pip install 'flashdispatch[conformance]'"


class MissingExtraError(FlashDispatchError, ImportError):
    """A package of the extra is not installed."""


def needs(module: str, purpose: str) -> None:
    """Raises MissingExtraError, with what to type, when `module` can't be found; imports nothing."""
    if find_spec(module) is None:
        raise MissingExtraError(f"{purpose} needs {module}, which is not installed: {INSTALL}")
