"""What a problem's kernels are launched with: every argument but the tensors, worked out once per kind of call.

Nothing here runs or compiles. Tensors are read for their metadata alone, so meta tensors do, and a machine without a
GPU can describe the launches of any problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashdispatch_backends.tilelang_fa2 import tiles
from flashdispatch_backends.tilelang_fa2.recipe import Recipe
from flashdispatch_registry import Extras, Needs, Problem
from flashdispatch_registry.arch import sm_number
from flashdispatch_registry.problem import DTYPE_NAMES
from flashdispatch_registry.tile_table import Shape

LOG2E = math.log2(math.e)
LARGE = 1e38
"""Of float32: times log2(e) it is still finite, and not much more is."""
LARGEST_SOFTCAP = 1e30
"""A larger one caps nothing that float32 scores reach in earnest, and scale / softcap would be flushed to 0."""
HEADS_AT_ONCE = 16
"""Heads that take turns under a causal mask, at most; in the dK/dV kernel that many key/value heads."""
BYTES_AT_ONCE = 16 << 20
"""Of one head's keys and values, times the heads that take turns, at most: a third of an H200's L2 cache."""
TMA_UNIT = 8
"""Elements of 16 bit in the 16 bytes that TMA wants strides to be multiples of."""
DELTA = Shape(16, 16, 4, 1)
"""Of the delta kernel, which has no tile: block_m rows, a warp for each in turn."""

TENSORS: Mapping[str, tuple[str, ...]] = {
    "forward": ("q", "k", "v", "out", "lse", "mask", "q_lens", "kv_lens", "q_starts", "k_starts"),
    "delta": ("out", "dout", "lse", "dlse", "rows", "q_lens", "q_starts"),
    "total": ("q", "k", "rows", "mask", "q_lens", "kv_lens", "q_starts", "k_starts"),
    "dq": ("q", "k", "v", "dout", "rows", "dq", "mask", "q_lens", "kv_lens", "q_starts", "k_starts"),
    "dkdv": ("q", "k", "v", "dout", "rows", "dk", "dv", "mask", "q_lens", "kv_lens", "q_starts", "k_starts"),
}  # fmt: skip
"""The tensors that each kernel takes, in its order; in place of one that a call does not have stands a 0."""
_BAND = ("batch", "seqlen_q", "seqlen_k", "group", "heads_at_once", "left", "right", "top_left", "scale", "softcap")
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "forward": _BAND,
    "delta": ("batch", "seqlen_q"),
    "total": _BAND,
    "dq": (*_BAND, "gradient_scale"),
    "dkdv": (*_BAND, "gradient_scale"),
}
"""The numbers that follow them."""

ShapeOf = Callable[[Problem, str], Shape]
"""The tile in force for a problem's kernel."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, but for the tensors."""

    recipe: Recipe
    tensors: tuple[str | int, ...]
    """Names of the arguments that are tensors, in the kernel's order; 0 for one that the call does not have."""
    numbers: tuple[int | float, ...]
    """Every argument after them."""

    def on(self, aligned: bool) -> Launch:
        """The same for tensors that all begin at multiples of 16 bytes, or not."""
        if aligned or not self.recipe.tma:
            return self
        return replace(self, recipe=replace(self.recipe, tma=False))


def forward_launch(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, shape_of: ShapeOf) -> Launch:
    """The forward kernel's launch. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
    return _launch("forward", problem, (q, k, v), extras, shape_of(problem, "forward"), _numbers(problem, q, k))


def backward_launches(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, extras: Extras, with_dlse: bool, needs: Needs,
    shape_of: ShapeOf,
) -> list[Launch]:  # fmt: skip
    """The backward's launches, in their order: delta first, whose rows the others read."""
    loaded, numbers = (q, k, v, dout), _numbers(problem, q, k)
    launches = [_launch("delta", problem, (), extras, DELTA, numbers, with_dlse=with_dlse)]
    if natural(problem):
        launches.append(_launch("total", problem, (q, k), extras, shape_of(problem, "total"), numbers))
    if needs.q:
        launches.append(_launch("dq", problem, loaded, extras, shape_of(problem, "dq"), numbers))
    for kernel in tiles.key_passes(problem):
        outputs = tuple(x for x, needed in (("dk", needs.k), ("dv", needs.v)) if needed and x in kernel)
        if outputs:
            launches.append(_launch("dkdv", problem, loaded, extras, shape_of(problem, kernel), numbers, outputs))
    return launches


def described(problem: Problem, mask_dtype: torch.dtype, shape_of: ShapeOf) -> list[Launch]:
    """The launches of a problem whose tensors are not there: dense ones are assumed."""
    shape_q = (problem.batch, problem.seqlen_q, problem.heads_q)
    shape_k = (problem.batch, problem.seqlen_k, problem.heads_kv)

    def meta(shape: tuple[int, ...], dtype: torch.dtype = problem.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = meta((*shape_q, problem.head_dim)), meta((*shape_k, problem.head_dim))
    v, dout = meta((*shape_k, problem.head_dim_v)), meta((*shape_q, problem.head_dim_v))
    extras = Extras(
        attn_mask=meta(problem.attn_mask_shape or (), mask_dtype) if problem.attn_mask else None,
        q_lens=meta((problem.batch,), torch.int32) if problem.q_lens else None,
        kv_lens=meta((problem.batch,), torch.int32) if problem.kv_lens else None,
    )
    launches = [forward_launch(problem, q, k, v, extras, shape_of)]
    if problem.needs_backward:
        needs = Needs(*(name in problem.needs_grad for name in Needs._fields))
        for with_dlse in (False, True) if problem.needs_lse_grad else (False,):
            launches += backward_launches(problem, q, k, v, dout, extras, with_dlse, needs, shape_of)
    return list(dict.fromkeys(launches))


def tensors_of(extras: Extras) -> dict[str, Tensor | None]:
    """The optional tensors under the kernels' names. Starts are for sequences packed in one tensor: none so far."""
    return {
        "mask": extras.attn_mask, "q_lens": extras.q_lens, "kv_lens": extras.kv_lens, "q_starts": None,
        "k_starts": None,
    }  # fmt: skip


def rows_shape(problem: Problem, q: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """What rows is made as: (B, Hq, 2 or 3, Sq rounded up), dense float32. See `scores.numbers_of_rows`."""
    batch, seqlen_q, heads, _ = q.shape
    rounded, numbers = -(-seqlen_q // tiles.ROW_BLOCK) * tiles.ROW_BLOCK, 3 if natural(problem) else 2
    strides = (heads * numbers * rounded, numbers * rounded, rounded, 1)
    return (batch, heads, numbers, rounded), strides, torch.float32


def fits_tma(tensor: Tensor) -> bool:
    """Whether strides allow TMA, which wants multiples of 16 bytes, and none of 0; a dim of size 1 says nothing."""
    return all(
        size <= 1 or (stride > 0 and stride % TMA_UNIT == 0)
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )


def as_tma_reads(tensor: Tensor) -> Tensor:
    """A tensor that `fits_tma`: itself, or the same elements where a dim of size 1 has a stride TMA would not take."""
    batch, row, head, _ = tensor.stride()
    if not (batch | row | head) % TMA_UNIT and batch and row and head:
        return tensor
    strides = [
        tensor.shape[-1] if size == 1 else stride
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    return tensor.as_strided(tensor.shape, (*strides, 1))


def _launch(
    kernel: str, problem: Problem, loaded: Sequence[Tensor], extras: Extras, shape: Shape,
    numbers: Mapping[str, int | float], outputs: tuple[str, ...] = (), with_dlse: bool = False,
) -> Launch:  # fmt: skip
    given = tensors_of(extras)
    scored = kernel != "delta"
    mask = extras.attn_mask
    recipe = Recipe(
        kernel=kernel,
        dtype=DTYPE_NAMES[problem.dtype],
        head_dim=problem.head_dim if scored else problem.head_dim_v,
        head_dim_v=problem.head_dim_v,
        shape=shape,
        tma=scored and (sm_number(problem.arch) or 0) >= 90 and all(map(fits_tma, loaded)),
        q_lens=extras.q_lens is not None,
        kv_lens=scored and extras.kv_lens is not None,
        mask=DTYPE_NAMES.get(mask.dtype, "bool") if scored and mask is not None else None,
        softcap=scored and problem.softcap is not None,
        natural=natural(problem),
        plain=not scored or _plain(problem),
        outputs=outputs,
        lse=kernel != "forward" or problem.return_lse or problem.needs_backward,
        dlse=with_dlse,
    )
    absent = {name for name, tensor in given.items() if tensor is None} | ({"dk", "dv"} - set(outputs))
    if not with_dlse:
        absent.add("dlse")
    if not recipe.lse:
        absent.add("lse")
    return Launch(
        recipe,
        tuple(0 if name in absent else name for name in TENSORS[kernel]),
        tuple(numbers[name] for name in NUMBERS[kernel]),
    )


def natural(problem: Problem) -> bool:
    """Whether log2(e) times a float mask's number, or the call's scale, could overflow. See scores.py."""
    return problem.attn_mask == "float" or abs(problem.scale) > LARGE


def _plain(problem: Problem) -> bool:
    """Whether scale * q.k is all, with a scale that float32 has a normal number for: 0 * -inf would be NaN."""
    return not natural(problem) and problem.softcap is None and problem.attn_mask is None and problem.scale > 1 / LARGE


def _numbers(problem: Problem, q: Tensor, k: Tensor) -> dict[str, int | float]:
    """Every number under the kernels' names."""
    band, unit = problem.band, 1.0 if natural(problem) else LOG2E  # see scores.py
    scale, softcap = problem.scale * unit, 0.0
    if problem.softcap is not None:
        cap = min(problem.softcap, LARGEST_SOFTCAP)
        scale, softcap = problem.scale / cap, cap * unit
    beyond = q.shape[1] + k.shape[1]  # no distance is larger, and nothing overflows 32 bits
    return {
        "batch": q.shape[0], "seqlen_q": q.shape[1], "seqlen_k": k.shape[1], "group": problem.group,
        "heads_at_once": _heads_at_once(problem),
        "left": beyond if band.left is None else min(band.left, beyond),
        "right": beyond if band.right is None else min(band.right, beyond),
        "top_left": int(band.align == "top_left"), "scale": float(scale), "softcap": float(softcap),
        "gradient_scale": float(problem.scale),
    }  # fmt: skip


def _heads_at_once(problem: Problem) -> int:
    """How many heads take turns under a causal mask; 1 where it matters little which blocks are started last."""
    if problem.band.right is None or problem.band.left is not None:
        return 1
    bytes_of_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    heads = min(HEADS_AT_ONCE, problem.batch * problem.heads_q)
    return max(1, min(heads, BYTES_AT_ONCE // max(1, bytes_of_head)))
