"""One check in progress on one backend: the calls it makes, and what it found so far.

Everything a check asks of a backend goes through `Trial`, and from there through `flashdispatch.attention` with
``backend=`` forced. The first call of each form is timed apart: it is the one that compiles. `flashdispatch.explain`
says whether a call is declared; one that is not must raise BackendUnsupportedError with the same reason codes, before
anything is launched.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashdispatch
from flashdispatch_conformance import global_state, stage
from flashdispatch_conformance.case import Case, Part
from flashdispatch_conformance.inputs import Inputs, build
from flashdispatch_conformance.result import INSTALLATION, NotRun, Outcome, Result
from flashdispatch_conformance.tolerance import Expected, Stats, judge
from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.plan import Plan
from flashdispatch_registry.problem import DTYPE_NAMES
from flashdispatch_registry.reasons import Code, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who is tested, and in what."""

    backend: str
    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    record: Callable[[str, Tensor], None] | None = None
    """Given every input, judged tensor and truth by name, for whoever wants to look at them."""


class NotRunError(Exception):
    """Raised inside a check that can say nothing here."""

    def __init__(self, why: NotRun, text: str) -> None:
        super().__init__(text)
        self.why = why


class Trial:
    """The calls of one check, and its findings."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.messages: list[str] = []
        """What does not hold. Empty at the end: the check passed."""
        self.refused: dict[str, tuple[str, ...]] = {}
        self.stats: dict[str, Stats] = {}
        self.ran = False
        """True once a declared call was made."""
        self.compile_s = 0.0
        self._called: set[tuple[int, str]] = set()
        self._kept: list[Inputs] = []  # so that no id in _called is used again

    def fail(self, message: str) -> None:
        """Notes something that does not hold."""
        self.messages.append(message)

    def inputs(self, case: Case, given: Mapping[str, Tensor] | None = None, *, seed: int | None = None) -> Inputs:
        """The tensors of `case` in the target's dtype and device; `given` as for `inputs.build`."""
        target = self.target
        chosen = target.seed if seed is None else seed
        inputs = build(case, target.dtype, target.device, arch_of(target.device), chosen, given)
        for name, value in {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.arguments()}.items():
            self._record(name, value)
        self._record("dout", inputs.dout)
        self._record("dlse", inputs.dlse)
        return inputs

    # Declared support

    def plan(self, inputs: Inputs, part: Part) -> Plan:
        """What the core says of the call, with the target forced."""
        with torch.set_grad_enabled(part == "gradients"):
            return flashdispatch.explain(inputs.q, inputs.k, inputs.v, **self.arguments(inputs, part))

    def declared(self, inputs: Inputs, part: Part) -> bool:
        """True when the backend declares this call; else checks that it is refused as it must be, and notes why.

        Raises NotRunError when the backend can't run here at all.
        """
        reasons = self.plan(inputs, part).candidate(self.target.backend).reasons
        if not reasons:
            return True
        if any(reason.code in INSTALLATION for reason in reasons):
            raise NotRunError(NotRun.NOT_INSTALLED, "; ".join(map(str, reasons)))
        self.refused[part] = tuple(str(reason.code) for reason in reasons)
        for reason in reasons:
            if reason.code is Code.WHY_NOT_RAISED:
                self.fail(f"why_not raised for the {part} call: {reason.got}")
        with torch.set_grad_enabled(part == "gradients"):
            self._check_refusal(inputs, part, reasons)
        return False

    def _check_refusal(self, inputs: Inputs, part: Part, reasons: Sequence[Reason]) -> None:
        codes = ", ".join(self.refused[part])
        try:
            self._attention(inputs, part)
        except flashdispatch.BackendUnsupportedError as error:
            missing = [str(reason.code) for reason in reasons if str(reason.code) not in str(error)]
            if missing:
                self.fail(f"the refusal of the {part} call does not say {', '.join(missing)}")
        except Exception as error:  # noqa: BLE001  any other error is what is looked for here
            raised = f"{type(error).__name__}: {error}"
            self.fail(f"{part} is not declared ({codes}) and raised {raised} in place of BackendUnsupportedError")
        else:
            self.fail(f"{part} is not declared ({codes}) but the call ran")

    # Calls

    def arguments(self, inputs: Inputs, part: Part) -> dict[str, Any]:
        """Keyword arguments of `flashdispatch.attention` for this call."""
        return_lse = part == "lse" or (part == "gradients" and inputs.case.dlse)
        return inputs.arguments() | {"return_lse": return_lse, "backend": self.target.backend}

    def call(self, inputs: Inputs, part: Part) -> dict[str, Tensor]:
        """One forward call: out, and lse when asked for. Gradients are recorded for the part "gradients" alone."""
        with self._timed(inputs, part), torch.set_grad_enabled(part == "gradients"):
            got = self._attention(inputs, part)
        self.ran = True
        return got

    def differentiable_call(self, inputs: Inputs) -> dict[str, Tensor]:
        """Forward and backward: out, lse when it is differentiated, and a gradient for each leaf."""
        got = self.call(inputs, "gradients")
        with self._timed(inputs, "backward"):
            return got | backward(inputs, got)

    @contextmanager
    def _timed(self, inputs: Inputs, what: str) -> Iterator[None]:
        """Around a call: the first of its kind counts as compiling."""
        if (id(inputs), what) in self._called:
            stage.enter("running")
            yield
            return
        self._called.add((id(inputs), what))
        self._kept.append(inputs)
        stage.enter("compiling or running")
        start = time.perf_counter()
        yield
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        self.compile_s += time.perf_counter() - start

    def _attention(self, inputs: Inputs, part: Part) -> dict[str, Tensor]:
        got = flashdispatch.attention(inputs.q, inputs.k, inputs.v, **self.arguments(inputs, part))
        return {"out": got} if isinstance(got, Tensor) else dict(zip(("out", "lse"), got, strict=True))

    # Judgement

    def judge(self, name: str, got: Tensor, expected: Expected, said: str = "") -> None:
        """Holds one tensor, in the oracle's layout, to the gates; `said` is added to what it breaks."""
        key = name if name not in self.stats else f"{name} ({said or len(self.stats)})"
        stage.enter("judging")
        stats = judge(name, got, expected, self.target.dtype)
        self._record(key, got)
        self._record(f"{key}: truth", expected.truth)
        self.stats[key] = stats
        for failure in stats.failures:
            self.fail(f"{failure.message} [{said}]" if said else failure.message)

    def _record(self, name: str, value: object) -> None:
        if self.target.record is not None and isinstance(value, Tensor):
            self.target.record(name, value)

    def result(
        self,
        check: str,
        outcome: Outcome,
        messages: Sequence[str],
        *,
        not_run: NotRun | None = None,
        seconds: float = 0.0,
        peak_bytes: int | None = None,
    ) -> Result:
        """The Result of this trial."""
        return Result(
            check=check,
            backend=self.target.backend,
            dtype=DTYPE_NAMES[self.target.dtype],
            outcome=outcome,
            messages=tuple(messages),
            not_run=not_run,
            refused=self.refused,
            stats=self.stats,
            compile_s=self.compile_s,
            run_s=max(seconds - self.compile_s, 0.0),
            peak_bytes=peak_bytes,
        )


def backward(inputs: Inputs, got: Mapping[str, Tensor], *, retain_graph: bool = False) -> dict[str, Tensor]:
    """The gradients of a differentiable call's outputs by the case's dout and dlse, one for each leaf."""
    leaves = inputs.leaves()
    pairs = [(got["out"], inputs.dout), (got.get("lse"), inputs.dlse)]
    used = [(output, gradient) for output, gradient in pairs if output is not None and gradient is not None]
    outputs, arriving = [output for output, _ in used], [gradient for _, gradient in used]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving, retain_graph=retain_graph)
    return {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit: NaN equals itself, and -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))


@contextmanager
def _global_state_kept(trial: Trial) -> Iterator[None]:
    """PyTorch's global state is after the block what it was before; a change that was left behind is a finding."""
    before = global_state.snapshot()
    try:
        yield
    finally:
        trial.messages.extend(global_state.restore(before))


def ends_the_run(error: BaseException, backend: str) -> bool:
    """Whether `error` is no unit's: the operator's Ctrl-C, or that `backend` is not registered.

    Where the signal is ignored, as in the child processes, KeyboardInterrupt is not the operator's.
    """
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    unknown = isinstance(error, flashdispatch.UnknownBackendError)
    return unknown and all(status.name != backend for status in flashdispatch.backends())


def raised(error: BaseException) -> str:
    """``TypeName: message``, of a long message the first line. It goes before the traceback, which has all of it."""
    lines = str(traceback.TracebackException.from_exception(error)).strip().splitlines()  # str(error) itself may raise
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def run_trial(check: str, body: Callable[[Trial], None], target: Target) -> Result:
    """Runs `body` on a Trial of `target` and says what came of it; an exception becomes an outcome.

    Raises UnknownBackendError when there is no such backend, KeyboardInterrupt when the operator ends the run.
    """
    start = time.perf_counter()
    cuda = target.device.type == "cuda"
    if cuda:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # which the next line does not do
        torch.cuda.reset_peak_memory_stats(target.device)
    trial = Trial(target)

    def result(outcome: Outcome, messages: Sequence[str], not_run: NotRun | None = None) -> Result:
        peak = None
        if cuda and outcome != "error":  # after an error the device may answer nothing more
            peak = torch.cuda.max_memory_allocated(target.device)
        seconds = time.perf_counter() - start
        return trial.result(check, outcome, messages, not_run=not_run, seconds=seconds, peak_bytes=peak)

    try:
        # The device of the run is the current one, as it is for who uses it; condition/second_device is about another.
        with torch.cuda.device(target.device) if cuda else nullcontext(), _global_state_kept(trial):
            body(trial)
        if cuda:
            torch.cuda.synchronize(target.device)
    except flashdispatch.DisabledBackendError as error:
        return result("not_run", [str(error)], NotRun.NOT_INSTALLED)
    except flashdispatch.BackendUnsupportedError as error:  # refused after explain said yes: its code failed to load
        reasons = () if error.plan is None else error.plan.candidate(target.backend).reasons
        if any(reason.code in INSTALLATION for reason in reasons):
            return result("not_run", [str(error)], NotRun.NOT_INSTALLED)
        return result("fail", [str(error)])
    except flashdispatch.BackendContractError as error:
        return result("fail", [*trial.messages, str(error)])
    except NotRunError as error:
        return result("not_run", [str(error)], error.why)
    except torch.OutOfMemoryError as error:
        return result("not_run", [f"no memory: {error}"], NotRun.NO_MEMORY)
    except BaseException as error:  # whatever a backend raises is a finding, and the next check must run
        if ends_the_run(error, target.backend):
            raise
        return result("error", [raised(error), *trial.messages, traceback.format_exc()])
    if trial.messages:
        return result("fail", trial.messages)
    return result("pass" if trial.ran else "unsupported", [])
