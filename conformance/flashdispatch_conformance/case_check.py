"""The check of one case: its calls, held to the truth and to the contract's form.

A case makes up to three calls (`Case.calls`): **gradients** (the differentiable call and its backward), **out** (no
gradients) and **lse** (no gradients, LSE returned). What is declared must pass every check; what is not must be
refused. A backend without a backward is so still held to its forward.

Checked: shapes, dtypes and the contract's strides; every output and gradient against the float64 truth (`tolerance`);
the forward bitwise repeatable, gradients too where the call asks for it; the output bitwise the same with and without
the LSE; inputs and the poison around them untouched, and unread (NaN would come out); and that the core understood the
call as the case means it.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from flashdispatch_conformance.case import Case, Part
from flashdispatch_conformance.inputs import Inputs, as_truth
from flashdispatch_conformance.oracle import inside_band, length
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.tolerance import Expected, expect
from flashdispatch_conformance.trial import Target, Trial, run_trial, same_bits
from flashdispatch_registry.layout import dense_strides
from flashdispatch_registry.problem import Problem


def run_case(
    case: Case, backend: str, dtype: torch.dtype, device: str | torch.device = "cpu", *, seed: int = 0
) -> Result:
    """Runs `case` and returns its Result; an exception of the backend becomes the outcome ``"error"``.

    Raises UnknownBackendError when there is no such backend.
    """
    return check_case(case, Target(backend=backend, dtype=dtype, device=torch.device(device), seed=seed))


def check_case(case: Case, target: Target) -> Result:
    """The same, for a target."""
    return run_trial(case.id, lambda trial: _CaseCheck(trial, case).all_parts(), target)


class _CaseCheck:
    """One case in progress: its inputs, the truth, and what was judged so far."""

    def __init__(self, trial: Trial, case: Case) -> None:
        self.trial, self.case = trial, case
        self.inputs: Inputs = trial.inputs(case)
        self._expected: dict[str, Expected] | None = None
        self._seen: dict[str, Tensor] = {}

    def all_parts(self) -> None:
        """Makes the case's calls and their checks."""
        calls = self.case.calls
        if "gradients" in calls and self.case.needs_grad and self.declared("gradients"):
            self.check_gradients()
        out = self.check_forward() if "out" in calls and self.declared("out") else None
        if "lse" in calls and self.declared("lse"):
            self.check_lse(out)
        if changed := self.inputs.changed():
            self.trial.fail(f"inputs were written to: {', '.join(changed)}")

    # The three calls

    def check_gradients(self) -> None:
        first, second = self.trial.differentiable_call(self.inputs), self.trial.differentiable_call(self.inputs)
        for name, tensor in first.items():
            self.check(name, tensor, "gradients")
            same = same_bits(tensor, second[name])
            if name in ("out", "lse") or self.inputs.problem.deterministic:
                if not same:
                    self.trial.fail(f"{name} is not bitwise repeatable in the differentiable call")
            elif not same:
                self.check(name, second[name], "gradients")

    def check_forward(self) -> Tensor:
        first, second = self.trial.call(self.inputs, "out"), self.trial.call(self.inputs, "out")
        self.check("out", first["out"], "out")
        if not same_bits(first["out"], second["out"]):
            self.trial.fail("out is not bitwise repeatable")
        return first["out"]

    def check_lse(self, out: Tensor | None) -> None:
        got = self.trial.call(self.inputs, "lse")
        for name, tensor in got.items():
            self.check(name, tensor, "lse")
        if out is not None and not same_bits(got["out"], out):
            self.trial.fail("out is another one when the LSE is returned too")

    # Declared support

    def declared(self, part: Part) -> bool:
        self.check_problem(self.trial.plan(self.inputs, part).problem, part)
        return self.trial.declared(self.inputs, part)

    def check_problem(self, got: Problem, part: Part) -> None:
        """The core must have understood the call as the case means it."""
        wanted = self.inputs.problem
        if part != "gradients":
            wanted = replace(wanted, needs_grad=(), return_lse=part == "lse")
        for name in (item.name for item in fields(Problem)):
            if name == "band" and self.same_band(got, wanted):
                continue
            if name == "scale" and math.isclose(got.scale, wanted.scale, rel_tol=1e-12):
                continue
            if getattr(got, name) != getattr(wanted, name):
                text = f"{getattr(got, name)!r}, expected {getattr(wanted, name)!r}"
                self.trial.fail(f"the core took the {part} call's {name} for {text}")

    def same_band(self, got: Problem, wanted: Problem) -> bool:
        """Two bands that hide the same keys are one: with Sq = Sk the alignments are."""
        case = self.case
        lens = {
            (length(self.inputs.q_lens, b, case.seqlens[0]), length(self.inputs.kv_lens, b, case.seqlens[1]))
            for b in range(case.sequences)
        }
        return all(torch.equal(inside_band(got, n, m), inside_band(wanted, n, m)) for n, m in lens)

    # Tensors

    def check(self, name: str, tensor: Tensor, part: Part) -> None:
        """Form and values of one output or gradient. Bits that were already judged are not judged again."""
        self.check_form(name, tensor, part)
        if name in self._seen and same_bits(self._seen[name], tensor):
            return
        self._seen.setdefault(name, tensor)
        expected = self.expected()[name]
        tensor = as_truth(name, tensor, self.case.layout)
        if name == "dattn_mask":
            tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
        first = tensor if self.case.distinct is None else tensor[: self.case.distinct]
        self.trial.judge(name, first, expected, f"{part} call")
        if self.case.distinct is not None:
            self.check_copies(name, tensor, expected, part, self.case.distinct)

    def check_copies(self, name: str, tensor: Tensor, expected: Expected, part: Part, count: int) -> None:
        """Sequences that repeat the first `count` are held to the truth of those, wherever their bits differ."""
        copies = tensor.detach().reshape(-1, count, *tensor.shape[1:])
        bits = copies.contiguous().view(torch.uint8).flatten(1)
        other = (bits != bits[0]).any(1).nonzero().flatten()
        if len(other):
            where = f"{len(other)} repetitions of {count} sequences, the first at {int(other[0]) * count}"
            again = repeated(expected, len(other))
            self.trial.judge(name, copies[other].flatten(0, 1), again, f"{part} call, in {where}")

    def check_form(self, name: str, tensor: Tensor, part: Part) -> None:
        """Shape, dtype, device and, for out and lse, strides."""
        q = self.inputs.q
        if name == "out":
            shape, dtype = (*q.shape[:3], self.case.dims[1]), self.trial.target.dtype
            strides = dense_strides(shape, q.stride())  # q is as the caller gave it, so its layout is not asked
        elif name == "lse":
            shape = (self.case.batch, self.case.heads[0], self.case.seqlens[0])
            dtype = torch.float64 if self.trial.target.dtype == torch.float64 else torch.float32
            strides = dense_strides(shape, (3, 2, 1))
        else:
            leaf = self.inputs.leaves()[name.removeprefix("d")]
            shape, dtype, strides = tuple(leaf.shape), leaf.dtype, tensor.stride()
        said = f"{name} of the {part} call has"
        if tuple(tensor.shape) != shape:
            self.trial.fail(f"{said} shape {tuple(tensor.shape)}, expected {shape}")
            return
        if tensor.dtype != dtype:
            self.trial.fail(f"{said} dtype {tensor.dtype}, expected {dtype}")
        if tensor.device != q.device:
            self.trial.fail(f"{said} device {tensor.device}, expected {q.device}")
        matter = [dim for dim, size in enumerate(shape) if size > 1] if tensor.numel() else []
        if any(tensor.stride(dim) != strides[dim] for dim in matter):
            self.trial.fail(f"{said} strides {tensor.stride()}, expected {strides}")
        if name in ("out", "lse") and tensor.requires_grad != (part == "gradients"):
            self.trial.fail(f"{said} requires_grad={tensor.requires_grad}")

    def expected(self) -> dict[str, Expected]:
        """The truth and its noise, worked out once a case."""
        if self._expected is None:
            self._expected = expect(self.inputs.problem, *self.inputs.canonical())
        return self._expected


def repeated(expected: Expected, count: int) -> Expected:
    """What `count` repetitions of a batch must be. They are the same rows again, so `rows` stays."""
    values: dict[str, Any] = {item.name: getattr(expected, item.name) for item in fields(expected)}
    again: dict[str, Any] = {
        name: x.repeat(count, *[1] * (x.dim() - 1)) for name, x in values.items() if isinstance(x, Tensor)
    }
    return replace(expected, **again)
