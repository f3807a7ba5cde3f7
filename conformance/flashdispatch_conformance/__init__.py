"""The conformance suite: proves that an attention backend computes what the contract says.

Three lines test a backend with pytest::

    from flashdispatch_conformance import AttentionConformance

    class TestMine(AttentionConformance):
        backend = "mine"

`oracle` is the float64 truth, `tolerance` the noise model and its gates, `cases` the problems, `inputs` their tensors;
`catalogue` lists every check. Importing the package or one of its parts loads no pytest.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashdispatch_conformance.suite import AttentionConformance, Result, run_case

__all__ = ["AttentionConformance", "Result", "run_case"]


def __getattr__(name: str) -> Any:
    """Loads the suite on first use, after telling a running pytest to explain its asserts."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "pytest" in sys.modules:
        import pytest

        if "flashdispatch_conformance.suite" not in sys.modules:  # too late to rewrite it, and pytest would warn
            pytest.register_assert_rewrite("flashdispatch_conformance.suite")
    from flashdispatch_conformance import suite

    return getattr(suite, name)
