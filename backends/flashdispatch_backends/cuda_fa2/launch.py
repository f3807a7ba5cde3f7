"""The backend object: makes the outputs, takes the addresses, launches on torch's current stream.

What a launch needs beside addresses is worked out when a kind of call is seen first (`arguments`), and kept. A launch
then writes its addresses into a buffer that holds the rest already, and hands its own address to the driver through
CuPy, which takes a raw stream.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence

import cupy
import torch
from torch import Tensor

from flashdispatch_backends.cuda_fa2 import SPEC, tiles
from flashdispatch_backends.cuda_fa2.arguments import (
    ADDRESSES,
    ADDRESSES_FORMAT,
    ALIGNMENT,
    Launch,
    ShapeOf,
    Tensors,
    backward_launches,
    described,
    forward_launch,
    row_kinds,
    tensors_of,
)
from flashdispatch_backends.cuda_fa2.compile import (
    Kernel,
    capability,
    compile_in_threads,
    compile_what_can,
    compiled,
    require_toolchain,
)
from flashdispatch_backends.cuda_fa2.facts import facts
from flashdispatch_registry import Extras, Forward, Gradients, Needs, Problem
from flashdispatch_registry.backend import NO_EXTRAS
from flashdispatch_registry.binding import BindingBackend, BoundForward
from flashdispatch_registry.kernels import KernelFacts, Tile
from flashdispatch_registry.layout import dense_strides, empty_on, output_strides, rows_of
from flashdispatch_registry.tile_table import TileTable

# torch.cuda.current_stream() makes a Stream object and costs 40 times as much. A CPU build of torch has neither.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)  # noqa: SLF001
CHECKED = ("q", "k", "v", "out", "dout", "mask")
"""Tensors that others made: a kernel may copy 16 bytes at once when they all begin at multiples of `ALIGNMENT`."""


class CudaFA2(BindingBackend):
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
        """Compiles side by side what `problem` needs, wherever its tensors begin and whatever strides they have.

        Of gradients, those that it names together: a pass for dK or dV alone is another kernel.
        """
        launches = self._launches(problem, self.shape)
        forms = [launch.on(aligned).recipe for launch in launches for aligned in (True, False)]
        compile_in_threads(forms, torch.cuda.current_device())

    def _launches(self, problem: Problem, shape_of: ShapeOf) -> list[Launch]:
        """The launches of `problem`. A float mask has one of two dtypes, and the problem does not say which."""
        masks = (problem.dtype, torch.float32) if problem.attn_mask == "float" else (torch.bool,)
        return [launch for mask in masks for launch in described(problem, mask, shape_of)]

    def kernels(self, problem: Problem) -> Sequence[str]:
        """The kernels that `problem` may launch."""
        return tiles.KERNELS if problem.needs_backward else ("forward",)

    def prepare_tiles(self, problem: Problem, kernel: str, tiles: Sequence[Tile]) -> None:
        """Compiles `kernel` with each of `tiles` side by side, for dense tensors."""
        recipes = []
        for tile in tiles:
            shape = self.table.checked(kernel, tile)
            recipes += [launch.recipe for launch in self._launches(problem, lambda *_, shape=shape: shape)]
        recipes = [recipe for recipe in recipes if recipe.kernel == kernel]
        compile_what_can(recipes, capability(torch.cuda.current_device()))

    def facts(self, problem: Problem) -> Sequence[KernelFacts]:
        """Compiles for ``problem.arch``; needs no GPU."""
        recipes = dict.fromkeys(launch.recipe for launch in self._launches(problem, self.shape))
        return [facts(recipe, problem.arch) for recipe in recipes]


class BoundKernel:
    """One kernel of one kind of call on one device."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.launch = launch
        self.index = device.index or 0
        self.kernels: dict[bool, Kernel] = {}
        """By whether the addresses are aligned; compiled or loaded on first use."""
        self._buffers = threading.local()

    def kernel(self, aligned: bool) -> Kernel:
        """The loaded kernel.

        Raises ColdKernelError when it is not there yet and a stream is capturing.
        """
        found = self.kernels.get(aligned)
        if found is None:
            found = self.kernels[aligned] = compiled(self.launch.on(aligned).recipe, self.index)
        return found

    def start(self, aligned: bool, *addresses: int) -> None:
        """Launches on torch's current stream, with the addresses of all of `ADDRESSES`, 0 for what is not there."""
        kernel = self.kernels.get(aligned) or self.kernel(aligned)
        local = self._buffers
        try:
            buffer = local.buffer
        except AttributeError:
            buffer = local.buffer = self._new_buffer()
        arguments, parameters, _ = buffer
        ADDRESSES_FORMAT.pack_into(arguments, 0, *addresses)
        # The driver reads the buffer before it returns, and no other thread has it.
        kernel.start(self.launch.grid, _current_stream(self.index), parameters)

    def _new_buffer(self) -> tuple[ctypes.Array[ctypes.c_char], int, object]:
        """The struct of arguments.cuh, the address of an array that holds its address, and that array.

        A thread's first. In a thread that has not yet asked the CUDA runtime for anything, the driver has no context.
        """
        cupy.cuda.runtime.setDevice(self.index)  # the current one already
        numbers = self.launch.numbers
        arguments = ctypes.create_string_buffer(
            bytes(ADDRESSES_FORMAT.size) + numbers, ADDRESSES_FORMAT.size + len(numbers)
        )
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        return arguments, ctypes.addressof(parameters), parameters


def launch_all(kernels: Sequence[BoundKernel], tensors: Tensors) -> None:
    """Launches one kernel after the other on torch's current stream."""
    at = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
    union = 0
    for name in CHECKED:
        union |= at.get(name, 0)
    aligned = not union % ALIGNMENT
    if any(aligned not in kernel.kernels for kernel in kernels):
        recipes = [kernel.launch.on(aligned).recipe for kernel in kernels]
        compile_in_threads(recipes, kernels[0].index)  # side by side; one after the other they are found below
    for kernel in kernels:
        passed = kernel.launch.tensors
        kernel.start(aligned, *[at[name] if name in passed else 0 for name in ADDRESSES])


def bound_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, shape_of: ShapeOf) -> BoundForward:
    """The forward of every call with this one's metadata: makes out and lse, and launches.

    A closure, and `launch_all` written out in it: it is on every call's way.
    """
    kernel = BoundKernel(forward_launch(problem, q, k, v, extras, shape_of), q.device)
    saves, dtype, empty = problem.needs_backward, q.dtype, empty_on(q.device)
    with_lse = "lse" in kernel.launch.tensors
    out_shape = (*q.shape[:3], problem.head_dim_v)
    out_strides = output_strides(out_shape, q.stride(), problem.layout)
    rows, start = rows_of(q), kernel.start
    nothing = not math.prod(out_shape)
    alone = all(extra is None for extra in extras)
    absent = (0,) * (len(ADDRESSES) - 5)

    def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out = empty(out_shape, out_strides, dtype)
        lse = empty(*rows) if with_lse else None
        if nothing:
            return Forward(out, lse, (q, k, v, out, lse, *extras.given(problem)) if saves and lse is not None else ())
        if alone:
            at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
            at_lse = 0 if lse is None else lse.data_ptr()
            start(not (at_q | at_k | at_v) % ALIGNMENT, at_q, at_k, at_v, out.data_ptr(), at_lse, *absent)
            return Forward(out, lse, (q, k, v, out, lse) if saves and lse is not None else ())
        launch_all([kernel], {"q": q, "k": k, "v": v, "out": out, "lse": lse} | tensors_of(extras))
        return Forward(out, lse, (q, k, v, out, lse, *extras.given(problem)) if saves and lse is not None else ())

    return run


class Backward:
    """The backward of every call with one call's metadata."""

    def __init__(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, extras: Extras,
        with_dlse: bool, needs: Needs, shape_of: ShapeOf,
    ) -> None:  # fmt: skip
        launches = backward_launches(problem, q, k, v, out, dout, extras, with_dlse, needs, shape_of)
        self.kernels = [BoundKernel(launch, q.device) for launch in launches if launch.grid]
        self.dtype, self.empty = q.dtype, empty_on(q.device)
        self.gradients = [
            (tuple(x.shape), dense_strides(x.shape, x.stride())) if needed else None
            for x, needed in zip((q, k, v), needs[:3], strict=True)
        ]
        (batch, heads, seqlen_q), _, number = rows_of(q)
        shape = (row_kinds(problem), batch, heads, seqlen_q)
        self.rows = (shape, dense_strides(shape, (3, 2, 1, 0)), number)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        extras: Extras,
    ) -> Gradients:  # fmt: skip
        """Makes the gradients, and launches one kernel after the other."""
        dq, dk, dv = (None if made is None else self.empty(*made, self.dtype) for made in self.gradients)
        tensors: dict[str, Tensor | None] = {
            "q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse,
            "rows": self.empty(*self.rows), "dq": dq, "dk": dk, "dv": dv,
        }  # fmt: skip
        if self.kernels:
            launch_all(self.kernels, tensors if extras is NO_EXTRAS else tensors | tensors_of(extras))
        return Gradients(dq, dk, dv)


if torch.cuda.is_available():
    require_toolchain(torch.cuda.current_device())  # what fails to import is a reason, and choice goes on
backend = CudaFA2()
