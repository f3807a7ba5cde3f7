"""What is asked of a backend, as one frozen value: everything a choice or a kernel may depend on, and no tensors.

Letters, here and everywhere: B batch, Hq/Hkv query and key/value heads, Sq/Sk lengths, D head dim of q and k, Dv of v.
A Problem is built from a call by `flashdispatch`; backends, selection and the conformance suite only read it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch

from flashdispatch_registry.arch import device_type_of
from flashdispatch_registry.masks import FULL, Band

Layout = Literal["bshd", "bhsd"]
MaskKind = Literal["bool", "float"]
Differentiable = Literal["q", "k", "v", "attn_mask", "sinks"]

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention problem: shapes, dtypes, masks and what must come out. Hashable, comparable, JSON both ways."""

    arch: str
    """Architecture of q's device: ``"sm_90"``, ``"cpu"``."""
    dtype: torch.dtype
    """Dtype of q, k and v, after autocast."""
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    """Sq, the padded length when q_lens is given. A hint only while tracing with dynamic shapes."""
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    """Softmax scale, already resolved: 1/sqrt(D) when the caller gave None."""
    band: Band = FULL
    """causal and window."""
    attn_mask: MaskKind | None = None
    attn_mask_shape: tuple[int, int, int, int] | None = None
    """Four dims, each 1 (broadcast) or full: (B, Hq, Sq, Sk)."""
    alibi: bool = False
    sinks: bool = False
    q_lens: bool = False
    kv_lens: bool = False
    softcap: float | None = None
    dropout_p: float = 0.0
    layout: Layout = "bshd"
    """How the caller's tensors are ordered. Backends always get (B, S, H, D) views."""
    needs_grad: tuple[Differentiable, ...] = ()
    """The inputs that want a gradient; empty for a forward-only call."""
    return_lse: bool = False
    deterministic: bool = False
    """The backward must be bitwise repeatable. The forward always is."""
    fp32_precision: Literal["ieee", "tf32"] = "ieee"
    """"tf32" only when torch's own setting allows it; a backend may always be more accurate."""

    @property
    def device_type(self) -> str:
        """``"cuda"`` or ``"cpu"``, from the architecture."""
        return device_type_of(self.arch)

    @property
    def needs_backward(self) -> bool:
        """True when the plan must cover a backward pass."""
        return bool(self.needs_grad)

    @property
    def needs_lse_grad(self) -> bool:
        """True when the LSE is an output of a differentiable call, so a gradient may arrive for it."""
        return self.return_lse and self.needs_backward

    @property
    def group(self) -> int:
        """Query heads per key/value head (GQA); 1 is multi-head attention."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    def describe(self) -> str:
        """The request in one line, as error messages show it."""
        parts = [
            f"{self.arch} {DTYPE_NAMES.get(self.dtype, self.dtype)}",
            f"B{self.batch} Hq{self.heads_q} Hkv{self.heads_kv} Sq{self.seqlen_q} Sk{self.seqlen_k} D{self.head_dim}"
            + (f" Dv{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""),
            str(self.band),
        ]
        if self.attn_mask:
            parts.append(f"{self.attn_mask} attn_mask {self.attn_mask_shape}")
        parts += [name for name in ("alibi", "sinks", "q_lens", "kv_lens") if getattr(self, name)]
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        if self.dropout_p:
            parts.append(f"dropout {self.dropout_p:g}")
        if not math.isclose(self.scale, self.head_dim**-0.5 if self.head_dim else 1.0):
            parts.append(f"scale {self.scale:g}")
        parts.append("gradients of " + ", ".join(self.needs_grad) if self.needs_grad else "forward only")
        if self.fp32_precision != "ieee":
            parts.append(f"{self.fp32_precision} allowed")
        if self.return_lse:
            parts.append("with LSE")
        if self.deterministic:
            parts.append("deterministic")
        parts.append(f"layout {self.layout}")
        return ", ".join(parts)

    def with_arch(self, arch: str) -> Problem:
        """The same problem on another architecture."""
        return replace(self, arch=arch)

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back to an equal Problem."""
        data = asdict(self)
        data["dtype"] = DTYPE_NAMES[self.dtype]
        data["attn_mask_shape"] = list(self.attn_mask_shape) if self.attn_mask_shape else None
        data["needs_grad"] = list(self.needs_grad)
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """Reads what `to_json` wrote. Unknown keys raise ValueError: what is not understood is never dropped."""
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown Problem fields: {', '.join(sorted(unknown))}")
        values = dict(data)
        values["dtype"] = DTYPES[values["dtype"]]
        if "band" in values:
            values["band"] = Band(**values["band"])
        if values.get("attn_mask_shape") is not None:
            values["attn_mask_shape"] = tuple(values["attn_mask_shape"])
        if "needs_grad" in values:
            values["needs_grad"] = tuple(values["needs_grad"])
        return cls(**values)
