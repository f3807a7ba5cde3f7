"""The suite as a pytest class, for a backend's own test module."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

import flashdispatch
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.case_check import run_case
from flashdispatch_conformance.cases import BY_ID, NAMED
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.verdict import MINIMUM
from flashdispatch_registry.problem import DTYPE_NAMES
from flashdispatch_registry.reasons import Code

if TYPE_CHECKING:
    import pytest

__all__ = ["AttentionConformance", "Result", "run_case"]


class AttentionConformance:
    """The suite as a pytest class: subclass it in a test module and name your backend.

    ::

        class TestMine(AttentionConformance):
            backend = "mine"

    Test ids are ``test_case[<case id>-<dtype>]``. Calls that the backend does not declare are skipped with their reason
    codes once they were refused as they must be.
    """

    backend: ClassVar[str]
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float16, torch.bfloat16, torch.float32)
    cases: ClassVar[Sequence[Case]] = NAMED
    device: ClassVar[str | None] = None
    """None: ``"cuda"`` where there is one, else ``"cpu"``."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes `test_case` over the class's cases and dtypes."""
        if "case" in metafunc.fixturenames:
            pairs = list(itertools.product(self.cases, self.dtypes))
            ids = [f"{case.id}-{DTYPE_NAMES[dtype]}" for case, dtype in pairs]
            metafunc.parametrize(("case", "dtype"), pairs, ids=ids)

    def run(self, case: Case, dtype: torch.dtype) -> Result:
        """Runs one case on the class's backend and device."""
        return run_case(case, self.backend, dtype, self._device())

    def test_case(self, case: Case, dtype: torch.dtype) -> None:
        """One case in one dtype."""
        import pytest  # the suite also runs without pytest

        result = self.run(case, dtype)
        if result.outcome in ("unsupported", "not_run"):
            pytest.skip(result.report())
        assert result.outcome == "pass", result.report()

    def test_the_minimum_is_supported(self) -> None:
        """Forward and LSE at D = 64 and 128 in a 16-bit dtype: a backend that declares nothing can't conform."""
        dtypes = [dtype for dtype in self.dtypes if dtype.itemsize == 2]
        assert dtypes, "the minimum is tested in float16 or bfloat16: name one of them in `dtypes`"
        for case in (replace(BY_ID[name], grads=()) for name in MINIMUM):
            results = [self.run(case, dtype) for dtype in dtypes]
            assert any(r.outcome == "pass" and not r.refused for r in results), self._below_the_minimum(results)

    def _device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def _below_the_minimum(self, results: Sequence[Result]) -> str:
        """Why no result is a full pass, and what to do when it is only that the wrong device was asked."""
        text = "\n".join(result.report() for result in results)
        refusals = [codes for result in results for codes in result.refused.values()]
        if any(result.outcome != "unsupported" for result in results) or not all(Code.DEVICE in c for c in refusals):
            return text
        spec = next(status.spec for status in flashdispatch.backends() if status.name == self.backend)
        declared, here = sorted(spec.support.devices) if spec else [], self._device()
        return (
            f"nothing was tested: {self.backend} declares devices {declared}, the suite ran on {here!r}, and all calls "
            f"were refused. If it runs on {here} too, add that to Support.devices (default: {{'cuda'}}); if not, run "
            f"the suite where there is such a device (cuda is found, others are named by `device`).\n{text}"
        )
