"""Every named case on every registered backend that can run on this machine."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashdispatch
from flashdispatch_conformance import run_case
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.cases import NAMED
from flashdispatch_conformance.catalogue import BY_ID, units
from flashdispatch_conformance.check import Unit
from flashdispatch_registry.problem import DTYPE_NAMES

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
RUNS = [
    pytest.param(
        status.name,
        device,
        dtype,
        id=f"{status.name}-{device}-{DTYPE_NAMES[dtype]}",
        marks=[pytest.mark.gpu] if device == "cuda" else [],
    )
    for status, device in itertools.product(flashdispatch.backends(), DEVICES)
    if status.ready and status.spec is not None and device in status.spec.support.devices
    for dtype in sorted(status.spec.support.dtypes, key=str)
]
FULL = set(units("full"))


def test_a_backend_can_run_here() -> None:
    assert ("torch_reference", "cpu", torch.bfloat16) in [run.values for run in RUNS]


@pytest.mark.parametrize("case", NAMED, ids=[case.id for case in NAMED])
@pytest.mark.parametrize(("backend", "device", "dtype"), RUNS)
def test_case(case: Case, backend: str, device: str, dtype: torch.dtype) -> None:
    if dtype != torch.float64 and Unit(BY_ID[case.id], dtype) not in FULL:
        pytest.skip(f"{case.id} in {DTYPE_NAMES[dtype]} is not of the full tier")
    result = run_case(case, backend, dtype, device)
    if result.outcome == "unsupported" and backend != "torch_reference":  # the floor supports everything
        pytest.skip(result.report())
    assert result.outcome == "pass", result.report()
    assert backend != "torch_reference" or not result.refused
