"""`attention()`: the call, its meaning, and the hot path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashdispatch import _execute, _forcing, _plans, _registry, _settings
from flashdispatch._adapt import adapt, as_bshd
from flashdispatch._arguments import (
    Arguments,
    autocast_dtype,
    check,
    fp32_precision,
    refuse_forward_mode,
    refuse_lost_gradients,
)
from flashdispatch._registry import Names
from flashdispatch_registry.backend import NO_EXTRAS
from flashdispatch_registry.masks import Align
from flashdispatch_registry.problem import Layout

_PLAIN = (Tensor, torch.nn.Parameter)
"""Exact types that run eagerly; subclasses (FakeTensor among them) go through the library ops, which they intercept."""


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Align = ...,
    window: tuple[int | None, int | None] | None = ...,
    attn_mask: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    q_lens: Tensor | None = ...,
    kv_lens: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    backend: str | Names | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Align = ...,
    window: tuple[int | None, int | None] | None = ...,
    attn_mask: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    q_lens: Tensor | None = ...,
    kv_lens: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    backend: str | Names | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Align = False,
    window: tuple[int | None, int | None] | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_lens: Tensor | None = None,
    kv_lens: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | Names | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale · q kᵀ + bias) v``, on the fastest backend that can run it.

    The meaning is the same on every backend. Order: scores S = scale·QKᵀ → softcap → + attn_mask (float) and ALiBi →
    masks (causal, window, bool attn_mask, lengths; all ANDed) → softmax (with sinks) → dropout → ·V. A query that sees
    no key gives output 0, LSE −inf and gradients 0. Differentiable once: in q, k, v, a float attn_mask and sinks, and
    through the LSE.

    Args:
        q: (B, Sq, Hq, D) for layout "bshd", (B, Hq, Sq, D) for "bhsd". float16, bfloat16, float32 or float64. Any
            strides with a contiguous last dim run without a copy.
        k: (B, Sk, Hkv, D) likewise. Hq must be a multiple of Hkv (GQA): query head h uses key head h // (Hq / Hkv).
        v: (B, Sk, Hkv, Dv) likewise. Dv may differ from D.
        causal: True: query i sees key j iff j <= i + Sk − Sq (bottom-right: the last query sees the last key), with
            each sequence's own lengths. "top_left": iff j <= i, PyTorch's ``is_causal``.
        window: (left, right), inclusive, each >= 0 or None for no limit: p − left <= j <= p + right, where p is the
            query's position i + Sk − Sq (or i for causal="top_left"). A window of w keys that ends at the query itself
            is (w − 1, 0).
        attn_mask: broadcastable to (B, Hq, Sq, Sk). Bool: True = attend. Float (q's dtype or float32): added to the
            scores in float32; −inf masks; gets a gradient when it requires one. Never expanded in memory.
        alibi_slopes: (Hq,) or (B, Hq) float32: adds −slope·|p − j|. No gradient.
        sinks: (Hq,) float32 logits: one more softmax column whose value is zero. The LSE includes it.
        q_lens: (B,) int32 true query lengths. Rows past them give output 0 and LSE −inf; what they hold (also NaN)
            never matters.
        kv_lens: (B,) int32 true key lengths, likewise. With causal=True and several queries q_lens must be given too.
        scale: softmax scale; None is 1/√D. Any finite float.
        softcap: c > 0: scores become c·tanh(S/c). None: off.
        dropout_p: probability of dropping an attention weight; kept ones are scaled by 1/(1 − p). Philox4x32-10 by
            position, so the mask is the same on every backend.
        dropout_seed: int, or an int64 tensor (seed, offset) on q's device. None draws one from torch's generator.
        layout: "bshd" or "bhsd", of q, k, v and the output.
        return_lse: also return the LSE: (B, Hq, Sq) float32 (float64 for float64), natural log of the softmax
            denominator, before dropout.
        deterministic: True: the backward is bitwise repeatable. None: what torch.use_deterministic_algorithms says.
        backend: name of the backend to run, or a chain "a,b". Strict: raises when it can't run this. None: see
            `use_backend` and FLASHDISPATCH_BACKEND; else chosen automatically.

    Returns:
        The output in q's layout and dtype with Dv last, strides as ``torch.empty_like`` of a dense q; or (output, LSE).

    Raises:
        InvalidRequestError: (ValueError) shapes, values or arguments that contradict each other.
        InvalidTypeError: (TypeError) an argument of the wrong type.
        UnknownBackendError: (ValueError) a backend name that is not registered.
        DisabledBackendError: (ValueError) a backend both asked for and in FLASHDISPATCH_DISABLE.
        BackendUnsupportedError: (NotImplementedError) the backend asked for can't run this; all its reasons.
        NoBackendError: (NotImplementedError) nobody can run this; everyone's reasons.
        FallbackError: (RuntimeError) only a slow path is left on a GPU and FLASHDISPATCH_FALLBACK=error.
        ForwardModeError: (NotImplementedError) an input carries a forward-mode tangent.
        SettingsError: (ValueError) an environment variable whose value means nothing.
        ColdKernelError: (RuntimeError) a kernel would have to be compiled during CUDA graph capture; see `prepare`.
        BackendContractError: (RuntimeError) the backend returned what the contract does not allow.
        SecondDerivativeError, RecomputeError: (RuntimeError) from the backward; see docs/contract.md.

    Sources: FlashAttention (arXiv 2205.14135), FlashAttention-2 (arXiv 2307.08691), ALiBi (arXiv 2108.12409), attention
    sinks (arXiv 2309.17453).

    Example:
        >>> import torch, flashdispatch
        >>> q, k, v = (torch.randn(2, 128, 8, 64, requires_grad=True) for _ in range(3))
        >>> out = flashdispatch.attention(q, k, v, causal=True)
        >>> out.sum().backward()
    """
    if torch.compiler.is_dynamo_compiling():
        # Imported here, where Dynamo runs the import while tracing: the module loads torch._dynamo, and with it triton.
        from flashdispatch._compile import traced

        return traced(
            q, k, v, causal, window, attn_mask, alibi_slopes, sinks, q_lens, kv_lens, scale, softcap, dropout_p,
            dropout_seed, layout, return_lse, deterministic, backend, _forcing.mirror.names, _forcing.default(),
            forward_ad._current_level,
        )  # fmt: skip
    # From here to the backend every look-up counts: the whole way of a call seen before costs some 6 µs.
    environment, disable = _settings.in_force()
    context, default = _forcing.context(), _forcing._default
    records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    key: Any
    try:
        device, dtype = q.device, q.dtype
        # A contiguous tensor's strides follow from its shape, all but those that mean nothing (of dims of size 1, of
        # empty tensors), and whether it is contiguous is read faster.
        key = (
            q.shape, q.is_contiguous() or q.stride(), dtype, device, records and q.requires_grad,
            k.shape, k.is_contiguous() or k.stride(), k.dtype, k.device, records and k.requires_grad,
            v.shape, v.is_contiguous() or v.stride(), v.dtype, v.device, records and v.requires_grad,
            type(q), type(k), type(v), records, torch._C._len_torch_dispatch_stack(),
            causal, scale, dropout_p, layout, return_lse, deterministic, backend,
            # True is 1 to a dict, and not to us.
            type(causal), type(scale), type(dropout_p), type(return_lse), type(deterministic),
            torch._C._get_deterministic_algorithms(),
            autocast_dtype(device.type) if torch._C._is_any_autocast_enabled() else None,
            fp32_precision(dtype, device.type) if dtype is torch.float32 else None,
            environment, disable, context, default, _registry.registry().generation,
        )  # fmt: skip
        if not (
            window is None and softcap is None and dropout_seed is None and attn_mask is None and alibi_slopes is None
            and sinks is None and q_lens is None and kv_lens is None
        ):  # fmt: skip
            # Two lengths of key never meet: equal tuples have one length.
            given = (attn_mask, alibi_slopes, sinks, q_lens, kv_lens)
            key += (
                window, softcap, type(softcap), None if window is None else tuple(type(limit) for limit in window),
                *(None if tensor is None else _metadata(tensor, records) for tensor in given),
                _metadata(dropout_seed, records) if isinstance(dropout_seed, Tensor) else type(dropout_seed),
            )  # fmt: skip
        call = _plans.cache.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # An argument that is no tensor, not hashable, or has no strides. The checks below name it, or find it good and
        # run it uncached.
        key = call = None
    transformed = torch._C._are_functorch_transforms_active()
    if call is None or forward_ad._current_level >= 0 or transformed:
        args = Arguments(
            q, k, v, causal, window, attn_mask, alibi_slopes, sinks, q_lens, kv_lens, scale, softcap, dropout_p,
            dropout_seed, layout, return_lse, deterministic,
        )  # fmt: skip
        if forward_ad._current_level >= 0:
            refuse_forward_mode(args)
        if transformed and records:
            refuse_lost_gradients(args)
        asked = _forcing.Asked(backend, _settings.text(environment), context, default)
        disable = _settings.text(disable)
        if not _runs_eagerly(args):
            from flashdispatch._compile import lower

            return lower(args, asked, disable)
        call = _call(args, asked, disable)
        if key is not None:
            _plans.remember(_plans.cache, key, call)
    if call.plain:
        extras = NO_EXTRAS
        if layout == "bhsd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    else:
        q, k, v, extras = adapt(
            q, k, v, attn_mask, alibi_slopes, sinks, q_lens, kv_lens, dropout_seed, call.bound.problem, call.cast_to
        )
    bound = call.bound
    if bound.differentiable:
        out, lse = _execute.record(bound, q, k, v, extras, transformed)
    elif records:
        torch._C._set_grad_enabled(False)  # not `with torch.no_grad()`, which costs five times as much
        try:
            out, lse, _ = bound.compute(q, k, v, extras)
        finally:
            torch._C._set_grad_enabled(True)
    else:
        out, lse, _ = bound.compute(q, k, v, extras)
    if layout == "bhsd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out  # type: ignore[return-value]  # there is an LSE when it is asked for


@dataclass(frozen=True, slots=True)
class _Call:
    """What the cache keeps for one call's metadata."""

    bound: _execute.Bound
    cast_to: torch.dtype | None
    plain: bool
    """q, k and v go to the backend alone, without copy or cast: `adapt` has nothing to do but to transpose them."""


def _call(args: Arguments, asked: _forcing.Asked, disable: str | None) -> _Call:
    """The slow path: checks the arguments, makes the plan, loads the backend, binds it to this call's strides."""
    checked = check(args)
    problem = checked.problem
    plan, backend = _plans.commit(problem, asked, disable, adapters=checked.adapters)
    q = as_bshd(args.q, problem, checked.cast_to)
    extras = (args.attn_mask, args.alibi_slopes, args.sinks, args.q_lens, args.kv_lens)
    plain = not checked.adapters and not problem.dropout_p and all(tensor is None for tensor in extras)
    bound = _execute.bound(
        plan, backend, q, check=_settings.read().check, same_strides=True, autocast=checked.cast_to is not None
    )
    return _Call(bound, checked.cast_to, plain)


def _metadata(tensor: Tensor, records: bool) -> tuple[object, ...]:
    requires_grad = records and tensor.requires_grad
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, requires_grad, type(tensor)


def _runs_eagerly(args: Arguments) -> bool:
    """False for tensor subclasses and under a dispatch mode (FakeTensorMode, make_fx): they see the library ops."""
    tensors = (value for value in args if isinstance(value, Tensor))
    return torch._C._len_torch_dispatch_stack() == 0 and all(type(tensor) in _PLAIN for tensor in tensors)
