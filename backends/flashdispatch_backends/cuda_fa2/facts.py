"""What a kernel compiles to: registers, spills, shared memory, telling instructions, and every stage as text."""

from __future__ import annotations

import re

from flashdispatch_backends.cuda_fa2.compile import compile_source
from flashdispatch_backends.cuda_fa2.recipe import Recipe
from flashdispatch_registry.arch import sm_number
from flashdispatch_registry.disassembly import sass_of
from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.kernels import KernelFacts

_COUNTED = {
    "mma.sync": r"\bmma\.sync",
    "ldmatrix": r"\bldmatrix",
    "cp.async": r"\bcp\.async\.(cg|ca)",
    "ex2": r"\bex2\.approx",
    "bar.sync": r"\bbar(rier)?\.sync",
}
"""What to count in PTX: instructions that tell the hardware path."""


def facts(recipe: Recipe, arch: str) -> KernelFacts:
    """Compiles `recipe` for `arch` and reads what came out. Machine code is among the texts where a disassembler is.

    Raises InvalidRequestError for what NVRTC can't compile for.
    """
    number = sm_number(arch)
    if number is None or number < 80:
        raise InvalidRequestError(f"cuda_fa2 compiles for NVIDIA architectures from sm_80 on, not for {arch}")
    try:
        binary = compile_source(recipe, number)
    except RuntimeError as error:
        raise InvalidRequestError(str(error)) from error
    ptx = binary.ptx.decode()
    texts = {"cuda": "\n".join((*recipe.options, "")), "ptx": ptx}
    machine_code = sass_of(binary.cubin)
    return KernelFacts(
        kernel=recipe.kernel,
        variant=_variant(recipe),
        arch=arch,
        tile=recipe.shape._asdict(),
        registers=_number(r"Used (\d+) registers", binary.log),
        spill_bytes=_number(r"(\d+) bytes stack frame", binary.log),
        shared_bytes=recipe.shared_bytes,
        threads=recipe.threads,
        instructions={name: len(re.findall(pattern, ptx)) for name, pattern in _COUNTED.items()},
        texts=texts | ({"sass": machine_code} if machine_code else {}),
    )


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    if found is None:
        raise RuntimeError(f"NVRTC's log does not say what {pattern!r} looks for:\n{log}")
    return int(found.group(1))


def _variant(recipe: Recipe) -> str:
    """Which of the forms that one problem may launch: a float mask has one of two dtypes."""
    return f"mask {recipe.mask}" if recipe.mask not in (None, "bool") else ""
