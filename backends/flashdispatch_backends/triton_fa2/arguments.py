"""What a problem's kernels are launched with: every argument but the addresses, worked out once per kind of call.

Nothing here runs or compiles. Tensors are read for their metadata alone, so meta tensors do, and a machine without a
GPU can describe the launches of any problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashdispatch_backends.triton_fa2 import tiles
from flashdispatch_backends.triton_fa2.compile import ALIGNMENT, KERNELS, MASK_STRIDES, STRIDE_UNIT, Recipe
from flashdispatch_registry import Extras, Gradients, Needs, Problem
from flashdispatch_registry.layout import dense_strides, output_strides
from flashdispatch_registry.tile_table import Shape

LOG2E = math.log2(math.e)
LARGE = 1e38
"""Of float32: times log2(e) it is still finite, and not much more is."""
MASK_PARTS = 64
"""Most pieces in which the gradient of a mask without rows is summed: enough programs, little memory."""
HEADS_AT_ONCE = 16
"""Heads that take turns under a causal mask, at most; in the dK/dV kernel that many key/value heads."""
BYTES_AT_ONCE = 16 << 20
"""Of one head's keys and values, times the heads that take turns, at most: a third of an H200's L2 cache."""
KNOWN_STRIDES = frozenset({"stride_mm", "stride_mn"})
"""Strides of a mask that are compiled in where they are 0 or 1."""
_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip

Tensors = Mapping[str, Tensor | None]
ShapeOf = Callable[[Problem, str], Shape]
"""The tile in force for a problem's kernel."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, but for the addresses."""

    recipe: Recipe
    grid: int
    pointers: tuple[str | None, ...]
    """Names of the arguments that are tensors, in the kernel's order; None for one that it is compiled without."""
    rest: tuple[Any, ...]
    """Every argument after the pointers: numbers, and what is compiled in."""

    def on(self, aligned: bool) -> Launch:
        """The same for tensors that all begin at multiples of 16 bytes, or not."""
        if aligned or not (self.recipe.aligned or self.recipe.aligned_mask):
            return self
        return replace(self, recipe=replace(self.recipe, aligned=False, aligned_mask=False))


def forward_launch(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, shape_of: ShapeOf) -> Launch:
    """The forward kernel's launch. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
    shape = shape_of(problem, "forward")
    out_shape = (*q.shape[:3], problem.head_dim_v)
    out = _meta(out_shape, q.dtype, output_strides(out_shape, q.stride(), problem.layout))
    lse = _row() if problem.return_lse or problem.needs_backward else None
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse} | pointers_of(extras)
    values = _values(problem, q, k, extras, {"q": q, "k": k, "v": v, "o": out})
    return _launch("forward", _blocks(q.shape[1], shape.block_m) * q.shape[2] * q.shape[0], shape, tensors, values)


def backward_launches(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, extras: Extras, with_dlse: bool,
    needs: Needs, shape_of: ShapeOf,
) -> list[Launch]:  # fmt: skip
    """The backward's launches, in their order: dq first, which leaves Delta to the others."""
    gradients = gradients_like(q, k, v, needs)
    strided = {
        "q": q, "k": k, "v": v, "o": out, "do": dout, "dq": gradients.q, "dk": gradients.k, "dv": gradients.v,
    }  # fmt: skip
    values = _values(problem, q, k, extras, strided)
    common = {
        "q": q, "k": k, "v": v, "lse": _row(), "dout": dout, "delta": _row(),
        "total": _row() if values["NATURAL"] else None,
    } | pointers_of(extras)  # fmt: skip
    batch, seqlen_q, heads, _ = q.shape
    launches = []

    def add(kernel: str, blocks: Callable[[Shape], int], tensors: dict[str, Tensor | None], more: Any = None) -> None:
        shape = shape_of(problem, kernel)
        launches.append(_launch(kernel, blocks(shape), shape, common | tensors, values | (more or {})))

    if needs.q or needs.k or needs.sinks or needs.attn_mask or values["NATURAL"]:
        dsinks, dlse = _row() if needs.sinks else None, _row() if with_dlse else None
        add(
            "dq",
            lambda shape: _blocks(seqlen_q, shape.block_m) * heads * batch,
            {"out": out, "dlse": dlse, "dq": gradients.q, "dsinks": dsinks},
        )
    for kernel in tiles.key_passes(problem):
        outputs = {"dk": gradients.k if "dk" in kernel else None, "dv": gradients.v if "dv" in kernel else None}
        if outputs["dk"] is not None or outputs["dv"] is not None:
            add(kernel, lambda shape: _blocks(k.shape[1], shape.block_n) * k.shape[2] * batch, outputs)
    if needs.attn_mask and extras.attn_mask is not None:
        per = [size > 1 for size in extras.attn_mask.shape]
        grid = math.prod(dmask_shape(extras.attn_mask, q, k, shape_of(problem, "dmask"), launched=True))
        flags = dict(zip(("PER_SEQUENCE", "PER_HEAD", "PER_ROW", "PER_KEY"), per, strict=True))
        parts = _parts(extras.attn_mask, q, shape_of(problem, "dmask"))
        add("dmask", lambda _: grid, {"dmask": _row()}, {"parts": parts} | flags)
    return launches


def described(problem: Problem, mask_dtype: torch.dtype, shape_of: ShapeOf) -> list[Launch]:
    """The launches of a problem whose tensors are not there: dense ones are assumed."""
    shape_q = (problem.batch, problem.seqlen_q, problem.heads_q)
    shape_k = (problem.batch, problem.seqlen_k, problem.heads_kv)
    q, k = _meta((*shape_q, problem.head_dim), problem.dtype), _meta((*shape_k, problem.head_dim), problem.dtype)
    v, dout = _meta((*shape_k, problem.head_dim_v), problem.dtype), _meta((*shape_q, problem.head_dim_v), problem.dtype)

    def given(there: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return _meta(shape, dtype) if there else None

    extras = Extras(
        attn_mask=given(problem.attn_mask is not None, problem.attn_mask_shape or (), mask_dtype),
        alibi_slopes=given(problem.alibi, (problem.heads_q,), torch.float32),
        sinks=given(problem.sinks, (problem.heads_q,), torch.float32),
        q_lens=given(problem.q_lens, (problem.batch,), torch.int32),
        kv_lens=given(problem.kv_lens, (problem.batch,), torch.int32),
        dropout_seed=given(problem.dropout_p > 0, (2,), torch.int64),
    )
    launches = [forward_launch(problem, q, k, v, extras, shape_of)]
    if problem.needs_backward:
        needs = Needs(*(name in problem.needs_grad for name in Needs._fields))
        for with_dlse in (False, True) if problem.needs_lse_grad else (False,):
            launches += backward_launches(problem, q, k, v, dout, dout, extras, with_dlse, needs, shape_of)
    return launches


def gradients_like(q: Tensor, k: Tensor, v: Tensor, needs: Needs) -> Gradients:
    """Meta tensors for dq, dk and dv as far as needed: dense, in the stride order of q, k and v."""
    made = (
        _meta(tuple(x.shape), x.dtype, dense_strides(x.shape, x.stride())) if needed else None
        for x, needed in zip((q, k, v), needs[:3], strict=True)
    )
    return Gradients(*made)


def dmask_shape(mask: Tensor, q: Tensor, k: Tensor, shape: Shape, *, launched: bool = False) -> tuple[int, ...]:
    """What `dmask_kernel` fills, (B | 1, Hq | 1, Sq | parts, Sk | key blocks); or its programs along these dims."""
    batch, heads, rows, keys = mask.shape
    parts, key_blocks = _parts(mask, q, shape), _blocks(k.shape[1], shape.block_n)
    if launched:
        return batch, heads, parts, key_blocks
    return batch, heads, rows if rows > 1 else parts, keys if keys > 1 else key_blocks


def _parts(mask: Tensor, q: Tensor, shape: Shape) -> int:
    """Programs along the queries: one a block where the mask has rows, else a few that loop over blocks."""
    blocks = _blocks(q.shape[1], shape.block_m)
    return blocks if mask.shape[2] > 1 else min(blocks, MASK_PARTS)


def pointers_of(extras: Extras) -> dict[str, Tensor | None]:
    """The optional tensors under the kernels' names. Starts are for sequences packed in one tensor: none so far."""
    return {
        "mask": extras.attn_mask, "slopes": extras.alibi_slopes, "sinks": extras.sinks, "q_lens": extras.q_lens,
        "kv_lens": extras.kv_lens, "seed": extras.dropout_seed, "q_starts": None, "k_starts": None,
    }  # fmt: skip


def precision(problem: Problem) -> str:
    """How tl.dot multiplies float32; 16-bit products are exact in any case.

    float32 with IEEE accuracy goes through tensor cores, too: each number is three bfloat16 parts of 8 bits, and the
    six products that reach float32's last bit are added in float32. (What is within 0.4 % of float32's largest number
    is past bfloat16's, and becomes infinite.) On an H200 that is closer to the truth than
    fused multiply-adds, and several times faster (docs/measurements.md).
    """
    if problem.dtype is not torch.float32 or problem.fp32_precision == "tf32":
        return "tf32"
    return "bf16x6" if problem.device_type == "cuda" else "ieee"  # the interpreter multiplies in NumPy


def _values(
    problem: Problem, q: Tensor, k: Tensor, extras: Extras, strided: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """Numbers and constants under the kernels' names, for all kernels; None is what a call does not have."""
    band, mask, slopes, p = problem.band, extras.attn_mask, extras.alibi_slopes, problem.dropout_p
    # Natural where log2(e) times a number of the call could overflow: a mask's, or the call's own.
    natural = problem.attn_mask == "float" or max(abs(problem.scale), problem.softcap or 0.0) > LARGE
    unit = 1.0 if natural else LOG2E  # see scores.py
    scale, softcap = problem.scale * unit, None
    if problem.softcap is not None:
        scale, softcap = problem.scale / problem.softcap, float(problem.softcap * unit)
    block_d, block_dv = tiles.padded_dims(problem)
    beyond = q.shape[1] + k.shape[1]  # no distance is larger, and nothing overflows 32 bits
    values: dict[str, Any] = {
        "stride_slopes": None if slopes is None else slopes.stride(0) if slopes.dim() == 2 else 0,
        "batch": q.shape[0], "heads": q.shape[2], "group": problem.group, "GROUP": problem.group,
        "heads_at_once": _heads_at_once(problem), "seqlen_q": q.shape[1], "seqlen_k": k.shape[1],
        "stride_lb": q.shape[2] * q.shape[1], "stride_lh": q.shape[1],  # of LSE, Delta, dLSE and total
        "left": None if band.left is None else min(band.left, beyond),
        "right": None if band.right is None else min(band.right, beyond),
        "scale": float(scale), "softcap": softcap, "gradient_scale": float(problem.scale),
        "threshold": min(round(p * 2**32), 2**32 - 1) if p else None,
        "kept": None if not p else 1.0 / (1.0 - p) if p < 1.0 else 0.0,
        "D": problem.head_dim, "DV": problem.head_dim_v,
        "BLOCK_D": block_d, "BLOCK_DV": block_dv,
        "TOP_LEFT": band.align == "top_left", "MASK": problem.attn_mask, "NATURAL": natural,
        "PLAIN": not natural and problem.softcap is None and mask is None and slopes is None and problem.scale >= 0,
        "PRECISION": precision(problem),
    }  # fmt: skip
    for letter, tensor in strided.items():
        for dim, stride in zip("bsh", (0, 0, 0) if tensor is None else tensor.stride(), strict=False):
            values[f"stride_{letter}{dim}"] = stride
    for index, dim in enumerate("bhmn"):  # a dim of size 1 is broadcast
        values[f"stride_m{dim}"] = None if mask is None else 0 if mask.shape[index] == 1 else mask.stride(index)
    return values


def _heads_at_once(problem: Problem) -> int | None:
    """How many heads take turns under a causal mask; None where it matters little which blocks are started last.

    One number for all kernels and GPUs, found on an H200 (docs/measurements.md, "The order of blocks").
    """
    if problem.band.right is None or problem.band.left is not None:
        return None
    bytes_of_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    heads = min(HEADS_AT_ONCE, problem.batch * problem.heads_q)
    return max(1, min(heads, BYTES_AT_ONCE // max(1, bytes_of_head)))


def _launch(kernel: str, grid: int, shape: Shape, tensors: Tensors, values: Mapping[str, Any]) -> Launch:
    """Sorts a kernel's arguments into pointers, numbers and constants."""
    values = {**values, "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n}
    types: list[str] = []
    constants: list[tuple[str, Any]] = []
    pointers: list[str | None] = []
    rest: list[Any] = []
    for name in KERNELS[kernel].arg_names:
        if name in tensors:
            tensor = tensors[name]
            pointers.append(None if tensor is None else name)
            types.append("constexpr" if tensor is None else _POINTERS[tensor.dtype])
            if tensor is None:
                constants.append((name, None))
            continue
        value = values[name]
        rest.append(value)
        types.append(_type(name, value))
        if types[-1] == "constexpr":
            constants.append((name, value))
    aligned_mask = tensors["mask"] is not None and all(
        values[name] % ALIGNMENT == 0 or (values[name] == 1 and name in KNOWN_STRIDES) for name in MASK_STRIDES
    )
    recipe = Recipe(kernel, tuple(types), tuple(constants), shape, _aligned(tensors), aligned_mask)
    return Launch(recipe, grid, tuple(pointers), tuple(rest))


def _type(name: str, value: Any) -> str:
    if name.isupper() or value is None:
        return "constexpr"
    if name in KNOWN_STRIDES and value in (0, 1):
        return "constexpr"  # a row of a mask that is one number, or wide loads of one that is contiguous
    if name.startswith("stride_"):
        return "i64"
    if name == "threshold":
        return "u32"
    return "fp32" if isinstance(value, float) else "i32"


def _aligned(tensors: Tensors) -> bool:
    """Whether strides allow wide loads and stores; that of a dim of size 1 is multiplied by 0 and says nothing."""
    return all(
        stride % STRIDE_UNIT == 0 or size <= 1
        for tensor in (tensors.get(name) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
        if tensor is not None
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _meta(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _row() -> Tensor:
    """Stands for a contiguous float32 tensor of the kernel's own, whose strides no argument says."""
    return torch.empty(0, dtype=torch.float32, device="meta")
