"""cuda_fa2 before anything runs: which tile, which kernels, and with which arguments. Needs no GPU."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from flashdispatch_backends.cuda_fa2 import SPEC, tiles
from flashdispatch_backends.cuda_fa2 import launch as launching
from flashdispatch_backends.cuda_fa2.arguments import (
    ADDRESSES,
    ADDRESSES_FORMAT,
    LARGEST_SOFTCAP,
    NUMBERS_FORMAT,
    STRIDED,
    Launch,
    backward_launches,
    described,
    forward_launch,
)
from flashdispatch_backends.cuda_fa2.compile import Kernel, sources
from flashdispatch_backends.cuda_fa2.launch import Backward, BoundKernel, CudaFA2, bound_forward
from flashdispatch_backends.cuda_fa2.recipe import ARGUMENT_BYTES
from flashdispatch_backends.cuda_fa2.tiles import SHIPPED, padded, shared_bytes, sides
from flashdispatch_registry import Band, Code, Extras, Needs, Problem
from flashdispatch_registry.kernels import Inspectable, PreparesTiles, Tunable
from flashdispatch_registry.tile_table import SHARED_BYTES, Shape, family

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
FLOAT_MASK = {"attn_mask": "float", "attn_mask_shape": (2, 4, 256, 256)}
NEEDS = Needs(q=True, k=True, v=True, attn_mask=False, sinks=False)


def problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "arch": "sm_90", "dtype": torch.bfloat16, "batch": 2, "heads_q": 4, "heads_kv": 4, "seqlen_q": 256,
        "seqlen_k": 256, "head_dim": 64, "head_dim_v": 64, "scale": 0.125, "needs_grad": ("q", "k", "v"),
    }  # fmt: skip
    return Problem(**(fields | changes))


@pytest.fixture
def backend() -> CudaFA2:
    """One of its own, so that no test sets another's tiles."""
    return CudaFA2()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(backend: CudaFA2, asked: Problem, mask_dtype: torch.dtype = torch.float32) -> dict[str, Launch]:
    return {launch.recipe.kernel: launch for launch in described(asked, mask_dtype, backend.shape)}


def numbers(launch: Launch) -> dict[str, Any]:
    """What a launch passes, under the names of arguments.cuh."""
    strides = [f"{name}_{dim}" for name in STRIDED for dim in "bsh"]
    names = [
        *strides, "rows_b", "rows_h", "rows_kind", "mask_b", "mask_h", "mask_m", "mask_n", "heads", "group",
        "heads_at_once", "seqlen_q", "seqlen_k", "left", "right", "top_left", "head_dim", "head_dim_v", "scale",
        "softcap", "gradient_scale",
    ]  # fmt: skip
    return dict(zip(names, NUMBERS_FORMAT.unpack(launch.numbers), strict=True))


def test_it_offers_what_the_tools_ask_for(backend: CudaFA2) -> None:
    assert isinstance(backend, Tunable)
    assert isinstance(backend, PreparesTiles)
    assert isinstance(backend, Inspectable)


def test_an_architecture_without_asynchronous_copies_is_impossible() -> None:
    assert "cp.async" in SPEC.support.impossible["sm_75"]


# The struct


def test_the_struct_is_described_in_its_order() -> None:
    text = re.sub(r"//.*", "", sources()["arguments.cuh"].decode())
    body = re.search(r"struct Arguments \{(.*?)\};", text, re.DOTALL)
    assert body
    fields = [
        (kind, name.strip(" *"))
        for kind, names in re.findall(r"(?:const )?(\w+)\s+([^;]+);", body.group(1))
        for name in names.split(",")
    ]
    strides = [name for kind, name in fields if kind == "Strides"]
    assert [name for _, name in fields[: len(ADDRESSES)]] == list(ADDRESSES)
    assert [name.removeprefix("at_") for name in strides] == list(STRIDED)
    assert [name for kind, name in fields if kind == "int"][-11:] == [
        "heads", "group", "heads_at_once", "seqlen_q", "seqlen_k", "left", "right", "top_left", "head_dim",
        "head_dim_v", "unused",
    ]  # fmt: skip
    assert [name for kind, name in fields if kind == "float"][-3:] == ["scale", "softcap", "gradient_scale"]


def test_its_size_is_what_the_kernels_are_told() -> None:
    assert ADDRESSES_FORMAT.size + NUMBERS_FORMAT.size == ARGUMENT_BYTES
    # The compiler aligns each field to its size; the formats, without padding, must agree with that.
    assert NUMBERS_FORMAT.size == struct.calcsize(NUMBERS_FORMAT.format.replace("<", "@"))
    assert ADDRESSES_FORMAT.size % 8 == 0


# Tiles


@pytest.mark.parametrize(
    ("head_dim", "side_count", "on_chip"),
    [(16, 1, 16), (24, 1, 32), (64, 1, 64), (72, 1, 80), (72, 2, 96), (200, 4, 256), (192, 4, 192)],
)
def test_a_head_dim_is_padded_to_16_for_each_side(head_dim: int, side_count: int, on_chip: int) -> None:
    assert padded(head_dim, side_count) == on_chip


@pytest.mark.parametrize(
    ("kernel", "widest", "shape", "count"),
    [
        ("forward", 256, Shape(128, 64, 8, 1), 1),
        ("dq", 128, Shape(128, 32, 4, 2), 1),
        ("dq", 256, Shape(128, 64, 8, 1), 2),
        ("dkdv", 64, Shape(64, 128, 4, 2), 1),
        ("dkdv", 128, Shape(64, 64, 4, 2), 2),
        ("dkdv", 256, Shape(64, 64, 8, 2), 4),
        ("dkdv", 256, Shape(32, 64, 4, 2), 2),  # not more than the streamed block has times 16 rows
        ("dkdv", 64, Shape(64, 64, 8, 2), 2),  # no fewer than the warps need to have rows
    ],
)
def test_warps_share_rows_where_heads_are_wide(kernel: str, widest: int, shape: Shape, count: int) -> None:
    assert sides(kernel, widest, shape) == count


@pytest.mark.parametrize(("arch", "head_dim"), list(product(ARCHS, (16, 64, 72, 96, 128, 192, 256))))
def test_the_tiles_in_force_fit_the_shared_memory_of_every_architecture(
    backend: CudaFA2, arch: str, head_dim: int
) -> None:
    for changes in ({}, {"softcap": 20.0}, FLOAT_MASK, {"band": Band(100, 0)}):
        asked = problem(arch=arch, head_dim=head_dim, head_dim_v=head_dim, **changes)
        for launch in launches(backend, asked).values():
            assert launch.recipe.shared_bytes <= SHARED_BYTES[family(arch)]


@pytest.mark.parametrize(("head_dim", "kernel"), list(product((16, 64, 128, 256), tiles.KERNELS)))
def test_what_is_measured_is_legal_and_fits(backend: CudaFA2, head_dim: int, kernel: str) -> None:
    asked = problem(head_dim=head_dim, head_dim_v=head_dim)
    space = list(tiles.space(asked, kernel))
    assert len(space) > 5
    for shape in space:
        tiles.check(kernel, shape)
        assert shared_bytes(kernel, head_dim, head_dim, shape, natural=True) <= SHARED_BYTES["sm_90"]


def test_every_shipped_tile_is_legal() -> None:
    for row, shape in SHIPPED.items():
        tiles.check(row.partition("/")[0], shape)


@pytest.mark.parametrize(
    ("kernel", "shape", "words"),
    [
        ("total", Shape(64, 64, 4, 1), "no kernel 'total'"),
        ("forward", Shape(64, 64, 3, 1), "num_warps is 4 or 8"),
        ("forward", Shape(64, 64, 4, 3), "num_stages 1 or 2"),
        ("forward", Shape(64, 48, 4, 1), "block_n a power of two"),
        ("forward", Shape(48, 64, 4, 1), "block_m is a power of two from 32"),
        ("forward", Shape(64, 64, 8, 1), "block_m has 16 rows for each warp"),
        ("dkdv", Shape(16, 64, 8, 1), "block_n has 16 rows for each warp"),
    ],
)
def test_a_tile_that_would_not_compile_is_refused(kernel: str, shape: Shape, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiles.check(kernel, shape)


def test_a_tile_that_is_set_is_the_one_that_is_launched(backend: CudaFA2) -> None:
    asked = problem()
    backend.set_tile(asked, "dq", {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 1})
    assert launches(backend, asked)["dq"].recipe.shape == Shape(64, 32, 4, 1)
    backend.set_tile(asked, "dq", None)
    assert launches(backend, asked)["dq"].recipe.shape == SHIPPED["dq/sm_90/d64/full"]


# Recipes


def test_one_kernel_serves_all_lengths_batches_heads_and_masks_of_position(backend: CudaFA2) -> None:
    variants = [
        problem(), problem(seqlen_q=1, seqlen_k=70001), problem(batch=7), problem(heads_q=8, heads_kv=2),
        problem(band=Band(None, 0)), problem(q_lens=True, kv_lens=True), problem(return_lse=True),
    ]  # fmt: skip
    for kernel in tiles.KERNELS:
        assert len({launches(backend, asked)[kernel].recipe for asked in variants}) == 1


def test_head_dims_between_two_multiples_of_16_share_a_kernel(backend: CudaFA2) -> None:
    found = {launches(backend, problem(head_dim=d, head_dim_v=d))["forward"].recipe for d in (72, 80)}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("changes", "plain", "natural"),
    [
        ({}, True, False), ({"scale": 0.0}, False, False), ({"scale": -0.1}, False, False),
        ({"softcap": 9.0}, False, False), ({"attn_mask": "bool", "attn_mask_shape": (2, 1, 1, 256)}, False, False),
        (FLOAT_MASK, False, True), ({"scale": 1e38 * 1.5}, False, True), ({"scale": 1e-39}, False, False),
    ],
)  # fmt: skip
def test_what_a_score_is_made_of(backend: CudaFA2, changes: dict[str, Any], plain: bool, natural: bool) -> None:
    recipe = launches(backend, problem(**changes))["forward"].recipe
    assert (recipe.plain, recipe.natural) == (plain, natural)


def test_gradients_that_nobody_asks_for_are_not_compiled_in(backend: CudaFA2) -> None:
    assert launches(backend, problem(needs_grad=("k",)))["dkdv"].recipe.outputs == ("dk",)
    assert "dkdv" not in launches(backend, problem(needs_grad=("q",)))
    only_v = launches(backend, problem(needs_grad=("v",)))
    assert "dq" not in only_v["dq"].tensors  # the kernel still makes each row's numbers
    assert only_v["dkdv"].recipe.outputs == ("dv",)


def test_strides_that_break_16_bytes_take_the_kernel_that_copies_one_by_one(backend: CudaFA2) -> None:
    q, k, v = (meta(2, 256, 4, 72)[..., :64] for _ in range(3))
    assert forward_launch(problem(), q, k, v, Extras(), backend.shape).recipe.aligned
    odd = meta(2, 256, 4, 66)[..., :64]
    assert not forward_launch(problem(), odd, k, v, Extras(), backend.shape).recipe.aligned
    out = meta(2, 256, 4, 64)
    found = backward_launches(problem(), q, k, v, out, odd, Extras(), False, NEEDS, backend.shape)
    assert [launch.recipe.aligned for launch in found] == [False, False]
    # A dim of size 1 says nothing.
    one = torch.empty_strided((1, 256, 1, 64), (7, 64, 3, 1), dtype=torch.bfloat16, device="meta")
    assert forward_launch(problem(), one, one, one, Extras(), backend.shape).recipe.aligned


def test_an_address_that_breaks_16_bytes_takes_it_too(backend: CudaFA2) -> None:
    launch = launches(backend, problem(**FLOAT_MASK))["forward"]
    assert launch.on(True) is launch
    loose = launch.on(False).recipe
    assert not loose.aligned
    assert not loose.paired_mask


@pytest.mark.parametrize(
    ("mask", "paired"),
    [
        (meta(2, 4, 256, 256, dtype=torch.bool), True),
        (meta(1, 1, 256, 256, dtype=torch.bool).expand(2, 4, 256, 256), True),
        (meta(2, 4, 256, 255, dtype=torch.bool), False),  # odd rows
        (meta(2, 4, 256, 256, dtype=torch.bool).transpose(2, 3), False),
        (meta(2, 4, 256, 1, dtype=torch.bool), False),
        (meta(1, 1, 1, 256, dtype=torch.bool), True),
    ],
)
def test_neighbours_of_a_mask_are_read_at_once_where_they_lie_side_by_side(
    backend: CudaFA2, mask: torch.Tensor, paired: bool
) -> None:
    q = meta(2, 256, 4, 64)
    asked = problem(attn_mask="bool", attn_mask_shape=tuple(mask.shape), needs_grad=())
    launch = forward_launch(asked, q, q, q, Extras(attn_mask=mask), backend.shape)
    assert launch.recipe.paired_mask is paired


# Numbers


def test_strides_and_lengths_are_the_tensors(backend: CudaFA2) -> None:
    q, k, v = meta(2, 130, 4, 64), meta(2, 70, 2, 64).transpose(1, 2).contiguous().transpose(1, 2), meta(2, 70, 2, 64)
    asked = problem(heads_kv=2, seqlen_q=130, seqlen_k=70, needs_grad=(), band=Band(5, None, "top_left"))
    found = numbers(forward_launch(asked, q, k, v, Extras(), backend.shape))
    assert (found["q_b"], found["q_s"], found["q_h"]) == q.stride()[:3]
    assert (found["k_b"], found["k_s"], found["k_h"]) == (2 * 70 * 64, 64, 70 * 64)
    assert (found["heads"], found["group"], found["seqlen_q"], found["seqlen_k"]) == (4, 2, 130, 70)
    assert (found["left"], found["right"], found["top_left"]) == (5, 200, 1)
    assert (found["rows_b"], found["rows_h"], found["rows_kind"]) == (4 * 130, 130, 2 * 4 * 130)


def test_dims_of_a_mask_that_are_broadcast_have_stride_0(backend: CudaFA2) -> None:
    q, mask = meta(2, 256, 4, 64), meta(2, 1, 1, 256, dtype=torch.bool)
    asked = problem(attn_mask="bool", attn_mask_shape=(2, 1, 1, 256), needs_grad=())
    found = numbers(forward_launch(asked, q, q, q, Extras(attn_mask=mask), backend.shape))
    assert [found[f"mask_{dim}"] for dim in "bhmn"] == [256, 0, 0, 1]


def test_scale_and_softcap_are_in_the_scores_units(backend: CudaFA2) -> None:
    log2e = 1.4426950408889634
    plain = numbers(launches(backend, problem())["forward"])
    assert plain["scale"] == pytest.approx(0.125 * log2e)
    assert plain["gradient_scale"] == 0.125
    capped = numbers(launches(backend, problem(softcap=20.0))["forward"])
    assert capped["scale"] == pytest.approx(0.125 / 20.0)
    assert capped["softcap"] == pytest.approx(20.0 * log2e)
    assert numbers(launches(backend, problem(softcap=1e37))["forward"])["softcap"] == pytest.approx(
        LARGEST_SOFTCAP * log2e
    )
    assert numbers(launches(backend, problem(**FLOAT_MASK))["forward"])["scale"] == 0.125
    assert numbers(launches(backend, problem(scale=1e300))["forward"])["scale"] == float("inf")


def test_heads_take_turns_under_a_causal_mask_alone(backend: CudaFA2) -> None:
    causal = numbers(launches(backend, problem(band=Band(None, 0)))["forward"])["heads_at_once"]
    assert causal == 8  # all there are
    assert numbers(launches(backend, problem())["forward"])["heads_at_once"] == 1
    assert numbers(launches(backend, problem(band=Band(9, 0)))["forward"])["heads_at_once"] == 1


def test_a_program_for_each_block_of_rows(backend: CudaFA2) -> None:
    found = launches(backend, problem(seqlen_q=129, heads_kv=2))
    assert found["forward"].grid == 2 * 2 * 4  # blocks of 128 queries, sequences, heads
    assert found["dkdv"].grid == 2 * 2 * 2  # blocks of 128 keys, sequences, key/value heads


# Launches, with a stand-in for the driver


class Recorder:
    """In place of a loaded kernel: keeps the struct that each launch passes."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int, bytes]] = []

    def start(self, grid: int, stream: int, parameters: int) -> None:
        address = ctypes.c_void_p.from_address(parameters).value
        assert address
        self.launched.append((grid, stream, ctypes.string_at(address, ARGUMENT_BYTES)))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, bool], Recorder]]:
    found: dict[tuple[str, bool], Recorder] = {}

    def compiled(recipe: Any, _: int) -> Any:
        return found.setdefault((recipe.kernel, recipe.aligned), Recorder())

    monkeypatch.setattr(launching, "compiled", compiled)
    monkeypatch.setattr(launching, "compile_in_threads", lambda *_: None)
    monkeypatch.setattr(launching, "_current_stream", lambda _: 77)
    monkeypatch.setattr(launching.cupy.cuda.runtime, "setDevice", lambda _: None)
    return found


def passed(content: bytes) -> dict[str, int]:
    return dict(zip(ADDRESSES, ADDRESSES_FORMAT.unpack_from(content), strict=True))


def test_a_forward_passes_addresses_and_numbers_on_the_current_stream(
    backend: CudaFA2, recorded: dict[tuple[str, bool], Recorder]
) -> None:
    q, k, v = (torch.zeros(2, 256, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    asked = problem(needs_grad=())
    run = bound_forward(asked, q, k, v, Extras(), backend.shape)
    result = run(q, k, v, Extras())
    ((grid, stream, content),) = recorded["forward", True].launched
    assert (grid, stream) == (2 * 2 * 4, 77)
    at = passed(content)
    assert (at["q"], at["k"], at["v"], at["out"]) == tuple(x.data_ptr() for x in (q, k, v, result.out))
    assert not any(at[name] for name in ADDRESSES[4:])
    assert content[ADDRESSES_FORMAT.size :] == forward_launch(asked, q, k, v, Extras(), backend.shape).numbers
    assert result.lse is None
    assert result.saved == ()


def test_an_unaligned_tensor_takes_the_other_kernel(
    backend: CudaFA2, recorded: dict[tuple[str, bool], Recorder]
) -> None:
    q = torch.zeros(2 * 256 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 256, 4, 64)
    bound_forward(problem(needs_grad=()), q, q, q, Extras(), backend.shape)(q, q, q, Extras())
    assert list(recorded) == [("forward", False)]


def test_a_backward_passes_each_kernel_what_it_takes(
    backend: CudaFA2, recorded: dict[tuple[str, bool], Recorder]
) -> None:
    q, k, v, out, dout = (torch.zeros(2, 256, 4, 64, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.zeros(2, 4, 256)
    bound = Backward(problem(), q, k, v, out, dout, Extras(), False, NEEDS, backend.shape)
    gradients = bound(q, k, v, out, lse, dout, None, Extras())
    (dq,) = (passed(content) for _, _, content in recorded["dq", True].launched)
    (dkdv,) = (passed(content) for _, _, content in recorded["dkdv", True].launched)
    assert gradients.q is not None
    assert gradients.k is not None
    assert (dq["dq"], dq["lse"], dq["dlse"]) == (gradients.q.data_ptr(), lse.data_ptr(), 0)
    assert (dkdv["dq"], dkdv["lse"], dkdv["dk"]) == (0, 0, gradients.k.data_ptr())
    assert dq["rows"] == dkdv["rows"] != 0


def test_threads_write_their_addresses_into_buffers_of_their_own(
    backend: CudaFA2, recorded: dict[tuple[str, bool], Recorder]
) -> None:
    kernel = BoundKernel(launches(backend, problem(needs_grad=()))["forward"], torch.device("cpu"))
    together = threading.Barrier(4)

    def launch_many(number: int) -> None:
        together.wait()
        for _ in range(200):
            kernel.start(True, *(number,) * len(ADDRESSES))

    threads = [threading.Thread(target=launch_many, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [set(passed(content).values()) for _, _, content in recorded["forward", True].launched]
    assert len(found) == 800
    assert all(len(values) == 1 for values in found)


@pytest.mark.parametrize("shape", [(0, 256, 4), (2, 0, 4), (2, 256, 0)])
def test_nothing_is_launched_where_there_is_nothing_to_compute(
    backend: CudaFA2, recorded: dict[tuple[str, bool], Recorder], shape: tuple[int, int, int]
) -> None:
    batch, seqlen, heads = shape
    q = torch.zeros(batch, seqlen, heads, 64, dtype=torch.bfloat16)
    asked = problem(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads, heads_kv=heads)
    result = bound_forward(asked, q, q, q, Extras(), backend.shape)(q, q, q, Extras())
    assert result.out.shape == q.shape
    lse = torch.zeros(batch, heads, seqlen)
    Backward(asked, q, q, q, q, q, Extras(), False, NEEDS, backend.shape)(q, q, q, q, lse, q, None, Extras())
    assert not recorded


def test_a_kernel_starts_with_its_own_block_and_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    started: Callable[..., None] = lambda *arguments: seen.append(arguments)  # noqa: E731
    monkeypatch.setattr("flashdispatch_backends.cuda_fa2.compile.driver.launchKernel", started, raising=False)
    Kernel(11, 128, 65536, None).start(5, 6, 7)
    assert seen == [(11, 5, 1, 1, 128, 1, 1, 65536, 6, 7, 0)]


def test_sizes_that_32_bits_can_not_number_are_a_reason() -> None:
    assert SPEC.why_not is not None
    assert list(SPEC.why_not(problem(seqlen_k=2**29))) == []
    (positions,) = SPEC.why_not(problem(batch=1, heads_q=1, heads_kv=1, seqlen_q=2**30))
    assert (positions.code, positions.field) == (Code.BACKEND_LIMIT, "seqlen")
