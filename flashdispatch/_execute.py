"""A plan made callable: runs the chosen backend, forward and backward, and keeps its promises around it.

The core owns autograd, autocast, the device guard and the output's strides, so that a backend is only kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from flashdispatch._arguments import check_length_values, has_autocast
from flashdispatch_registry.backend import Backend, Extras, Forward, Gradients, Needs
from flashdispatch_registry.errors import BackendContractError, RecomputeError, SecondDerivativeError
from flashdispatch_registry.layout import output_strides
from flashdispatch_registry.plan import Plan
from flashdispatch_registry.problem import Problem

ONCE = "attention is differentiable once; for a second derivative compute it in plain PyTorch operations"


@dataclass(frozen=True, slots=True)
class Bound:
    """A plan, its backend's code, and what one call has to do around it. Tensors are (B, S, H, D) from here on."""

    plan: Plan
    problem: Problem
    backend: Backend
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    """The contract's strides of the output for this call's q."""
    lse_shape: tuple[int, ...]
    autocast: str | None
    """q's device type, where autocast exists for it: the backend runs outside any autocast region."""
    guard: bool
    """More than one GPU: q's device must be made current."""
    read_lengths: bool
    """Lengths whose values may be read: on the CPU, or anywhere under FLASHDISPATCH_CHECK=1."""
    device: torch.device
    identity: int
    """Saved with a call's tensors and compared in its backward: activation checkpointing recomputes the forward, and
    what one backend saved means nothing to another."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """Runs the backend's forward.

        Raises InvalidRequestError for lengths out of range, BackendContractError for a result that breaks the contract.
        """
        if self.read_lengths:
            check_length_values("q_lens", extras.q_lens, self.problem.seqlen_q)
            check_length_values("kv_lens", extras.kv_lens, self.problem.seqlen_k)
        recording = torch.is_grad_enabled()
        if recording:  # not `with torch.no_grad()`, which costs five times as much on every call's way
            torch._C._set_grad_enabled(False)
        try:
            if self._as_it_is():
                result = self.backend.forward(self.problem, q, k, v, extras)
            else:
                with self._around(q):
                    result = self.backend.forward(self.problem, q, k, v, extras)
        except Exception as error:
            error.add_note(self._note("forward"))
            raise
        finally:
            if recording:
                torch._C._set_grad_enabled(True)
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], tuple):
            raise self._broken(f"returned {_kind(result)} from forward; the contract wants Forward(out, lse, saved)")
        out, lse, saved = result
        self._check("out", out, self.out_shape, self.problem.dtype)
        if self.problem.return_lse or self.problem.needs_grad:
            self._check("lse", lse, self.lse_shape, lse_dtype(self.problem.dtype))
        if lse is not None and not lse.is_contiguous():
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
        q = cast("Tensor", inputs[0])
        with self._around(q):
            if dout is None:
                dout = torch.zeros(self.out_shape, dtype=self.problem.dtype, device=q.device)
            elif dout.stride(-1) != 1:
                # An expanded dout, as out.sum().backward() sends, has stride 0: made dense once, for every backend.
                dout = dout.contiguous()
            if dlse is not None:
                dlse = dlse.contiguous()
            try:
                gradients = self.backend.backward(self.problem, saved, dout, dlse, needs)
            except Exception as error:
                error.add_note(self._note("backward"))
                raise
        if not isinstance(gradients, tuple) or len(gradients) != len(Needs._fields):
            raise self._broken(f"returned {_kind(gradients)} from backward; the contract wants Gradients")
        for name, needed, gradient, given in zip(Needs._fields, needs, gradients, inputs, strict=True):
            if needed and given is not None:
                self._check(f"d{name}", gradient, given.shape, given.dtype)
        return gradients

    def _as_it_is(self) -> bool:
        """The common case, for which no context manager is paid: no autocast region, one GPU."""
        return not self.guard and (self.autocast is None or not torch.is_autocast_enabled(self.autocast))

    @contextmanager
    def _around(self, tensor: Tensor) -> Iterator[None]:
        """What a backend runs in: grad mode off, autocast off, the tensor's GPU current."""
        with ExitStack() as around:
            around.enter_context(torch.no_grad())
            if self.autocast is not None and torch.is_autocast_enabled(self.autocast):
                around.enter_context(torch.autocast(self.autocast, enabled=False))
            if self.guard:
                around.enter_context(torch.cuda.device(tensor.device))
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


def bound(plan: Plan, backend: Backend, q: Tensor, *, check: bool) -> Bound:
    """Binds `plan` to a call whose q, as a (B, S, H, D) view, is `q`; `check` is FLASHDISPATCH_CHECK."""
    kind, problem = q.device.type, plan.problem
    shape = (*q.shape[:3], problem.head_dim_v)
    return Bound(
        plan=plan,
        problem=problem,
        backend=backend,
        out_shape=shape,
        out_strides=output_strides(shape, q.stride(), problem.layout),
        lse_shape=(q.shape[0], q.shape[2], q.shape[1]),
        autocast=kind if has_autocast(kind) else None,
        guard=kind == "cuda" and torch.cuda.device_count() > 1,
        read_lengths=(problem.q_lens or problem.kv_lens) and (kind == "cpu" or check),
        device=q.device,
        identity=hash((plan.chosen, problem)),
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
    def forward(ctx: Any, call: Bound, extras: Extras, *inputs: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """`inputs`: q, k, v, and attn_mask and sinks when one of them is given.

        Keeps what the backend asks for; returns out, or (out, lse) when the LSE is asked for.
        """
        q, k, v = cast("tuple[Tensor, Tensor, Tensor]", inputs[:3])
        if len(inputs) > 3:
            extras = extras._replace(attn_mask=inputs[3], sinks=inputs[4])
        out, lse, saved = call.forward(q, k, v, extras)
        # The inputs are kept in any case: a second derivative is noticed through them.
        ctx.save_for_backward(_identity(call.identity), *inputs, *saved)
        ctx.inputs = len(inputs)
        ctx.call = call
        # An unused output then arrives as None, and no dLSE tensor is ever made for it.
        ctx.set_materialize_grads(False)
        return (out, cast("Tensor", lse)) if call.problem.return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        """The gradients of q, k, v, attn_mask and sinks, as far as they are needed."""
        if dout is None and dlse is None:
            return (None,) * (2 + int(ctx.inputs))
        identity, *kept = ctx.saved_tensors
        call, inputs, saved = ctx.call, tuple(kept[: ctx.inputs]), tuple(kept[ctx.inputs :])
        if int(identity) != call.identity:
            raise RecomputeError(
                f"activation checkpointing recomputed with another backend or setting what {call.plan.chosen} had "
                "computed: what is in force at backward() differs from the forward. Call backward() inside the same "
                "use_backend block and settings, or give attention() backend=\n"
                f"  asked: {call.problem.describe()}",
                plan=call.plan,
            )
        needs = Needs(*ctx.needs_input_grad[2:], *(False,) * (5 - ctx.inputs))
        gradients = call.backward(saved, dout, dlse, needs, (*inputs, *(None,) * (5 - ctx.inputs)))[: ctx.inputs]
        if torch.is_grad_enabled():  # create_graph=True
            connected = [tensor for tensor in (dout, dlse, *inputs) if tensor is not None and tensor.requires_grad]
            # torch ships `apply` without types.
            gradients = Once.apply(len(connected), *connected, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, *gradients)


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


def run(call: Bound, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor | None]:
    """One eager call: (out, lse), lse None unless asked for."""
    if call.problem.needs_grad:
        alone = extras.attn_mask is None and extras.sinks is None
        inputs = (q, k, v) if alone else (q, k, v, extras.attn_mask, extras.sinks)
        result = Attention.apply(call, extras, *inputs)  # type: ignore[no-untyped-call]  # torch ships it without types
        return cast("tuple[Tensor, Tensor]", result) if call.problem.return_lse else (result, None)
    out, lse, _ = call.forward(q, k, v, extras)
    return out, lse if call.problem.return_lse else None
