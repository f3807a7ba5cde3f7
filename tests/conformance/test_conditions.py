"""Conditions on backends that keep something between calls: each is right in a single call, and wrong in the second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

import flashdispatch
from flashdispatch_backends import torch_reference
from flashdispatch_conformance.catalogue import BY_ID
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target
from flashdispatch_registry import BackendSpec, Extras, Forward, Gradients, Needs, Problem, Support

SUPPORT: Support = next(b.spec.support for b in flashdispatch.backends() if b.name == "torch_reference" and b.spec)


class Honest:
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        return torch_reference.forward(problem, q, k, v, extras)

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        return torch_reference.backward(problem, saved, dout, dlse, needs)

    def prepare(self, problem: Problem) -> None:
        pass


def write(to: Tensor, value: Tensor) -> None:
    """As a kernel writes: autograd is not told."""
    np.copyto(to.detach().numpy(), value.detach().numpy())


class SpoilsWhatItSaved(Honest):
    """As an in-place exp2 of the LSE in the backward."""

    def backward(self, problem, saved, dout, dlse, needs) -> Gradients:
        got = super().backward(problem, saved, dout, dlse, needs)
        write(saved[4], 2.0 * saved[4])
        return got


class OneWorkspace(Honest):
    """The LSE that the backward reads is in memory that all calls of a shape share."""

    def __init__(self) -> None:
        self.workspace: dict[tuple[int, ...], Tensor] = {}

    def forward(self, problem, q, k, v, extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, v, extras)
        if not saved:
            return Forward(out, lse, saved)
        kept = self.workspace.setdefault(tuple(lse.shape), torch.empty_like(lse))
        write(kept, lse)
        return Forward(out, lse, (*saved[:4], kept, *saved[5:]))


class OneOutput(Honest):
    """The output is in memory that all calls of a shape share, as a wrapper around a CUDA graph has it."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, ...], Tensor] = {}

    def forward(self, problem, q, k, v, extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, v, extras)
        kept = self.outputs.setdefault(tuple(out.shape), torch.empty_like(out)).copy_(out)
        return Forward(kept, lse, saved)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Runs a condition on a backend, in bfloat16 on the CPU."""
    module = ModuleType("conformance_condition_fake")
    monkeypatch.setitem(sys.modules, "conformance_condition_fake", module)

    def check(name: str, backend: object) -> Result:
        module.backend = backend  # type: ignore[attr-defined]
        spec = BackendSpec(name="keeps", factory="conformance_condition_fake:backend", support=SUPPORT)
        flashdispatch.register(spec)
        try:
            target = Target(backend="keeps", dtype=torch.bfloat16, device=torch.device("cpu"))
            return BY_ID[f"condition/{name}"].run(target)
        finally:
            flashdispatch.unregister("keeps")

    return check


@pytest.mark.parametrize(
    ("name", "backend", "said"),
    [
        ("second_backward", SpoilsWhatItSaved, "in the second backward of one graph"),
        ("two_layers", OneWorkspace, "in layer 1 of two"),
        ("kept_results", OneOutput, "out of an earlier call is not what it was"),
    ],
)
def test_what_is_kept_between_calls_is_found(check, name: str, backend: type, said: str) -> None:
    assert check(name, Honest()).outcome == "pass"
    result = check(name, backend())
    assert result.outcome == "fail", result.report()
    assert any(said in message for message in result.messages), result.report()
