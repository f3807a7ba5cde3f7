"""What a problem's kernels are launched with: every argument but the addresses, worked out once per kind of call.

Nothing here runs or compiles. Tensors are read for their metadata alone, so meta tensors do, and a machine without a
GPU can describe the launches of any problem.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashdispatch_backends.cuda_fa2 import tiles
from flashdispatch_backends.cuda_fa2.recipe import Recipe
from flashdispatch_registry import Extras, Needs, Problem
from flashdispatch_registry.layout import dense_strides, output_strides
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
ALIGNMENT = 16
"""Bytes that cp.async copies at once."""

ADDRESSES = (
    "q", "k", "v", "out", "lse", "mask", "q_lens", "kv_lens", "q_starts", "k_starts", "dout", "dlse", "rows", "dq",
    "dk", "dv",
)  # fmt: skip
"""The tensors that a launch passes, in the order of arguments.cuh; 0 stands for one that it does without."""
STRIDED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
"""Those whose strides follow."""
ADDRESSES_FORMAT = struct.Struct(f"<{len(ADDRESSES)}Q")
NUMBERS_FORMAT = struct.Struct(f"<{3 * len(STRIDED) + 7}q10i3f4x")
"""Strides and counts of rows and mask, whole numbers, fractions."""

Tensors = Mapping[str, Tensor | None]
ShapeOf = Callable[[Problem, str], Shape]
"""The tile in force for a problem's kernel."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, but for the addresses."""

    recipe: Recipe
    grid: int
    tensors: frozenset[str]
    """Those of `ADDRESSES` that it passes."""
    numbers: bytes
    """Every argument after the addresses."""

    def on(self, aligned: bool) -> Launch:
        """The same for tensors that all begin at multiples of 16 bytes, or not."""
        if aligned or not (self.recipe.aligned or self.recipe.paired_mask):
            return self
        return replace(self, recipe=replace(self.recipe, aligned=False, paired_mask=False))


def forward_launch(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, shape_of: ShapeOf) -> Launch:
    """The forward kernel's launch. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
    out_shape = (*q.shape[:3], problem.head_dim_v)
    out = _meta(out_shape, q.dtype, output_strides(out_shape, q.stride(), problem.layout))
    lse = _rows() if problem.return_lse or problem.needs_backward else None
    tensors = tensors_of(extras) | {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    return _launch("forward", problem, q, k, tensors, shape_of)


def backward_launches(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, extras: Extras, with_dlse: bool,
    needs: Needs, shape_of: ShapeOf,
) -> list[Launch]:  # fmt: skip
    """The backward's launches, in their order: dq first, which leaves each row's numbers to dkdv."""
    dq, dk, dv = (
        _meta(tuple(x.shape), x.dtype, dense_strides(x.shape, x.stride())) if needed else None
        for x, needed in zip((q, k, v), needs[:3], strict=True)
    )
    common = tensors_of(extras) | {"q": q, "k": k, "v": v, "dout": dout, "rows": _rows()}
    rows: dict[str, Tensor | None] = {"out": out, "lse": _rows(), "dlse": _rows() if with_dlse else None, "dq": dq}
    launches = [_launch("dq", problem, q, k, common | rows, shape_of)]
    if needs.k or needs.v:
        launches.append(_launch("dkdv", problem, q, k, common | {"dk": dk, "dv": dv}, shape_of))
    return launches


def described(problem: Problem, mask_dtype: torch.dtype, shape_of: ShapeOf) -> list[Launch]:
    """The launches of a problem whose tensors are not there: dense ones are assumed."""
    shape_q = (problem.batch, problem.seqlen_q, problem.heads_q)
    shape_k = (problem.batch, problem.seqlen_k, problem.heads_kv)
    dtype = problem.dtype
    q, k = _meta((*shape_q, problem.head_dim), dtype), _meta((*shape_k, problem.head_dim), dtype)
    v, dout = _meta((*shape_k, problem.head_dim_v), dtype), _meta((*shape_q, problem.head_dim_v), dtype)
    lengths = _meta((problem.batch,), torch.int32)
    extras = Extras(
        attn_mask=_meta(problem.attn_mask_shape or (), mask_dtype) if problem.attn_mask else None,
        q_lens=lengths if problem.q_lens else None,
        kv_lens=lengths if problem.kv_lens else None,
    )
    launches = [forward_launch(problem, q, k, v, extras, shape_of)]
    if problem.needs_backward:
        needs = Needs(*(name in problem.needs_grad for name in Needs._fields))
        launches += backward_launches(problem, q, k, v, dout, dout, extras, False, needs, shape_of)
    return launches


def tensors_of(extras: Extras) -> dict[str, Tensor | None]:
    """The optional tensors under the kernels' names. Starts are for sequences packed in one tensor: none so far."""
    return {"mask": extras.attn_mask, "q_lens": extras.q_lens, "kv_lens": extras.kv_lens}


def natural(problem: Problem) -> bool:
    """Whether log2(e) times a float mask's number, or the call's scale, could overflow. See scores.cuh."""
    return problem.attn_mask == "float" or abs(problem.scale) > LARGE


def row_kinds(problem: Problem) -> int:
    """How many numbers of each row the backward keeps: LSE, Delta and, with natural scores, the share."""
    return 3 if natural(problem) else 2


def _launch(kernel: str, problem: Problem, q: Tensor, k: Tensor, tensors: Tensors, shape_of: ShapeOf) -> Launch:
    shape = shape_of(problem, kernel)
    side_count = tiles.sides(kernel, max(problem.head_dim, problem.head_dim_v), shape)
    mask = tensors["mask"]
    recipe = Recipe(
        kernel=kernel,
        dtype=DTYPE_NAMES[problem.dtype],
        block_d=tiles.padded(problem.head_dim, side_count),
        block_dv=tiles.padded(problem.head_dim_v, side_count),
        shape=shape,
        aligned=_aligned([tensors.get(name) for name in STRIDED[:5]]),
        mask=None if mask is None else DTYPE_NAMES.get(mask.dtype, "bool"),
        paired_mask=kernel != "dkdv" and mask is not None and _in_pairs(mask),
        softcap=problem.softcap is not None,
        natural=natural(problem),
        plain=_plain(problem),
        outputs=tuple(name for name in ("dk", "dv") if tensors.get(name) is not None),
    )
    blocks = -(-k.shape[1] // shape.block_n) if kernel == "dkdv" else -(-q.shape[1] // shape.block_m)
    heads = k.shape[2] if kernel == "dkdv" else q.shape[2]
    given = frozenset(name for name, tensor in tensors.items() if tensor is not None)
    return Launch(recipe, blocks * heads * q.shape[0], given, _numbers(problem, tensors, q, k, mask))


def _plain(problem: Problem) -> bool:
    """Whether scale * q.k is all, with a scale that float32 has a normal number for: 0 * -inf would be NaN."""
    return not natural(problem) and problem.softcap is None and problem.attn_mask is None and problem.scale > 1 / LARGE


def _numbers(problem: Problem, tensors: Tensors, q: Tensor, k: Tensor, mask: Tensor | None) -> bytes:
    """Every number, as arguments.cuh has them."""
    band, unit = problem.band, 1.0 if natural(problem) else LOG2E  # see scores.cuh
    scale, softcap = problem.scale * unit, 0.0
    if problem.softcap is not None:
        cap = min(problem.softcap, LARGEST_SOFTCAP)
        scale, softcap = problem.scale / cap, cap * unit
    (batch, seqlen_q, heads, _), seqlen_k = q.shape, k.shape[1]
    beyond = seqlen_q + seqlen_k  # no distance is larger, and nothing overflows 32 bits
    strides = [stride for name in STRIDED for stride in _strides(tensors.get(name))]
    rows = (heads * seqlen_q, seqlen_q, batch * heads * seqlen_q)
    along_mask = [0] * 4
    if mask is not None:  # a dim of size 1 is broadcast
        along_mask = [0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True)]
    left = beyond if band.left is None else min(band.left, beyond)
    right = beyond if band.right is None else min(band.right, beyond)
    return NUMBERS_FORMAT.pack(
        *strides, *rows, *along_mask,
        heads, problem.group, _heads_at_once(problem), seqlen_q, seqlen_k, left, right, band.align == "top_left",
        problem.head_dim, problem.head_dim_v, *map(_float32, (scale, softcap, problem.scale)),
    )  # fmt: skip


def _heads_at_once(problem: Problem) -> int:
    """How many heads take turns under a causal mask; 1 where it matters little which blocks are started last."""
    if problem.band.right is None or problem.band.left is not None:
        return 1
    bytes_of_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    heads = min(HEADS_AT_ONCE, problem.batch * problem.heads_q)
    return max(1, min(heads, BYTES_AT_ONCE // max(1, bytes_of_head)))


def _float32(number: float) -> float:
    """What is beyond float32 is infinite there; `struct` would refuse it."""
    return number if abs(number) <= torch.finfo(torch.float32).max else math.copysign(math.inf, number)


def _strides(tensor: Tensor | None) -> Sequence[int]:
    """Of batch, rows and heads; those of a dim of size 1 are multiplied by 0."""
    if tensor is None:
        return (0, 0, 0)
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Whether strides let every row begin at a multiple of 16 bytes when the tensor does."""
    return all(
        stride * tensor.element_size() % ALIGNMENT == 0
        for tensor in tensors
        if tensor is not None
        for stride in _strides(tensor)
    )


def _in_pairs(mask: Tensor) -> bool:
    """Whether two neighbours along the keys may be read at once, where the mask begins at a multiple of two."""
    *others, last = zip(mask.shape, mask.stride(), strict=True)
    dense = last[0] % 2 == 0 and last[1] == 1
    return dense and all(size == 1 or stride % 2 == 0 for size, stride in others)


def _meta(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _rows() -> Tensor:
    """Stands for a contiguous float32 tensor of the kernels' own, whose strides no argument says."""
    return torch.empty(0, dtype=torch.float32, device="meta")
