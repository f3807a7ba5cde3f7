"""The backend object: makes the outputs, takes the addresses, launches on torch's current stream.

What a launch needs beside addresses is worked out when a kind of call is seen first (`arguments`), and kept. Triton's
own `kernel[grid](...)` would find the kernel anew from all arguments of every call; here the compiled kernel is started
as it is, with addresses as plain integers, which Triton's launcher takes without asking the driver about them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdispatch_backends.triton_fa2 import INTERPRETED, SPEC, tiles
from flashdispatch_backends.triton_fa2.arguments import (
    Launch,
    Tensors,
    backward_launches,
    described,
    dmask_shape,
    forward_launch,
    gradients_like,
    pointers_of,
)
from flashdispatch_backends.triton_fa2.compile import (
    ALIGNMENT,
    KERNELS,
    Recipe,
    compile_in_processes,
    compile_in_threads,
    compiled,
    starter,
)
from flashdispatch_backends.triton_fa2.facts import facts
from flashdispatch_backends.triton_fa2.tiles import Shape
from flashdispatch_registry import Extras, Forward, Gradients, Needs, Problem, tile_store
from flashdispatch_registry.backend import NO_EXTRAS
from flashdispatch_registry.kernels import KernelFacts, Tile
from flashdispatch_registry.layout import output_strides

log = logging.getLogger("flashdispatch")

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a shape, strides and a dtype, with nothing in it."""

BOUND_LIMIT = 1024
"""Kinds of call that are remembered here; beyond it all are forgotten."""

# torch.cuda.current_stream() makes a Stream object and costs 40 times as much. A CPU build of torch has neither.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)  # noqa: SLF001
CHECKED = frozenset({"q", "k", "v", "out", "lse", "dout", "mask"})
"""Tensors that others made: a kernel may use wide loads when they all begin at multiples of `ALIGNMENT`."""


class TritonFA2:
    """The backend: `Backend`, `Binds`, `Tunable`, `PreparesTiles` and `Inspectable` of the registry."""

    def __init__(self) -> None:
        self._tiles: dict[str, Shape] = {}
        self._tuned: dict[int, tuple[str, Mapping[str, Shape]]] = {}
        self._bound: dict[Any, Any] = {}

    # The contract

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """FA-2 Algorithm 1. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
        key = (problem, _metadata(q, k, v, extras))
        bound = self._bound.get(key)
        if bound is None:
            bound = self._remember(key, self.bind(problem, q, k, v, extras))
        result: Forward = bound(q, k, v, extras)
        return result

    def bind(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras
    ) -> Callable[[Tensor, Tensor, Tensor, Extras], Forward]:
        """What runs every forward whose tensors have the shapes, strides and dtypes of these."""
        return bound_forward(problem, q, k, v, extras, self.shape)

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """FA-2 Algorithm 2, as two passes."""
        q, k, v, out, lse, *given = saved
        extras = Extras.restored(problem, given) if given else NO_EXTRAS
        lse = lse.contiguous()  # a hook on saved tensors may give them back with other strides
        key = (problem, _metadata(q, k, v, extras), out.stride(), dout.stride(), dlse is not None, needs)
        bound = self._bound.get(key)
        if bound is None:
            bound = BoundBackward(problem, q, k, v, out, dout, extras, dlse is not None, needs, self.shape)
            self._remember(key, bound)
        result: Gradients = bound(q, k, v, out, lse, dout, dlse, extras)
        return result

    def prepare(self, problem: Problem) -> None:
        """Compiles side by side what dense tensors of `problem` need, wherever they begin.

        A mask with other strides (expanded, transposed) is compiled in its first call.
        """
        if not INTERPRETED:
            recipes = [loose for recipe in self._recipes(problem) for loose in recipe.with_less_alignment()]
            compile_in_threads(recipes, torch.cuda.current_device())

    def _recipes(self, problem: Problem) -> list[Recipe]:
        """The kernels of `problem`. A float mask has one of two dtypes, and the problem does not say which."""
        masks = (problem.dtype, torch.float32) if problem.attn_mask == "float" else (torch.bool,)
        return list(dict.fromkeys(x.recipe for mask in masks for x in described(problem, mask, self.shape)))

    def _remember(self, key: Any, bound: Any) -> Any:
        if len(self._bound) >= BOUND_LIMIT:
            self._bound.clear()
        self._bound[key] = bound
        return bound

    # Tiles

    def kernels(self, problem: Problem) -> Sequence[str]:
        """The kernels that `problem` may launch."""
        backward = ("dq", *tiles.key_passes(problem)) if problem.needs_backward else ()
        return ("forward", *backward, *(("dmask",) if "attn_mask" in problem.needs_grad else ()))

    def tile_key(self, problem: Problem, kernel: str) -> str:
        """See `tiles.key`."""
        return tiles.key(problem, kernel)

    def tile_space(self, problem: Problem, kernel: str) -> Sequence[Tile]:
        """See `tiles.space`."""
        return [
            shape._asdict() for shape in dict.fromkeys((self.shape(problem, kernel), *tiles.space(problem, kernel)))
        ]

    def tile(self, problem: Problem, kernel: str) -> Tile:
        """The tile in force."""
        return self.shape(problem, kernel)._asdict()

    def set_tile(self, problem: Problem, kernel: str, tile: Tile | None) -> None:
        """Uses `tile` for calls that are bound from now on; None goes back to what was tuned or shipped.

        Raises ValueError for an unknown kernel and for what is no tile.
        """
        if kernel not in KERNELS:
            raise ValueError(f"triton_fa2 has no kernel {kernel!r}; it has {', '.join(KERNELS)}")
        self._bound.clear()
        key = tiles.key(problem, kernel)
        if tile is None:
            self._tiles.pop(key, None)
        else:
            self._tiles[key] = Shape.of(tile)

    def prepare_tiles(self, problem: Problem, kernel: str, tiles: Sequence[Tile]) -> None:
        """Compiles `kernel` with each of `tiles` in processes beside each other, for dense tensors."""
        shapes = [Shape.of(tile) for tile in tiles]
        wanted = [recipe for recipe in self._recipes(problem) if recipe.kernel == kernel]
        compile_in_processes(
            [recipe.with_shape(shape) for recipe in wanted for shape in shapes], torch.cuda.get_device_capability()
        )

    def shape(self, problem: Problem, kernel: str) -> Shape:
        """The tile in force, of the problem's best row: set in this process, else tuned on this GPU, else shipped."""
        return tiles.look_up(problem, kernel, self._tiles, self._tuned_here(problem), tiles.SHIPPED)

    def _tuned_here(self, problem: Problem) -> Mapping[str, Shape]:
        """What was tuned on the current GPU; nothing for a problem of another architecture."""
        if problem.device_type != "cuda" or not torch.cuda.is_available():
            return {}
        index = torch.cuda.current_device()
        if index not in self._tuned:
            fingerprint = tile_store.fingerprint_of(SPEC, index)
            self._tuned[index] = (fingerprint["arch"], _checked(tile_store.load(SPEC.name, fingerprint)))
        arch, tuned = self._tuned[index]
        return tuned if arch == problem.arch else {}

    # What it compiles to

    def facts(self, problem: Problem) -> Sequence[KernelFacts]:
        """Compiles for ``problem.arch``; needs no GPU."""
        return [facts(recipe, problem.arch) for recipe in self._recipes(problem)]


class BoundKernel:
    """One kernel of one kind of call on one device."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.launch = launch
        self.index = device.index or 0
        self.starters: dict[bool, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        """By whether the addresses are aligned; compiled or loaded on first use."""

    def starter(self, aligned: bool) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.starter`.

        Raises ColdKernelError when the kernel is not there yet and a stream is capturing.
        """
        found = self.starters.get(aligned)
        if found is None:
            kernel = compiled(self.launch.on(aligned).recipe, self.index)
            found = self.starters[aligned] = starter(kernel)
        return found


def launch_all(kernels: Sequence[BoundKernel], tensors: Tensors) -> None:
    """Launches one kernel after the other on torch's current stream."""
    if INTERPRETED:
        for kernel in kernels:
            launch = kernel.launch
            given = [None if name is None else tensors[name] for name in launch.pointers]
            arrays = [x.view(torch.uint8) if x is not None and x.dtype is torch.bool else x for x in given]
            KERNELS[launch.recipe.kernel][(launch.grid,)](*arrays, *launch.rest)
        return
    at: dict[str | None, int | None] = {None: None}
    union = 0
    for name, tensor in tensors.items():
        if tensor is None:
            at[name] = None
        else:
            address = at[name] = tensor.data_ptr()
            if name in CHECKED:
                union |= address
    for kernel in kernels:
        launch = kernel.launch
        start, fixed = kernel.starter(not union % ALIGNMENT)
        addresses = [at[name] for name in launch.pointers]
        start(launch.grid, 1, 1, _current_stream(kernel.index), *fixed, *addresses, *launch.rest)


def empty_on(device: torch.device) -> Empty:
    """``torch.empty_strided(shape, strides, dtype=dtype)`` on `device`, which on a GPU must be the current one.

    There it is the function that torch's compiled graphs allocate with, where torch has it: half the host time.
    """
    fast: Empty | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # noqa: SLF001
    if device.type == "cuda" and fast is not None:
        return fast
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def rows_of(q: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """What LSE, Delta and total are made as: (B, Hq, Sq) float32, dense."""
    batch, seqlen_q, heads, _ = q.shape
    return (batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1), torch.float32


def bound_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, shape_of: Callable[[Problem, str], Shape]
) -> Callable[[Tensor, Tensor, Tensor, Extras], Forward]:
    """The forward of every call with this one's metadata: makes out and lse, and launches.

    A closure, and `launch_all` written out in it: it is on every call's way.
    """
    kernel = BoundKernel(forward_launch(problem, q, k, v, extras, shape_of), q.device)
    starters, grid, index = kernel.starters, kernel.launch.grid, kernel.index
    saves, with_lse = problem.needs_backward, problem.return_lse or problem.needs_backward
    dtype, empty, rows = q.dtype, empty_on(q.device), rows_of(q)
    out_shape = (*q.shape[:3], problem.head_dim_v)
    out_strides = output_strides(out_shape, q.stride(), problem.layout)
    alone = all(extra is None for extra in extras) and not INTERPRETED and grid > 0
    # The arguments after q, k, v, out and lse, when these are all the tensors there are.
    tail = (*(None for _ in kernel.launch.pointers[5:]), *kernel.launch.rest)
    stream, kernels = _current_stream, [kernel] if grid else []

    def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out = empty(out_shape, out_strides, dtype)
        lse = empty(*rows) if with_lse else None
        if alone:
            at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
            aligned = not (at_q | at_k | at_v) % ALIGNMENT
            start, fixed = starters.get(aligned) or kernel.starter(aligned)
            at_lse = None if lse is None else lse.data_ptr()
            start(grid, 1, 1, stream(index), *fixed, at_q, at_k, at_v, out.data_ptr(), at_lse, *tail)
            return Forward(out, lse, (q, k, v, out, lse) if saves and lse is not None else ())
        launch_all(kernels, {"q": q, "k": k, "v": v, "out": out, "lse": lse} | pointers_of(extras))
        if not saves or lse is None:
            return Forward(out, lse, ())
        return Forward(out, lse, (q, k, v, out, lse, *extras.given(problem)))

    return run


class BoundBackward:
    """The backward of every call with one call's metadata."""

    def __init__(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, extras: Extras,
        with_dlse: bool, needs: Needs, shape_of: Callable[[Problem, str], Shape],
    ) -> None:  # fmt: skip
        launches = backward_launches(problem, q, k, v, out, dout, extras, with_dlse, needs, shape_of)
        self.kernels = [BoundKernel(launch, q.device) for launch in launches if launch.grid]
        self.dtype, self.empty, self.rows = q.dtype, empty_on(q.device), rows_of(q)
        like = gradients_like(q, k, v, needs)[:3]
        self.gradients = [None if x is None else (tuple(x.shape), x.stride()) for x in like]
        batch, seqlen_q, heads, _ = q.shape
        self.dsinks_shape = (batch, heads, -(-seqlen_q // shape_of(problem, "dq").block_m)) if needs.sinks else None
        self.dmask_shape: tuple[int, ...] | None = None
        if needs.attn_mask and extras.attn_mask is not None:
            self.dmask_shape = dmask_shape(extras.attn_mask, q, k, shape_of(problem, "dmask"))
        self.coarse = any("total" in launch.pointers for launch in launches)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        extras: Extras,
    ) -> Gradients:  # fmt: skip
        """Makes the gradients, and launches one kernel after the other."""
        empty = self.empty
        dq, dk, dv = (None if made is None else empty(*made, self.dtype) for made in self.gradients)
        dsinks = None if self.dsinks_shape is None else lse.new_empty(self.dsinks_shape)
        dmask = None if self.dmask_shape is None else lse.new_empty(self.dmask_shape)
        tensors: dict[str, Tensor | None] = {
            "q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse, "delta": empty(*self.rows),
            "total": empty(*self.rows) if self.coarse else None, "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks,
            "dmask": dmask,
        }  # fmt: skip
        launch_all(self.kernels, tensors if extras is NO_EXTRAS else tensors | pointers_of(extras))
        summed = None
        if dmask is not None and extras.attn_mask is not None:
            summed = dmask.sum_to_size(extras.attn_mask.shape).to(extras.attn_mask.dtype)
        return Gradients(dq, dk, dv, summed, None if dsinks is None else dsinks.sum(dim=(0, 2)))


def _checked(tuned: Mapping[str, Tile]) -> Mapping[str, Shape]:
    """What was kept on disk, without what is no tile: a warning says so, and the shipped one is used."""
    good = {}
    for key, tile in tuned.items():
        try:
            good[key] = Shape.of(tile)
        except ValueError as error:
            log.warning("the tuned tile of %s is not used: %s", key, error)
    return good


def _metadata(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[object, ...]:
    """What a launch depends on beside the problem. Dtypes but the mask's, and Dv, are the problem's."""
    given = None if extras is NO_EXTRAS else tuple(None if x is None else (x.stride(), x.dtype) for x in extras)
    return q.device, q.shape, q.stride(), k.shape, k.stride(), v.stride(), given


backend = TritonFA2()
