"""The backend object: makes the outputs, and launches on torch's current stream.

What a launch needs beside tensors is worked out when a kind of call is seen first (`arguments`), and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashdispatch_backends.tilelang_fa2 import SPEC, tiles
from flashdispatch_backends.tilelang_fa2.arguments import (
    Launch,
    ShapeOf,
    as_tma_reads,
    backward_launches,
    described,
    forward_launch,
    natural,
    rows_shape,
    tensors_of,
)
from flashdispatch_backends.tilelang_fa2.compile import (
    compile_in_threads,
    compile_what_can,
    compiled,
    require_compilers,
)
from flashdispatch_backends.tilelang_fa2.facts import facts
from flashdispatch_registry import Extras, Forward, Gradients, Needs, Problem
from flashdispatch_registry.backend import NO_EXTRAS
from flashdispatch_registry.binding import BindingBackend, BoundForward
from flashdispatch_registry.kernels import KernelFacts, Tile
from flashdispatch_registry.layout import dense_strides, empty_on, output_strides, rows_of
from flashdispatch_registry.tile_table import TileTable

ALIGNMENT = 16
"""Bytes: what TMA wants of an address."""
LOADED = ("q", "k", "v", "dout")
"""Tensors that TMA reads."""


class TileLangFA2(BindingBackend):
    """The backend: `Backend`, `Binds`, `Tunable`, `PreparesTiles` and `Inspectable` of the registry."""

    def __init__(self) -> None:
        super().__init__(TileTable(SPEC, tiles.SHIPPED, tiles.rows, tiles.space, tiles.careful, tiles.check))

    def bind(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> BoundForward:
        """FA-2 Algorithm 1. q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
        return bound_forward(problem, q, k, v, extras, self.shape)

    def bind_backward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, extras: Extras,  # noqa: ARG002
        with_dlse: bool, needs: Needs,
    ) -> Backward:  # fmt: skip
        """FA-2 Algorithm 2, as two passes."""
        return Backward(problem, q, k, v, dout, extras, with_dlse, needs, self.shape)

    def prepare(self, problem: Problem) -> None:
        """Compiles side by side what `problem` needs, wherever its tensors begin and whatever strides they have.

        Of gradients, those that it names together: a pass for dK or dV alone is another kernel.
        """
        forms = (launch.on(aligned).recipe for launch in self._launches(problem) for aligned in (True, False))
        compile_in_threads(list(dict.fromkeys(forms)), torch.cuda.current_device())

    def _launches(self, problem: Problem) -> list[Launch]:
        """The launches of `problem`. A float mask has one of two dtypes, and the problem does not say which."""
        masks = (problem.dtype, torch.float32) if problem.attn_mask == "float" else (torch.bool,)
        return [launch for mask in masks for launch in described(problem, mask, self.shape)]

    def kernels(self, problem: Problem) -> Sequence[str]:
        """The kernels that `problem` may launch and that have tiles."""
        if not problem.needs_backward:
            return ("forward",)
        return ("forward", *(("total",) if natural(problem) else ()), "dq", *tiles.key_passes(problem))

    def prepare_tiles(self, problem: Problem, kernel: str, tiles: Sequence[Tile]) -> None:
        """Compiles `kernel` with each of `tiles` side by side, for dense tensors."""
        wanted = [launch.recipe for launch in self._launches(problem) if launch.recipe.tile_name == kernel]
        shapes = [self.table.checked(kernel, tile) for tile in tiles]
        compile_what_can(
            [replace(recipe, shape=shape) for recipe in wanted for shape in shapes], torch.cuda.get_device_capability()
        )

    def facts(self, problem: Problem) -> Sequence[KernelFacts]:
        """Compiles for ``problem.arch``; needs no GPU."""
        recipes = dict.fromkeys(launch.recipe for launch in self._launches(problem))
        return [facts(recipe, problem.arch) for recipe in recipes]


class BoundKernel:
    """One kernel of one kind of call on one device."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.launch = launch
        self.index = device.index or 0
        self.starters: dict[bool, Callable[..., None]] = {}
        """By whether the addresses are aligned; compiled or loaded on first use."""

    def starter(self, aligned: bool) -> Callable[..., None]:
        """The compiled kernel, called with all its arguments.

        Raises ColdKernelError when it is not there yet and a stream is capturing.
        """
        found = self.starters.get(aligned)
        if found is None:
            found = self.starters[aligned] = compiled(self.launch.on(aligned).recipe, self.index)
        return found


def launch_all(kernels: Sequence[BoundKernel], tensors: Mapping[str, Tensor | None]) -> None:
    """Launches one kernel after the other on torch's current stream."""
    loads_by_tma = any(kernel.launch.recipe.tma for kernel in kernels)
    at: dict[str | int, Any] = {0: 0}
    at.update(tensors)
    union = 0
    for name in LOADED:
        tensor = at.get(name)
        if tensor is not None:
            union |= tensor.data_ptr()
            if loads_by_tma:
                at[name] = as_tma_reads(tensor)
    aligned = not union % ALIGNMENT
    if aligned not in kernels[0].starters:
        recipes = [kernel.launch.on(aligned).recipe for kernel in kernels]
        compile_in_threads(recipes, kernels[0].index)  # side by side; one after the other they are found below
    for kernel in kernels:
        launch = kernel.launch
        start = kernel.starters.get(aligned) or kernel.starter(aligned)
        start(*[at[name] for name in launch.tensors], *launch.numbers)


def bound_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, shape_of: ShapeOf) -> BoundForward:
    """The forward of every call with this one's metadata: makes out and lse, and launches.

    A closure, and `launch_all` written out in it: it is on every call's way.
    """
    kernel = BoundKernel(forward_launch(problem, q, k, v, extras, shape_of), q.device)
    # Strides of dims of size 1 say nothing, and may differ from call to call.
    restride = kernel.launch.recipe.tma and any(1 in x.shape[:3] for x in (q, k, v))
    starters, saves, dtype, empty = kernel.starters, problem.needs_backward, q.dtype, empty_on(q.device)
    out_shape = (*q.shape[:3], problem.head_dim_v)
    out_strides = output_strides(out_shape, q.stride(), problem.layout)
    rows, with_lse = rows_of(q), kernel.launch.recipe.lse
    nothing = not (math.prod(out_shape) and k.shape[1])
    alone = all(extra is None for extra in extras)
    tail = (*kernel.launch.tensors[5:], *kernel.launch.numbers)  # where these five are all the tensors there are

    def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        given, out = (q, k, v), empty(out_shape, out_strides, dtype)
        lse = empty(*rows) if with_lse else None
        if nothing:
            out.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
        elif alone:
            if restride:
                q, k, v = as_tma_reads(q), as_tma_reads(k), as_tma_reads(v)
            aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT
            start = starters.get(aligned) or kernel.starter(aligned)
            start(q, k, v, out, 0 if lse is None else lse, *tail)
        else:
            launch_all([kernel], {"q": q, "k": k, "v": v, "out": out, "lse": lse, **tensors_of(extras)})
        if not saves or lse is None:
            return Forward(out, lse, ())
        return Forward(out, lse, (*given, out, lse, *extras.given(problem)))

    return run


class Backward:
    """The backward of every call with one call's metadata."""

    def __init__(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, extras: Extras, with_dlse: bool,
        needs: Needs, shape_of: ShapeOf,
    ) -> None:  # fmt: skip
        launches = backward_launches(problem, q, k, v, dout, extras, with_dlse, needs, shape_of)
        self.kernels = [BoundKernel(launch, q.device) for launch in launches]
        self.dtype, self.empty = q.dtype, empty_on(q.device)
        self.gradients = [
            (tuple(x.shape), dense_strides(x.shape, x.stride())) if needed else None
            for x, needed in zip((q, k, v), needs[:3], strict=True)
        ]
        self.nothing = not (q.numel() and k.numel() and v.numel())
        self.rows = rows_shape(problem, q)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        extras: Extras,
    ) -> Gradients:  # fmt: skip
        """Makes the gradients, and launches one kernel after the other."""
        dq, dk, dv = (None if made is None else self.empty(*made, self.dtype) for made in self.gradients)
        if self.nothing:
            for gradient in (dq, dk, dv):
                if gradient is not None:
                    gradient.zero_()
            return Gradients(dq, dk, dv)
        tensors: dict[str, Tensor | None] = {
            "q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse,
            "rows": self.empty(*self.rows), "dq": dq, "dk": dk, "dv": dv,
        }  # fmt: skip
        launch_all(self.kernels, tensors if extras is NO_EXTRAS else tensors | tensors_of(extras))
        return Gradients(dq, dk, dv)


if torch.cuda.is_available():
    require_compilers()  # what fails to import is a reason, and choice goes on; a first compile that fails is an error
backend = TileLangFA2()
