"""What a backend declares it can do, and the reasons the core derives from it. Default: closed.

A feature that a backend does not declare is never given to it, and a feature that a later version of the contract adds
is off for every backend that was written before. `CHECKS` maps each `Problem` field to the rule that reads it; a test
holds that no field is missing, so that no argument of a call can be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import get_args

import torch

from flashdispatch_registry.arch import sm_number
from flashdispatch_registry.masks import Align
from flashdispatch_registry.problem import DTYPE_NAMES, MaskKind, Problem
from flashdispatch_registry.reasons import Code, Reason


@dataclass(frozen=True, slots=True)
class HeadDims:
    """The head dims a kernel takes: ``minimum <= D <= maximum`` and D a multiple of `multiple`. None is no limit."""

    minimum: int = 1
    maximum: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        sizes = (self.minimum, self.multiple, self.minimum if self.maximum is None else self.maximum)
        if not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ValueError(f"HeadDims takes positive ints, got {self}")
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"HeadDims.maximum {self.maximum} is below its minimum {self.minimum}")

    def __contains__(self, head_dim: int) -> bool:
        above = self.maximum is not None and head_dim > self.maximum
        return head_dim >= self.minimum and not above and head_dim % self.multiple == 0

    def __str__(self) -> str:
        span = f"{self.minimum} or more" if self.maximum is None else f"{self.minimum}..{self.maximum}"
        return span if self.multiple == 1 else f"{span} in steps of {self.multiple}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Declared support, as data. Everything not named here is off.

    Raises ValueError or TypeError when the declaration contradicts itself (for example a mask gradient without a
    backward) or has a word that means nothing.
    """

    dtypes: frozenset[torch.dtype]
    head_dims: HeadDims
    devices: frozenset[str] = frozenset({"cuda"})
    """Torch device types."""
    min_arch: str | None = None
    """The oldest NVIDIA architecture whose instructions the kernels use, e.g. ``"sm_80"``. There is no upper bound."""
    impossible: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Architectures where it cannot work, with the technical reason (bytes of shared memory, a missing instruction)."""
    head_dims_v: HeadDims | None = None
    """Dv where it may differ from D; None: Dv must equal D."""
    backward_head_dims: HeadDims | None = None
    """D and Dv the backward takes, when that is less than the forward's; None: the same."""
    causal: frozenset[Align] = frozenset()
    window: bool = False
    attn_mask: frozenset[MaskKind] = frozenset()
    attn_mask_grad: bool = False
    alibi: bool = False
    sinks: bool = False
    sinks_grad: bool = False
    lengths: bool = False
    """q_lens and kv_lens."""
    softcap: bool = False
    dropout: bool = False
    """The Philox contract, bit for bit. An adapter around a kernel with its own random numbers declares False."""
    gqa: bool = False
    backward: bool = False
    lse: bool = False
    lse_grad: bool = False
    """Takes a gradient for the LSE (Delta - dLSE in place of Delta)."""
    deterministic: bool = False
    """The backward is bitwise repeatable when asked. (The forward must always be.)"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "impossible", dict(self.impossible))  # a copy: nobody else can change it
        self._check_words()
        for name in ("attn_mask_grad", "sinks_grad", "lse_grad", "deterministic"):
            if getattr(self, name) and not self.backward:
                raise ValueError(f"Support.{name} needs backward=True")
        if self.lse_grad and not self.lse:
            raise ValueError("Support.lse_grad needs lse=True")
        if self.attn_mask_grad and "float" not in self.attn_mask:
            raise ValueError('Support.attn_mask_grad needs "float" in attn_mask')
        if self.sinks_grad and not self.sinks:
            raise ValueError("Support.sinks_grad needs sinks=True")

    def _check_words(self) -> None:
        """A misspelt declaration must fail here, where its author sees it, and not in a user's call."""
        vocabulary: dict[str, tuple[object, ...]] = {
            "dtypes": tuple(DTYPE_NAMES),
            "causal": get_args(Align),
            "attn_mask": get_args(MaskKind),
        }
        for name, allowed in vocabulary.items():
            value = getattr(self, name)
            if not isinstance(value, frozenset) or not value.issubset(allowed):
                words = ", ".join(map(str, allowed))
                raise ValueError(f"Support.{name} must be a frozenset of {words}, got {value!r}")
        for name in ("dtypes", "devices"):
            if not getattr(self, name):
                raise ValueError(f"Support.{name} is empty: the backend could never run")
        if not isinstance(self.devices, frozenset):
            raise TypeError(f"Support.devices must be a frozenset of torch device types, got {self.devices!r}")
        for device in self.devices:
            torch.device(device)  # raises RuntimeError for what is no device type
        for name in ("head_dims", "head_dims_v", "backward_head_dims"):
            value = getattr(self, name)
            if not isinstance(value, HeadDims) and (value is not None or name == "head_dims"):
                raise TypeError(f"Support.{name} must be HeadDims, got {value!r}")
        if self.min_arch is not None and (not isinstance(self.min_arch, str) or sm_number(self.min_arch) is None):
            raise ValueError(f"Support.min_arch must look like 'sm_80', got {self.min_arch!r}")
        for declared in fields(self):
            if declared.type == "bool" and not isinstance(getattr(self, declared.name), bool):
                raise TypeError(f"Support.{declared.name} must be True or False, got {getattr(self, declared.name)!r}")

    def impossible_on(self, arch: str) -> str | None:
        """The technical reason why `arch` can never run this, or None."""
        if arch in self.impossible:
            return self.impossible[arch]
        number, oldest = sm_number(arch), sm_number(self.min_arch) if self.min_arch else None
        if number is not None and oldest is not None and number < oldest:
            return f"the kernels use instructions of {self.min_arch} and newer"
        return None


Check = Callable[[Support, Problem], Iterator[Reason]]


def _arch(s: Support, p: Problem) -> Iterator[Reason]:
    if p.device_type not in s.devices:
        yield Reason(Code.DEVICE, "device", p.device_type, " or ".join(sorted(s.devices)), _move_to(s))
        return
    why = s.impossible_on(p.arch)
    if why is not None:
        yield Reason(Code.ARCH_IMPOSSIBLE, "arch", p.arch, f"other architectures: {why}")


def _move_to(s: Support) -> str:
    return f"move the tensors to a {min(s.devices)} device"


def _dtype(s: Support, p: Problem) -> Iterator[Reason]:
    if p.dtype not in s.dtypes:
        names = sorted(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in s.dtypes)
        yield Reason(Code.DTYPE, "dtype", DTYPE_NAMES[p.dtype], ", ".join(names), f"cast q, k and v to {names[0]}")


def _head_dim(s: Support, p: Problem) -> Iterator[Reason]:
    if p.head_dim not in s.head_dims:
        yield Reason(Code.HEAD_DIM, "head_dim", str(p.head_dim), str(s.head_dims))


def _head_dim_v(s: Support, p: Problem) -> Iterator[Reason]:
    if p.head_dim_v == p.head_dim:
        return
    if s.head_dims_v is None:
        yield Reason(Code.HEAD_DIM_V, "head_dim_v", str(p.head_dim_v), f"Dv equal to D ({p.head_dim})")
    elif p.head_dim_v not in s.head_dims_v:
        yield Reason(Code.HEAD_DIM_V, "head_dim_v", str(p.head_dim_v), str(s.head_dims_v))


def _gqa(s: Support, p: Problem) -> Iterator[Reason]:
    if p.heads_q != p.heads_kv and not s.gqa:
        fix = "expand k and v with repeat_interleave over the head dim"
        yield Reason(Code.GQA, "heads", f"Hq {p.heads_q}, Hkv {p.heads_kv}", "Hq equal to Hkv", fix)


def _band(s: Support, p: Problem) -> Iterator[Reason]:
    if p.band.is_full:
        return
    if p.band.has_window and not s.window:
        yield Reason(Code.WINDOW, "window", str(p.band), "no window")
    if p.band.align not in s.causal and (p.band.is_causal or p.band.align != "bottom_right"):
        allowed = " or ".join(sorted(s.causal)) or "no causal mask"
        fix = "with Sq == Sk both alignments are the same mask" if s.causal and p.seqlen_q == p.seqlen_k else ""
        yield Reason(Code.CAUSAL, "causal", p.band.align, allowed, fix)


def _attn_mask(s: Support, p: Problem) -> Iterator[Reason]:
    if p.attn_mask is not None and p.attn_mask not in s.attn_mask:
        allowed = " or ".join(sorted(s.attn_mask)) or "no attn_mask"
        fix = "causal=, window= and kv_lens= cover most masks without a tensor"
        yield Reason(Code.ATTN_MASK, "attn_mask", p.attn_mask, allowed, fix)


def _alibi(s: Support, p: Problem) -> Iterator[Reason]:
    if p.alibi and not s.alibi:
        yield Reason(Code.ALIBI, "alibi_slopes", "given", "None")


def _sinks(s: Support, p: Problem) -> Iterator[Reason]:
    if p.sinks and not s.sinks:
        yield Reason(Code.SINKS, "sinks", "given", "None")


def _lengths(s: Support, p: Problem) -> Iterator[Reason]:
    given = [name for name in ("q_lens", "kv_lens") if getattr(p, name)]
    if given and not s.lengths:
        yield Reason(Code.LENGTHS, " and ".join(given), "given", "None")


def _softcap(s: Support, p: Problem) -> Iterator[Reason]:
    if p.softcap is not None and not s.softcap:
        yield Reason(Code.SOFTCAP, "softcap", f"{p.softcap:g}", "None")


def _dropout(s: Support, p: Problem) -> Iterator[Reason]:
    if p.dropout_p and not s.dropout:
        yield Reason(Code.DROPOUT, "dropout_p", f"{p.dropout_p:g}", "0.0")


def _lse(s: Support, p: Problem) -> Iterator[Reason]:
    if p.return_lse and not s.lse:
        yield Reason(Code.LSE, "return_lse", "True", "False")
    elif p.needs_lse_grad and not s.lse_grad:
        fix = "detach q, k and v, or call without return_lse"
        yield Reason(Code.LSE_GRAD, "return_lse", "True with gradients", "LSE without gradients", fix)


def _grads(s: Support, p: Problem) -> Iterator[Reason]:
    if not p.needs_backward:
        return
    if not s.backward:
        yield Reason(
            Code.BACKWARD, "needs_grad", ", ".join(p.needs_grad), "forward only", "call it under torch.no_grad()"
        )
        return
    if "attn_mask" in p.needs_grad and not s.attn_mask_grad:
        yield Reason(Code.ATTN_MASK_GRAD, "attn_mask", "requires grad", "a mask without gradient", "detach the mask")
    if "sinks" in p.needs_grad and not s.sinks_grad:
        yield Reason(Code.SINKS_GRAD, "sinks", "requires grad", "sinks without gradient", "detach the sinks")
    if s.backward_head_dims is not None:
        sizes = {"head_dim": p.head_dim, "head_dim_v": p.head_dim_v}
        if p.head_dim == p.head_dim_v:
            del sizes["head_dim_v"]
        for name, size in sizes.items():
            if size not in s.backward_head_dims:
                yield Reason(Code.HEAD_DIM_BACKWARD, name, str(size), f"{s.backward_head_dims} with gradients")


def _deterministic(s: Support, p: Problem) -> Iterator[Reason]:
    if p.deterministic and p.needs_backward and not s.deterministic:
        fix = "deterministic=False, or torch.use_deterministic_algorithms(False)"
        yield Reason(Code.DETERMINISM, "deterministic", "True", "False", fix)


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "arch": _arch,
        "dtype": _dtype,
        "head_dim": _head_dim,
        "head_dim_v": _head_dim_v,
        "heads_q": _gqa,
        "band": _band,
        "attn_mask": _attn_mask,
        "alibi": _alibi,
        "sinks": _sinks,
        "q_lens": _lengths,
        "softcap": _softcap,
        "dropout_p": _dropout,
        "return_lse": _lse,
        "needs_grad": _grads,
        "deterministic": _deterministic,
    }
)
"""Problem field -> the rule that reads it."""

COVERED = frozenset({"heads_kv", "kv_lens"})
"""Fields read by the rule of a neighbour: heads_kv with heads_q, kv_lens with q_lens."""

NEUTRAL = frozenset({"batch", "seqlen_q", "seqlen_k", "scale", "attn_mask_shape", "layout", "fp32_precision"})
"""Fields whose every value every backend must take: any size, any finite scale, any broadcast mask, either layout; and
a permission (TF32) that a backend is free not to use. A size limit of a kernel belongs in its `why_not`."""


def declared_reasons(support: Support, problem: Problem) -> tuple[Reason, ...]:
    """Every reason, not just the first, why `support` does not cover `problem`; empty when it does."""
    return tuple(reason for check in CHECKS.values() for reason in check(support, problem))


def beyond_32_bits(problem: Problem) -> Iterator[Reason]:
    """Sizes beyond kernels with 32-bit positions and a program for each block of rows, for a backend's `why_not`."""
    positions = problem.seqlen_q + problem.seqlen_k
    if positions >= 2**30:
        yield Reason(Code.BACKEND_LIMIT, "seqlen", f"Sq + Sk = {positions}", "less than 2**30: positions are 32 bit")
    blocks = problem.batch * problem.heads_q * -(-max(problem.seqlen_q, problem.seqlen_k) // 16)
    if blocks >= 2**31:
        yield Reason(
            Code.BACKEND_LIMIT, "batch", f"{blocks} blocks of 16 rows", "less than 2**31, a launch's largest grid",
            "split the batch",
        )  # fmt: skip
