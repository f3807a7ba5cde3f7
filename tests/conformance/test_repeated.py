"""A batch that repeats its first sequences: every one is judged, by the truth of those alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

import flashdispatch
from flashdispatch_backends import torch_reference
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.case_check import run_case
from flashdispatch_registry import BackendSpec, Extras, Forward, Problem, Support

SUPPORT: Support = next(b.spec.support for b in flashdispatch.backends() if b.name == "torch_reference" and b.spec)
CASE = Case(
    id="named/repeated",
    why="a test",
    batch=6,
    distinct=2,
    seqlens=(17, 33),
    causal=True,
    q_lens=(17, 9) * 3,
    kv_lens=(33, 20) * 3,
    dlse=True,
)


class Spoiled:
    """torch_reference, with something done to its output."""

    def __init__(self, spoil: Callable[[Tensor], None]) -> None:
        self.spoil = spoil

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = torch_reference.forward(problem, q, k, v, extras)
        self.spoil(result.out)
        return result

    backward = staticmethod(torch_reference.backward)
    prepare = staticmethod(torch_reference.prepare)


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Tensor], None]], str]]:
    """Registers a backend whose output is spoiled so, and returns its name."""

    def register(spoil: Callable[[Tensor], None]) -> str:
        module = ModuleType("repeated_fake")
        module.backend = Spoiled(spoil)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "repeated_fake", module)
        flashdispatch.register(BackendSpec(name="spoiled", factory="repeated_fake:backend", support=SUPPORT))
        return "spoiled"

    yield register
    flashdispatch.unregister("spoiled")


def test_a_right_backend_passes() -> None:
    result = run_case(CASE, "torch_reference", torch.bfloat16)
    assert result.outcome == "pass", result.report()
    assert result.stats["out"].numel == (17 + 9) * 2 * 64  # the first two sequences


def test_a_wrong_repetition_is_found_and_named(spoiled: Callable[[Callable[[Tensor], None]], str]) -> None:
    def spoil(out: Tensor) -> None:
        out[5, 3, 1, 7] += 1.0

    result = run_case(CASE, spoiled(spoil), torch.bfloat16)
    assert result.outcome == "fail"
    assert any("in 1 repetitions of 2 sequences, the first at 4" in message for message in result.messages)


def test_a_repetition_may_differ_within_the_noise(spoiled: Callable[[Callable[[Tensor], None]], str]) -> None:
    def spoil(out: Tensor) -> None:
        out[2, 3, 1, 7] *= 1 + 2.0**-7

    result = run_case(CASE, spoiled(spoil), torch.bfloat16)
    assert result.outcome == "pass", result.report()
    assert any("repetitions" in name for name in result.stats)


def test_a_repetition_that_is_not_zero_past_its_length_is_found(
    spoiled: Callable[[Callable[[Tensor], None]], str],
) -> None:
    def spoil(out: Tensor) -> None:
        out[3, 16] = 1e-6

    result = run_case(CASE, spoiled(spoil), torch.bfloat16)
    assert result.outcome == "fail"
    assert any("must be exactly 0" in message for message in result.messages)
