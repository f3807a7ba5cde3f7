"""One thread, since the cases are so small that more of them only wait for each other; and reports that nobody ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashdispatch
from flashdispatch_conformance import catalogue
from flashdispatch_conformance.check import Tier
from flashdispatch_conformance.report import Run
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.tolerance import Stats
from flashdispatch_registry import BackendSpec, HeadDims, Support


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Reported:
    """Results for reports on a backend that is only a declaration, and a file."""

    backend = "declared_only"

    def __init__(self, kernels: Path) -> None:
        self.kernels = kernels

    def passed(self, check: str, dtype: str, **changes: Any) -> Result:
        """A unit that passed, with z-scores that depend on its name."""
        z = 0.2 + len(check) % 7 / 10
        scores: dict[str, Any] = {"rms": z / 2, "row": z, "max": 2 * z, "bias": -0.01, "numel": 8192, "rows": 128}
        counts = (0,) * 16 + (5000, 3192) + (0,) * 16
        result = Result(
            check=check,
            backend=self.backend,
            dtype=dtype,
            outcome="pass",
            stats={name: Stats(**scores, worst_index=(0, 1), histogram=counts) for name in ("out", "lse")},
            compile_s=0.125,
            run_s=0.5,
            peak_bytes=4096,
        )
        return replace(result, **changes)

    def all_passed(self, tier: Tier = "smoke") -> list[Result]:
        return [self.passed(*unit.id.rsplit("-", 1)) for unit in catalogue.units(tier)]

    def failed(self, result: Result, message: str = "out: max of z is 9, allowed 8", **changes: Any) -> Result:
        return replace(result, **({"outcome": "fail", "messages": (message,)} | changes))

    def run(self, tier: Tier = "smoke", **changes: Any) -> Run:
        fields: dict[str, Any] = {
            "backend": self.backend,
            "device": torch.device("cpu"),
            "tier": tier,
            "planned": tuple(unit.id for unit in catalogue.units(tier)),
            "started": "2026-11-30T10:00:00+00:00",
            "ended": "2026-11-30T10:01:30+00:00",
            "command": ("flashdispatch", "conformance", "run"),
            "workers": 2,
        }
        return Run(**(fields | changes))


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reported]:
    """With its backend registered, and a suite that is as it was committed."""
    kernels = tmp_path / "declared_only_kernels.py"
    kernels.write_text("BLOCK = 64\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("flashdispatch_conformance.surroundings.suite_modified", lambda: False)
    monkeypatch.setattr("flashdispatch_conformance.surroundings.source_tree_sha256", lambda: "5" * 64)
    support = Support(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=HeadDims(8, 256, 8),
        causal=frozenset({"bottom_right"}),
        lse=True,
    )
    spec = BackendSpec(
        name=Reported.backend, factory="declared_only_kernels:backend", support=support, requires=("numpy>=1",)
    )
    flashdispatch.register(spec)
    yield Reported(kernels)
    flashdispatch.unregister(spec.name)
