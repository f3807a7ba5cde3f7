"""One call's arguments, checked, and turned into a `Problem`. Metadata only: no value of a tensor is read here.

Every check names what was given and what would be right. It runs when a call is seen for the first time; after that
the call's metadata is a key to a plan (see `_attention`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal, NamedTuple, NoReturn, cast, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashdispatch_registry.arch import arch_of, device_type_of
from flashdispatch_registry.errors import ForwardModeError, InvalidRequestError, InvalidTypeError
from flashdispatch_registry.masks import Align, Band
from flashdispatch_registry.plan import Adapter
from flashdispatch_registry.problem import DTYPE_NAMES, DTYPES, Differentiable, Layout, MaskKind, Problem


class Arguments(NamedTuple):
    """The arguments of `attention`, as given."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool | Align = False
    window: tuple[int | None, int | None] | None = None
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_lens: Tensor | None = None
    kv_lens: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    layout: Layout = "bshd"
    return_lse: bool = False
    deterministic: bool | None = None


class Checked(NamedTuple):
    """What checking the arguments gives."""

    problem: Problem
    adapters: tuple[Adapter, ...]
    cast_to: torch.dtype | None
    """The dtype that autocast asks q, k and v to be cast to; None when nothing is cast."""


def check(args: Arguments, *, arch: str | None = None) -> Checked:
    """Checks `args` and describes them as a Problem, for q's device or for another `arch`.

    Raises InvalidRequestError (a ValueError) or InvalidTypeError (a TypeError).
    """
    args = _concrete(args)
    _check_tensors(args)
    sizes = _sizes(args)
    cast_to = autocast_dtype(args.q.device.type)
    dtype = _dtype(args, cast_to)
    band = _band(args, sizes)
    mask, mask_shape = _attn_mask(args, sizes, dtype)
    _alibi(args, sizes)
    _sinks(args, sizes)
    _lengths(args)
    dropout_p = _dropout(args)
    _flag(args, "return_lse")
    deterministic = args.deterministic
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    else:
        _flag(args, "deterministic")
    problem = Problem(
        arch=arch or arch_of(args.q.device),
        dtype=dtype,
        batch=sizes.batch,
        heads_q=sizes.heads_q,
        heads_kv=sizes.heads_kv,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        head_dim=sizes.head_dim,
        head_dim_v=sizes.head_dim_v,
        scale=_scale(args, sizes),
        band=band,
        attn_mask=mask,
        attn_mask_shape=mask_shape,
        alibi=args.alibi_slopes is not None,
        sinks=args.sinks is not None,
        q_lens=args.q_lens is not None,
        kv_lens=args.kv_lens is not None,
        softcap=_softcap(args),
        dropout_p=dropout_p,
        layout=args.layout,
        needs_grad=_needs_grad(args),
        return_lse=args.return_lse,
        deterministic=deterministic,
        fp32_precision=fp32_precision(dtype, device_type_of(arch or args.q.device.type)),
    )
    return Checked(problem, _adapters(args, cast_to), cast_to)


def check_length_values(name: str, lengths: Tensor | None, limit: int) -> None:
    """Reads the values of a tensor of lengths and raises InvalidRequestError for one outside 0..limit.

    On a GPU this synchronises, so it is done there only under FLASHDISPATCH_CHECK=1.
    """
    if lengths is None or lengths.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(lengths))
    if low < 0 or high > limit:
        raise InvalidRequestError(f"{name} must be within 0..{limit}, got values from {low} to {high}")


def records_gradients() -> bool:
    """Whether autograd records what happens now. Inference mode records nothing, even inside enable_grad()."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def refuse_forward_mode(args: Arguments) -> None:
    """Raises ForwardModeError when an argument carries a forward-mode tangent: it would be dropped without a word."""
    for name, value in args._asdict().items():
        if not isinstance(value, Tensor):
            continue
        # torch ships it without types.
        if forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise ForwardModeError(
                f"{name} carries a forward-mode tangent; attention has reverse-mode derivatives only (use backward(), "
                "torch.autograd.grad or torch.autograd.functional.vjp)"
            )


def refuse_lost_gradients(args: Arguments) -> None:
    """Inside torch.func.vmap: raises InvalidRequestError when what is mapped over requires a gradient.

    The mapped tensor's own flag says no, so no gradient would be recorded, and it would be lost without a word.
    """
    for name, value in args._asdict().items():
        inner = value
        while isinstance(inner, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
            if inner.requires_grad and not value.requires_grad:
                _bad(f"{name} is mapped over by torch.func.vmap and requires a gradient, which would be lost; make the "
                     "mapped dim part of the batch, or detach it", args)  # fmt: skip


class _Sizes(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int


def _bad(message: str, args: Arguments) -> NoReturn:
    raise InvalidRequestError(f"{message}\n  asked: {_shapes(args)}")


def _bad_type(message: str, args: Arguments) -> NoReturn:
    raise InvalidTypeError(f"{message}\n  asked: {_shapes(args)}")


def _shapes(args: Arguments) -> str:
    given = ((name, getattr(args, name)) for name in ("q", "k", "v"))
    shown = [
        f"{name} {_shape(t)} {str(t.dtype).removeprefix('torch.')} {t.device}" if isinstance(t, Tensor) else name
        for name, t in given
    ]
    return f"{', '.join(shown)}, layout {args.layout!r}"


def _shape(tensor: Tensor) -> str:
    return "nested" if tensor.is_nested else str(tuple(tensor.shape))


def _concrete(args: Arguments) -> Arguments:
    """Under tracing a plain number may arrive symbolic; where it decides about the kernel it becomes one, guarded."""

    def number(value: Any) -> Any:
        return float(value) if isinstance(value, torch.SymFloat | torch.SymInt) else value

    window: Any = args.window
    if isinstance(window, tuple | list):
        window = tuple(int(limit) if isinstance(limit, torch.SymInt) else limit for limit in window)
    return args._replace(
        window=window, scale=number(args.scale), softcap=number(args.softcap), dropout_p=number(args.dropout_p)
    )


def _hint(size: Any) -> int:
    """The size, or under tracing with dynamic shapes the size it was first seen with: no guard, no recompile."""
    if not isinstance(size, torch.SymInt):
        return int(size)  # under torch.jit.trace it is a tensor
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else 0


def _check_tensors(args: Arguments) -> None:
    for name in ("q", "k", "v"):
        tensor = getattr(args, name)
        if not isinstance(tensor, Tensor):
            _bad_type(f"{name} must be a torch.Tensor, got {type(tensor).__name__}", args)
        if tensor.is_nested or tensor.layout is not torch.strided:
            _bad(f"{name} must be a dense (strided) tensor; pad it and give q_lens / kv_lens", args)
    if args.layout not in get_args(Layout):
        _bad(f"layout must be 'bshd' (batch, sequence, heads, head dim) or 'bhsd', got {args.layout!r}", args)
    for name in ("q", "k", "v"):
        if getattr(args, name).dim() != 4:
            order = ", ".join({"b": "B", "s": "S", "h": "H", "d": "D"}[letter] for letter in args.layout)
            _bad(f"{name} must have 4 dims ({order}), got {getattr(args, name).dim()}; add the missing ones with "
                 "unsqueeze, or use flashdispatch.sdpa() for PyTorch's shapes", args)  # fmt: skip
    devices = {getattr(args, name).device for name in ("q", "k", "v")}
    if len(devices) > 1:
        _bad("q, k and v must be on one device", args)
    for name in ("attn_mask", "alibi_slopes", "sinks", "q_lens", "kv_lens"):
        tensor = getattr(args, name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            _bad_type(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}", args)
        if tensor.is_nested or tensor.layout is not torch.strided:
            _bad(f"{name} must be a dense (strided) tensor", args)
        if tensor.device != args.q.device:
            _bad(f"{name} is on {tensor.device} and q on {args.q.device}; move it with {name}.to(q.device)", args)


def _sizes(args: Arguments) -> _Sizes:
    """Sizes, with heads and head dims fixed (a kernel is chosen by them) and B, Sq, Sk possibly hints."""
    seq, head = (1, 2) if args.layout == "bshd" else (2, 1)
    q, k, v = args.q.shape, args.k.shape, args.v.shape
    if not (q[0] == k[0] == v[0]):
        _bad(f"q, k and v must have one batch size, got {q[0]}, {k[0]} and {v[0]}", args)
    if k[seq] != v[seq]:
        _bad(f"k and v must have one sequence length, got {k[seq]} and {v[seq]}", args)
    heads_q, heads_k, heads_v = int(q[head]), int(k[head]), int(v[head])
    if heads_k != heads_v:
        _bad(f"k and v must have one number of heads, got {heads_k} and {heads_v}", args)
    if heads_q < 1 or heads_k < 1:
        _bad(f"q, k and v need at least one head, got Hq={heads_q}, Hkv={heads_k}", args)
    if heads_q % heads_k:
        other = "bhsd" if args.layout == "bshd" else "bshd"
        fits = k[seq] != 0 and q[seq] % k[seq] == 0 and q[seq] < q[head]
        hint = f"; read with layout={other!r} they would fit" if fits else ""
        _bad(f"Hq must be a multiple of Hkv (GQA), got Hq={heads_q}, Hkv={heads_k}{hint}", args)
    head_dim, head_dim_k, head_dim_v = int(q[3]), int(k[3]), int(v[3])
    if head_dim != head_dim_k:
        _bad(f"q and k must have one head dim, got {head_dim} and {head_dim_k}", args)
    if head_dim < 1 or head_dim_v < 1:
        _bad(f"head dims must be at least 1, got D={head_dim}, Dv={head_dim_v}", args)
    return _Sizes(_hint(q[0]), heads_q, heads_k, _hint(q[seq]), _hint(k[seq]), head_dim, head_dim_v)


def _dtype(args: Arguments, cast_to: torch.dtype | None) -> torch.dtype:
    dtypes = [args.q.dtype, args.k.dtype, args.v.dtype]
    for name, dtype in zip(("q", "k", "v"), dtypes, strict=True):
        if dtype not in DTYPE_NAMES:
            _bad_type(f"{name} must be {', '.join(DTYPES)}, got {dtype}", args)
    if cast_to is not None:  # as SDPA does: every floating dtype but float64
        dtypes = [dtype if dtype is torch.float64 else cast_to for dtype in dtypes]
    if len(set(dtypes)) > 1:
        _bad("q, k and v must have one dtype; cast them, or run under torch.autocast", args)
    return dtypes[0]


def _band(args: Arguments, sizes: _Sizes) -> Band:
    aligned = isinstance(args.causal, str) and args.causal in get_args(Align)
    if not isinstance(args.causal, bool) and not aligned:
        _bad(
            "causal must be False, True (bottom-right: the last query sees the last key) or 'top_left' (the first "
            f"query sees the first key, PyTorch's is_causal), got {args.causal!r}",
            args,
        )
    align: Align = "top_left" if args.causal == "top_left" else "bottom_right"
    band = Band.of(causal=args.causal is not False, align=align, window=_window(args))
    no_q_lens = args.kv_lens is not None and args.q_lens is None
    if band.is_causal and align == "bottom_right" and no_q_lens and sizes.seqlen_q > 1:
        _bad(
            "a causal mask with kv_lens and no q_lens: which query is the last one? Padding would shift the diagonal "
            "and silently empty the first rows. Say which is meant:\n"
            "  q_lens=kv_lens: queries are padded like the keys (self-attention)\n"
            f"  q_lens=torch.full_like(kv_lens, {sizes.seqlen_q}): all queries are real, and end where the keys end\n"
            "  (or causal='top_left': query i sees keys 0..i, whatever the lengths)",
            args,
        )
    known = isinstance(args.q.shape[_seq(args)], int) and isinstance(args.k.shape[_seq(args)], int)
    no_lengths = args.q_lens is None and args.kv_lens is None
    if align == "top_left" and no_lengths and known and sizes.seqlen_q == sizes.seqlen_k:
        return Band(band.left, band.right)  # the two alignments are one mask, and more backends know this name
    return band


def _window(args: Arguments) -> tuple[int | None, int | None] | None:
    window: Any = args.window
    if window is None:
        return None
    if isinstance(window, int):
        _bad_type(
            f"window must be a tuple (left, right), got the int {window}. A window of {window} keys that ends at the "
            f"query itself is window=({window - 1}, 0); {window} keys on each side are window=({window}, {window})",
            args,
        )
    if not isinstance(window, tuple | list) or len(window) != 2:
        _bad_type(f"window must be a tuple (left, right) of ints >= 0 or None, got {window!r}", args)
    for limit in window:
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
            _bad_type(f"window's sides must be ints or None (no limit), got {window!r}", args)
        if limit is not None and limit < 0:
            _bad(f"window's sides must be >= 0; no limit is None (flash-attention's -1), got {window!r}", args)
        if limit is not None and limit > 2**31 - 1:
            _bad(f"window's sides must fit 32 bits; no limit is None, got {window!r}", args)
    return (window[0], window[1])


def _attn_mask(
    args: Arguments, sizes: _Sizes, dtype: torch.dtype
) -> tuple[MaskKind | None, tuple[int, int, int, int] | None]:
    mask = args.attn_mask
    if mask is None:
        return None, None
    if mask.dtype is not torch.bool and mask.dtype not in (torch.float32, dtype, args.q.dtype):
        _bad_type(
            f"attn_mask must be bool (True = attend), float32 or q's dtype (added to the scores), got {mask.dtype}; "
            "cast it with attn_mask.float() (not .bool(): an additive mask is 0 where it attends)",
            args,
        )
    full = (args.q.shape[0], sizes.heads_q, args.q.shape[_seq(args)], args.k.shape[_seq(args)])
    if mask.dim() > 4 or any(
        have not in (1, want) for have, want in zip(reversed(mask.shape), reversed(full), strict=False)
    ):
        _bad(f"attn_mask {tuple(mask.shape)} can't be broadcast to (B, Hq, Sq, Sk) = {tuple(full)}", args)
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    shape = tuple(_hint(size) for size in padded)
    return ("bool" if mask.dtype is torch.bool else "float"), cast("tuple[int, int, int, int]", shape)


def _seq(args: Arguments) -> int:
    return 1 if args.layout == "bshd" else 2


def _alibi(args: Arguments, sizes: _Sizes) -> None:
    slopes = args.alibi_slopes
    if slopes is None:
        return
    if slopes.dtype is not torch.float32:
        _bad_type(f"alibi_slopes must be float32, got {slopes.dtype}", args)
    if tuple(slopes.shape) not in ((sizes.heads_q,), (args.q.shape[0], sizes.heads_q)):
        want = f"({sizes.heads_q},) or ({args.q.shape[0]}, {sizes.heads_q})"
        _bad(f"alibi_slopes must have shape (Hq,) or (B, Hq) = {want}, got {tuple(slopes.shape)}", args)
    if slopes.requires_grad and records_gradients():
        _bad("alibi_slopes have no gradient; detach them, or give the bias as a float attn_mask", args)


def _sinks(args: Arguments, sizes: _Sizes) -> None:
    sinks = args.sinks
    if sinks is None:
        return
    if sinks.dtype is not torch.float32:
        _bad_type(f"sinks must be float32, got {sinks.dtype}", args)
    if tuple(sinks.shape) != (sizes.heads_q,):
        _bad(f"sinks must have shape (Hq,) = ({sizes.heads_q},), got {tuple(sinks.shape)}", args)


def _lengths(args: Arguments) -> None:
    for name in ("q_lens", "kv_lens"):
        lengths = getattr(args, name)
        if lengths is None:
            continue
        if lengths.dtype is not torch.int32:
            _bad_type(f"{name} must be int32, got {lengths.dtype}; use {name}.to(torch.int32)", args)
        if tuple(lengths.shape) != (args.q.shape[0],):
            _bad(f"{name} must have shape (B,) = ({args.q.shape[0]},), got {tuple(lengths.shape)}", args)


def _scale(args: Arguments, sizes: _Sizes) -> float:
    if args.scale is None:
        return 1.0 / math.sqrt(sizes.head_dim)
    return _number(args, "scale")


def _softcap(args: Arguments) -> float | None:
    if args.softcap is None:
        return None
    softcap = _number(args, "softcap")
    if softcap <= 0:
        _bad(f"softcap must be > 0, got {softcap:g}; no softcap is None", args)
    return softcap


def _dropout(args: Arguments) -> float:
    dropout_p = _number(args, "dropout_p")
    if not 0 <= dropout_p <= 1:
        _bad(f"dropout_p must be within 0..1, got {dropout_p:g}", args)
    seed = args.dropout_seed
    if isinstance(seed, Tensor):
        if seed.dtype is not torch.int64 or tuple(seed.shape) != (2,) or seed.device != args.q.device:
            _bad(
                f"a dropout_seed tensor holds (seed, offset) as int64 on q's device, shape (2,); got {seed.dtype}, "
                f"shape {tuple(seed.shape)}, {seed.device}",
                args,
            )
    elif seed is not None and (not isinstance(seed, int | torch.SymInt) or isinstance(seed, bool)):
        _bad_type(f"dropout_seed must be an int or an int64 tensor (seed, offset), got {seed!r}", args)
    return dropout_p


def _number(args: Arguments, name: str) -> float:
    value = getattr(args, name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        _bad_type(f"{name} must be a number, got {value!r}", args)
    largest = torch.finfo(torch.float64 if args.q.dtype is torch.float64 else torch.float32).max
    if not abs(value) <= largest:  # also NaN
        _bad(f"{name} must be finite in {'float64' if largest > 1e300 else 'float32'}, got {str(value)[:20]}", args)
    return float(value)


def _flag(args: Arguments, name: str) -> None:
    value = getattr(args, name)
    if not isinstance(value, bool):
        _bad_type(f"{name} must be True or False, got {value!r}", args)


def _needs_grad(args: Arguments) -> tuple[Differentiable, ...]:
    if not records_gradients():
        return ()
    names: tuple[Differentiable, ...] = ("q", "k", "v", "attn_mask", "sinks")
    return tuple(name for name in names if getattr(args, name) is not None and getattr(args, name).requires_grad)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of the autocast region in force; None outside one."""
    if not has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


has_autocast = cache(torch.amp.is_autocast_available)
"""Whether a device type knows autocast at all; a fact of the build, asked on every call."""


def fp32_precision(dtype: torch.dtype, device_type: str) -> Literal["ieee", "tf32"]:
    """What torch's own setting allows matrix products to be; a question for float32 on CUDA alone."""
    if dtype is not torch.float32 or device_type != "cuda":
        return "ieee"
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"


def _adapters(args: Arguments, cast_to: torch.dtype | None) -> tuple[Adapter, ...]:
    found: list[Adapter] = []
    for name in ("q", "k", "v"):
        tensor = getattr(args, name)
        dtype = tensor.dtype if cast_to is None or tensor.dtype is torch.float64 else cast_to
        size = _numel(tensor) * dtype.itemsize
        if dtype is not tensor.dtype:
            found.append(Adapter("cast", name, size, _autocast(tensor.dtype, dtype)))
        if needs_copy(tensor):
            found.append(Adapter("copy", name, size, f"stride {tensor.stride(3)} in the last dim"))
    mask = args.attn_mask
    if mask is not None and cast_to is not None and mask.dtype not in (torch.bool, torch.float32, cast_to):
        found.append(Adapter("cast", "attn_mask", _numel(mask) * cast_to.itemsize, _autocast(mask.dtype, cast_to)))
    return tuple(found)


def _numel(tensor: Tensor) -> int:
    return math.prod(_hint(size) for size in tensor.shape)


def _autocast(have: torch.dtype, want: torch.dtype) -> str:
    return f"autocast: {DTYPE_NAMES[have]} to {DTYPE_NAMES[want]}"


def needs_copy(tensor: Tensor) -> bool:
    """True when the last dim is not contiguous, the only stride the contract asks for."""
    return tensor.stride(-1) != 1 and tensor.shape[-1] != 1
