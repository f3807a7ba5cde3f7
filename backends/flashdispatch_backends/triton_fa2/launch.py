"""The backend object: makes the outputs, takes the addresses, launches on torch's current stream.

What a launch needs beside addresses is worked out when a kind of call is seen first (`arguments`), and kept. Triton's
own `kernel[grid](...)` would find the kernel anew from all arguments of every call; here the compiled kernel is started
as it is, with addresses as plain integers, which Triton's launcher takes without asking the driver about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from flashdispatch_registry import Extras, Forward, Gradients, Needs, Problem
from flashdispatch_registry.backend import NO_EXTRAS
from flashdispatch_registry.binding import BindingBackend, BoundForward
from flashdispatch_registry.kernels import KernelFacts, Tile
from flashdispatch_registry.layout import empty_on, output_strides, rows_of
from flashdispatch_registry.tile_table import Shape, TileTable

# torch.cuda.current_stream() makes a Stream object and costs 40 times as much. A CPU build of torch has neither.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)  # noqa: SLF001
CHECKED = frozenset({"q", "k", "v", "out", "lse", "dout", "mask"})
"""Tensors that others made: a kernel may use wide loads when they all begin at multiples of `ALIGNMENT`."""


class TritonFA2(BindingBackend):
    """The backend: `Backend`, `Binds`, `Tunable`, `PreparesTiles` and `Inspectable` of the registry."""

    def __init__(self) -> None:
        super().__init__(TileTable(SPEC, tiles.SHIPPED, tiles.rows, tiles.space, tiles.careful, tiles.check))

    def bind(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> BoundForward:
        """FA-2 Algorithm 1. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
        return bound_forward(problem, q, k, v, extras, self.shape)

    def bind_backward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, extras: Extras,
        with_dlse: bool, needs: Needs,
    ) -> Backward:  # fmt: skip
        """FA-2 Algorithm 2, as two passes."""
        return Backward(problem, q, k, v, out, dout, extras, with_dlse, needs, self.shape)

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

    def kernels(self, problem: Problem) -> Sequence[str]:
        """The kernels that `problem` may launch."""
        backward = ("dq", *tiles.key_passes(problem)) if problem.needs_backward else ()
        return ("forward", *backward, *(("dmask",) if "attn_mask" in problem.needs_grad else ()))

    def prepare_tiles(self, problem: Problem, kernel: str, tiles: Sequence[Tile]) -> None:
        """Compiles `kernel` with each of `tiles` in processes beside each other, for dense tensors."""
        shapes = [self.table.checked(kernel, tile) for tile in tiles]
        wanted = [recipe for recipe in self._recipes(problem) if recipe.kernel == kernel]
        compile_in_processes(
            [recipe.with_shape(shape) for recipe in wanted for shape in shapes], torch.cuda.get_device_capability()
        )

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


def bound_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, shape_of: Callable[[Problem, str], Shape]
) -> BoundForward:
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


class Backward:
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


backend = TritonFA2()
