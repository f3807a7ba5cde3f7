"""Runs one case on one backend through the public API and says what came of it.

A case makes up to three calls, each with ``backend=`` forced: **gradients** (the differentiable call and its backward),
**out** (no gradients) and **lse** (no gradients, LSE returned). For each, `flashdispatch.explain` says whether the
backend declares support. What is declared must pass every check; what is not must raise BackendUnsupportedError. A
backend without a backward is so still held to its forward.

Checked: shapes, dtypes and the contract's strides; every output and gradient against the float64 truth (`tolerance`);
the forward bitwise repeatable, gradients too where the call asks for it; the output bitwise the same with and without
the LSE; inputs and the poison around them untouched, and unread (NaN would come out); and that the core understood the
call as the case means it. float32 values are judged no finer than float16 rounding (`tolerance` says why).
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

import flashdispatch
from flashdispatch_conformance.cases import BY_ID, NAMED, Case
from flashdispatch_conformance.inputs import Inputs, bshd, build
from flashdispatch_conformance.oracle import inside_band, length
from flashdispatch_conformance.tolerance import FLOAT32_JUDGED, Expected, Stats, expect, judge
from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.layout import dense_strides
from flashdispatch_registry.problem import DTYPE_NAMES, Problem
from flashdispatch_registry.reasons import Code, Reason

if TYPE_CHECKING:
    import pytest

Outcome = Literal["pass", "fail", "error", "unsupported", "not_run"]
Part = Literal["gradients", "out", "lse"]

INSTALLATION = frozenset(
    {Code.DEP_MISSING, Code.LOAD_FAILED, Code.API_VERSION, Code.DUPLICATE_NAME, Code.DISABLED, Code.NOT_ALLOWED}
)
"""Reasons that say nothing about the backend's support: the case was not run."""

MINIMUM = ("named/forward_only", "named/length_64", "named/d128")
"""Cases whose forward every backend must support in float16 or bfloat16: without them, "all passed" says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one case on one backend in one dtype."""

    case: str
    backend: str
    dtype: str
    outcome: Outcome
    """unsupported: every call of the case was refused, as declared. not_run: no statement about the backend."""
    messages: tuple[str, ...] = ()
    """What failed, or why it was not run."""
    refused: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    """Calls that the backend does not declare, with the reason codes. The outcome is about the others."""
    stats: Mapping[str, Stats] = field(default_factory=dict)
    """By tensor: out, lse, dq, dk, dv, dattn_mask, dsinks; with the call's name where two calls differ bitwise."""
    judged: bool = True
    """False in float32: z-scores of its own rounding are recorded, and only those of a coarser one judged."""
    unjudged: str = ""
    """Then what is judged, and what is not."""

    def report(self) -> str:
        """The result as text: outcome, messages and the numbers of every tensor."""
        lines = [f"{self.case} on {self.backend} in {self.dtype}: {self.outcome}", *self.messages]
        lines += [f"{part} refused: {', '.join(codes)}" for part, codes in self.refused.items()]
        for name, z in self.stats.items():
            lines.append(f"  {name:10} {z}")
            lines += [] if z.coarse is None else [f"    float32_coarse {z.coarse}"]
        return "\n".join([*lines, self.unjudged] if self.unjudged else lines)


def run_case(
    case: Case, backend: str, dtype: torch.dtype, device: str | torch.device = "cpu", *, seed: int = 0
) -> Result:
    """Runs `case` and returns its Result; an exception of the backend becomes the outcome ``"error"``.

    Raises UnknownBackendError when there is no such backend.
    """
    run = _Run(case, backend, dtype, torch.device(device), seed)
    try:
        run.all_parts()
    except flashdispatch.UnknownBackendError:
        raise
    except flashdispatch.DisabledBackendError as error:
        return run.result("not_run", [str(error)])
    except flashdispatch.BackendUnsupportedError as error:  # refused after explain said yes: its code failed to load
        reasons = () if error.plan is None else error.plan.candidate(backend).reasons
        return run.result("not_run" if _cannot_run_here(reasons) else "fail", [str(error)])
    except flashdispatch.BackendContractError as error:
        return run.result("fail", [*run.messages, str(error)])
    except _NotRunError as error:
        return run.result("not_run", [str(error)])
    except torch.OutOfMemoryError as error:
        return run.result("not_run", [f"no memory: {error}"])
    except Exception:  # noqa: BLE001  whatever a backend raises is a finding, and the next case must run
        return run.result("error", [*run.messages, traceback.format_exc()])
    if run.messages:
        return run.result("fail", run.messages)
    return run.result("pass" if run.ran else "unsupported", [])


class _NotRunError(Exception):
    """The backend can't run here at all."""


def _cannot_run_here(reasons: Sequence[Reason]) -> bool:
    return any(reason.code in INSTALLATION for reason in reasons)


class _Run:
    """One case in progress: its inputs, the truth, and what was found so far."""

    def __init__(self, case: Case, backend: str, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.case, self.backend, self.dtype = case, backend, dtype
        self.inputs: Inputs = build(case, dtype, device, arch_of(device), seed)
        self.messages: list[str] = []
        self.refused: dict[Part, tuple[str, ...]] = {}
        self.stats: dict[str, Stats] = {}
        self.ran = False
        self._expected: dict[str, Expected] | None = None
        self._seen: dict[str, Tensor] = {}

    def result(self, outcome: Outcome, messages: Iterable[str]) -> Result:
        float32 = self.dtype == torch.float32 and self.stats
        unjudged = FLOAT32_JUDGED[self.inputs.problem.fp32_precision] if float32 else ""
        return Result(
            case=self.case.id,
            backend=self.backend,
            dtype=DTYPE_NAMES[self.dtype],
            outcome=outcome,
            messages=tuple(messages),
            refused=self.refused,
            stats=self.stats,
            judged=not unjudged,
            unjudged=unjudged,
        )

    def all_parts(self) -> None:
        """Makes the case's calls and their checks."""
        if self.case.needs_grad and self.declared("gradients"):
            self.check_gradients()
        out = self.check_forward() if self.declared("out") else None
        if self.declared("lse"):
            self.check_lse(out)
        if changed := self.inputs.changed():
            self.messages.append(f"inputs were written to: {', '.join(changed)}")

    # The three calls

    def check_gradients(self) -> None:
        first, second = self.differentiable_call(), self.differentiable_call()
        for name, tensor in first.items():
            self.check(name, tensor, "gradients")
            same = _same_bits(tensor, second[name])
            if name in ("out", "lse") or self.inputs.problem.deterministic:
                if not same:
                    self.messages.append(f"{name} is not bitwise repeatable in the differentiable call")
            elif not same:
                self.check(name, second[name], "gradients")

    def check_forward(self) -> Tensor:
        with torch.no_grad():
            first, second = self.call("out"), self.call("out")
        self.check("out", first["out"], "out")
        if not _same_bits(first["out"], second["out"]):
            self.messages.append("out is not bitwise repeatable")
        return first["out"]

    def check_lse(self, out: Tensor | None) -> None:
        with torch.no_grad():
            got = self.call("lse")
        for name, tensor in got.items():
            self.check(name, tensor, "lse")
        if out is not None and not _same_bits(got["out"], out):
            self.messages.append("out is another one when the LSE is returned too")

    def arguments(self, part: Part) -> dict[str, Any]:
        return_lse = part == "lse" or (part == "gradients" and self.case.dlse)
        return self.inputs.arguments() | {"return_lse": return_lse, "backend": self.backend}

    def call(self, part: Part) -> dict[str, Tensor]:
        """One forward call: out, and lse when asked for."""
        inputs = self.inputs
        got = flashdispatch.attention(inputs.q, inputs.k, inputs.v, **self.arguments(part))
        self.ran = True
        return {"out": got} if isinstance(got, Tensor) else dict(zip(("out", "lse"), got, strict=True))

    def differentiable_call(self) -> dict[str, Tensor]:
        """Forward and backward: out, lse when it is differentiated, and a gradient for each leaf."""
        got, leaves = self.call("gradients"), self.inputs.leaves()
        pairs = [(got["out"], self.inputs.dout), (got.get("lse"), self.inputs.dlse)]
        used = [(output, gradient) for output, gradient in pairs if output is not None and gradient is not None]
        outputs, arriving = [output for output, _ in used], [gradient for _, gradient in used]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving)
        return got | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}

    # Declared support

    def declared(self, part: Part) -> bool:
        """True when the backend declares this call; else checks that the call is refused, and notes why."""
        with torch.set_grad_enabled(part == "gradients"):
            plan = flashdispatch.explain(self.inputs.q, self.inputs.k, self.inputs.v, **self.arguments(part))
            self.check_problem(plan.problem, part)
            reasons = plan.candidate(self.backend).reasons
            if not reasons:
                return True
            if _cannot_run_here(reasons):
                raise _NotRunError("; ".join(map(str, reasons)))
            self.refused[part] = tuple(str(reason.code) for reason in reasons)
            self.messages += [
                f"why_not raised for the {part} call: {reason.got}"
                for reason in reasons
                if reason.code is Code.WHY_NOT_RAISED
            ]
            self.check_refusal(part, reasons)
        return False

    def check_refusal(self, part: Part, reasons: Sequence[Reason]) -> None:
        codes = ", ".join(self.refused[part])
        try:
            self.call(part)
        except flashdispatch.BackendUnsupportedError as error:
            missing = [str(reason.code) for reason in reasons if str(reason.code) not in str(error)]
            if missing:
                self.messages.append(f"the refusal of the {part} call does not say {', '.join(missing)}")
        except Exception as error:  # noqa: BLE001  any other error is what is looked for here
            text = f"{type(error).__name__}: {error}"
            self.messages.append(
                f"{part} is not declared ({codes}) and raised {text} in place of BackendUnsupportedError"
            )
        else:
            self.messages.append(f"{part} is not declared ({codes}) but the call ran")

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
                self.messages.append(f"the core took the {part} call's {name} for {text}")

    def same_band(self, got: Problem, wanted: Problem) -> bool:
        """Two bands that hide the same keys are one: with Sq = Sk the alignments are."""
        case = self.case
        lens = {
            (length(self.inputs.q_lens, b, case.seqlens[0]), length(self.inputs.kv_lens, b, case.seqlens[1]))
            for b in range(case.batch)
        }
        return all(torch.equal(inside_band(got, n, m), inside_band(wanted, n, m)) for n, m in lens)

    # Tensors

    def check(self, name: str, tensor: Tensor, part: Part) -> None:
        """Form and values of one output or gradient. Bits that were already judged are not judged again."""
        self.check_form(name, tensor, part)
        if name in self._seen and _same_bits(self._seen[name], tensor):
            return
        key = name if name not in self._seen else f"{name} ({part})"
        self._seen.setdefault(name, tensor)
        expected = self.expected()[name]
        if name in ("out", "dq", "dk", "dv"):
            tensor = bshd(tensor, self.case.layout)
        elif name == "dattn_mask":
            tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
        stats = judge(name, tensor, expected, self.inputs.problem)
        self.stats[key] = stats
        self.messages += [f"{failure.message} [{part} call]" for failure in stats.failures]

    def check_form(self, name: str, tensor: Tensor, part: Part) -> None:
        """Shape, dtype, device and, for out and lse, strides."""
        q = self.inputs.q
        if name == "out":
            shape, dtype = (*q.shape[:3], self.case.dims[1]), self.dtype
            strides = dense_strides(shape, q.stride())  # q is as the caller gave it, so its layout is not asked
        elif name == "lse":
            shape = (self.case.batch, self.case.heads[0], self.case.seqlens[0])
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
            strides = dense_strides(shape, (3, 2, 1))
        else:
            leaf = self.inputs.leaves()[name.removeprefix("d")]
            shape, dtype, strides = tuple(leaf.shape), leaf.dtype, tensor.stride()
        said = f"{name} of the {part} call has"
        if tuple(tensor.shape) != shape:
            self.messages.append(f"{said} shape {tuple(tensor.shape)}, expected {shape}")
            return
        if tensor.dtype != dtype:
            self.messages.append(f"{said} dtype {tensor.dtype}, expected {dtype}")
        if tensor.device != q.device:
            self.messages.append(f"{said} device {tensor.device}, expected {q.device}")
        matter = [dim for dim, size in enumerate(shape) if size > 1] if tensor.numel() else []
        if any(tensor.stride(dim) != strides[dim] for dim in matter):
            self.messages.append(f"{said} strides {tensor.stride()}, expected {strides}")
        if name in ("out", "lse") and tensor.requires_grad != (part == "gradients"):
            self.messages.append(f"{said} requires_grad={tensor.requires_grad}")

    def expected(self) -> dict[str, Expected]:
        """The truth and its noise, worked out once a case."""
        if self._expected is None:
            self._expected = expect(self.inputs.problem, *self.inputs.canonical())
        return self._expected


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit: NaN equals itself, and -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))


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
        """Causal forward and LSE at D = 64 and 128 in a 16-bit dtype: a backend that declares nothing can't conform."""
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
