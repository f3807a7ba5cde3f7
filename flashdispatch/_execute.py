"""A plan made callable: runs the chosen backend, forward and backward, and keeps its promises around it.

The core owns autograd, autocast, the device guard and the output's strides, so that a backend is only kernels.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flashdispatch_registry.backend import Backend, Extras, Forward, Gradients, Needs
from flashdispatch_registry.errors import SecondDerivativeError
from flashdispatch_registry.layout import output_strides
from flashdispatch_registry.plan import Plan
from flashdispatch_registry.problem import Problem


@dataclass(frozen=True, slots=True)
class Bound:
    """A plan, its backend's code, and what one call has to do around it. Tensors are (B, S, H, D) from here on."""

    plan: Plan
    problem: Problem
    backend: Backend
    out_strides: tuple[int, ...]
    """The contract's strides of the output for this call's q."""
    autocast: str | None
    """q's device type, where autocast exists for it: the backend runs outside any autocast region."""
    guard: bool
    """More than one GPU: q's device must be made current."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """Runs the backend's forward."""
        try:
            if self._as_it_is():
                out, lse, saved = self.backend.forward(self.problem, q, k, v, extras)
            else:
                with self._around(q):
                    out, lse, saved = self.backend.forward(self.problem, q, k, v, extras)
        except Exception as error:
            error.add_note(self._note("forward"))
            raise
        if out.stride() != self.out_strides:
            # The same values in the promised strides: compiled code and the caller's view() rely on them.
            dense = torch.empty_strided(out.shape, self.out_strides, dtype=out.dtype, device=out.device)
            dense.copy_(out)
            saved = tuple(dense if tensor is out else tensor for tensor in saved)
            out = dense
        return Forward(out, lse, saved)

    def backward(
        self, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None, needs: Needs, like: Tensor
    ) -> Gradients:
        """Runs the backend's backward. `dout` None (only the LSE was used) is zero; `like` tells its device."""
        problem = self.problem
        with self._around(like):
            if dout is None:
                shape = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
                dout = torch.zeros(shape, dtype=problem.dtype, device=like.device)
            elif dout.stride(-1) != 1:
                # An expanded dout, as out.sum().backward() sends, has stride 0: made dense once, for every backend.
                dout = dout.contiguous()
            if dlse is not None:
                dlse = dlse.contiguous()
            try:
                return self.backend.backward(problem, saved, dout, dlse, needs)
            except Exception as error:
                error.add_note(self._note("backward"))
                raise

    def _as_it_is(self) -> bool:
        """The common case, for which no context manager is paid: no autocast region, one GPU."""
        return not self.guard and (self.autocast is None or not torch.is_autocast_enabled(self.autocast))

    def _around(self, tensor: Tensor) -> ExitStack:
        """What a backend runs in: grad mode off, autocast off, the tensor's GPU current."""
        around = ExitStack()
        around.enter_context(torch.no_grad())
        if self.autocast is not None and torch.is_autocast_enabled(self.autocast):
            around.enter_context(torch.autocast(self.autocast, enabled=False))
        if self.guard:
            around.enter_context(torch.cuda.device(tensor.device))
        return around

    def _note(self, pass_: str) -> str:
        return f"flashdispatch: in the {pass_} of backend {self.plan.chosen}, asked: {self.problem.describe()}"


def bound(plan: Plan, backend: Backend, q: Tensor) -> Bound:
    """Binds `plan` to a call whose q, as a (B, S, H, D) view, is `q`."""
    kind = q.device.type
    shape = (*q.shape[:3], plan.problem.head_dim_v)
    return Bound(
        plan=plan,
        problem=plan.problem,
        backend=backend,
        out_strides=output_strides(shape, q.stride(), plan.problem.layout),
        autocast=kind if torch.amp.is_autocast_available(kind) else None,
        guard=kind == "cuda" and torch.cuda.device_count() > 1,
    )


class Attention(torch.autograd.Function):
    """The autograd node. Gradients for any subset of q, k, v, attn_mask and sinks; the LSE is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Bound,
        extras: Extras,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Keeps what the backend asks for; returns out, or (out, lse) when the LSE is asked for."""
        out, lse, saved = call.forward(q, k, v, extras._replace(attn_mask=attn_mask, sinks=sinks))
        ctx.save_for_backward(*saved)
        ctx.call = call
        # An unused output then arrives as None, and no dLSE tensor is ever made for it.
        ctx.set_materialize_grads(False)
        return (out, cast("Tensor", lse)) if call.problem.return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        """FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2) as the backend runs it."""
        if dout is None and dlse is None:
            return (None,) * 7
        needs = Needs(*ctx.needs_input_grad[2:])
        like = cast("Tensor", dout if dout is not None else dlse)
        gradients = ctx.call.backward(ctx.saved_tensors, dout, dlse, needs, like)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = Once.apply(like.new_empty(0, requires_grad=True), *gradients)  # type: ignore[no-untyped-call]
        return (None, None, *gradients)


class Once(torch.autograd.Function):
    """Passes gradients on and raises when they are differentiated again: a second derivative is never dropped.

    torch's `once_differentiable` raises only when dout itself needs a gradient, so that a gradient penalty, whose dout
    is constant, would silently lose its part through q, k and v.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        """`anchor` requires a gradient, so what comes out does too."""
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *second: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        """Raises SecondDerivativeError."""
        raise SecondDerivativeError(
            "attention is differentiable once; for a second derivative compute it in plain PyTorch operations"
        )


def run(call: Bound, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor | None]:
    """One eager call: (out, lse), lse None unless asked for."""
    if call.problem.needs_grad:
        # torch ships `apply` without types.
        result = Attention.apply(call, extras, q, k, v, extras.attn_mask, extras.sinks)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", result) if call.problem.return_lse else (result, None)
    out, lse, _ = call.forward(q, k, v, extras)
    return out, lse if call.problem.return_lse else None
