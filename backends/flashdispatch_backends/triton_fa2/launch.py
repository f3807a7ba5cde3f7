"""The backend object: from a call's tensors to kernel launches.

What a launch needs is worked out once per kind of call (`bind`): the kernel, the grid, and every argument that is no
pointer. A call then makes its outputs, takes their addresses and launches the compiled kernel on torch's current stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import triton
from torch import Tensor

from flashdispatch_backends.triton_fa2 import INTERPRETED, compile, tiles
from flashdispatch_backends.triton_fa2.compile import ALIGNMENT, KERNELS, STRIDE_UNIT, Recipe
from flashdispatch_backends.triton_fa2.tiles import Shape, padded
from flashdispatch_registry import Extras, Forward, Gradients, Needs, Problem, empty_gradient
from flashdispatch_registry.kernels import KernelFacts, Tile
from flashdispatch_registry.layout import dense_strides, output_strides

LOG2E = math.log2(math.e)
MASK_PARTS = 64
"""Most pieces in which the gradient of a mask without rows is summed: enough programs, little memory."""
_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip

_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, but for the addresses."""

    recipe: Recipe
    grid: int
    pointers: tuple[str, ...]
    """Names of the arguments that are tensors, in the kernel's order, absent ones among them."""
    rest: tuple[Any, ...]
    """Every argument after the pointers: numbers, and what is compiled in."""

    def on(self, aligned: bool) -> Launch:
        """The same for tensors that begin at multiples of 16 bytes, or not."""
        if aligned or not self.recipe.aligned:
            return self
        return replace(self, recipe=replace(self.recipe, aligned=False))

    def run(self, tensors: Mapping[str, Tensor | None], device: int) -> None:
        """Launches on torch's current stream of `device`."""
        if self.grid == 0:
            return
        given = [tensors.get(name) for name in self.pointers]
        if INTERPRETED:
            arrays = [t.view(torch.uint8) if t is not None and t.dtype is torch.bool else t for t in given]
            KERNELS[self.recipe.kernel][(self.grid,)](*arrays, *self.rest)
            return
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in given]
        start(compile.compiled(self.recipe, device), self.grid, device, (*addresses, *self.rest))


def start(kernel: Any, grid: int, device: int, arguments: tuple[Any, ...]) -> None:
    """Starts a compiled kernel on torch's current stream; addresses are plain integers."""
    kernel.run(
        grid, 1, 1, _current_stream(device), kernel.function, kernel.packed_metadata, None, None, None, *arguments
    )


def _launch(
    kernel: str, grid: int, shape: Shape, aligned: bool, tensors: Mapping[str, Tensor | None], values: Mapping[str, Any]
) -> Launch:
    """Sorts a kernel's arguments into pointers, numbers and constants."""
    names = KERNELS[kernel].arg_names
    types, constants, rest = [], [], []
    pointers = []
    for name in names:
        if name in tensors:
            tensor = tensors[name]
            pointers.append(name)
            types.append("constexpr" if tensor is None else _TYPES[tensor.dtype])
            if tensor is None:
                constants.append((name, None))
            continue
        value = values[name]
        rest.append(value)
        if name.isupper() or (name in ("stride_mm", "stride_mn") and value in (0, 1)):
            # A mask's stride of 0 or 1 is known to the compiler: wide loads, or one for the whole tile.
            types.append("constexpr")
            constants.append((name, value))
        elif name.startswith("stride_"):
            types.append("i64")
        elif name == "threshold":
            types.append("u32")
        else:
            types.append("fp32" if isinstance(value, float) else "i32")
    recipe = Recipe(kernel, tuple(types), tuple(constants), shape, aligned)
    return Launch(recipe, grid, tuple(pointers), tuple(rest))


def _strides(letter: str, tensor: Tensor | None) -> dict[str, int]:
    b, s, h = (0, 0, 0) if tensor is None else tensor.stride()[:3]
    return {f"stride_{letter}b": b, f"stride_{letter}s": s, f"stride_{letter}h": h}


def _aligned(*tensors: Tensor | None) -> bool:
    """Whether the wide loads may be used, as far as strides say; a stride of a dim of size 1 is multiplied by 0."""
    return all(
        stride % STRIDE_UNIT == 0 or size == 1
        for tensor in tensors
        if tensor is not None
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )


def _values(problem: Problem, q: Tensor, k: Tensor, extras: Extras) -> dict[str, Any]:
    """The arguments that all kernels share."""
    band = problem.band
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    natural = problem.attn_mask == "float"
    unit = 1.0 if natural else LOG2E
    scale = problem.scale * unit
    softcap = 0.0
    if problem.softcap is not None:
        scale, softcap = problem.scale / problem.softcap, problem.softcap * unit
    mask, slopes = extras.attn_mask, extras.alibi_slopes
    strides = [
        0 if size == 1 else stride
        for size, stride in (zip(mask.shape, mask.stride(), strict=True) if mask is not None else [(1, 0)] * 4)
    ]
    beyond = seqlen_q + seqlen_k  # no distance is larger
    p = problem.dropout_p
    return {
        "stride_mb": strides[0], "stride_mh": strides[1], "stride_mm": strides[2], "stride_mn": strides[3],
        "stride_slopes": slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        "heads": q.shape[2], "group": problem.group, "GROUP": problem.group, "batch": q.shape[0],
        "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
        "left": beyond if band.left is None else min(band.left, beyond),
        "right": beyond if band.right is None else min(band.right, beyond),
        "scale": float(scale), "softcap": float(softcap),
        "threshold": min(round(p * 2**32), 2**32 - 1), "kept": 1.0 / (1.0 - p) if p < 1.0 else 0.0,
        "scale_dq": float(problem.scale), "scale_dk": float(problem.scale),
        "D": problem.head_dim, "DV": problem.head_dim_v,
        "BLOCK_D": padded(problem.head_dim), "BLOCK_DV": padded(problem.head_dim_v),
        "LEFT": band.left is not None, "RIGHT": band.right is not None, "TOP_LEFT": band.align == "top_left",
        "MASK": problem.attn_mask, "SOFTCAP": problem.softcap is not None, "NATURAL": natural,
        "PLAIN": problem.softcap is None and mask is None and slopes is None and problem.scale >= 0,
        "PRECISION": precision(problem),
    }  # fmt: skip


def precision(problem: Problem) -> str:
    """How tl.dot multiplies float32; 16-bit products are exact in any case."""
    return "tf32" if problem.dtype is not torch.float32 or problem.fp32_precision == "tf32" else "ieee"


def _extras(extras: Extras) -> dict[str, Tensor | None]:
    return {
        "mask": extras.attn_mask, "slopes": extras.alibi_slopes, "sinks": extras.sinks, "q_lens": extras.q_lens,
        "kv_lens": extras.kv_lens, "seed": extras.dropout_seed, "q_starts": None, "k_starts": None,
    }  # fmt: skip


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


class TritonFA2:
    """The backend: `Backend`, `Binds`, `Tunable` and `Inspectable` of the registry."""

    def __init__(self) -> None:
        self._set: dict[str, Shape] = {}

    # The contract

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """FA-2 Algorithm 1. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
        return self.bind(problem, q, k, v, extras)(q, k, v, extras)

    def bind(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras
    ) -> Callable[[Tensor, Tensor, Tensor, Extras], Forward]:
        """What runs every call whose tensors have the shapes, strides and dtypes of these."""
        return BoundForward(self, problem, q, k, v, extras)

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """FA-2 Algorithm 2, as two passes."""
        q, k, v, out, lse, *given = saved
        extras = _unpack(problem, given)
        return run_backward(self, problem, q, k, v, out, lse, dout, dlse, extras, needs)

    def prepare(self, problem: Problem) -> None:
        """Compiles side by side what `problem` needs, for tensors with and without 16-byte alignment."""
        if INTERPRETED:
            return
        compile.compile_all(list(self._recipes(problem, both=True)), torch.cuda.current_device())

    def _recipes(self, problem: Problem, *, both: bool) -> Sequence[Recipe]:
        """The kernels of `problem`. A float mask may have either of two dtypes, which the problem does not say."""
        masks = (problem.dtype, torch.float32) if problem.attn_mask == "float" else (torch.bool,)
        launches = chain.from_iterable(described(self, problem, mask) for mask in dict.fromkeys(masks))
        recipes = list(dict.fromkeys(launch.recipe for launch in launches))
        return [replace(recipe, aligned=aligned) for recipe in recipes for aligned in ((True, False) if both else (recipe.aligned,))]

    # Tunable

    def kernels(self, problem: Problem) -> Sequence[str]:
        """The kernels that `problem` launches."""
        if not problem.needs_backward:
            return ("forward",)
        return ("forward", "dq", *tiles.key_passes(problem), *(("dmask",) if "attn_mask" in problem.needs_grad else ()))

    def tile_key(self, problem: Problem, kernel: str) -> str:
        """See `tiles.key`."""
        return tiles.key(problem, kernel)

    def tile_space(self, problem: Problem, kernel: str) -> Sequence[Tile]:
        """See `tiles.space`."""
        return [shape.to_tile() for shape in dict.fromkeys((self.shape(problem, kernel), *tiles.space(problem, kernel)))]

    def tile(self, problem: Problem, kernel: str) -> Tile:
        """The tile in force."""
        return self.shape(problem, kernel).to_tile()

    def set_tile(self, problem: Problem, kernel: str, tile: Tile | None) -> None:
        """Uses `tile` from now on, for calls that are bound from now on."""
        key = tiles.key(problem, kernel)
        if tile is None:
            self._set.pop(key, None)
        else:
            self._set[key] = Shape(**tile)

    def shape(self, problem: Problem, kernel: str) -> Shape:
        """The tile in force, as a Shape."""
        return self._set.get(tiles.key(problem, kernel)) or tiles.shipped(problem, kernel)

    # Inspectable

    def facts(self, problem: Problem) -> Sequence[KernelFacts]:
        """Compiles for ``problem.arch``; needs no GPU."""
        return [compile.facts(recipe, problem.arch) for recipe in self._recipes(problem, both=False)]


class BoundForward:
    """The forward of every call with one call's metadata."""

    def __init__(self, backend: TritonFA2, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> None:
        self.launch = forward_launch(backend, problem, q, k, v, extras)
        self.saves = problem.needs_backward
        self.with_lse = problem.return_lse or self.saves
        self.device, self.index, self.dtype = q.device, q.device.index or 0, q.dtype
        self.out_shape = (*q.shape[:3], problem.head_dim_v)
        self.out_strides = output_strides(self.out_shape, q.stride(), problem.layout)
        self.lse_shape = (q.shape[0], q.shape[2], q.shape[1])
        self.plain = all(extra is None for extra in extras)
        self.tail = (*(None for _ in self.launch.pointers[5:]), *self.launch.rest)
        self.kernels: dict[bool, Any] = {}
        """By whether the addresses are aligned; filled on first use."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out = torch.empty_strided(self.out_shape, self.out_strides, dtype=self.dtype, device=self.device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device) if self.with_lse else None
        saved = () if not self.saves else (q, k, v, out, lse, *[extra for extra in extras if extra is not None])
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        kernel = self.kernels.get(not (at_q | at_k | at_v) % ALIGNMENT)
        if kernel is None or not self.plain:
            self.run_any(q, k, v, out, lse, extras)
        elif self.launch.grid:
            # On every call's way, so nothing is looked up here.
            kernel.run(
                self.launch.grid, 1, 1, _current_stream(self.index), kernel.function, kernel.packed_metadata, None,
                None, None, at_q, at_k, at_v, out.data_ptr(), None if lse is None else lse.data_ptr(), *self.tail,
            )  # fmt: skip
        return Forward(out, lse, saved)

    def run_any(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, extras: Extras) -> None:
        """The first call, and those with more tensors."""
        aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT
        launch = self.launch.on(aligned)
        launch.run({"q": q, "k": k, "v": v, "out": out, "lse": lse} | _extras(extras), self.index)
        if not INTERPRETED and launch.grid:
            self.kernels[aligned] = compile.compiled(launch.recipe, self.index)


def forward_launch(
    backend: TritonFA2, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> Launch:
    """The forward kernel's launch, but for the addresses."""
    out_shape = (*q.shape[:3], problem.head_dim_v)
    out = torch.empty_strided(
        out_shape, output_strides(out_shape, q.stride(), problem.layout), dtype=q.dtype, device="meta"
    )
    shape = backend.shape(problem, "forward")
    lse = q.new_empty(0, dtype=torch.float32, device="meta") if problem.return_lse or problem.needs_backward else None
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse} | _extras(extras)
    values = _values(problem, q, k, extras) | {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n}
    for letter, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
        values |= _strides(letter, tensor)
    grid = _blocks(q.shape[1], shape.block_m) * q.shape[2] * q.shape[0]
    return _launch("forward", grid, shape, _aligned(q, k, v, out), tensors, values)


def backward_launches(
    backend: TritonFA2, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor,
    gradients: Gradients, with_dlse: bool, needs: Needs, extras: Extras,
) -> list[Launch]:  # fmt: skip
    """The backward's launches, but for the addresses. Of `gradients` only metadata is read."""
    values = _values(problem, q, k, extras)
    for letter, tensor in (
        ("q", q), ("k", k), ("v", v), ("o", out), ("do", dout), ("dq", gradients.q), ("dk", gradients.k),
        ("dv", gradients.v),
    ):  # fmt: skip
        values |= _strides(letter, tensor)
    row = q.new_empty(0, dtype=torch.float32, device="meta")
    aligned = _aligned(q, k, v, out, dout, gradients.q, gradients.k, gradients.v)
    common = {"q": q, "k": k, "v": v, "lse": row, "dout": dout, "delta": row} | _extras(extras)
    batch, seqlen_q, heads, _ = q.shape
    launches = []

    def add(kernel: str, grid: int, tensors: dict[str, Tensor | None], more: dict[str, Any]) -> None:
        shape = backend.shape(problem, kernel)
        blocks = {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n}
        launches.append(_launch(kernel, grid, shape, aligned, common | tensors, values | blocks | more))

    if needs.q or needs.k or needs.sinks or needs.attn_mask:
        dsinks = row if needs.sinks else None
        add(
            "dq", _blocks(seqlen_q, backend.shape(problem, "dq").block_m) * heads * batch,
            {"out": out, "dlse": row if with_dlse else None, "dq": gradients.q, "dsinks": dsinks}, {},
        )  # fmt: skip
    for kernel in tiles.key_passes(problem):
        outputs = {"dk": gradients.k if "dk" in kernel else None, "dv": gradients.v if "dv" in kernel else None}
        if any(output is not None for output in outputs.values()):
            grid = _blocks(k.shape[1], backend.shape(problem, kernel).block_n) * k.shape[2] * batch
            add(kernel, grid, outputs, {})
    if needs.attn_mask and extras.attn_mask is not None:
        shape, mask = backend.shape(problem, "dmask"), extras.attn_mask
        per = [size > 1 for size in mask.shape]
        rows, keys = _blocks(seqlen_q, shape.block_m), _blocks(k.shape[1], shape.block_n)
        parts = rows if per[2] else min(rows, MASK_PARTS)
        grid = keys * parts * mask.shape[1] * mask.shape[0]
        flags = dict(zip(("PER_SEQUENCE", "PER_HEAD", "PER_ROW", "PER_KEY"), per, strict=True))
        add("dmask", grid, {"dmask": row}, {"parts": parts} | flags)
    return launches


def run_backward(
    backend: TritonFA2, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    dlse: Tensor | None, extras: Extras, needs: Needs,
) -> Gradients:  # fmt: skip
    """Makes the gradients and launches the backward."""
    gradients = Gradients(
        empty_gradient(q) if needs.q else None,
        empty_gradient(k) if needs.k else None,
        empty_gradient(v) if needs.v else None,
    )
    launches = backward_launches(
        backend, problem, q, k, v, out, dout, gradients, dlse is not None, needs, extras
    )
    aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr() | out.data_ptr()) % ALIGNMENT
    index, seqlen_q, seqlen_k = q.device.index or 0, q.shape[1], k.shape[1]
    tensors: dict[str, Tensor | None] = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse, "delta": torch.empty_like(lse),
        "dq": gradients.q, "dk": gradients.k, "dv": gradients.v,
    } | _extras(extras)  # fmt: skip
    dmask = dsinks = None
    for launch in launches:
        launch = launch.on(aligned)
        if launch.recipe.kernel == "dq" and needs.sinks:
            blocks = launch.grid // max(1, q.shape[0] * q.shape[2])
            dsinks = tensors["dsinks"] = lse.new_empty(q.shape[0], q.shape[2], blocks)
        if launch.recipe.kernel == "dmask":
            dmask = tensors["dmask"] = lse.new_empty(_dmask_shape(launch, extras.attn_mask, seqlen_q, seqlen_k))
        launch.run(tensors, index)
    return gradients._replace(
        attn_mask=None if dmask is None else dmask.sum_to_size(extras.attn_mask.shape).to(extras.attn_mask.dtype),
        sinks=None if dsinks is None else dsinks.sum(dim=(0, 2)),
    )


def _dmask_shape(launch: Launch, mask: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
    """(B | 1, Hq | 1, Sq | parts, Sk | key blocks), which `dmask_kernel` fills."""
    batch, heads, rows, keys = mask.shape
    key_blocks = _blocks(seqlen_k, launch.recipe.shape.block_n)
    parts = launch.grid // max(1, batch * heads * key_blocks)
    return batch, heads, rows if rows > 1 else parts, keys if keys > 1 else key_blocks


def _unpack(problem: Problem, given: Sequence[Tensor]) -> Extras:
    """The extras among the saved tensors: the problem says which are there."""
    left = iter(given)
    present = (
        problem.attn_mask is not None, problem.alibi, problem.sinks, problem.q_lens, problem.kv_lens,
        problem.dropout_p > 0,
    )  # fmt: skip
    return Extras(*(next(left) if is_given else None for is_given in present))


def described(backend: TritonFA2, problem: Problem, mask_dtype: torch.dtype) -> list[Launch]:
    """The launches of a problem without its tensors: dense ones are assumed."""
    shape_q = (problem.batch, problem.seqlen_q, problem.heads_q)
    shape_k = (problem.batch, problem.seqlen_k, problem.heads_kv)

    def meta(*shape: int, dtype: torch.dtype = problem.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = meta(*shape_q, problem.head_dim), meta(*shape_k, problem.head_dim)
    v, out = meta(*shape_k, problem.head_dim_v), meta(*shape_q, problem.head_dim_v)
    extras = Extras(
        attn_mask=None if problem.attn_mask_shape is None else meta(*problem.attn_mask_shape, dtype=mask_dtype),
        alibi_slopes=meta(problem.heads_q, dtype=torch.float32) if problem.alibi else None,
        sinks=meta(problem.heads_q, dtype=torch.float32) if problem.sinks else None,
        q_lens=meta(problem.batch, dtype=torch.int32) if problem.q_lens else None,
        kv_lens=meta(problem.batch, dtype=torch.int32) if problem.kv_lens else None,
        dropout_seed=meta(2, dtype=torch.int64) if problem.dropout_p else None,
    )
    launches = [forward_launch(backend, problem, q, k, v, extras)]
    if problem.needs_backward:
        needs = Needs(*(name in problem.needs_grad for name in Needs._fields))
        gradients = Gradients(*(x if needed else None for x, needed in zip((q, k, v), needs[:3], strict=True)))
        for with_dlse in (False, True) if problem.needs_lse_grad else (False,):
            launches += backward_launches(
                backend, problem, q, k, v, out, out, gradients, with_dlse, needs, extras
            )  # fmt: skip
    return launches


backend = TritonFA2()
