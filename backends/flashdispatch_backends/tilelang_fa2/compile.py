"""From a recipe to a kernel that can be called: for the GPU at hand, or for another architecture without one.

A kernel's Python is traced into TileLang's program (0.2 s), which is lowered to CUDA and C (5 s), compiled by nvcc
(5 s) and linked (1 s). `Recipe` is all that this depends on beside the architecture, and `compiled` keeps one kernel
per recipe and device. TileLang's cache on disk lies beneath: its key is a hash of the traced program, the architecture,
the compiler's settings and TileLang's version, so that another process only traces and loads.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tilelang
import torch
from tilelang import tvm
from tilelang.contrib.cc import get_cplus_compiler

from flashdispatch_backends.tilelang_fa2.backward import delta, dkdv, dq, total
from flashdispatch_backends.tilelang_fa2.forward import forward
from flashdispatch_backends.tilelang_fa2.recipe import Recipe
from flashdispatch_backends.tilelang_fa2.scores import ROUNDED
from flashdispatch_registry.errors import ColdKernelError

KERNELS: dict[str, Callable[[Any], Any]] = {
    "forward": forward,
    "delta": delta,
    "total": total,
    "dq": dq,
    "dkdv": dkdv,
}
"""The function that traces each kernel."""
PASS_CONFIGS: dict[str, Any] = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,
}
"""Exponentials by the hardware's instruction, and no guards of TileLang's own: the kernels guard their accesses."""


def suited(recipe: Recipe, arch: int) -> Recipe:
    """`recipe` as compute capability `arch` can run it: before 90 there is no TMA, and TileLang pipelines no tile."""
    if arch >= 90:
        return recipe
    shape = recipe.shape._replace(num_stages=min(recipe.shape.num_stages, 1))
    return replace(recipe, tma=False, shape=shape)


def target(arch: int) -> dict[str, str]:
    """Compute capability `arch` (90 for sm_90) as TileLang takes it, with the instructions of that one alone."""
    return {"kind": "cuda", "arch": f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"}


_tracing = threading.Lock()


def program(recipe: Recipe) -> Any:
    """The kernel as TileLang traces it: a PrimFunc, whose ``script()`` is text."""
    # One at a time: ast.parse of CPython 3.11, which TileLang calls, now and then fails when threads use it together.
    with _tracing, _quiet(f"tracing {recipe}"):
        return KERNELS[recipe.kernel](recipe)


def lowered(recipe: Recipe, arch: int) -> Any:
    """Lowers for compute capability `arch`; needs neither a GPU nor nvcc.

    Returns TileLang's CompiledArtifact: ``kernel_source`` is the CUDA text, ``device_mod`` what it was made from.
    """
    func = program(suited(recipe, arch))
    aim = tvm.target.Target(target(arch))
    with _quiet(f"lowering {recipe} for {aim}"), aim, tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS):
        return tilelang.lower(func, target=aim, enable_device_compile=False)


_built: dict[tuple[Recipe, int], Any] = {}


def build(recipe: Recipe, arch: int) -> Any:
    """Compiles for compute capability `arch`, or finds it compiled; needs no GPU. Returns TileLang's JITKernel."""
    recipe = suited(recipe, arch)
    kernel = _built.get((recipe, arch))
    if kernel is None:
        func = program(recipe)
        with _quiet(f"compiling {recipe} for {target(arch)}"):
            kernel = tilelang.compile(
                func, target=target(arch), execution_backend="tvm_ffi", pass_configs=PASS_CONFIGS, verbose=_verbose()
            )
        _built[recipe, arch] = kernel
    return kernel


def require_compilers() -> None:
    """Raises FileNotFoundError where TileLang would find no nvcc, or no C++ compiler for a kernel's host code."""
    home = tilelang.env.CUDA_HOME
    if not home or shutil.which(Path(home, "bin", "nvcc")) is None:
        where = f"in {home}/bin" if home else "on this machine"
        error = FileNotFoundError(f"TileLang compiles with nvcc, and there is none {where}")
        error.add_note("install the CUDA toolkit, and set CUDA_HOME where its nvcc is not on PATH")
        raise error
    if get_cplus_compiler() is None:
        error = FileNotFoundError("TileLang compiles with a C++ compiler, and there is none on PATH")
        error.add_note("install g++ or clang++, or set CXX")
        raise error


_compiled: dict[tuple[Recipe, int], Callable[..., None]] = {}


def compiled(recipe: Recipe, device: int) -> Callable[..., None]:
    """The kernel, loaded on `device`, which is the current one: called with its arguments, it starts.

    It starts on torch's current stream of the tensors' device, which it leaves as the current one. It checks dtypes,
    shapes and devices itself; addresses and strides of TMA loads must suit, and no size that makes up its grid, nor any
    of a tensor loaded by TMA, may be 0.

    Raises ColdKernelError when it would have to be compiled or loaded while a stream is capturing.
    """
    start = _compiled.get((recipe, device))
    if start is None:
        if torch.cuda.is_current_stream_capturing():
            raise ColdKernelError(
                f"{recipe.kernel} kernel of tilelang_fa2 is not compiled yet, and a CUDA graph is being captured. Call "
                "flashdispatch.prepare(...) with the same arguments, or run the call once, before capturing"
            )
        major, minor = torch.cuda.get_device_capability(device)
        kernel = build(recipe, 10 * major + minor)
        start = _entry(kernel)
        start(*_smallest(kernel.prim_func, torch.device("cuda", device)))
        _compiled[recipe, device] = start
    return start


def _entry(kernel: Any) -> Callable[..., None]:
    """What `kernel` calls, without the wrapper in Python around it: 2 µs of host time instead of 10.

    A kernel found on disk is a loaded library; one that was just compiled is linked once more.
    """
    executable = kernel.adapter.get_exportable_executable()
    library = executable.jit() if isinstance(executable, tvm.runtime.Executable) else executable
    start: Callable[..., None] = library.get_function("main")
    return start


def _smallest(func: Any, device: torch.device) -> list[Any]:
    """Arguments of the smallest launch, with sizes of 1: the only way to have a kernel loaded before it is needed."""

    def size(extent: Any) -> int:
        if isinstance(extent, tvm.tirx.IntImm):
            return int(extent)
        return 4 if extent.name == ROUNDED else 1

    def argument(parameter: Any) -> Any:
        if parameter not in func.buffer_map:
            return 1
        tensor = func.buffer_map[parameter]
        return torch.zeros([size(extent) for extent in tensor.shape], dtype=getattr(torch, tensor.dtype), device=device)

    return [argument(parameter) for parameter in func.params]


def compile_in_threads(recipes: Sequence[Recipe], device: int) -> None:
    """Compiles in threads beside each other, and loads; raises the first failure.

    Raises ColdKernelError while a stream is capturing, unless everything is there already.
    """
    missing = [recipe for recipe in dict.fromkeys(recipes) if (recipe, device) not in _compiled]
    if missing and not torch.cuda.is_current_stream_capturing():
        major, minor = torch.cuda.get_device_capability(device)
        with ThreadPoolExecutor() as pool:  # lowering lets go of Python's lock, and nvcc is a process of its own
            list(pool.map(build, missing, [10 * major + minor] * len(missing)))
    for recipe in missing:
        compiled(recipe, device)


def compile_what_can(recipes: Sequence[Recipe], capability: tuple[int, int]) -> None:
    """Compiles in threads beside each other, loading nothing.

    What does not compile is left to whoever asks for it, who then gets the error.
    """
    arch = 10 * capability[0] + capability[1]

    def build_or_pass(recipe: Recipe) -> None:
        with suppress(Exception):  # the compilers' errors have many types; `build` raises this one again
            build(recipe, arch)

    with ThreadPoolExecutor() as pool:
        list(pool.map(build_or_pass, dict.fromkeys(recipes)))


# TileLang prints to the terminal what it begins and ends, and a traced kernel's whole source when tracing fails. What
# a thread that compiles for us logs is kept here instead. Other threads, and handlers that others add, are left alone.

_logger = logging.getLogger(__name__)
_thread = threading.local()


def _verbose() -> bool:
    """Whether TILELANG_VERBOSE asks for all that TileLang has to say."""
    return bool(tilelang.env.get_default_verbose())


def _passes(record: logging.LogRecord) -> bool:
    """A filter of TileLang's own handlers: False for what `_quiet` keeps."""
    kept: list[logging.LogRecord] | None = getattr(_thread, "kept", None)
    if kept is None or _verbose():
        return True
    kept.append(record)
    return False


for _handler in logging.getLogger("tilelang").handlers:
    _handler.addFilter(_passes)


@contextmanager
def _quiet(doing: str) -> Iterator[None]:
    """Keeps TileLang's messages off the terminal, unless TILELANG_VERBOSE is set.

    An exception gets them, and `doing`, as notes; without one, warnings go to this module's logger.
    """
    kept = _thread.kept = []
    try:
        yield
    except Exception as error:
        error.add_note(f"While {doing}, with TileLang {tilelang.__version__}")
        for record in kept:
            error.add_note(record.getMessage())
        raise
    finally:
        _thread.kept = None
    for record in kept:
        if record.levelno >= logging.WARNING:
            _logger.warning("TileLang, while %s: %s", doing, record.getMessage())
