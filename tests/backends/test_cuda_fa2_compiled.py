"""cuda_fa2 without a GPU: NVRTC compiles its kernels for each architecture, and what they take is within bounds.

A covering set: every kernel on every architecture, every macro in some kernel, the widest and the narrowest heads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from flashdispatch_backends.cuda_fa2.arguments import described
from flashdispatch_backends.cuda_fa2.compile import Binary, compile_source
from flashdispatch_backends.cuda_fa2.facts import facts
from flashdispatch_backends.cuda_fa2.launch import backend
from flashdispatch_backends.cuda_fa2.recipe import Recipe
from flashdispatch_backends.cuda_fa2.tiles import resident_and_streamed
from flashdispatch_registry import Problem
from flashdispatch_registry.disassembly import cuobjdump
from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.tile_table import SHARED_BYTES, family

BOOL = {"attn_mask": "bool", "attn_mask_shape": (2, 4, 256, 256)}
FLOAT = {"attn_mask": "float", "attn_mask_shape": (2, 4, 256, 256)}
ARCHS = (80, 86, 89, 90, 100, 120)
REGISTERS = 255
"""A thread's, on all of these architectures."""


def problem(arch: int, head_dim: int, **changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "arch": f"sm_{arch}", "dtype": torch.bfloat16, "batch": 2, "heads_q": 4, "heads_kv": 4, "seqlen_q": 256,
        "seqlen_k": 256, "head_dim": head_dim, "head_dim_v": head_dim, "scale": 0.125, "needs_grad": ("q", "k", "v"),
    }  # fmt: skip
    return Problem(**(fields | changes))


@dataclass(frozen=True)
class Wanted:
    """What is compiled."""

    arch: int
    recipe: Recipe


def kernels(arch: int, head_dim: int, *names: str, mask_dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Kernels of one problem, by a name that says what they are."""
    found = {
        each.recipe.kernel: each.recipe
        for each in described(problem(arch, head_dim, **changes), mask_dtype, backend.shape)
    }
    said = " ".join(filter(None, (str(changes.get("attn_mask") or ""), "softcap" if "softcap" in changes else "")))
    return {f"sm_{arch} d{head_dim} {name} {said}".strip(): Wanted(arch, found[name]) for name in names}


EVERY = ("forward", "dq", "dkdv")
FLOAT16 = {"dtype": torch.float16}
WANTED: dict[str, Wanted] = {
    **{name: wanted for arch in ARCHS for name, wanted in kernels(arch, 128, *EVERY).items()},
    **kernels(90, 64, *EVERY),
    **kernels(90, 256, *EVERY),
    **kernels(86, 256, *EVERY),
    **kernels(120, 16, *EVERY),
    **kernels(80, 72, *EVERY, softcap=20.0, **FLOAT16),
    **kernels(90, 128, *EVERY, **FLOAT),
    **kernels(90, 64, *EVERY, **BOOL, softcap=20.0),
    **kernels(100, 192, *EVERY, **FLOAT, mask_dtype=torch.bfloat16),
}
_FORWARD = WANTED["sm_90 d64 forward"]
WANTED |= {
    "sm_90 d64 forward unaligned": replace(_FORWARD, recipe=replace(_FORWARD.recipe, aligned=False)),
    "sm_90 d64 dkdv of dk": Wanted(90, replace(WANTED["sm_90 d64 dkdv"].recipe, outputs=("dk",))),
    "sm_90 d256 dkdv of dv": Wanted(90, replace(WANTED["sm_90 d256 dkdv"].recipe, outputs=("dv",))),
    "sm_90 d128 dq unpaired": Wanted(90, replace(WANTED["sm_90 d128 dq float"].recipe, paired_mask=False)),
}


def budget(recipe: Recipe) -> int:
    """Bytes of a thread's stack that a kernel may spill to.

    Tiles are chosen by time, and the fastest for wide tiles spill a few numbers outside the loop; masks and softcaps,
    which need more registers, read the tiles of plain scores with more of it.
    """
    return 112 if recipe.plain else 256


Binaries = Callable[[str], Binary]


@pytest.fixture(scope="module")
def binary(request: pytest.FixtureRequest) -> Iterator[Binaries]:
    """What became of one of `WANTED`. Whatever the selected tests name is begun at once, in their order."""
    pool = ThreadPoolExecutor(os.cpu_count())
    begun = cache(lambda name: pool.submit(compile_source, WANTED[name].recipe, WANTED[name].arch))
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec"):
            for name in {item.callspec.params.get("name")} & set(WANTED):
                begun(name)
    yield lambda name: begun(name).result()
    pool.shutdown(cancel_futures=True)


def number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found, log
    return int(found.group(1))


def test_the_set_is_small() -> None:
    assert 40 <= len(WANTED) <= 60
    assert {wanted.arch for wanted in WANTED.values()} == set(ARCHS)


@pytest.mark.parametrize("name", WANTED)
def test_it_compiles_within_the_registers_and_shared_memory_there_are(name: str, binary: Binaries) -> None:
    wanted, found = WANTED[name], binary(name)
    assert found.cubin.startswith(b"\x7fELF")
    assert number(r"Used (\d+) registers", found.log) <= REGISTERS
    assert number(r"(\d+) bytes stack frame", found.log) <= budget(wanted.recipe)
    # All of it is dynamic, so that what is asked for at the launch is what a block has.
    assert "bytes smem" not in found.log
    assert wanted.recipe.shared_bytes <= SHARED_BYTES[family(f"sm_{wanted.arch}")]
    # A block must fit into the registers of a multiprocessor.
    assert number(r"Used (\d+) registers", found.log) * wanted.recipe.threads <= 65536


@pytest.mark.parametrize("name", WANTED)
def test_products_are_those_of_its_dtype_and_p_stays_in_registers(name: str, binary: Binaries) -> None:
    recipe, ptx = WANTED[name].recipe, binary(name).ptx.decode()
    types = set(re.findall(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(\w+)\.(\w+)\.f32", ptx))
    assert types == ({("bf16", "bf16")} if recipe.dtype == "bfloat16" else {("f16", "f16")})
    assert ("cp.async.cg" in ptx) == recipe.aligned
    # Results pass through shared memory at the end, and P and dS where warps share rows; nothing else does.
    resident, streamed = resident_and_streamed(recipe.kernel, recipe.shape)
    tiles_of_rows = resident * recipe.sides // recipe.shape.num_warps // 16
    widths = {"dk": recipe.block_d, "dv": recipe.block_dv}
    results = [widths[name] for name in recipe.outputs] or [
        recipe.block_d if recipe.kernel == "dq" else recipe.block_dv
    ]
    exchanged = streamed * len(results) if recipe.sides > 1 else 0
    columns = (sum(results) + exchanged) // recipe.sides
    assert ptx.count("st.shared.b32") == tiles_of_rows * columns // 8 * 2


@pytest.mark.parametrize("name", ["sm_90 d128 forward", "sm_90 d64 dkdv"])
def test_no_atomics_that_would_make_gradients_depend_on_an_order(name: str, binary: Binaries) -> None:
    assert not re.search(r"\b(atom|red)\.", binary(name).ptx.decode())


def test_a_struct_of_another_size_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdispatch_backends.cuda_fa2.recipe.ARGUMENT_BYTES", 440)
    with pytest.raises(RuntimeError, match=r"arguments\.py describes another struct"):
        compile_source(WANTED["sm_90 d64 forward"].recipe, 90)


# What `flashdispatch source` shows


def test_facts_of_a_kernel() -> None:
    (found,) = backend.facts(problem(90, 64, needs_grad=()))
    assert (found.kernel, found.arch, found.threads) == ("forward", "sm_90", 128)
    assert 100 < found.registers <= REGISTERS
    assert found.instructions["mma.sync"] == 256
    assert found.instructions["cp.async"] > 0
    assert ".entry forward_kernel" in found.texts["ptx"]
    assert "-DBLOCK_D=64" in found.texts["cuda"]


@pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump on this machine")
def test_machine_code_is_among_the_texts_where_a_disassembler_is() -> None:
    (found,) = backend.facts(problem(80, 16, needs_grad=()))
    assert "HMMA" in found.texts["sass"]


def test_without_a_disassembler_the_other_texts_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdispatch_registry.disassembly.cuobjdump", lambda: None)
    (found,) = backend.facts(problem(80, 16, needs_grad=()))
    assert list(found.texts) == ["cuda", "ptx"]


@pytest.mark.parametrize(("arch", "words"), [("sm_75", "from sm_80 on"), ("cpu", "from sm_80 on"), ("sm_81", "sm_81")])
def test_an_architecture_that_it_can_not_be_compiled_for(arch: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        facts(WANTED["sm_90 d64 forward"].recipe, arch)
