"""What can go wrong in the demo: a package that is missing, or a promise that did not hold."""

from __future__ import annotations

from flashdispatch_registry.errors import FlashDispatchError


class MissingPackageError(FlashDispatchError, ImportError):
    """A package that only the demo needs can't be imported; the message says what to type."""


class DemoFailedError(FlashDispatchError, AssertionError):
    """Something that the demo shows turned out not to be true here."""


def require(holds: bool, failure: str) -> None:
    """Raises DemoFailedError(failure) unless `holds`. Unlike `assert` it is there under ``python -O`` too."""
    if not holds:
        raise DemoFailedError(f"the demo failed: {failure}")
