"""tilelang_fa2 without a GPU and without nvcc: the CUDA that its kernels are lowered to, on each architecture.

Lowered in as many threads as there are cores, since a kernel takes seconds; one that loads no tile by TMA takes most.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from flashdispatch_backends.tilelang_fa2 import facts
from flashdispatch_backends.tilelang_fa2.arguments import described
from flashdispatch_backends.tilelang_fa2.compile import lowered, program, suited
from flashdispatch_backends.tilelang_fa2.launch import backend
from flashdispatch_backends.tilelang_fa2.recipe import Recipe
from flashdispatch_registry import Problem
from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.tile_table import SHARED_BYTES, family

BOOL = {"attn_mask": "bool", "attn_mask_shape": (2, 1, 1, 256)}
FLOAT = {"attn_mask": "float", "attn_mask_shape": (2, 4, 256, 256)}
LENGTHS = {"q_lens": True, "kv_lens": True}


def problem(arch: int, head_dim: int, **changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "arch": f"sm_{arch}", "dtype": torch.float16, "batch": 2, "heads_q": 4, "heads_kv": 4, "seqlen_q": 256,
        "seqlen_k": 256, "head_dim": head_dim, "head_dim_v": head_dim, "scale": 0.125, "needs_grad": ("q", "k", "v"),
    }  # fmt: skip
    return Problem(**(fields | changes))


def recipe(asked: Problem, tile_name: str, **changes: Any) -> Recipe:
    """Of one kernel of a problem."""
    found = [launch.recipe for launch in described(asked, torch.float32, backend.shape)]
    (one,) = [each for each in found if each.tile_name == tile_name]
    return replace(one, **changes)


@dataclass(frozen=True)
class Wanted:
    """What is lowered."""

    arch: int
    recipe: Recipe

    @property
    def suited(self) -> Recipe:
        return suited(self.recipe, self.arch)


def family_of(arch: int, head_dim: int, *kernels: str, **changes: Any) -> dict[str, Wanted]:
    """Kernels of one problem, by name."""
    asked = problem(arch, head_dim, **changes)
    return {f"sm_{arch} d{head_dim} {kernel}": Wanted(arch, recipe(asked, kernel)) for kernel in kernels}


WANTED: dict[str, Wanted] = {
    # The slowest come first.
    **family_of(80, 16, "dkdv", "dq", "delta"),
    "sm_80 d72 packed": Wanted(80, recipe(problem(80, 72, softcap=20.0, **LENGTHS), "forward", packed=True)),
    **family_of(80, 64, "total", **FLOAT),
    **family_of(89, 64, "total", **FLOAT),
    **family_of(89, 16, "delta"),
    **family_of(90, 128, "dkdv", "forward", "dq", "delta"),
    **family_of(90, 256, "dk", "dv"),
    **family_of(90, 64, "total", **FLOAT),
    "sm_90 d64 unaligned": Wanted(90, recipe(problem(90, 64, **FLOAT), "total", tma=False)),
    "sm_90 d72 dkdv": Wanted(90, recipe(problem(90, 72, softcap=20.0, **BOOL, **LENGTHS), "dkdv")),
    "sm_100 d64 dv128": Wanted(100, recipe(problem(100, 64, head_dim_v=128, dtype=torch.bfloat16), "forward")),
    **family_of(100, 64, "dkdv", "dq", "delta"),
    **family_of(100, 256, "total", **FLOAT),
}
"""Every kernel on every architecture but for sm_89, which a test shows to be lowered as sm_80 is."""

KIB = 1024
SCORED = [name for name, wanted in WANTED.items() if wanted.recipe.kernel != "delta"]


@dataclass(frozen=True)
class Text:
    """What became of a recipe."""

    cuda: str
    shared_bytes: int
    threads: int
    artifact: Any
    """TileLang's own."""


def lower(wanted: Wanted) -> Text:
    artifact = lowered(wanted.recipe, wanted.arch)
    (kernel,) = artifact.device_mod.functions.values()
    barriers = 8 * sum(map(int, re.findall(r"__shared__ .*\buint64_t \w+\[(\d+)\]", artifact.kernel_source)))
    return Text(
        artifact.kernel_source,
        int(kernel.attrs.get("dyn_shared_memory_buf", 0)) + -(-barriers // KIB) * KIB,  # tiles begin at multiples of it
        int(kernel.attrs["thread_extent"]["threadIdx.x"]),
        artifact,
    )


Texts = Callable[[str], Text]


@pytest.fixture(scope="module")
def text(request: pytest.FixtureRequest) -> Iterator[Texts]:
    """What became of one of `WANTED`. Whatever the selected tests name is begun at once, in their order."""
    pool = ThreadPoolExecutor(os.cpu_count())
    begun = cache(lambda name: pool.submit(lower, WANTED[name]))
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec"):
            begun(item.callspec.params["name"])
    yield lambda name: begun(name).result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", WANTED)
def test_it_asks_for_no_more_shared_memory_than_there_is(name: str, text: Texts) -> None:
    found, wanted = text(name), WANTED[name]
    assert found.shared_bytes <= SHARED_BYTES[family(f"sm_{wanted.arch}")]
    # On sm_90 and later one warp group more copies.
    compute = 32 * wanted.recipe.shape.num_warps
    assert found.threads in ((compute, compute + 128) if wanted.suited.tma else (compute,))


@pytest.mark.parametrize("name", SCORED)
def test_products_run_on_tensor_cores_and_on_sm_90_on_its_own(name: str, text: Texts) -> None:
    cuda = text(name).cuda
    products = set(re.findall(r"tl::(wgmma|mma_sync|tcgen05mma)\w*<", cuda))
    assert products == {"wgmma" if WANTED[name].arch == 90 else "mma_sync"}
    assert cuda.count("tl::DataType::kFloat32") > 0
    assert ("kBFloat16" in cuda) == (WANTED[name].recipe.dtype == "bfloat16")


STREAMED = {"forward": "qkv", "total": "qk", "dq": ("q", "k", "v", "dout"), "dkdv": ("q", "k", "v", "dout")}
"""What each kernel reads as tiles."""


@pytest.mark.parametrize("name", SCORED)
def test_tiles_are_loaded_by_tma_where_the_recipe_says_so_and_one_by_one_else(name: str, text: Texts) -> None:
    cuda, wanted = text(name).cuda, WANTED[name].suited
    by_tma = set(re.findall(r"tl::tma_load\((\w+)_desc", cuda)) - {"rows"}
    one_by_one = set(re.findall(r" = (q|k|v|dout)\[", cuda))
    streamed = set(STREAMED[wanted.kernel]) - ({"v"} if wanted.outputs == ("dv",) else set())
    assert (by_tma, one_by_one) == ((streamed, set()) if wanted.tma else (set(), streamed))
    assert wanted.tma == (WANTED[name].arch >= 90 and "unaligned" not in name)


@pytest.mark.parametrize("name", WANTED)
def test_offsets_are_64_bit(name: str, text: Texts) -> None:
    cuda = text(name).cuda
    declared = cuda.partition("__launch_bounds__")[2].partition("{")[0]
    assert not re.search(r"\bint (?!mask_size)\w+_[bshmn]\b", declared)  # a stride
    tensors = re.findall(r"\* __restrict__ (\w+)", declared)
    of_rows = [tensor for tensor in tensors if tensor not in ("q_lens", "kv_lens", "q_starts", "k_starts")]
    seen = 0
    for at in re.finditer(rf"\b({'|'.join(of_rows or ['-'])})\[", cuda):
        line = cuda[at.end() :].partition("\n")[0]
        index = line[: closing(line)]
        seen += 1
        assert "(int64_t)" in index, index
        # No sum and no product is made in 32 bits and widened afterwards, but for a head's number and a block's.
        small = r"\(int\)threadIdx\.x\)|n [%/] count\)|head \* group\)"
        assert not re.search(rf"\(int64_t\)\((?!{small})", index), index
    assert seen >= len(of_rows)


def closing(line: str) -> int:
    """Where the bracket that is open closes."""
    depth = 1
    for at, letter in enumerate(line):
        depth += (letter == "[") - (letter == "]")
        if not depth:
            return at
    raise AssertionError(line)


@pytest.mark.parametrize("name", [name for name in WANTED if name.startswith("sm_89")])
def test_sm_80_and_sm_89_are_lowered_alike(name: str, text: Texts) -> None:
    other = name.replace("sm_89", "sm_80")
    assert WANTED[name].suited == WANTED[other].suited
    assert text(name).cuda == text(other).cuda


@pytest.mark.parametrize("name", ["sm_80 d72 packed"])
def test_packed_sequences_begin_where_their_starts_say(name: str, text: Texts) -> None:
    cuda = text(name).cuda
    for tensor in ("q_starts", "k_starts", "q_lens", "kv_lens"):
        assert f"{tensor}[" in cuda


@pytest.mark.parametrize("name", ["sm_90 d72 dkdv"])
def test_a_mask_is_read_where_it_lies(name: str, text: Texts) -> None:
    declared = text(name).cuda.partition("__launch_bounds__")[2].partition("{")[0]
    assert "* __restrict__ mask" in declared
    assert all(f"int64_t mask_{dim}" in declared for dim in "bhmn")


def test_a_kernel_is_traced_to_the_same_text_again() -> None:
    """TileLang finds it on disk by that text."""
    wanted = [WANTED[name].suited for name in ("sm_90 d128 forward", "sm_90 d128 dkdv")]
    first = [program(recipe).script() for recipe in wanted]
    assert [program(recipe).script() for recipe in reversed(wanted)] == first[::-1]


# With nvcc


@pytest.fixture(scope="module")
def tools() -> None:
    """Skips where what compiles is not on this machine."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on this machine")
    try:
        facts._disassembler()
    except InvalidRequestError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("name", ["sm_90 d128 forward", "sm_90 d128 dkdv", "sm_90 d256 dk", "sm_90 d64 total"])
def test_nothing_spills_on_sm_90(name: str, text: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "lowered", lambda *_: text(name).artifact)  # once is enough
    found = facts.facts(WANTED[name].recipe, "sm_90")
    said = f"{found.kernel} {dict(found.tile)} {dict(found.instructions)}"
    assert found.spill_bytes == 0, said
    assert 0 < found.registers <= 255, said
    assert found.registers * found.threads <= 65536, said
    assert found.threads == text(name).threads, said
    assert found.shared_bytes - text(name).shared_bytes in (0, KIB), said  # CUDA keeps one KiB, and counts it
    assert list(found.texts) == ["tir", "cuda", "ptx", "sass"]
    assert all(found.texts.values())
    assert found.instructions["wgmma"], said
    assert found.instructions["tma"], said


@pytest.mark.usefixtures("tools")
def test_an_architecture_that_nvcc_does_not_know_is_an_error_of_ours() -> None:
    with pytest.raises(InvalidRequestError, match=r"can't compile for sm_999"):
        facts.facts(WANTED["sm_90 d128 delta"].recipe, "sm_999")


def test_kernels_may_be_traced_in_threads_beside_each_other() -> None:
    asked = [recipe(problem(90, head_dim), "dq") for head_dim in (16, 32, 64, 72, 96, 128, 160, 192)]
    with ThreadPoolExecutor(len(asked)) as pool:
        texts = {str(traced.script()) for traced in pool.map(program, asked)}
    assert len(texts) == len(asked)
