"""What a kernel compiles to: registers, spills, shared memory, telling instructions, and every stage as text."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

from flashdispatch_backends.triton_fa2.compile import KERNELS, Recipe, build
from flashdispatch_registry.arch import sm_number
from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.kernels import KernelFacts

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_COUNTED = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma.sync": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "fma.f32": r"\bfma\.rn\.f32",
    "ex2": r"\bex2\.approx",
    "cp.async": r"\bcp\.async\.(cg|ca)",
    "ldmatrix": r"\bldmatrix",
}
"""What to count in PTX: instructions that tell the hardware path."""


def facts(recipe: Recipe, arch: str) -> KernelFacts:
    """Compiles `recipe` for `arch` and reads what came out."""
    number = sm_number(arch)
    if number is None:
        raise InvalidRequestError(f"Triton compiles for NVIDIA architectures such as sm_90, not for {arch}")
    try:
        kernel = build(recipe, number)
    except RuntimeError as error:
        raise InvalidRequestError(f"Triton {triton.__version__} can't compile for {arch}: {error}") from error
    usage, sass = _disassemble(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    return KernelFacts(
        kernel=recipe.kernel,
        variant=_variant(recipe),
        arch=arch,
        tile=recipe.shape._asdict(),
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        threads=32 * recipe.shape.num_warps,
        instructions={name: len(re.findall(pattern, ptx)) for name, pattern in _COUNTED.items()},
        texts={"ttir": kernel.asm["ttir"], "ttgir": kernel.asm["ttgir"], "ptx": ptx, "sass": sass},
    )


def _disassemble(cubin: bytes) -> tuple[dict[str, int], str]:
    """Resource usage and machine code of a cubin, by the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [str(_BIN / "cuobjdump"), file.name]

        def told(what: str) -> str:
            # The command and its arguments are ours.
            return subprocess.run([*dump, what], check=True, capture_output=True, text=True).stdout  # noqa: S603

        usage, sass = told("--dump-resource-usage"), told("--dump-sass")
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    return {name: int(value) for name, value in found.items()}, sass


def _variant(recipe: Recipe) -> str:
    """Which of the forms that one problem may launch: a float mask has one of two dtypes, and dLSE may not arrive."""
    types = dict(zip(KERNELS[recipe.kernel].arg_names, recipe.types, strict=True))
    float_mask = types.get("mask") in ("*fp16", "*bf16", "*fp32")
    said = [f"mask {types['mask'][1:]}"] if float_mask else []
    return ", ".join([*said, *(["with dLSE"] if types.get("dlse", "constexpr") != "constexpr" else [])])
