"""A plan made callable: runs the chosen backend, forward and backward, and keeps its promises around it.

The core owns autograd, autocast, the device guard and the output's strides, so that a backend is only kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from flashdispatch._arguments import check_length_values, has_autocast
from flashdispatch_registry.backend import Backend, Binds, Extras, Forward, Gradients, Needs
from flashdispatch_registry.errors import BackendContractError, RecomputeError, SecondDerivativeError
from flashdispatch_registry.layout import output_strides
from flashdispatch_registry.plan import Plan
from flashdispatch_registry.problem import Problem

Run = Callable[[Tensor, Tensor, Tensor, Extras], Forward]

ONCE = "attention is differentiable once; for a second derivative compute it in plain PyTorch operations"


@dataclass(slots=True)
class Bound:
    """A plan, its backend's code, and what one call has to do around it. Tensors are (B, S, H, D) from here on.

    `compute` is on every call's way, so what it compares is stored here ready to be compared.
    """

    plan: Plan
    problem: Problem
    backend: Backend
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    """The contract's strides of the output for this call's q."""
    lse_shape: tuple[int, ...]
    dtype: torch.dtype
    lse_dtype: torch.dtype
    device: torch.device
    with_lse: bool
    """The backend has to give the LSE: it was asked for, or the backward needs it."""
    differentiable: bool
    return_lse: bool
    autocast: str | None
    """q's device type, where an autocast region may be in force: the backend runs outside of it."""
    guard: bool
    """More than one GPU: q's device must be made current."""
    read_lengths: bool
    """Lengths whose values may be read: on the CPU, or anywhere under FLASHDISPATCH_CHECK=1."""
    identity: int
    """Saved with a call's tensors under saved-tensors hooks, and compared in its backward: activation checkpointing is
    such hooks, it recomputes the forward, and what one backend saved means nothing to another."""
    run: Run | None
    """The backend's forward for these tensors' metadata; None until a first call binds it."""
    binds: bool = False
    """`run` is the backend's own for this metadata (`Binds`)."""
    settled: bool = False
    """It binds, and its first result was right: those after it have the same metadata."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """Runs the backend's forward and records nothing.

        Raises InvalidRequestError for lengths out of range, BackendContractError for a result that breaks the contract.
        """
        with torch.no_grad():
            return self.compute(q, k, v, extras)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """`forward` for callers that have turned recording off themselves."""
        if self.read_lengths:
            check_length_values("q_lens", extras.q_lens, self.problem.seqlen_q)
            check_length_values("kv_lens", extras.kv_lens, self.problem.seqlen_k)
        # No context managers: each costs more than all that is done here.
        autocast = self.autocast
        if autocast is not None and not torch.is_autocast_enabled(autocast):
            autocast = None
        if autocast is not None:
            torch.set_autocast_enabled(autocast, False)
        result: Any
        try:
            if self.guard and torch.cuda.current_device() != self.device.index:
                with torch.cuda.device(self.device):
                    result = (self.run or self._bind(q, k, v, extras))(q, k, v, extras)
            else:
                result = (self.run or self._bind(q, k, v, extras))(q, k, v, extras)
        except Exception as error:
            error.add_note(self._note("forward"))
            raise
        finally:
            if autocast is not None:
                torch.set_autocast_enabled(autocast, True)
        if self.settled:
            return result  # type: ignore[no-any-return]  # its type was checked in the first call
        try:
            # The contract: what is right goes on as it is.
            out, lse, saved = result
            if (
                type(result) is Forward
                and type(saved) is tuple
                and out.dtype is self.dtype
                and out.shape == self.out_shape
                and out.stride() == self.out_strides
                and out.device == self.device
                and (
                    not self.with_lse
                    or (
                        lse.dtype is self.lse_dtype
                        and lse.shape == self.lse_shape
                        and lse.is_contiguous()
                        and lse.device == self.device
                    )
                )
            ):
                self.settled = self.binds
                return result
        except (AttributeError, TypeError, ValueError):
            pass  # no three values, or not tensors
        return self._put_right(result)

    def _bind(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Run:
        backend = self.backend
        if isinstance(backend, Binds):
            self.run, self.binds = backend.bind(self.problem, q, k, v, extras), True
        else:
            self.run = partial(backend.forward, self.problem)
        return self.run

    def _put_right(self, result: Any) -> Forward:
        """A result that is not just as the contract has it: with the promised strides, or BackendContractError."""
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], tuple):
            raise self._broken(f"returned {_kind(result)} from forward; the contract wants Forward(out, lse, saved)")
        out, lse, saved = result
        self._check("out", out, self.out_shape, self.dtype)
        if self.with_lse:
            self._check("lse", lse, self.lse_shape, self.lse_dtype)
            if not lse.is_contiguous():
                dense = lse.contiguous()
                saved = tuple(dense if tensor is lse else tensor for tensor in saved)
                lse = dense
        if out.stride() != self.out_strides:
            # The same values in the promised strides: compiled code and the caller's view() rely on them.
            dense = torch.empty_strided(out.shape, self.out_strides, dtype=out.dtype, device=out.device)
            dense.copy_(out)
            saved = tuple(dense if tensor is out else tensor for tensor in saved)
            out = dense
        return Forward(out, lse, saved)

    def backward(
        self,
        saved: tuple[Tensor, ...],
        dout: Tensor | None,
        dlse: Tensor | None,
        needs: Needs,
        inputs: tuple[Tensor | None, ...],
    ) -> Gradients:
        """Runs the backend's backward. `dout` None (only the LSE was used) is zero. `inputs`: q, k, v, mask, sinks.

        Raises BackendContractError for gradients that break the contract.
        """
        kind = self.device.type
        if torch.is_grad_enabled() or self.guard or (has_autocast(kind) and torch.is_autocast_enabled(kind)):
            with self._around():
                gradients = self._gradients(saved, dout, dlse, needs)
        else:  # the usual case: autograd has turned grad mode off, and nothing else is to be turned off
            gradients = self._gradients(saved, dout, dlse, needs)
        if not isinstance(gradients, tuple) or len(gradients) != len(Needs._fields):
            raise self._broken(f"returned {_kind(gradients)} from backward; the contract wants Gradients")
        for name, needed, gradient, given in zip(Needs._fields, needs, gradients, inputs, strict=True):
            if needed and given is not None:
                self._check(f"d{name}", gradient, given.shape, given.dtype)
        return gradients

    def _gradients(
        self, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        if dout is None:
            dout = torch.zeros(self.out_shape, dtype=self.dtype, device=self.device)
        elif dout.stride(-1) != 1 or dout.is_neg():
            # An expanded dout, as out.sum().backward() sends, has stride 0: made dense once, for every backend.
            dout = dout.resolve_neg().contiguous()
        if dlse is not None:
            dlse = dlse.resolve_neg().contiguous()
        try:
            return self.backend.backward(self.problem, saved, dout, dlse, needs)
        except Exception as error:
            error.add_note(self._note("backward"))
            raise

    @contextmanager
    def _around(self) -> Iterator[None]:
        """What a backend runs in: grad mode off, autocast off, the tensors' GPU current."""
        with ExitStack() as around:
            around.enter_context(torch.no_grad())
            kind = self.device.type
            if has_autocast(kind) and torch.is_autocast_enabled(kind):
                around.enter_context(torch.autocast(kind, enabled=False))
            if self.guard:
                around.enter_context(torch.cuda.device(self.device))
            yield

    def _check(self, name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        right = isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype is dtype
        if not right or tensor.device != self.device:  # type: ignore[union-attr]  # right says it is a tensor
            raise self._broken(
                f"returned {name} {_kind(tensor)}; the contract wants {tuple(shape)} {dtype} on {self.device}"
            )

    def _broken(self, what: str) -> BackendContractError:
        name = self.plan.chosen
        return BackendContractError(
            f"backend {name} {what}\n  asked: {self.problem.describe()}\n"
            f"  FLASHDISPATCH_DISABLE={name} keeps it from being used",
            plan=self.plan,
        )

    def _note(self, pass_: str) -> str:
        name = self.plan.chosen
        return (
            f"flashdispatch: in the {pass_} of backend {name}, asked: {self.problem.describe()}\n"
            f"FLASHDISPATCH_DISABLE={name} keeps it from being used"
        )


def bound(
    plan: Plan, backend: Backend, q: Tensor, *, check: bool, same_strides: bool = False, autocast: bool = True
) -> Bound:
    """Binds `plan` to a call whose q, as a (B, S, H, D) view, is `q`; `check` is FLASHDISPATCH_CHECK.

    `same_strides`: the result will serve only calls whose tensors all have one metadata; else the strides of k, v and
    the extras may change between calls. `autocast`: it may be called in an autocast region.
    """
    kind, problem = q.device.type, plan.problem
    shape = (*q.shape[:3], problem.head_dim_v)
    return Bound(
        plan=plan,
        problem=problem,
        backend=backend,
        out_shape=shape,
        out_strides=output_strides(shape, q.stride(), problem.layout),
        lse_shape=(q.shape[0], q.shape[2], q.shape[1]),
        dtype=problem.dtype,
        lse_dtype=lse_dtype(problem.dtype),
        device=q.device,
        with_lse=problem.return_lse or problem.needs_backward,
        differentiable=problem.needs_backward,
        return_lse=problem.return_lse,
        autocast=kind if autocast and has_autocast(kind) else None,
        guard=kind == "cuda" and torch.cuda.device_count() > 1,
        read_lengths=(problem.q_lens or problem.kv_lens) and (kind == "cpu" or check),
        identity=hash((plan.chosen, problem)),
        run=None if same_strides else partial(backend.forward, problem),
    )


@lru_cache(maxsize=4096)
def _identity(value: int) -> Tensor:
    """`Bound.identity` as a tensor, to be saved like one. Made in autograd's own call: never an inference tensor."""
    return torch.tensor(value, device="cpu")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return "None" if value is None else f"a {type(value).__name__}"


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The LSE's dtype: float32, and float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Attention(torch.autograd.Function):
    """The autograd node. Gradients for any subset of q, k, v, attn_mask and sinks; the LSE is differentiable."""

    @staticmethod
    def forward(
        ctx: Any, call: Bound, extras: Extras, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`more`: attn_mask and sinks, when one of them is given.

        Keeps what the backend asks for; returns out, or (out, lse) when the LSE is asked for.
        """
        if more:
            extras = extras._replace(attn_mask=more[0], sinks=more[1])
        out, lse, saved = call.compute(q, k, v, extras)  # autograd has turned grad mode off
        kept: tuple[Tensor | None, ...]
        places: tuple[int, ...]
        if len(saved) > 2 and saved[0] is q and saved[1] is k and saved[2] is v and not more:
            kept, places = saved, (0, 1, 2)  # what most backends save most of the time
        else:
            kept, places = _each_once((q, k, v, *more), saved)
        strides = None
        if _saved_tensors_hooks(False) is not None:  # only then can other tensors come back than those kept here
            strides = tuple(None if tensor is None else tensor.stride() for tensor in kept)
            kept = (*kept, _identity(call.identity))
        # What ctx.save_for_backward() and ctx.set_materialize_grads() do, without their calls.
        ctx.to_save = kept
        ctx.materialize_grads = False  # an unused output arrives as None, and no dLSE tensor is ever made for it
        ctx.what = call, places, len(saved), strides
        return (out, cast("Tensor", lse)) if call.return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        """The gradients of q, k, v, attn_mask and sinks, as far as they are needed."""
        call, places, count, strides = ctx.what
        if dout is None and dlse is None:
            return (None,) * (2 + len(places))
        kept = ctx.saved_tensors
        if strides is not None:
            *kept, identity = kept
            if int(identity) != call.identity:
                raise RecomputeError(
                    f"activation checkpointing recomputed with another backend or setting what {call.plan.chosen} had "
                    "computed: what is in force at backward() differs from the forward. Call backward() inside the "
                    "same use_backend block and settings, or give attention() backend=\n"
                    f"  asked: {call.problem.describe()}",
                    plan=call.plan,
                )
            kept = [
                tensor if tensor is None or tensor.stride() == stride else tensor.contiguous()
                for tensor, stride in zip(kept, strides, strict=True)
            ]
        inputs, saved = tuple(kept[at] for at in places), tuple(kept[:count])
        absent = len(Needs._fields) - len(places)
        needs = Needs(*ctx.needs_input_grad[2:], *(False,) * absent)
        gradients = call.backward(saved, dout, dlse, needs, (*inputs, *(None,) * absent))[: len(places)]
        if torch.is_grad_enabled():  # create_graph=True
            connected = [tensor for tensor in (dout, dlse, *inputs) if tensor is not None and tensor.requires_grad]
            # torch ships `apply` without types.
            gradients = Once.apply(len(connected), *connected, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, *gradients)


def _each_once(
    inputs: tuple[Tensor | None, ...], saved: tuple[Tensor, ...]
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """What to keep, each tensor once: `saved`, and those inputs that are not among it; and where the inputs are.

    The inputs are kept in any case: a second derivative is noticed through them.
    """
    kept: list[Tensor | None] = list(saved)
    places = []
    for tensor in inputs:
        at = next((at for at, other in enumerate(kept) if other is tensor), len(kept))
        if at == len(kept):
            kept.append(tensor)
        places.append(at)
    return tuple(kept), tuple(places)


class Once(torch.autograd.Function):
    """Passes gradients on and raises when they are differentiated again: a second derivative is never dropped.

    torch's `once_differentiable` raises only when dout itself needs a gradient, so that a gradient penalty, whose dout
    is constant, would silently lose its part through q, k and v. Here the gradients stay connected to all of them.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The first `count` tensors are what the gradients depend on; the rest are the gradients."""
        ctx.nothing = (None,) * (len(tensors) + 1)
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        """Raises SecondDerivativeError when there is a second derivative to pass on."""
        if all(gradient is None for gradient in second):
            return cast("tuple[None, ...]", ctx.nothing)
        raise SecondDerivativeError(ONCE)


_apply: Any = super(torch.autograd.Function, Attention).apply
"""`Attention.apply` without torch's wrapper in Python, which costs a third of the whole and has two tasks: to refuse
functorch's transforms, and to unwrap what one of them left behind. `record` sees to both."""
_unwrap = torch._C._functorch.unwrap_if_dead
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def record(
    call: Bound, q: Tensor, k: Tensor, v: Tensor, extras: Extras, transformed: bool
) -> tuple[Tensor, Tensor | None]:
    """One eager call with gradients: (out, lse), lse None unless asked for. `transformed`: functorch is at work."""
    if transformed or extras.attn_mask is not None or extras.sinks is not None:
        more = (extras.attn_mask, extras.sinks)
        result = Attention.apply(call, extras, q, k, v, *more)  # type: ignore[no-untyped-call]  # torch ships no types
    else:
        result = _apply(call, extras, _unwrap(q), _unwrap(k), _unwrap(v))
    return result if call.return_lse else (result, None)
