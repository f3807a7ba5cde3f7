"""Why a backend can't take a problem, as data: the same record drives errors, `explain`, `doctor` and tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Code(StrEnum):
    """Stable reason codes. A code never changes its meaning; new ones may be added.

    The first group follows from a backend's declared `Support`; the second from the installation, the settings and the
    way the backend was asked for.
    """

    DEVICE = "DEVICE"
    ARCH_IMPOSSIBLE = "ARCH_IMPOSSIBLE"
    DTYPE = "DTYPE"
    HEAD_DIM = "HEAD_DIM"
    HEAD_DIM_V = "HEAD_DIM_V"
    HEAD_DIM_BACKWARD = "HEAD_DIM_BACKWARD"
    GQA = "GQA"
    CAUSAL = "CAUSAL"
    WINDOW = "WINDOW"
    ATTN_MASK = "ATTN_MASK"
    ATTN_MASK_GRAD = "ATTN_MASK_GRAD"
    ALIBI = "ALIBI"
    SINKS = "SINKS"
    SINKS_GRAD = "SINKS_GRAD"
    LENGTHS = "LENGTHS"
    SOFTCAP = "SOFTCAP"
    DROPOUT = "DROPOUT"
    BACKWARD = "BACKWARD"
    LSE = "LSE"
    LSE_GRAD = "LSE_GRAD"
    DETERMINISM = "DETERMINISM"
    BACKEND_LIMIT = "BACKEND_LIMIT"

    DEP_MISSING = "DEP_MISSING"
    LOAD_FAILED = "LOAD_FAILED"
    API_VERSION = "API_VERSION"
    DUPLICATE_NAME = "DUPLICATE_NAME"
    DISABLED = "DISABLED"
    NOT_AUTO = "NOT_AUTO"
    NOT_ALLOWED = "NOT_ALLOWED"
    FALLBACK = "FALLBACK"
    KNOWN_ISSUE = "KNOWN_ISSUE"
    WHY_NOT_RAISED = "WHY_NOT_RAISED"
    NONCONFORMANT = "NONCONFORMANT"


@dataclass(frozen=True, slots=True)
class Reason:
    """One obstacle: what was asked (`got`), what the backend takes (`allowed`), and what would help (`fix`).

    `field` names the argument or `Problem` field at fault. Values are text, so that a reason can be printed, compared,
    pickled and stored as JSON. A backend's own `why_not` uses `Code.BACKEND_LIMIT` when no other code fits.
    """

    code: Code
    field: str
    got: str
    allowed: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.code}: {self.field} is {self.got}; takes {self.allowed}"
        return f"{text} (fix: {self.fix})" if self.fix else text

    def to_json(self) -> dict[str, str]:
        """A plain dict of strings."""
        return {key: str(value) for key, value in asdict(self).items()}
