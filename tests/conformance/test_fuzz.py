"""Fuzzing: it draws valid cases near the edges, finds a planted fault, makes it small, and says how to run it again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase
from torch import Tensor

import flashdispatch
from flashdispatch_backends import torch_reference
from flashdispatch_conformance.case import Case, Replay, contradictions
from flashdispatch_conformance.case_check import run_case
from flashdispatch_conformance.fuzz import BUDGET, cases, fuzz
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target
from flashdispatch_registry import BackendSpec, Extras, Forward, Problem, Support

SUPPORT: Support = next(b.spec.support for b in flashdispatch.backends() if b.name == "torch_reference" and b.spec)


@cache
def drawn() -> list[Case]:
    found: list[Case] = []

    @hypothesis.settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=300,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases())
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


def test_cases_are_valid_small_and_different() -> None:
    for case in drawn():
        assert contradictions(case) == []
        assert case.batch * case.heads[0] * case.seqlens[0] * case.seqlens[1] <= BUDGET
        assert Case.from_json(case.to_json()) == case
    assert len(set(drawn())) > 200


FEATURES: dict[str, Callable[[Case], bool]] = {
    "a mask that wants a gradient": lambda c: c.mask is not None and c.mask.grad,
    "one more than a tile": lambda c: c.seqlens[0] % 16 == 1 and c.seqlens[0] > 16,
    "both lengths": lambda c: c.kv_lens is not None and c.q_lens is not None,
    "a window that is not causal": lambda c: c.window is not None and c.causal is False,
    "dropout and a gradient of the LSE": lambda c: c.dropout_p > 0 and c.dlse,
    "no keys": lambda c: c.seqlens[1] == 0,
    "a gradient of sinks": lambda c: "sinks" in c.grads,
    "another Dv in the other layout": lambda c: c.dims[0] != c.dims[1] and c.layout == "bhsd",
    "forward only": lambda c: not c.needs_grad,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_drawn(feature: str) -> None:
    assert any(FEATURES[feature](case) for case in drawn())


class ForgetsTheLastKeys:
    """torch_reference, but where Sk is over 64 and no multiple of 16 the keys of the last, partial block are hidden."""

    @staticmethod
    def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        whole = k.shape[1] // 16 * 16
        if k.shape[1] > 64 and whole < k.shape[1] and not problem.attn_mask and not problem.kv_lens:
            right = torch_reference.forward(problem, q, k, v, extras)
            wrong = torch_reference.forward(problem, q, k[:, :whole], v[:, :whole], extras)
            return right._replace(out=wrong.out, lse=wrong.lse)
        return torch_reference.forward(problem, q, k, v, extras)

    backward = staticmethod(torch_reference.backward)
    prepare = staticmethod(torch_reference.prepare)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    module = ModuleType("fuzz_fake")
    module.backend = ForgetsTheLastKeys()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fuzz_fake", module)
    flashdispatch.register(BackendSpec(name="forgetful", factory="fuzz_fake:backend", support=SUPPORT))
    yield "forgetful"
    flashdispatch.unregister("forgetful")


def test_a_fault_is_found_shrunk_and_replayed(forgetful: str) -> None:
    finding = next(fuzz(forgetful, torch.float32, max_examples=100, derandomize=True))
    case = finding.replay.case
    assert finding.result.outcome == "fail"
    assert case.seqlens[1] == 65  # the shortest that fails
    assert (case.batch, case.heads, case.mask, case.softcap) == (1, (1, 1), None, None)
    command, _, rest = finding.line().partition(" '")
    assert command == "flashdispatch conformance replay --backend forgetful"
    replay = Replay.parse(rest.removesuffix("'"))
    assert replay == finding.replay
    assert run_case(replay.case, forgetful, torch.float32, seed=replay.seed).outcome == "fail"
    assert run_case(replay.case, "torch_reference", torch.float32, seed=replay.seed).outcome == "pass"


def test_a_right_backend_has_no_findings() -> None:
    assert list(fuzz("torch_reference", torch.bfloat16, max_examples=12, derandomize=True)) == []


class Clock:
    """Stands still for a few looks at it, and is then far ahead."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def monotonic(self) -> float:
        self.looks -= 1
        return 0.0 if self.looks >= 0 else 1000.0


def test_it_ends_in_the_middle_of_a_round_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Case] = []

    def check_case(case: Case, target: Target) -> Result:
        checked.append(case)
        return Result(check=case.id, backend=target.backend, dtype="float32", outcome="pass")

    monkeypatch.setattr("flashdispatch_conformance.fuzz.check_case", check_case)
    monkeypatch.setattr("flashdispatch_conformance.fuzz.time", Clock(looks=5))
    assert list(fuzz("torch_reference", torch.float32, seconds=10.0)) == []
    assert len(checked) == 3  # one look for the end, one for the round, one for each example


def test_what_was_found_before_its_time_was_up_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_case(case: Case, target: Target) -> Result:
        return Result(check=case.id, backend=target.backend, dtype="float32", outcome="error")

    monkeypatch.setattr("flashdispatch_conformance.fuzz.check_case", check_case)
    monkeypatch.setattr("flashdispatch_conformance.fuzz.time", Clock(looks=4))
    (finding,) = fuzz("torch_reference", torch.float32, seconds=10.0)
    assert finding.result.outcome == "error"


def test_it_has_a_limit_or_says_so() -> None:
    with pytest.raises(ValueError, match="without a limit it would never end"):
        next(fuzz("torch_reference", torch.float32))


def test_an_unknown_backend_is_no_finding() -> None:
    with pytest.raises(flashdispatch.UnknownBackendError):
        next(fuzz("nobody_has_this_name", torch.float32, max_examples=1))
