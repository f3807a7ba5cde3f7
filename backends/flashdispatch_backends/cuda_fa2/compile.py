"""From a recipe to a kernel that can be launched: for the GPU at hand, or for another architecture without one.

NVRTC compiles the files of this folder, with a recipe's macros, to a cubin (1 to 3 s). `Recipe` is all that this
depends on beside the architecture. Cubins are kept on disk, under a name that hashes all of it and the compiler's
version, and `compiled` keeps one loaded kernel per recipe and device.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import cupy
import torch
from cupy_backends.cuda.api import driver
from cupy_backends.cuda.libs import nvrtc
from filelock import FileLock

from flashdispatch_backends.cuda_fa2.recipe import Recipe
from flashdispatch_registry.errors import ColdKernelError
from flashdispatch_registry.tile_store import cache_dir

OPTIONS = ("-std=c++17", "-w", "--ptxas-options=-v")
"""The last one has the compiler's log say what a kernel takes."""


@cache
def sources() -> dict[str, bytes]:
    """The CUDA files of this folder, by name."""
    folder = files("flashdispatch_backends.cuda_fa2")
    found = (file for file in folder.iterdir() if file.name.endswith((".cu", ".cuh")))
    return {file.name: file.read_bytes() for file in sorted(found, key=lambda file: file.name)}


def target(arch: int) -> str:
    """Compute capability `arch` (90 for sm_90) as NVRTC takes it, with the instructions of that one alone."""
    return f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"


@dataclass(frozen=True, slots=True)
class Binary:
    """What NVRTC makes of a recipe."""

    ptx: bytes
    cubin: bytes
    log: str


_opening = threading.Lock()


@cache
def _open_nvrtc() -> None:
    """Has NVRTC open its library of built-ins: now and then that fails in threads beside each other (13.0)."""
    program = nvrtc.createProgram('extern "C" __global__ void nothing() {}', "nothing.cu", [], [])
    nvrtc.compileProgram(program, ())
    nvrtc.destroyProgram(program)


def compile_source(recipe: Recipe, arch: int) -> Binary:
    """Compiles for compute capability `arch`; needs no GPU.

    Raises RuntimeError with the compiler's log when it refuses, which an old NVRTC does for a new architecture.
    """
    with _opening:
        _open_nvrtc()
    texts = sources()
    headers = {name: text for name, text in texts.items() if name.endswith(".cuh")}
    program = nvrtc.createProgram(
        texts[recipe.source].decode(), recipe.source, list(headers.values()), [name.encode() for name in headers]
    )
    try:
        nvrtc.compileProgram(program, (f"-arch={target(arch)}", *OPTIONS, *recipe.options))
        # CuPy takes the last byte for a text's closing zero; without it tools find the file cut off.
        cubin = nvrtc.getCUBIN(program) + b"\0"
        return Binary(nvrtc.getPTX(program), cubin, nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        numbers = ".".join(map(str, nvrtc.getVersion()))
        log = nvrtc.getProgramLog(program).strip()
        raise RuntimeError(f"NVRTC {numbers} does not compile {recipe} for {target(arch)}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def path_of(recipe: Recipe, arch: int) -> Path:
    """The file of a recipe's cubin, whether it is there or not."""
    digest = hashlib.sha256()
    for part in (*sources().items(), *recipe.options, *OPTIONS, target(arch), nvrtc.getVersion()):
        text = repr(part).encode()
        digest.update(f"{len(text)} ".encode() + text)
    return cache_dir() / "cuda_fa2" / f"{recipe.kernel}-{target(arch)}-{digest.hexdigest()[:24]}.cubin"


def build(recipe: Recipe, arch: int) -> Path:
    """Compiles for compute capability `arch`, or finds it compiled, by this process or another; needs no GPU.

    Raises RuntimeError as `compile_source` does, OSError when the cache folder can't be written.
    """
    path = path_of(recipe, arch)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                new = path.with_suffix(".new")
                new.write_bytes(compile_source(recipe, arch).cubin)
                new.replace(path)  # as a whole: a reader needs no lock
    return path


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that is loaded on a device."""

    function: int
    """The driver's handle."""
    threads: int
    shared_bytes: int
    module: Any
    """CuPy's RawModule, which owns the handle."""

    def start(self, grid: int, stream: int, parameters: int) -> None:
        """Launches `grid` blocks. `parameters` is the address of an array with the address of the struct."""
        driver.launchKernel(self.function, grid, 1, 1, self.threads, 1, 1, self.shared_bytes, stream, parameters, 0)


_compiled: dict[tuple[Recipe, int], Kernel] = {}


def compiled(recipe: Recipe, device: int) -> Kernel:
    """The kernel, loaded on `device`, which is the current one.

    Raises ColdKernelError when it would have to be compiled or loaded while a stream is capturing.
    """
    kernel = _compiled.get((recipe, device))
    if kernel is None:
        if torch.cuda.is_current_stream_capturing():
            raise ColdKernelError(
                f"{recipe.kernel} kernel of cuda_fa2 is not compiled yet, and a CUDA graph is being captured. Call "
                "flashdispatch.prepare(...) with the same arguments, or run the call once, before capturing"
            )
        kernel = _compiled[recipe, device] = _loaded(build(recipe, capability(device)), recipe)
    return kernel


def _loaded(path: Path, recipe: Recipe) -> Kernel:
    """Loads a cubin. One that the driver refuses is deleted, so that the next call compiles it again."""
    try:
        module = cupy.RawModule(path=str(path))
        raw = module.get_function(recipe.entry)
        if recipe.shared_bytes > 48 << 10:
            raw.max_dynamic_shared_size_bytes = recipe.shared_bytes
        return Kernel(raw.kernel.ptr, recipe.threads, recipe.shared_bytes, module)
    except driver.CUDADriverError as error:
        path.unlink(missing_ok=True)
        error.add_note(f"While loading {recipe} from {path}, which is deleted now")
        raise


def capability(device: int) -> int:
    """90 for a GPU of sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def compile_in_threads(recipes: Sequence[Recipe], device: int) -> None:
    """Compiles in threads beside each other, and loads; raises the first failure.

    Raises ColdKernelError while a stream is capturing, unless everything is there already.
    """
    missing = [recipe for recipe in dict.fromkeys(recipes) if (recipe, device) not in _compiled]
    if len(missing) > 1 and not torch.cuda.is_current_stream_capturing():
        arch = capability(device)
        with ThreadPoolExecutor() as pool:  # NVRTC runs without Python's lock
            list(pool.map(build, missing, [arch] * len(missing)))
    for recipe in missing:
        compiled(recipe, device)


def compile_what_can(recipes: Sequence[Recipe], arch: int) -> None:
    """Compiles in threads beside each other, loading nothing.

    What does not compile is left to whoever asks for it, who then gets the error.
    """

    def build_or_pass(recipe: Recipe) -> None:
        with suppress(RuntimeError):  # `build` raises it again
            build(recipe, arch)

    with ThreadPoolExecutor() as pool:
        list(pool.map(build_or_pass, dict.fromkeys(recipes)))


def require_toolchain(device: int) -> None:
    """Raises RuntimeError where NVRTC or the driver can't serve CuPy on `device`, with a note that says what to do."""
    cuda, arch = driver.get_build_version() // 1000, capability(device)
    try:
        known = nvrtc.getSupportedArchs()
    except (RuntimeError, OSError, ImportError) as error:
        wheel = "nvidia-cuda-nvrtc" if cuda >= 13 else f"nvidia-cuda-nvrtc-cu{cuda}"
        fix = f"pip install {wheel}, or install the CUDA {cuda} toolkit"
        raise _unfit(f"CuPy finds no NVRTC, CUDA's compiler at run time: {error}", fix) from error
    if arch not in known:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise _unfit(f"NVRTC {version} does not know sm_{arch}", "install a newer CuPy and NVRTC")
    supported = cupy.cuda.runtime.driverGetVersion() // 1000
    if supported < cuda:
        fix = f"update the driver, or pip uninstall cupy-cuda{cuda}x; pip install cupy-cuda{supported}x"
        raise _unfit(f"the driver supports CUDA {supported}, and CuPy is built for CUDA {cuda}", fix)


def _unfit(what: str, fix: str) -> RuntimeError:
    error = RuntimeError(what)
    error.add_note(fix)
    return error
