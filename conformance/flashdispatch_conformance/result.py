"""What came of one check on one backend in one dtype: the record that reports, pytest and the command line share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from flashdispatch_conformance.tolerance import Stats
from flashdispatch_registry.reasons import Code

Outcome = Literal["pass", "fail", "error", "unsupported", "waived", "unexpected_pass", "not_run"]
"""What a check can end as. All are counted and none is hidden.

pass             everything that is declared holds
fail             something that is declared does not hold, or a refusal is not as it must be
error            the backend raised, crashed its process or ran into the watchdog
unsupported      every call was refused, as declared
waived           it fails, and a waiver that has not expired says so
unexpected_pass  a waiver says that it fails, and it does not
not_run          no statement about the backend, with the reason
"""

INSTALLATION = frozenset(
    {Code.DEP_MISSING, Code.LOAD_FAILED, Code.API_VERSION, Code.DUPLICATE_NAME, Code.DISABLED, Code.NOT_ALLOWED}
)
"""Reasons that say nothing about the backend's support: the check was not run."""


class NotRun(StrEnum):
    """Why a check says nothing."""

    NO_CUDA = "NO_CUDA"
    ONE_GPU = "ONE_GPU"
    NO_COMPILER = "NO_COMPILER"
    """torch.compile can't build anything on this machine."""
    INTERPRETER = "INTERPRETER"
    """A kernel language's interpreter does not do this at all."""
    NO_MEMORY = "NO_MEMORY"
    NOT_INSTALLED = "NOT_INSTALLED"
    """The backend can't be loaded here, or is disabled."""
    FILTERED = "FILTERED"
    """Left out by an option of the run."""
    INTERRUPTED = "INTERRUPTED"


NOT_OF_THIS_MACHINE = frozenset({NotRun.NO_CUDA, NotRun.ONE_GPU, NotRun.NO_COMPILER, NotRun.INTERPRETER})
"""Reasons that lie in the machine: the verdict for its architecture is given without these checks, and says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one check on one backend in one dtype."""

    check: str
    """The check's id, e.g. ``"named/length_63"``."""
    backend: str
    dtype: str
    outcome: Outcome
    messages: tuple[str, ...] = ()
    """What failed, or why it was not run."""
    not_run: NotRun | None = None
    """Given exactly with the outcome not_run."""
    waiver: str = ""
    """The id of the waiver behind waived and unexpected_pass."""
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Calls that the backend does not declare, with the reason codes. The outcome is about the others."""
    stats: Mapping[str, Stats] = field(default_factory=dict)
    """By tensor: out, lse, dq, dk, dv, dattn_mask, dsinks; with the call's name where two calls differ bitwise."""
    compile_s: float = 0.0
    """Seconds of the first call of each form, which is the one that compiles."""
    run_s: float = 0.0
    """All other seconds: inputs, calls, truth and judgement."""
    peak_bytes: int | None = None
    """Largest device memory that PyTorch had handed out, inputs included; None on a CPU."""

    @property
    def id(self) -> str:
        """The check and the dtype, as pytest and reports name them."""
        return f"{self.check}-{self.dtype}"

    def report(self) -> str:
        """The result as text: outcome, messages and the numbers of every tensor."""
        lines = [f"{self.check} on {self.backend} in {self.dtype}: {self.outcome}", *self.messages]
        lines += [f"{part} refused: {', '.join(codes)}" for part, codes in self.refused.items()]
        lines += [f"  {name:10} {z}" for name, z in self.stats.items()]
        return "\n".join(lines)
