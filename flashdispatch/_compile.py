"""torch.compile, torch.export and FakeTensors: the library ops `flashdispatch::forward` and `flashdispatch::backward`.

Dynamo does not trace the choice: it puts `traced` into its graph as one call, and when that graph is lowered `traced`
runs as ordinary Python on FakeTensors. There the plan is made, and what stays in the lowered graph is the op with the
backend's name as an argument: visible, cacheable, and with no way to choose again at run time. So inside a compiled
region the environment counts as of trace time; `use_backend` is guarded through `_forcing.mirror`, and changing it
compiles anew.

This module imports torch._dynamo (and with it triton), so it is imported only by a call that is being traced.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch._dynamo
from torch import Tensor

from flashdispatch import _execute, _plans, _registry, _settings
from flashdispatch._adapt import adapt
from flashdispatch._arguments import Arguments, check, fp32_precision, refuse_forward_mode
from flashdispatch._forcing import Asked
from flashdispatch._registry import Names
from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.backend import Extras, Gradients, Needs
from flashdispatch_registry.errors import (
    BackendUnsupportedError,
    ForwardModeError,
    InvalidRequestError,
    SecondDerivativeError,
)
from flashdispatch_registry.layout import dense_strides, empty_gradient, output_strides
from flashdispatch_registry.masks import Band
from flashdispatch_registry.problem import DTYPE_NAMES, Problem

TRACED_NOTE = "traced: which backend runs was settled at trace time, by the settings of then"


class Attributes(NamedTuple):
    """The op's plain arguments, in the order of its schema: what a Problem holds beyond the tensors' metadata."""

    left: int | None
    right: int | None
    align: str
    scale: float
    softcap: float | None
    dropout_p: float
    needs_grad: str
    """Comma-separated input names."""
    return_lse: bool
    deterministic: bool
    layout: str
    """The caller's; the op's tensors are (B, S, H, D) either way."""
    backend: str


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? q_lens, "
    "Tensor? kv_lens, Tensor? dropout_seed"
)
_ATTRIBUTES = (
    "int? left, int? right, str align, float scale, float? softcap, float dropout_p, str needs_grad, bool return_lse, "
    "bool deterministic, str layout, str backend"
)


def traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Any,
    window: Any,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_lens: Tensor | None,
    kv_lens: Tensor | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    layout: Any,
    return_lse: bool,
    deterministic: bool | None,
    backend: str | Names | None,
    context: Names | None,
    default: Names | None,
    dual_level: int,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` inside a compiled region, with what `use_backend` and `set_default_backend` say there (guarded)."""
    if dual_level >= 0:  # lowering takes tangents away before anybody could see them
        raise ForwardModeError("attention has reverse-mode derivatives only, and this is compiled inside a dual_level")
    args = Arguments(
        q, k, v, causal, window, attn_mask, alibi_slopes, sinks, q_lens, kv_lens, scale, softcap, dropout_p,
        dropout_seed, layout, return_lse, deterministic,
    )  # fmt: skip
    asked = Asked(backend, os.environ.get(_settings.BACKEND), context, default)
    return lower(args, asked, os.environ.get(_settings.DISABLE))


torch._dynamo.allow_in_graph(traced)  # type: ignore[no-untyped-call]  # torch ships it without types


def lower(args: Arguments, asked: Asked, disable: str | None) -> Tensor | tuple[Tensor, Tensor]:
    """Makes the plan and calls the op with the chosen backend's name."""
    refuse_forward_mode(args)
    checked = check(args)
    problem = checked.problem
    plan, _ = _plans.commit(problem, asked, disable, adapters=checked.adapters, notes=(TRACED_NOTE,))
    q, k, v, extras = adapt(
        args.q, args.k, args.v, args.attn_mask, args.alibi_slopes, args.sinks, args.q_lens, args.kv_lens,
        args.dropout_seed, problem, checked.cast_to,
    )  # fmt: skip
    attributes = Attributes(
        left=problem.band.left,
        right=problem.band.right,
        align=problem.band.align,
        scale=problem.scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        needs_grad=",".join(problem.needs_grad),
        return_lse=problem.return_lse,
        deterministic=problem.deterministic,
        layout=problem.layout,
        backend=cast("str", plan.chosen),
    )
    out, lse = torch.ops.flashdispatch.forward(q, k, v, *extras, *attributes)
    if problem.layout == "bhsd":
        out = out.transpose(1, 2)
    return (out, lse) if problem.return_lse else out


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, k, v = arguments[:3]
    extras, attributes = Extras(*arguments[3:9]), Attributes(*arguments[9:])
    call = _bound(q, k, v, extras, attributes)
    out, lse, saved = call.forward(q, k, v, extras)
    if call.problem.needs_backward:
        # Bounded: with dynamic lengths there is one a length, and a backward is never thousands of lengths behind.
        _plans.remember(_recipes, _recipe_key(call), _recipe(saved, q, k, v, extras, out, lse, call))
    if not _has_lse(attributes):
        lse = None
    return out, lse if lse is not None else q.new_empty(0, dtype=_execute.lse_dtype(q.dtype))


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, v, attributes = arguments[0], arguments[2], Attributes(*arguments[9:])
    out_shape = (*q.shape[:3], v.shape[3])
    out = q.new_empty_strided(out_shape, output_strides(out_shape, q.stride(), cast("Any", attributes.layout)))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if _has_lse(attributes) else (0,)
    return out, q.new_empty(lse_shape, dtype=_execute.lse_dtype(q.dtype))


def _has_lse(attributes: Attributes) -> bool:
    return attributes.return_lse or bool(attributes.needs_grad)


def _backward(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> Any:
    needs, inputs = Needs(*arguments[:5]), arguments[5:]
    q, k, v = inputs[:3]
    extras, attributes = Extras(*inputs[3:9]), Attributes(*inputs[9:])
    call = _bound(q, k, v, extras, attributes)
    named = _named(q, k, v, extras, out, lse)
    saved = tuple(cast("Tensor", named[name]) for name in _recipes[_recipe_key(call)])
    like = (q, k, v, extras.attn_mask, extras.sinks)
    gradients = call.backward(saved, dout, dlse, needs, like)
    return tuple(_strided(gradient, tensor, q) for gradient, tensor in zip(gradients, like, strict=True))


def _backward_fake(*arguments: Any) -> Any:
    needs, inputs = Needs(*arguments[4:9]), arguments[9:]  # after dout, dlse, out, lse
    like = (*inputs[:3], inputs[3], inputs[5])
    return tuple(
        empty_gradient(tensor) if needed else inputs[0].new_empty(0) for needed, tensor in zip(needs, like, strict=True)
    )


def _strided(gradient: Tensor | None, like: Tensor | None, q: Tensor) -> Tensor:
    """A gradient in its input's stride order, as the fake promises; none is an empty tensor."""
    if gradient is None or like is None:
        return q.new_empty(0)
    if gradient.stride() == dense_strides(like.shape, like.stride()):
        return gradient
    return empty_gradient(like).copy_(gradient)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.attributes = Attributes(*inputs[9:])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = Needs(wanted[0], wanted[1], wanted[2], wanted[3], wanted[5])
    nothing = (None,) * len(Attributes._fields)
    if dout is None and dlse is None:
        return (None,) * 9 + nothing
    if not ctx.attributes.needs_grad:
        raise InvalidRequestError(
            "this graph was traced without gradients, so its plan covers none; trace or export it with inputs that "
            "require grad"
        )
    made = torch.ops.flashdispatch.backward(dout, dlse, out, lse, *needs, *inputs, *ctx.attributes)
    grads = Gradients(*(gradient if need else None for gradient, need in zip(made, needs, strict=True)))
    return grads.q, grads.k, grads.v, grads.attn_mask, None, grads.sinks, None, None, None, *nothing


_NEEDS = "bool needs_q, bool needs_k, bool needs_v, bool needs_attn_mask, bool needs_sinks"
_forward_op = torch.library.custom_op(
    "flashdispatch::forward", _forward, mutates_args=(), schema=f"({_TENSORS}, {_ATTRIBUTES}) -> (Tensor, Tensor)"
)
_forward_op.register_fake(_forward_fake)
_forward_op.register_autograd(_autograd, setup_context=_setup_context)
_backward_op = torch.library.custom_op(
    "flashdispatch::backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_NEEDS}, {_TENSORS}, {_ATTRIBUTES})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_backward_op.register_fake(_backward_fake)


def _second_derivative(*_: Any) -> Any:
    raise SecondDerivativeError(_execute.ONCE)


_backward_op.register_autograd(_second_derivative)


_recipes: dict[tuple[str | None, Problem], tuple[str, ...]] = {}
"""How a backend's `saved` is made of the call's own tensors, learnt in the forward and used in the backward."""


def _recipe_key(call: _execute.Bound) -> tuple[str | None, Problem]:
    """TF32 may be allowed or not in between; it does not change what is saved."""
    return call.plan.chosen, replace(call.problem, fp32_precision="ieee")


def _bound(q: Tensor, k: Tensor, v: Tensor, extras: Extras, attributes: Attributes) -> _execute.Bound:
    """The op at run time: the plan for the real sizes, forced to the backend that tracing chose."""
    mask = extras.attn_mask
    precision = fp32_precision(q.dtype, q.device.type)
    key = (
        q.shape, q.stride(), q.dtype, q.device, k.shape, v.shape, None if mask is None else (mask.shape, mask.dtype),
        *(tensor is None for tensor in extras), *attributes, precision, _registry.registry().generation,
    )  # fmt: skip
    call: _execute.Bound | None = _plans.traced_cache.get(key)
    if call is None:
        problem = Problem(
            arch=arch_of(q.device),
            dtype=q.dtype,
            batch=q.shape[0],
            heads_q=q.shape[2],
            heads_kv=k.shape[2],
            seqlen_q=q.shape[1],
            seqlen_k=k.shape[1],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            scale=attributes.scale,
            band=Band(attributes.left, attributes.right, cast("Any", attributes.align)),
            attn_mask=None if mask is None else "bool" if mask.dtype is torch.bool else "float",
            attn_mask_shape=None if mask is None else cast("Any", tuple(mask.shape)),
            alibi=extras.alibi_slopes is not None,
            sinks=extras.sinks is not None,
            q_lens=extras.q_lens is not None,
            kv_lens=extras.kv_lens is not None,
            softcap=attributes.softcap,
            dropout_p=attributes.dropout_p,
            needs_grad=cast("Any", _settings.names(attributes.needs_grad)),
            return_lse=attributes.return_lse,
            deterministic=attributes.deterministic,
            layout=cast("Any", attributes.layout),
            fp32_precision=precision,
        )
        plan, backend = _plans.commit_traced(problem, attributes.backend)
        call = _execute.bound(plan, backend, q, check=_settings.read().check)
        _plans.remember(_plans.traced_cache, key, call)
    return call


def _named(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor | None
) -> dict[str, Tensor | None]:
    return {"q": q, "k": k, "v": v, **extras._asdict(), "out": out, "lse": lse}


def _recipe(
    saved: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    out: Tensor,
    lse: Tensor | None,
    call: _execute.Bound,
) -> tuple[str, ...]:
    named = _named(q, k, v, extras, out, lse)
    recipe = []
    for tensor in saved:
        name = next((name for name, own in named.items() if own is tensor), None)
        if name is None:
            shape = f"{tuple(tensor.shape)} {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}"
            raise BackendUnsupportedError(
                f"backend {call.plan.chosen} keeps a tensor {shape} of its own for the backward; under torch.compile "
                "only q, k, v, the extras, out and lse may be kept. Call it outside the compiled region, or force "
                "another backend there",
                plan=call.plan,
            )
        recipe.append(name)
    return tuple(recipe)
