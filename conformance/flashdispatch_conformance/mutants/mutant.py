"""A mutant: the honest emulation with one step spoiled, and the finding that must give it away."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashdispatch_conformance.emulation import Emulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A seeded fault."""

    name: str
    """The name of the class, in the form of a backend's name: ``"scale_off_by_one_percent"``."""
    fault: str
    """The real fault that it stands for, in one line."""
    backend: type[Emulation]
    finding: str
    """What must flag it, in the words of `selftest.findings`: ``"lse: max"``."""
    first: str
    """The unit that shows it, run before the others: ``"named/length_63-bfloat16"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyOnGpu:
    """A fault that no CPU can have."""

    name: str
    fault: str
    reason: str
    """Why it is not run."""


class Family:
    """The mutants of one module, in the order in which they are written."""

    def __init__(self) -> None:
        self._mutants: list[Mutant] = []

    def __iter__(self) -> Iterator[Mutant]:
        return iter(self._mutants)

    def add(self, finding: str, first: str) -> Callable[[type[Emulation]], type[Emulation]]:
        """Decorates the spoiled emulation, whose docstring says the fault."""

        def add(backend: type[Emulation]) -> type[Emulation]:
            self._mutants.append(
                Mutant(
                    name=re.sub(r"(?<!^)(?=[A-Z])", "_", backend.__name__).lower(),
                    fault=" ".join((backend.__doc__ or "").split()).rstrip("."),
                    backend=backend,
                    finding=finding,
                    first=first,
                )
            )
            return backend

        return add
