"""From a launch to a compiled kernel: ahead of time, for the GPU at hand or for another architecture without one.

Triton's own `kernel[grid](...)` looks at every argument of every call to see which kernel it needs. Here that is
decided once, when a call is bound: `Recipe` is all that a compiled kernel depends on, and `compiled` keeps one per
recipe and device. Triton's cache on disk lies beneath, so that another process only loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashdispatch_backends.triton_fa2.backward import dkdv_kernel, dq_kernel
from flashdispatch_backends.triton_fa2.forward import forward_kernel
from flashdispatch_backends.triton_fa2.mask_gradient import dmask_kernel
from flashdispatch_registry.errors import ColdKernelError
from flashdispatch_registry.tile_table import Shape

KERNELS: dict[str, Any] = {
    "forward": forward_kernel,
    "dq": dq_kernel,
    "dkdv": dkdv_kernel,
    "dk": dkdv_kernel,
    "dv": dkdv_kernel,
    "dmask": dmask_kernel,
}
ALIGNED_POINTERS = frozenset({"q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv"})
MASK_STRIDES = frozenset({"stride_mb", "stride_mh", "stride_mm", "stride_mn"})
UNKNOWN_STRIDES = frozenset({"stride_slopes", "stride_lb", "stride_lh"})
"""Of single numbers: no load is wide along them."""
ALIGNMENT = 16
"""Bytes: what the widest load of a thread wants of an address."""
STRIDE_UNIT = 8
"""Elements of 16 bit in it. One number for every dtype: more would mean more kernels."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a compiled kernel depends on, the device apart."""

    kernel: str
    types: tuple[str, ...]
    """Of each argument, in the kernel's order; "constexpr" for those compiled in."""
    constants: tuple[tuple[str, Any], ...]
    shape: Shape
    aligned: bool
    """`ALIGNED_POINTERS` are multiples of 16 bytes, and strides of what is q's dtype are of 8 elements."""
    aligned_mask: bool
    """The same of attn_mask, with strides of 16 elements: a byte each."""

    def with_shape(self, shape: Shape) -> Recipe:
        """The same with another tile."""
        blocks = {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n}
        constants = tuple((name, blocks.get(name, value)) for name, value in self.constants)
        return replace(self, constants=constants, shape=shape)

    def with_less_alignment(self) -> tuple[Recipe, ...]:
        """This one, and those for tensors of which less is known."""
        return tuple(
            replace(self, aligned=aligned, aligned_mask=aligned_mask)
            for aligned in {self.aligned, False}
            for aligned_mask in {self.aligned_mask, False}
        )


def build(recipe: Recipe, arch: int) -> Any:
    """Compiles for compute capability `arch` (90 for sm_90); needs no GPU. Returns Triton's CompiledKernel."""
    _hash_in_one_order()
    fn = KERNELS[recipe.kernel]
    names = fn.arg_names
    signature = dict(zip(names, recipe.types, strict=True))
    attributes = {}
    for index, (name, kind) in enumerate(signature.items()):
        unit = _known_unit(name, recipe)
        if unit > 1 and kind != "constexpr":
            attributes[(index,)] = [["tt.divisibility", unit]]
    source = ASTSource(fn, signature, dict(recipe.constants), attributes)
    options = {"num_warps": recipe.shape.num_warps, "num_stages": recipe.shape.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _hash_in_one_order() -> None:
    """So that every process finds on disk what another has compiled.

    Up to Triton 3.7 a kernel's hash depends on which of the functions it calls were hashed before, for another kernel
    (triton-lang/triton#10494 ends that). Two threads are no trouble: the second waits for the first at each kernel.
    """
    for kernel in KERNELS.values():
        _ = kernel.cache_key


def _known_unit(name: str, recipe: Recipe) -> int:
    """What an address or a stride is known to be a multiple of."""
    if name in MASK_STRIDES or name == "mask":
        return ALIGNMENT if recipe.aligned_mask else 1
    if name in ALIGNED_POINTERS:
        return ALIGNMENT if recipe.aligned else 1
    known = recipe.aligned and name.startswith("stride_") and name not in UNKNOWN_STRIDES
    return STRIDE_UNIT if known else 1


_compiled: dict[tuple[Recipe, int], Any] = {}


def compiled(recipe: Recipe, device: int) -> Any:
    """The kernel, loaded on `device`, which is the current one.

    Raises ColdKernelError when it would have to be compiled or loaded while a stream is capturing.
    """
    kernel = _compiled.get((recipe, device))
    if kernel is None:
        if torch.cuda.is_current_stream_capturing():
            raise ColdKernelError(
                f"{recipe.kernel} kernel of triton_fa2 is not compiled yet, and a CUDA graph is being captured. Call "
                "flashdispatch.prepare(...) with the same arguments, or run the call once, before capturing"
            )
        major, minor = torch.cuda.get_device_capability(device)
        kernel = build(recipe, 10 * major + minor)
        _ = kernel.run  # loads it
        _compiled[recipe, device] = kernel
    return kernel


def starter(kernel: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """(start, fixed) of a loaded kernel: ``start(grid, 1, 1, stream, *fixed, *arguments)`` launches it.

    Triton 3.6's launcher is a function in C and a wrapper in Python that makes room for kernels that ask for scratch
    memory. Ours ask for none, and without the wrapper a launch costs the host a fifth less.
    """
    launcher = kernel.run
    scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    if triton.__version__.startswith("3.6.") and not scratch:
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        return launcher.launch, (kernel.function, *flags, None, None, kernel.packed_metadata, None, None, None)
    return launcher, (kernel.function, kernel.packed_metadata, None, None, None)


def compile_in_threads(recipes: Sequence[Recipe], device: int) -> None:
    """Compiles in threads beside each other, and loads; raises the first failure.

    Raises ColdKernelError while a stream is capturing, unless everything is there already.
    """
    missing = [recipe for recipe in dict.fromkeys(recipes) if (recipe, device) not in _compiled]
    if missing and not torch.cuda.is_current_stream_capturing():
        major, minor = torch.cuda.get_device_capability(device)
        with ThreadPoolExecutor() as pool:  # ptxas and LLVM run outside Python's lock
            list(pool.map(build, missing, [10 * major + minor] * len(missing)))
    for recipe in missing:
        compiled(recipe, device)  # now found on disk


def compile_in_processes(recipes: Sequence[Recipe], capability: tuple[int, int]) -> None:
    """Fills Triton's cache on disk from several processes: for many kernels, where threads would wait for each other.

    What does not compile is left to whoever asks for it, who then gets the error.
    """
    arch = 10 * capability[0] + capability[1]
    # Not forked: a process with a CUDA context can't be.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_build_quietly, recipe, arch) for recipe in dict.fromkeys(recipes)]:
            done.result()


def _build_quietly(recipe: Recipe, arch: int) -> None:
    with suppress(Exception):  # the compiler's errors have many types; `build` raises this one again
        build(recipe, arch)
