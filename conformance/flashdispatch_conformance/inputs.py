"""The tensors of a case: values drawn by logical index, laid out as the case says, with poison around them.

Values come from a private CPU generator in float64, in (B, S, H, D) order, and are then rounded to the dtype and copied
into place. So a case has the same numbers on every device, layout and stride form, and never follows the memory order
of some output (pytorch/pytorch#133671: ``empty_like(out).uniform_()`` made two backends see two different dout).

Poison: NaN past q_lens and kv_lens in q, k, v, dout, dlse and float masks; NaN in the dlse of rows that see no key; and
every tensor lies inside a larger storage whose other elements are NaN. (Integer and bool tensors have no NaN: their
guards hold numbers that no tensor has, and True.) The storages are compared bit for bit after the calls.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from flashdispatch_conformance.case import Case, Mask, MaskView, View
from flashdispatch_conformance.oracle import truth
from flashdispatch_registry.backend import Extras
from flashdispatch_registry.masks import Band
from flashdispatch_registry.problem import Problem

GUARD = 256
"""Elements of poison before and after each tensor."""
_INT_POISON = 2**30
WIDTH_BESIDE = 8192
"""Elements of something else beside each token of the view wide_tokens."""
FAR = 2**24
"""Elements from row to row of the mask view far_rows."""

Layout = Literal["bshd", "bhsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The flat memory that a tensor is a view of, guards included, and its bytes as they were."""

    name: str
    flat: Tensor
    before: Tensor

    def changed(self) -> bool:
        """True when any byte is no longer what it was."""
        return not torch.equal(self.flat.view(torch.uint8), self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A case made concrete. q, k, v and dout are in the caller's layout; q, k, v, mask and sinks ask for gradients."""

    case: Case
    problem: Problem
    """What the core should make of the differentiable call; written here independently of the core."""
    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    """In the caller's shape, which may have fewer than four dims."""
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    q_lens: Tensor | None
    kv_lens: Tensor | None
    dropout_seed: int | Tensor | None
    dout: Tensor | None
    dlse: Tensor | None
    """(B, Hq, Sq), float32, or float64 for float64."""
    storages: tuple[Storage, ...]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `flashdispatch.attention` and `explain`, all but return_lse and backend."""
        case = self.case
        return {
            "causal": case.causal,
            "window": case.window,
            "attn_mask": self.attn_mask,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "q_lens": self.q_lens,
            "kv_lens": self.kv_lens,
            "scale": case.scale,
            "softcap": case.softcap,
            "dropout_p": case.dropout_p,
            "dropout_seed": self.dropout_seed,
            "layout": case.layout,
            "deterministic": case.deterministic,
        }

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that want a gradient, by the name of the argument."""
        return {name: getattr(self, name) for name in self.case.needs_grad}

    def canonical(self) -> tuple[Tensor, Tensor, Tensor, Extras, Tensor | None, Tensor | None]:
        """The oracle's arguments: q, k, v in (B, S, H, D), extras as backends get them, dout likewise, dlse.

        All of the first `Case.sequences` sequences alone: the others repeat their values.
        """
        case, count = self.case, self.case.sequences
        seed = self.dropout_seed
        if isinstance(seed, int):
            seed = torch.tensor([seed, 0])
        mask, slopes = self.attn_mask, self.alibi_slopes
        if mask is not None:
            mask = mask.detach().reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))[:count]
        extras = Extras(
            attn_mask=mask,
            alibi_slopes=slopes[:count] if slopes is not None and slopes.dim() == 2 else slopes,
            sinks=None if self.sinks is None else self.sinks.detach(),
            q_lens=None if self.q_lens is None else self.q_lens[:count],
            kv_lens=None if self.kv_lens is None else self.kv_lens[:count],
            dropout_seed=seed,
        )
        q, k, v = (bshd(x.detach()[:count], case.layout) for x in (self.q, self.k, self.v))
        dout = None if self.dout is None else bshd(self.dout[:count], case.layout)
        return q, k, v, extras, dout, None if self.dlse is None else self.dlse[:count]

    def changed(self) -> tuple[str, ...]:
        """Names of the tensors whose storage was written to."""
        return tuple(storage.name for storage in self.storages if storage.changed())


def bshd(tensor: Tensor, layout: Layout) -> Tensor:
    """A (B, S, H, D) view of a tensor in `layout`; its own inverse."""
    return tensor.transpose(1, 2) if layout == "bhsd" else tensor


def as_truth(name: str, tensor: Tensor, layout: Layout) -> Tensor:
    """A result of a call in the order of the truth: out, dq, dk and dv in (B, S, H, D), all others as they are."""
    return bshd(tensor, layout) if name in ("out", "dq", "dk", "dv") else tensor


def fp32_precision(device: torch.device) -> Literal["ieee", "tf32"]:
    """What torch's own setting allows float32 products on `device` to be."""
    if device.type != "cuda":
        return "ieee"
    matmul = torch.backends.cuda.matmul
    setting = getattr(matmul, "fp32_precision", None)
    allowed = setting == "tf32" if setting is not None else matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def problem_of(case: Case, dtype: torch.dtype, arch: str, device: torch.device) -> Problem:
    """The Problem of the case's differentiable call."""
    shape = None if case.mask is None else (1,) * (4 - len(case.mask.shape)) + case.mask.shape
    deterministic = case.deterministic
    return Problem(
        arch=arch,
        dtype=dtype,
        batch=case.batch,
        heads_q=case.heads[0],
        heads_kv=case.heads[1],
        seqlen_q=case.seqlens[0],
        seqlen_k=case.seqlens[1],
        head_dim=case.dims[0],
        head_dim_v=case.dims[1],
        scale=1.0 / math.sqrt(case.dims[0]) if case.scale is None else case.scale,
        band=Band.of(
            causal=case.causal is not False,
            align="top_left" if case.causal == "top_left" else "bottom_right",
            window=case.window,
        ),
        attn_mask=None if case.mask is None else "bool" if case.mask.kind == "bool" else "float",
        attn_mask_shape=cast("tuple[int, int, int, int] | None", shape),
        alibi=case.alibi is not None,
        sinks=case.sinks,
        q_lens=case.q_lens is not None,
        kv_lens=case.kv_lens is not None,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        layout=case.layout,
        needs_grad=cast("Any", case.needs_grad),
        return_lse=case.dlse,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        fp32_precision=fp32_precision(device) if dtype == torch.float32 else "ieee",
    )


def build(
    case: Case,
    dtype: torch.dtype,
    device: str | torch.device,
    arch: str,
    seed: int = 0,
    given: Mapping[str, Tensor] | None = None,
) -> Inputs:
    """Makes the tensors of `case`. The same (case, dtype, seed) gives the same numbers everywhere.

    `given` are float64 values that replace those drawn for q, k, v or dout, by name, in (B, S, H, D), or for the
    attn_mask, in the case's own shape (bool, or float64).
    """
    device = torch.device(device)
    problem = problem_of(case, dtype, arch, device)
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()) ^ seed)
    given = {} if given is None else given
    values = _draw(case, problem.scale, generator) | {name: given[name].clone() for name in given}
    for name, lens in (("q", case.q_lens), ("k", case.kv_lens), ("v", case.kv_lens), ("dout", case.q_lens)):
        for b, length in enumerate((lens or ())[: case.sequences]):
            values[name][b, length:] = torch.nan

    storages: list[Storage] = []

    copies = 1 if case.distinct is None else case.batch // case.distinct

    def place(
        name: str, logical: Tensor, to: torch.dtype, view: View | MaskView = "contiguous", copies: int = 1
    ) -> Tensor:
        heads_dim = 2 if case.layout == "bshd" else 1
        tensor, flat = lay_out(logical, to, device, view, heads_dim, copies)
        storages.append(Storage(name=name, flat=flat, before=flat.view(torch.uint8).clone()))
        return tensor

    def place_rows(name: str, view: View) -> Tensor:
        return place(name, bshd(values[name], case.layout), dtype, view, copies)

    q, k, v = place_rows("q", case.q_view), place_rows("k", case.k_view), place_rows("v", case.v_view)
    dout = place_rows("dout", case.dout_view) if case.dout and case.needs_grad else None
    mask = None
    if case.mask is not None:
        mask = _place_mask(case, case.mask, dtype, generator, place, given.get("attn_mask"))
    slopes = sinks = q_lens = kv_lens = None
    if case.alibi is not None:
        per_head = torch.tensor([2.0 ** (-8.0 * (h + 1) / case.heads[0]) for h in range(case.heads[0])])
        per_batch = torch.stack([per_head * (1 + b % case.sequences / 2) for b in range(case.batch)])
        slopes = place("alibi_slopes", per_head if case.alibi == "heads" else per_batch, torch.float32)
    if case.sinks:
        sinks = place("sinks", torch.randn(case.heads[0], generator=generator, dtype=torch.float64), torch.float32)
    if case.q_lens is not None:
        q_lens = place("q_lens", torch.tensor(case.q_lens), torch.int32)
    if case.kv_lens is not None:
        kv_lens = place("kv_lens", torch.tensor(case.kv_lens), torch.int32)
    dropout_seed: int | Tensor | None = None
    if case.dropout_p:
        chosen = case.dropout_seed
        dropout_seed = chosen if isinstance(chosen, int) else place("dropout_seed", torch.tensor(chosen), torch.int64)

    inputs = Inputs(
        case=case,
        problem=problem,
        q=q,
        k=k,
        v=v,
        attn_mask=mask,
        alibi_slopes=slopes,
        sinks=sinks,
        q_lens=q_lens,
        kv_lens=kv_lens,
        dropout_seed=dropout_seed,
        dout=dout,
        dlse=None,
        storages=(),
    )
    dlse = None
    if case.dlse:
        lse = truth(problem, *inputs.canonical()[:4]).lse
        gradient = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
        gradient[lse == -torch.inf] = torch.nan  # it must be ignored where a row sees nothing or is padding
        dlse = place("dlse", gradient, torch.float64 if dtype == torch.float64 else torch.float32, copies=copies)
    for leaf in inputs.leaves().values():
        leaf.requires_grad_()
    return replace(inputs, dlse=dlse, storages=tuple(storages))


def _draw(case: Case, scale: float, generator: torch.Generator) -> dict[str, Tensor]:
    """float64 q, k, v and dout in (B, S, H, D), of the sequences that have values of their own."""
    (heads_q, heads_kv), (seqlen_q, seqlen_k), (head_dim, head_dim_v) = case.heads, case.seqlens, case.dims
    batch = case.sequences

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(batch, seqlen_q, heads_q, head_dim), normal(batch, seqlen_k, heads_kv, head_dim)
    v, dout = normal(batch, seqlen_k, heads_kv, head_dim_v), normal(batch, seqlen_q, heads_q, head_dim_v)
    match case.values:
        case "normal":
            pass
        case "shifted_v":
            v += 1.0
        case "peaked":
            q, k = 4.0 * q, 2.0 * k
        case "logits_minus_120":
            q, k = 0.1 * q, 0.1 * k
            q[..., 0], k[..., 0] = 1.0, -120.0 / scale
        case "all_equal":
            spread, power = 1.0 + 0.1 * q[..., 0], 2.0 ** round(math.log2(1000.0 / abs(scale)) / 2)
            q, k = torch.zeros_like(q), torch.zeros_like(k)
            q[..., 0], k[..., 0] = power * spread, power
        case "zeros":
            q, k, v = (torch.zeros_like(x) for x in (q, k, v))
        case "outliers":
            for x in (q, k, v):
                x += 0.5
                x[..., ::16] *= 8.0
        case "needle":
            q, k = 0.1 * q, 0.1 * k
            q[..., 0], k[..., 0] = 1.0, 0.0
            if seqlen_k:
                needles = torch.randint(seqlen_k, (batch, 1, heads_kv), generator=generator)
                k[..., 0].scatter_(1, needles, 30.0 / scale)
        case "subnormal":
            q, k, v = 2.0**-16 * q, 2.0**12 * k, 2.0**-18 * v
            v[..., 1::2] *= 2.0**-110
        case "huge":
            q, k = (math.sqrt(1e5 / (abs(scale) * math.sqrt(head_dim))) * x for x in (q, k))
        case "ones":
            q, k, v = (torch.ones_like(x) for x in (q, k, v))
        case "v_ones":
            q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.ones_like(v)
        case "uniform":
            q, k, v = (torch.rand(x.shape, generator=generator, dtype=torch.float64) for x in (q, k, v))
    return {"q": q, "k": k, "v": v, "dout": dout}


def lay_out(
    logical: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    view: View | MaskView,
    heads_dim: int = 2,
    copies: int = 1,
) -> tuple[Tensor, Tensor]:
    """Copies `logical` into poisoned memory laid out as `view` says. Returns the tensor and its flat storage.

    With `copies` the first dim is that many times as long, and its values repeat. An expanded view has the values of
    index 0 along the dims it is expanded over.
    """
    shape = [copies * logical.shape[0], *logical.shape[1:]]
    held = list(shape)  # the shape of the dense tensor that the view is cut from
    sequence_dim = 3 - heads_dim
    match view:
        case "transposed":
            held[1], held[2] = held[2], held[1]
        case "sliced":
            held[heads_dim] *= 3
        case "padded_rows":
            held[-1] += 8
        case "every_other":
            held[0] *= 2
        case "last_dim_strided":
            held[-1] *= 2
        case "expanded_batch":
            held[0] = 1
        case "expanded_heads":
            held[heads_dim] = 1
        case "expanded_all":
            held = [1] * len(held)
        case "sequence_first":
            held[0], held[sequence_dim] = held[sequence_dim], held[0]
        case "wide_tokens":
            held = [shape[0], shape[sequence_dim], shape[heads_dim] * shape[3] + WIDTH_BESIDE]
        case "far_rows":
            held[-1] = FAR
        case "contiguous" | "unaligned" | "expanded":
            pass
    if dtype.is_floating_point:
        poison: float | int | bool = math.nan
    else:
        poison = True if dtype == torch.bool else _INT_POISON
    start = GUARD + (1 if view == "unaligned" else 0)
    count = math.prod(held)
    flat = torch.full((start + count + GUARD,), poison, dtype=dtype, device=device)
    dense = flat[start : start + count].view(held)
    match view:
        case "transposed":
            tensor = dense.transpose(1, 2)
        case "sliced":
            tensor = dense.narrow(heads_dim, shape[heads_dim], shape[heads_dim])
        case "padded_rows" | "far_rows":
            tensor = dense[..., : shape[-1]]
        case "sequence_first":
            tensor = dense.transpose(0, sequence_dim)
        case "wide_tokens":
            heads = dense[..., :-WIDTH_BESIDE].view(shape[0], shape[sequence_dim], shape[heads_dim], shape[3])
            tensor = heads.transpose(1, 2) if heads_dim == 1 else heads
        case "every_other":
            tensor = dense[::2]
        case "last_dim_strided":
            tensor = dense[..., ::2]
        case _:
            tensor = dense
    for dim, size in enumerate(tensor.shape):
        if size != shape[dim]:  # expanded over this dim
            logical = logical.narrow(dim, 0, 1)
    logical = logical.to(dtype).to(device)
    for b in range(len(logical)) if copies > 1 else ():
        tensor[b :: len(logical)] = logical[b]
    if copies == 1:
        tensor.copy_(logical)
    return tensor.expand(shape), flat


def _place_mask(
    case: Case,
    mask: Mask,
    dtype: torch.dtype,
    generator: torch.Generator,
    place: Callable[..., Tensor],
    given: Tensor | None = None,
) -> Tensor:
    """Draws and places a mask; past the lengths, where it has a place for each sequence, it is poison."""
    to = {"bool": torch.bool, "float": dtype, "float32": torch.float32}[mask.kind]
    per_sequence = len(mask.shape) == 4 and mask.shape[0] == case.batch
    shape = (case.sequences, *mask.shape[1:]) if per_sequence else mask.shape
    copies = mask.shape[0] // shape[0] if shape[0] else 1
    logical = _draw_mask(case, mask, shape, to, generator) if given is None else given.clone()
    if per_sequence:
        poison = True if mask.kind == "bool" else math.nan
        for b in range(case.sequences):
            if case.q_lens is not None and mask.shape[2] > 1:
                logical[b, :, case.q_lens[b] :] = poison
            if case.kv_lens is not None and mask.shape[3] > 1:
                logical[b, :, :, case.kv_lens[b] :] = poison
    if mask.view == "expanded":
        return place("attn_mask", logical[..., :1], to, copies=copies).expand(mask.shape)
    if mask.view == "expanded_heads":
        return place("attn_mask", logical[:, :1], to, copies=copies).expand(mask.shape)
    if mask.view == "heads_last":
        return place("attn_mask", logical.permute(0, 2, 3, 1), to, copies=copies).permute(0, 3, 1, 2)
    return place("attn_mask", logical, to, mask.view, copies)


def _draw_mask(case: Case, mask: Mask, shape: tuple[int, ...], to: torch.dtype, generator: torch.Generator) -> Tensor:
    """Bool or float64, in `shape`: the mask's own, or that of the sequences that have values of their own."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    rows = torch.arange(shape[-2])[:, None].expand(shape)
    keys = torch.arange(shape[-1])[None, :].expand(shape)
    match mask.pattern:
        case "random":
            visible = uniform < (0.7 if mask.kind == "bool" else 0.9)
        case "all_true" | "finfo_min" | "finfo_min_row":
            visible = torch.ones(shape, dtype=torch.bool)
        case "all_false":
            visible = torch.zeros(shape, dtype=torch.bool)
        case "first_half":
            visible = keys < round(0.58 * case.seqlens[1])
        case "empty_rows":
            visible = (uniform < 0.7) & (rows % 4 != 1)
        case "band":
            visible = (keys <= rows) & (keys >= rows - 9)
        case "corner":
            visible = (rows < shape[-2] // 2) & (keys < shape[-1] // 2)
        case "last_row_empty":
            visible = (keys <= rows) & (rows < shape[-2] - 1)
        case "segments":
            segment = max(-(-shape[-1] // 3), 1)
            visible = (keys // segment == rows // segment) & (keys <= rows) & (keys >= rows - 4)
        case "blocks":
            visible = keys // 64 == rows // 64
    if mask.kind == "bool":
        return visible
    added = torch.zeros(shape, dtype=torch.float64)
    if mask.pattern == "random":
        added = torch.randn(shape, generator=generator, dtype=torch.float64)
    elif mask.pattern in ("finfo_min", "finfo_min_row"):
        lowest = (uniform < 1 / 3) | ((rows == 1) & (mask.pattern == "finfo_min_row"))
        added = torch.where(lowest, torch.finfo(to).min, added)
    return torch.where(visible, added, -torch.inf)
