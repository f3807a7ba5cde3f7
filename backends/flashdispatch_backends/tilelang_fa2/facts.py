"""What a kernel compiles to: registers, spills, shared memory, telling instructions, and every stage as text."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import tilelang
from tilelang.contrib import nvcc

from flashdispatch_backends.tilelang_fa2.compile import lowered, suited, target
from flashdispatch_backends.tilelang_fa2.recipe import Recipe
from flashdispatch_registry.arch import sm_number
from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.kernels import KernelFacts

_COUNTED = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma.sync": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "ex2": r"\bex2\.approx",
    "tma": r"\bcp\.async\.bulk\.tensor",
    "cp.async": r"\bcp\.async\.(cg|ca)",
    "ldmatrix": r"\bldmatrix",
    "setmaxnreg": r"\bsetmaxnreg",
}
"""What to count in PTX: instructions that tell the hardware path."""


def facts(recipe: Recipe, arch: str) -> KernelFacts:
    """Compiles `recipe` for `arch` and reads what came out.

    Raises InvalidRequestError for what TileLang or nvcc can't compile for, and where nvcc or cuobjdump is missing.
    """
    number = sm_number(arch)
    if number is None:
        raise InvalidRequestError(f"TileLang compiles these kernels for NVIDIA architectures such as sm_90, not {arch}")
    dump = _disassembler()
    try:
        artifact = lowered(recipe, number)
        binary = _compile(artifact.kernel_source, number)
    except (RuntimeError, ValueError, OSError) as error:
        # nvcc's error comes after the whole source
        what = str(error).rpartition("Compilation error:\n")[2]
        raise InvalidRequestError(f"TileLang {tilelang.__version__} can't compile for {arch}: {what}") from error
    usage, ptx, sass = _disassemble(binary, dump)
    (kernel,) = artifact.device_mod.functions.values()
    return KernelFacts(
        kernel=recipe.tile_name,
        variant=_variant(recipe),
        arch=arch,
        tile=suited(recipe, number).shape._asdict(),
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=usage["SHARED"] + int(kernel.attrs.get("dyn_shared_memory_buf", 0)),
        threads=int(kernel.attrs["thread_extent"]["threadIdx.x"]),
        instructions={name: len(re.findall(pattern, ptx)) for name, pattern in _COUNTED.items()},
        texts={"tir": artifact.device_mod.script(), "cuda": artifact.kernel_source, "ptx": ptx, "sass": sass},
    )


def _compile(source: str, number: int) -> bytes:
    """A fatbin of PTX and machine code, by the nvcc that TileLang uses and with the options that it gives it."""
    token = target(number)["arch"].removeprefix("sm_")
    gencode = ["-gencode", f"arch=compute_{token},code=[compute_{token},sm_{token}]"]
    options = [*nvcc.default_compile_options(), "--use_fast_math"]
    return bytes(nvcc.compile_cuda(source, "fatbin", gencode, options))


def _disassembler() -> str:
    """The path of cuobjdump: the CUDA toolkit's, else the one that comes with Triton, which torch brings on Linux."""
    found = shutil.which("cuobjdump")
    triton = find_spec("triton")  # not imported
    folders = [Path(nvcc.CUDA_HOME, "bin")] if nvcc.CUDA_HOME else []
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    for path in [*([found] if found else []), *(str(folder / "cuobjdump") for folder in folders)]:
        if Path(path).is_file():
            return path
    raise InvalidRequestError(
        "cuobjdump, which reads a compiled kernel, is not on this machine: install the CUDA toolkit, or Triton "
        "(pip install triton), which brings one"
    )


def _disassemble(binary: bytes, dump: str) -> tuple[dict[str, int], str, str]:
    """Resource usage, PTX and machine code of a fatbin."""
    with tempfile.NamedTemporaryFile(suffix=".fatbin") as file:
        file.write(binary)
        file.flush()

        def told(what: str) -> str:
            # The command and its arguments are ours.
            return subprocess.run([dump, what, file.name], check=True, capture_output=True, text=True).stdout  # noqa: S603

        usage, ptx, sass = told("--dump-resource-usage"), told("--dump-ptx"), told("--dump-sass")
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    return {name: int(value) for name, value in found.items()}, ptx, sass


def _variant(recipe: Recipe) -> str:
    """Which of the forms that one problem may launch: a float mask has one of two dtypes, and dLSE may not arrive."""
    said = [f"mask {recipe.mask}"] if recipe.mask not in (None, "bool") else []
    return ", ".join([*said, *(["with dLSE"] if recipe.dlse else [])])
