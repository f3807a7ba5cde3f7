"""The answer to "which backend, and why?", as a value: printable, JSON, and attached to every error."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from flashdispatch_registry.backend import Memory, Numerics
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.reasons import Reason
from flashdispatch_registry.versions import versions

if TYPE_CHECKING:
    from rich.console import RenderableType

ArchState = Literal["portable", "tested", "untested", "nonconformant", "impossible", "unknown"]
Source = Literal["backend argument", "FLASHDISPATCH_BACKEND", "use_backend()", "set_default_backend()", "torch.compile"]


@dataclass(frozen=True, slots=True)
class Forced:
    """Backends named by somebody: tried in order, and nobody else is."""

    names: tuple[str, ...]
    source: Source
    overridden: tuple[tuple[Source, str], ...] = ()
    """What weaker sources asked for, and did not get."""

    def __str__(self) -> str:
        text = f"{','.join(self.names)} by {self.source}"
        return text + "".join(f", over {value} by {source}" for source, value in self.overridden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One backend in a plan, with every reason that speaks against it; none means it can run."""

    name: str
    distribution: str
    version: str
    reasons: tuple[Reason, ...]
    arch_state: ArchState
    """Tested and nonconformant are what a conformance report says; portable code needs none to be chosen; unknown when
    the plugin did not load."""
    priority: int
    memory: Memory | None
    fused: bool | None
    numerics: Numerics | None
    report: str = ""
    """The file of the conformance report that says so; empty when there is none on this code."""

    @property
    def can_run(self) -> bool:
        """True when nothing speaks against it."""
        return not self.reasons


@dataclass(frozen=True, slots=True)
class Adapter:
    """Something the core does to a tensor before the backend sees it, and what that costs."""

    name: Literal["cast", "copy"]
    tensor: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was chosen for a problem, and the whole way there.

    ``print(plan.table())`` shows it, a notebook renders it, `to_json` keeps it.
    """

    problem: Problem
    chosen: str | None
    """The backend's name; None when nothing can run."""
    candidates: tuple[Candidate, ...]
    """In the order of preference: the chosen one first."""
    forced: Forced | None = None
    """None: chosen automatically."""
    ranking: str = "static priority"
    """What ordered those that can run."""
    adapters: tuple[Adapter, ...] = ()
    fallback: str | None = None
    """Set when auto-selection had to take an unfused or quadratic backend for a GPU problem: what that means."""
    notes: tuple[str, ...] = ()

    def candidate(self, name: str) -> Candidate:
        """The candidate called `name`; KeyError when the plan has none."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict: problem, choice, candidates with reasons, adapters, who forced what, versions."""
        return {
            "problem": self.problem.to_json(),
            "request": self.problem.describe(),
            "chosen": self.chosen,
            "forced": asdict(self.forced) if self.forced else None,
            "ranking": self.ranking,
            "candidates": [
                asdict(candidate)
                | {"reasons": [reason.to_json() for reason in candidate.reasons], "can_run": candidate.can_run}
                for candidate in self.candidates
            ],
            "adapters": [asdict(adapter) for adapter in self.adapters],
            "fallback": self.fallback,
            "notes": list(self.notes),
            "versions": dict(versions()),
        }

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int = 120) -> str:
        """The plan as text, `width` columns wide."""
        from flashdispatch_registry.render import plan_text  # rich loads only when somebody looks

        return plan_text(self, width)

    def __rich__(self) -> RenderableType:
        from flashdispatch_registry.render import plan_view

        return plan_view(self)

    def _repr_html_(self) -> str:
        from flashdispatch_registry.render import plan_html

        return plan_html(self)
