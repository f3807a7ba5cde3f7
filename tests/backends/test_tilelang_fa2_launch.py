"""tilelang_fa2 before anything runs: which tile, which kernels, and with which arguments. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from flashdispatch_backends.tilelang_fa2 import SPEC, tiles
from flashdispatch_backends.tilelang_fa2 import launch as launching
from flashdispatch_backends.tilelang_fa2.arguments import (
    LARGEST_SOFTCAP,
    NUMBERS,
    TENSORS,
    Launch,
    as_tma_reads,
    backward_launches,
    described,
    fits_tma,
    forward_launch,
    rows_shape,
)
from flashdispatch_backends.tilelang_fa2.compile import KERNELS, program, suited
from flashdispatch_backends.tilelang_fa2.launch import Backward, TileLangFA2, bound_forward
from flashdispatch_backends.tilelang_fa2.tiles import SHIPPED, padded
from flashdispatch_registry import Band, Code, Extras, Needs, Problem
from flashdispatch_registry.errors import InvalidRequestError
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
def backend() -> TileLangFA2:
    """One of its own, so that no test sets another's tiles."""
    return TileLangFA2()


def test_it_offers_what_the_tools_ask_for(backend: TileLangFA2) -> None:
    assert isinstance(backend, Tunable)
    assert isinstance(backend, PreparesTiles)
    assert isinstance(backend, Inspectable)


def test_sizes_that_32_bits_can_not_number_are_a_reason() -> None:
    assert SPEC.why_not is not None
    assert list(SPEC.why_not(problem(seqlen_k=2**29))) == []
    (positions,) = SPEC.why_not(problem(batch=1, heads_q=1, heads_kv=1, seqlen_q=2**30))
    assert (positions.code, positions.field) == (Code.BACKEND_LIMIT, "seqlen")
    (blocks,) = SPEC.why_not(problem(batch=2**20, heads_q=2**10, heads_kv=2**10))
    assert (blocks.code, blocks.field) == (Code.BACKEND_LIMIT, "batch")


# Tiles


@pytest.mark.parametrize(("head_dim", "on_chip"), [(16, 16), (24, 32), (64, 64), (72, 80), (200, 208), (256, 256)])
def test_a_head_dim_is_a_multiple_of_16_on_the_chip(head_dim: int, on_chip: int) -> None:
    assert padded(head_dim) == on_chip


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm_80", "sm_80"), ("sm_86", "sm_86"), ("sm_87", "sm_80"), ("sm_89", "sm_86"), ("sm_90", "sm_90"),
        ("sm_100", "sm_100"), ("sm_103", "sm_100"), ("sm_120", "sm_86"), ("sm_130", "sm_86"), ("cpu", "sm_86"),
    ],
)  # fmt: skip
def test_an_architecture_belongs_to_the_family_with_its_shared_memory(arch: str, name: str) -> None:
    assert family(arch) == name


DISTINCT: dict[str, dict[str, Any]] = {
    "as it is": {},
    "another architecture": {"arch": "sm_80"},
    "wider": {"head_dim": 128, "head_dim_v": 128},
    "wider again": {"head_dim": 192, "head_dim_v": 192},
    "causal": {"band": Band(right=0)},
    "window": {"band": Band(left=64, right=0)},
    "softcap": {"softcap": 20.0},
    "causal softcap": {"band": Band(right=0), "softcap": 20.0},
}
SAME: dict[str, dict[str, Any]] = {
    "the other 16 bit": {"dtype": torch.float16},
    "a narrower head dim": {"head_dim": 40},
    "narrower values": {"head_dim_v": 16},
    "more of it": {"batch": 9, "heads_q": 8, "heads_kv": 2, "seqlen_q": 999, "seqlen_k": 1, "scale": 1.0},
    "lengths": {"q_lens": True, "kv_lens": True},
    "what comes out": {"return_lse": True, "needs_grad": (), "deterministic": True, "layout": "bhsd"},
}


def test_a_key_tells_apart_what_a_tile_depends_on(backend: TileLangFA2) -> None:
    kernels = ("forward", "dq", "dkdv")
    keys = [backend.tile_key(problem(**changes), kernel) for changes in DISTINCT.values() for kernel in kernels]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_a_key_is_the_same_for_what_a_tile_does_not_depend_on(changes: dict[str, Any], backend: TileLangFA2) -> None:
    assert backend.tile_key(problem(**changes), "dq") == backend.tile_key(problem(), "dq")


def test_architectures_of_one_family_share_a_key(backend: TileLangFA2) -> None:
    assert backend.tile_key(problem(arch="sm_89"), "dq") == backend.tile_key(problem(arch="sm_120"), "dq")


def test_the_wider_of_d_and_dv_names_the_row(backend: TileLangFA2) -> None:
    wide = backend.tile_key(problem(head_dim=128, head_dim_v=128), "dq")
    assert backend.tile_key(problem(head_dim_v=128), "dq") == backend.tile_key(problem(head_dim=72), "dq") == wide


OTHER = Shape(64, 16, 4, 1)
"""Fits everywhere, and is nobody's choice on sm_90."""


def test_a_tile_set_is_in_force_for_its_key_until_it_is_taken_back(backend: TileLangFA2) -> None:
    before, other = backend.tile(problem(), "dq"), OTHER._asdict()
    assert other != before
    backend.set_tile(problem(), "dq", other)
    assert backend.tile(problem(seqlen_q=33), "dq") == other  # the same key
    assert backend.tile(problem(), "dkdv") != other
    assert backend.tile(problem(head_dim=128, head_dim_v=128), "dq") != other
    (launch,) = (x for x in described(problem(), torch.bool, backend.shape) if x.recipe.kernel == "dq")
    assert launch.recipe.shape == OTHER
    backend.set_tile(problem(), "dq", None)
    backend.set_tile(problem(), "dq", None)
    assert backend.tile(problem(), "dq") == before


def at_least(kernel: str, shape: Shape, d: int, dv: int, natural: bool = False) -> int:
    """Bytes of shared memory that the blocks of one tile take: what stays, and num_stages of what streams.

    The forward keeps Q, dV's own pass K, the others two tensors; total has no V. With Q and dO stream 2 or 3 float32
    numbers of a row.
    """
    d, dv = padded(d), padded(dv)
    resident, streamed = (shape.block_n, shape.block_m) if kernel in ("dkdv", "dk", "dv") else shape[:2]
    stays = {"forward": d, "total": d, "dv": d}.get(kernel, d + dv)
    rows = 4 * (3 if natural else 2) if kernel in ("dkdv", "dk", "dv") else 0
    return 2 * resident * stays + shape.num_stages * streamed * (2 * (d if kernel == "total" else d + dv) + rows)


SPACE = [
    pytest.param(arch, dims, changes, id=f"{arch}-d{dims[0]}-dv{dims[1]}-{name}")
    for arch, dims, (name, changes) in product(
        ARCHS, ((16, 16), (64, 64), (128, 128), (16, 200), (256, 256)), {"plain": {}, "mask": FLOAT_MASK}.items()
    )
]


@pytest.mark.parametrize(("arch", "dims", "changes"), SPACE)
def test_the_space_holds_the_tile_in_force_once_and_only_tiles_that_can_be_launched(
    arch: str, dims: tuple[int, int], changes: dict[str, Any], backend: TileLangFA2
) -> None:
    asked = problem(arch=arch, head_dim=dims[0], head_dim_v=dims[1], **changes)
    for kernel in backend.kernels(asked):
        space = backend.tile_space(asked, kernel)
        shapes = [backend.table.checked(kernel, tile) for tile in space]
        assert backend.tile(asked, kernel) in space
        assert len(set(shapes)) == len(shapes)
        assert len(shapes) >= 2  # else there is nothing to tune
        for shape in shapes:
            assert at_least(kernel, shape, *dims, "attn_mask" in changes) <= SHARED_BYTES[family(arch)]
            assert shape.num_stages == 1 or arch in ("sm_90", "sm_100")  # TileLang pipelines no tile before


@pytest.mark.parametrize("row", SHIPPED)
def test_a_shipped_tile_fits_and_its_row_is_one_that_some_problem_reads(row: str, backend: TileLangFA2) -> None:
    kernel, group, width, *_ = row.split("/")
    d = int(width[1:])
    shape = backend.table.checked(row, SHIPPED[row]._asdict())
    assert at_least(kernel, shape, d, d) <= SHARED_BYTES[group]
    asked = problem(arch=group, head_dim=d, head_dim_v=d)
    of_kind = [
        replace(asked, band=band, attn_mask=mask, attn_mask_shape=mask and (1, 1, 1, 1))
        for band, mask in product((Band(), Band(right=0), Band(left=3, right=0)), (None, "float"))
    ]
    assert any(kernel in backend.kernels(p) and backend.tile_key(p, kernel) == row for p in of_kind)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dims", [(64, 64), (16, 16), (72, 72), (256, 64), (64, 256), (192, 128)], ids=str)
def test_every_problem_has_a_tile_that_fits(dims: tuple[int, int], arch: str, backend: TileLangFA2) -> None:
    for changes in (*DISTINCT.values(), FLOAT_MASK):
        asked = replace(problem(**changes), arch=arch, head_dim=dims[0], head_dim_v=dims[1])
        for kernel in backend.kernels(asked):
            shape = backend.shape(asked, kernel)
            assert backend.table.checked(kernel, shape._asdict()) == shape
            assert at_least(kernel, shape, *dims) <= SHARED_BYTES[family(arch)]


GOOD = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("forward", {"block_m": 64}),
        ("forward", GOOD | {"more": 1}),
        ("forward", GOOD | {"block_m": -64}),
        ("forward", GOOD | {"block_m": 0}),
        ("forward", GOOD | {"block_m": 96}),  # no multiple of 16 rows a warp
        ("forward", GOOD | {"block_m": 64, "num_warps": 8}),
        ("forward", GOOD | {"block_m": 320}),
        ("forward", GOOD | {"block_n": 48}),
        ("forward", GOOD | {"block_n": 256}),
        ("dkdv", GOOD | {"block_n": 32}),
        ("dkdv", GOOD | {"block_m": 192}),  # rows are rounded up to 128
        ("forward", GOOD | {"num_warps": 2}),
        ("forward", GOOD | {"num_stages": 0}),
        ("forward", GOOD | {"num_stages": 9}),
    ],
)
def test_what_is_no_tile_is_never_used(kernel: str, tile: dict[str, int], backend: TileLangFA2, caplog: Any) -> None:
    with pytest.raises(ValueError, match=r"num_warps"):
        backend.table.checked(kernel, tile | {"num_warps": 3})
    with pytest.raises(ValueError, match=r"block_m"):
        backend.set_tile(problem(), kernel, tile)
    bad, good = f"{kernel}/bad", f"{kernel}/good"
    assert backend.table.legal({bad: tile, good: GOOD}) == {good: Shape(**GOOD)}
    assert f"the tuned tile of tilelang_fa2 for {bad} is not used" in caplog.text


def test_a_kernel_that_there_is_not_has_no_tile(backend: TileLangFA2) -> None:
    with pytest.raises(ValueError, match="no tiles for a kernel 'nope'; it has forward"):
        backend.set_tile(problem(), "nope", GOOD)


def test_a_block_of_rows_divides_what_rows_are_rounded_up_to(backend: TileLangFA2) -> None:
    for row, shape in SHIPPED.items():
        if row.startswith("dk"):
            assert tiles.ROW_BLOCK % shape.block_m == 0
    for seqlen, rounded in ((1, 128), (128, 128), (129, 256)):
        q = torch.empty(2, seqlen, 4, 64, dtype=torch.bfloat16, device="meta")
        for asked, numbers in ((problem(), 2), (problem(**FLOAT_MASK), 3)):
            shape, strides, dtype = rows_shape(asked, q)
            assert (shape, dtype) == ((2, 4, numbers, rounded), torch.float32)
            assert strides == torch.empty(shape, device="meta").stride()


def test_where_dk_and_dv_do_not_fit_beside_each_other_each_has_its_pass(backend: TileLangFA2) -> None:
    assert backend.kernels(problem(head_dim=128, head_dim_v=128)) == ("forward", "dq", "dkdv")
    assert backend.kernels(problem(head_dim=256)) == ("forward", "dq", "dk", "dv")
    assert backend.kernels(problem(head_dim_v=136)) == ("forward", "dq", "dk", "dv")
    assert backend.kernels(problem(needs_grad=())) == ("forward",)
    assert backend.kernels(problem(**FLOAT_MASK)) == ("forward", "total", "dq", "dkdv")


# Launches


def names(launches: list[Launch]) -> list[str]:
    return [launch.recipe.tile_name for launch in launches]


@pytest.mark.parametrize(
    ("needs", "launched"),
    [
        ((), []),
        (("q",), ["delta", "dq"]),
        (("k",), ["delta", "dkdv"]),
        (("v",), ["delta", "dkdv"]),
        (("k", "v"), ["delta", "dkdv"]),
        (("q", "k", "v"), ["delta", "dq", "dkdv"]),
    ],
)
def test_a_backward_launches_what_its_gradients_need(
    needs: tuple[str, ...], launched: list[str], backend: TileLangFA2
) -> None:
    found = described(problem(needs_grad=needs), torch.bool, backend.shape)
    assert names(found) == ["forward", *launched]
    made = [name for launch in found for name in launch.tensors if name in ("dq", "dk", "dv")]
    assert made == [f"d{name}" for name in needs]
    with_mask = described(problem(needs_grad=needs, **FLOAT_MASK), torch.float32, backend.shape)
    assert names(with_mask) == ["forward", *launched[:1], *(["total"] if needs else []), *launched[1:]]


def test_wide_gradients_of_keys_and_values_are_launched_one_by_one(backend: TileLangFA2) -> None:
    wide = problem(head_dim=256, head_dim_v=256)
    assert names(described(wide, torch.bool, backend.shape)) == ["forward", "delta", "dq", "dk", "dv"]
    only = replace(wide, needs_grad=("v",))
    assert names(described(only, torch.bool, backend.shape)) == ["forward", "delta", "dv"]


@pytest.mark.parametrize(
    "changes", [{}, FLOAT_MASK, {"scale": 2e38}, {"softcap": 2e38}], ids=["plain", "mask", "scale", "softcap"]
)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_launches_described_are_the_kernels_named(
    changes: dict[str, Any], head_dim: int, backend: TileLangFA2
) -> None:
    asked = problem(head_dim=head_dim, head_dim_v=head_dim, **changes)
    found = names(described(asked, torch.float32, backend.shape))
    assert set(found) - {"delta"} == set(backend.kernels(asked))


def test_a_gradient_of_the_lse_is_read_by_delta_alone(backend: TileLangFA2) -> None:
    found = described(problem(return_lse=True), torch.bool, backend.shape)
    assert names(found) == ["forward", "delta", "dq", "dkdv", "delta"]
    assert [(x.recipe.dlse, "dlse" in x.tensors) for x in found if x.recipe.kernel == "delta"] == [
        (False, False), (True, True)
    ]  # fmt: skip


def test_a_float_mask_may_be_float32_or_of_the_inputs_dtype(backend: TileLangFA2) -> None:
    found = {launch.recipe.mask for launch in backend._launches(problem(**FLOAT_MASK)) if launch.recipe.kernel == "dq"}
    assert found == {"float32", "bfloat16"}
    asked = problem(attn_mask="bool", attn_mask_shape=(1, 1, 1, 256))
    assert {launch.recipe.mask for launch in backend._launches(asked) if launch.recipe.kernel == "dq"} == {"bool"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_launch_has_the_arguments_of_its_kernel_in_their_order(kernel: str, backend: TileLangFA2) -> None:
    asked = problem(q_lens=True, kv_lens=True, return_lse=True, **FLOAT_MASK)
    launch = [x for x in described(asked, torch.float32, backend.shape) if x.recipe.kernel == kernel][-1]
    function = program(launch.recipe)
    buffers = dict(function.buffer_map.items())
    taken = [buffers[x].name if x in buffers else x.name for x in function.params]
    assert taken == [*TENSORS[kernel], *NUMBERS[kernel]]
    assert len(launch.tensors) + len(launch.numbers) == len(taken)
    given = zip(launch.tensors, TENSORS[kernel], strict=True)
    assert all(name in (0, wanted) for name, wanted in given)
    # What the kernel takes as a tensor is one, and 0 is given where it takes a number.
    assert [x in buffers for x in function.params] == [isinstance(x, str) for x in (*launch.tensors, *launch.numbers)]
    kinds = [x.dtype for x in function.params[len(launch.tensors) :]]
    assert [str(kind)[:3] for kind in kinds] == [type(x).__name__[:3] for x in launch.numbers]


ONE_KERNEL: dict[str, dict[str, Any]] = {
    "lengths": {"seqlen_q": 31, "seqlen_k": 4097},
    "batch": {"batch": 7},
    "heads": {"heads_q": 12, "heads_kv": 3},
    "scale": {"scale": 1.5},
    "the other diagonal": {"band": Band(right=3, align="top_left")},
    "layout": {"layout": "bhsd"},
}


@pytest.mark.parametrize("changes", ONE_KERNEL.values(), ids=ONE_KERNEL)
def test_one_kernel_serves_all_lengths_batches_heads_and_scales(changes: dict[str, Any], backend: TileLangFA2) -> None:
    causal = problem(band=Band(right=0))
    asked = replace(causal, **changes)
    first = [launch.recipe for launch in described(causal, torch.bool, backend.shape)]
    assert [launch.recipe for launch in described(asked, torch.bool, backend.shape)] == first


@pytest.mark.parametrize("band", [Band(), Band(left=5), Band(left=5, right=5), Band(right=0)], ids=str)
def test_a_mask_of_position_is_no_part_of_a_kernel(band: Band) -> None:
    def tile(problem: Problem, kernel: str) -> Shape:
        return OTHER._replace(block_n=64)

    first = [launch.recipe for launch in described(problem(), torch.bool, tile)]
    assert [launch.recipe for launch in described(problem(band=band), torch.bool, tile)] == first


def qkv(
    head_dim: int = 64, seqlen_q: int = 256, seqlen_k: int = 256, batch: int = 2, heads: int = 4, heads_kv: int = 4,
    device: str = "meta",
) -> list[torch.Tensor]:  # fmt: skip
    return [
        torch.zeros(batch, seqlen, count, head_dim, dtype=torch.bfloat16, device=device)
        for seqlen, count in ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    ]


def like(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **changes: Any) -> Problem:
    """The problem of these tensors."""
    return problem(
        batch=q.shape[0], seqlen_q=q.shape[1], seqlen_k=k.shape[1], heads_q=q.shape[2], heads_kv=k.shape[2],
        head_dim=q.shape[3], head_dim_v=v.shape[3], **changes,
    )  # fmt: skip


def launches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor | None = None, **changes: Any
) -> dict[str, Launch]:
    """Of the forward, and of the backward with all gradients."""
    asked, extras = like(q, k, v, **changes), Extras()
    if dout is None:
        dout = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    found = [forward_launch(asked, q, k, v, extras, TileLangFA2().shape)]
    found += backward_launches(asked, q, k, v, dout, extras, False, NEEDS, TileLangFA2().shape)
    return {launch.recipe.tile_name: launch for launch in found}


def test_tiles_are_loaded_by_tma_from_sm_90_on() -> None:
    for arch, loads in (("sm_80", False), ("sm_89", False), ("sm_90", True), ("sm_100", True)):
        found = launches(*qkv(), arch=arch)
        assert {name: launch.recipe.tma for name, launch in found.items()} == {
            "forward": loads, "delta": False, "dq": loads, "dkdv": loads
        }  # fmt: skip


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.empty(2, 256, 4, 68, device="meta", dtype=torch.bfloat16)[..., :64], id="odd rows"),
        pytest.param(lambda: torch.empty(2, 256, 1, 64, device="meta").bfloat16().expand(2, 256, 4, 64), id="one head"),
        pytest.param(lambda: torch.empty(1, 256, 4, 64, device="meta").bfloat16().expand(2, -1, -1, -1), id="one"),
    ],
)
def test_strides_of_0_or_of_no_multiple_of_16_bytes_rule_tma_out(make: Callable[[], torch.Tensor], at: int) -> None:
    tensors = [*qkv(), torch.empty(2, 256, 4, 64, dtype=torch.bfloat16, device="meta")]
    tensors[at] = make()
    assert not fits_tma(tensors[at])
    found = launches(*tensors)
    assert found["forward"].recipe.tma == (at == 3)  # dout is nothing to the forward
    assert not found["dq"].recipe.tma
    assert not found["dkdv"].recipe.tma


@pytest.mark.parametrize("strides", [(3, 256, 64, 1), (0, 256, 64, 1), (1, 256, 64, 1)], ids=str)
def test_the_stride_of_a_dim_of_size_1_says_nothing(strides: tuple[int, ...]) -> None:
    q, k, v = (x.as_strided((1, 256, 4, 64), strides) for x in qkv(device="cpu"))
    assert all(launch.recipe.tma for name, launch in launches(q, k, v).items() if name != "delta")


def test_tma_is_given_strides_that_it_takes_whatever_those_of_dims_of_size_1_are() -> None:
    memory = torch.arange(4 * 72 * 8, dtype=torch.bfloat16)
    shapes = [((1, 5, 4, 72), (3, 288, 72, 1)), ((4, 1, 1, 72), (72, 0, 1, 1)), ((1, 1, 1, 72), (0, 0, 0, 1))]
    for shape, strides in shapes:
        given = memory.as_strided(shape, strides, 8)
        read = as_tma_reads(given)
        assert torch.equal(read, given)
        assert read.data_ptr() == given.data_ptr()
        assert all(stride > 0 and stride % 8 == 0 for stride in read.stride()[:3])
    whole = memory.view(2, 4, 4, 72)
    assert as_tma_reads(whole) is whole


def test_addresses_that_are_no_multiple_of_16_bytes_rule_tma_out() -> None:
    for name, launch in launches(*qkv()).items():
        assert launch.on(True) is launch
        assert launch.on(False).recipe == replace(launch.recipe, tma=False)
        assert (launch.on(False) is launch) == (name == "delta")
        assert launch.on(False).on(True) == launch.on(False)


def test_before_sm_90_a_recipe_is_one_without_tma_and_without_a_pipeline(backend: TileLangFA2) -> None:
    recipe = forward_launch(problem(), *qkv(), Extras(), lambda *_: Shape(128, 128, 8, 3)).recipe
    assert suited(recipe, 90) is recipe
    assert suited(recipe, 100) is recipe
    assert suited(recipe, 89) == replace(recipe, tma=False, shape=Shape(128, 128, 8, 1))


# Numbers


def number(launch: Launch, name: str) -> int | float:
    return launch.numbers[NUMBERS[launch.recipe.kernel].index(name)]


def forward(**changes: Any) -> Launch:
    return described(problem(needs_grad=(), **changes), torch.float32, TileLangFA2().shape)[0]


@pytest.mark.parametrize(
    ("band", "left", "right"),
    [
        (Band(), 512, 512),  # no distance is larger than Sq + Sk
        (Band(right=0), 512, 0),
        (Band(left=7, right=3), 7, 3),
        (Band(left=2**40, right=2**40), 512, 512),
    ],
    ids=str,
)
def test_a_band_is_two_distances_that_fit_32_bits(band: Band, left: int, right: int) -> None:
    launch = forward(band=band)
    assert (number(launch, "left"), number(launch, "right"), number(launch, "top_left")) == (left, right, 0)


def test_the_diagonals_corner_is_a_number() -> None:
    assert number(forward(band=Band(right=0, align="top_left")), "top_left") == 1


def test_sizes_are_the_tensors_and_not_the_problems(backend: TileLangFA2) -> None:
    """A problem's lengths may be hints."""
    q, k, v = qkv(seqlen_q=33, seqlen_k=65, batch=3)
    launch = forward_launch(problem(), q, k, v, Extras(), backend.shape)
    assert [number(launch, name) for name in ("batch", "seqlen_q", "seqlen_k")] == [3, 33, 65]
    assert (number(launch, "left"), number(launch, "right")) == (98, 98)
    assert number(forward(heads_q=12, heads_kv=4), "group") == 3


@pytest.mark.parametrize(
    ("changes", "natural", "plain"),
    [
        ({}, False, True),
        ({"scale": 0.0}, False, False),
        ({"scale": -0.5}, False, False),
        ({"scale": 1e38}, False, True),
        ({"scale": 2e38}, True, False),
        ({"scale": -2e38}, True, False),
        ({"softcap": 20.0}, False, False),
        ({"softcap": 2e38}, False, False),
        (FLOAT_MASK, True, False),
        ({"attn_mask": "bool", "attn_mask_shape": (1, 1, 1, 256)}, False, False),
    ],
    ids=str,
)
def test_scores_are_in_units_of_log_2_unless_that_could_overflow(
    changes: dict[str, Any], natural: bool, plain: bool
) -> None:
    launch, asked = forward(**changes), problem(**changes)
    assert (launch.recipe.natural, launch.recipe.plain) == (natural, plain)
    unit = 1.0 if natural else math.log2(math.e)
    scale, softcap = number(launch, "scale"), number(launch, "softcap")
    if asked.softcap is None:
        assert (scale, softcap) == (asked.scale * unit, 0.0)
    else:
        cap = min(asked.softcap, LARGEST_SOFTCAP)
        assert (scale, softcap) == (asked.scale / cap, cap * unit)
    assert torch.tensor([scale, softcap]).isfinite().all()  # in float32


@pytest.mark.parametrize("scale", [1, 0, -2])
def test_a_scale_that_is_a_whole_number_is_a_float_to_the_kernel(scale: int) -> None:
    for name, launch in launches(*qkv(), scale=scale).items():
        if name != "delta":
            assert isinstance(number(launch, "scale"), float)
    assert number(launches(*qkv(), scale=scale)["dq"], "gradient_scale") == scale
    assert isinstance(number(launches(*qkv(), scale=scale)["dq"], "gradient_scale"), float)


@pytest.mark.parametrize(
    ("changes", "at_once"),
    [
        ({}, 8),  # as many as there are
        ({"batch": 9}, 16),
        ({"band": Band(right=5)}, 8),
        ({"band": Band(right=0, align="top_left")}, 8),
        ({"seqlen_k": 0}, 8),
        # 16384 keys and values of a head, 64 numbers each in 16 bit, are 4 MiB.
        ({"seqlen_k": 16384}, 4),
        ({"seqlen_k": 16385}, 3),
        ({"seqlen_k": 16384, "head_dim_v": 192}, 2),
        ({"seqlen_k": 2**20}, 1),
        # Blocks with much the same work.
        ({"band": Band()}, 1),
        ({"band": Band(left=5, right=0)}, 1),
        ({"band": Band(left=5)}, 1),
    ],
    ids=str,
)
def test_up_to_16_heads_with_16_mib_of_keys_and_values_take_turns_under_a_causal_mask(
    changes: dict[str, Any], at_once: int
) -> None:
    assert number(forward(**({"band": Band(right=0)} | changes)), "heads_at_once") == at_once


# What a call does, with kernels that only note what they are given


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(recipe, argument, argument, ...) of every launch; nothing is compiled."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launching, "compiled", lambda recipe, _: lambda *given: seen.append((recipe, *given)))
    monkeypatch.setattr(launching, "compile_in_threads", lambda *_: None)
    return seen


SIZES = [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_kv": 0}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_nothing_is_launched_where_there_is_nothing(sizes: dict[str, int], started: list[Any]) -> None:
    q, k, v = qkv(device="cpu", **sizes)
    asked = replace(like(*qkv()), seqlen_q=q.shape[1], seqlen_k=k.shape[1])
    out, lse, _ = bound_forward(asked, q, k, v, Extras(), TileLangFA2().shape)(q, k, v, Extras())
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -math.inf).all()
    dout = torch.ones_like(q)
    backward = Backward(asked, q, k, v, dout, Extras(), False, NEEDS, TileLangFA2().shape)
    gradients = backward(q, k, v, out, lse, dout, None, Extras())
    assert [x.shape for x in gradients[:3]] == [q.shape, k.shape, v.shape]
    assert not any(x.any() for x in gradients[:3])
    assert started == []


def test_the_forward_is_given_its_tensors_and_then_its_numbers(started: list[Any]) -> None:
    q, k, v = qkv(device="cpu")
    out, lse, saved = bound_forward(problem(), q, k, v, Extras(), TileLangFA2().shape)(q, k, v, Extras())
    ((recipe, *given),) = started
    assert [x is y for x, y in zip(given[:5], (q, k, v, out, lse), strict=True)] == [True] * 5
    assert tuple(given[5:]) == (
        0,
        0,
        0,
        0,
        0,
        *forward_launch(problem(), q, k, v, Extras(), TileLangFA2().shape).numbers,
    )
    assert recipe.tma
    assert [x is y for x, y in zip(saved, (q, k, v, out, lse), strict=True)] == [True] * 5


@pytest.mark.parametrize(
    ("changes", "made"),
    [({}, True), ({"return_lse": True, "needs_grad": ()}, True), ({"needs_grad": ()}, False)],
    ids=str,
)
def test_the_lse_is_made_where_the_call_or_its_backward_asks_for_it(
    changes: dict[str, Any], made: bool, started: list[Any]
) -> None:
    q, k, v = qkv(device="cpu")
    result = bound_forward(problem(**changes), q, k, v, Extras(), TileLangFA2().shape)(q, k, v, Extras())
    ((recipe, *given),) = started
    assert (recipe.lse, isinstance(given[4], torch.Tensor), result.lse is not None) == (made, made, made)
    assert len(given) == len(TENSORS["forward"]) + len(NUMBERS["forward"])
    assert bool(result.saved) == problem(**changes).needs_backward


def test_extras_go_to_the_places_of_their_names(started: list[Any]) -> None:
    q, k, v = qkv(device="cpu")
    lens = torch.tensor([256, 9], dtype=torch.int32)
    mask = torch.zeros(1, 1, 256, 256)
    extras = Extras(attn_mask=mask, kv_lens=lens)
    asked = problem(kv_lens=True, attn_mask="float", attn_mask_shape=(1, 1, 256, 256))
    out, lse, _ = bound_forward(asked, q, k, v, extras, TileLangFA2().shape)(q, k, v, extras)
    dout = torch.ones_like(q)
    backward = Backward(asked, q, k, v, dout, extras, False, NEEDS, TileLangFA2().shape)
    dq, dk, dv, *_ = backward(q, k, v, out, lse, dout, None, extras)
    assert [recipe.tile_name for recipe, *_ in started] == ["forward", "delta", "total", "dq", "dkdv"]
    wanted = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv, "mask": mask,
        "kv_lens": lens, "q_lens": None, "q_starts": None, "k_starts": None, "dlse": None,
    }  # fmt: skip
    rows = set()
    for recipe, *given in started:
        for name, tensor in zip(TENSORS[recipe.kernel], given[: len(TENSORS[recipe.kernel])], strict=True):
            if name == "rows":
                rows.add(tensor.data_ptr())
            elif wanted[name] is None:
                assert tensor == 0, name
            else:
                assert tensor is wanted[name], name
    assert len(rows) == 1  # that delta and total fill and the others read


@pytest.mark.parametrize("at", ["q", "k", "v", "dout"])
def test_one_address_that_is_no_multiple_of_16_bytes_rules_tma_out(at: str, started: list[Any]) -> None:
    odd = torch.zeros(2 * 256 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 256, 4, 64)
    given = dict(zip(("q", "k", "v", "dout"), (*qkv(device="cpu"), torch.zeros_like(odd)), strict=True)) | {at: odd}
    q, k, v, dout = given.values()
    forward = bound_forward(problem(), q, k, v, Extras(), TileLangFA2().shape)
    out, lse, _ = forward(q, k, v, Extras())
    backward = Backward(problem(), q, k, v, dout, Extras(), False, NEEDS, TileLangFA2().shape)
    backward(q, k, v, out, lse, dout, None, Extras())
    assert [recipe.tma for recipe, *_ in started] == [at == "dout", False, False, False]
    even = [x.clone() for x in (q, k, v)]
    forward(*even, Extras())  # the next call may be another one
    assert started[-1][0].tma


def test_what_tma_reads_has_strides_that_it_takes(started: list[Any]) -> None:
    q, k, v = (x[:1].as_strided((1, 256, 4, 64), (3, 256, 64, 1)) for x in qkv(device="cpu"))
    asked = problem(batch=1)
    out, lse, saved = bound_forward(asked, q, k, v, Extras(), TileLangFA2().shape)(q, k, v, Extras())
    backward = Backward(asked, q, k, v, q, Extras(), False, NEEDS, TileLangFA2().shape)
    backward(q, k, v, out, lse, q, None, Extras())
    assert all(x is y for x, y in zip(saved[:3], (q, k, v), strict=True))  # as the caller gave them
    read = [
        tensor
        for recipe, *given in started
        for name, tensor in zip(TENSORS[recipe.kernel], given, strict=False)
        if recipe.tma and name in ("q", "k", "v", "dout")
    ]
    assert len(read) == 3 + 4 + 4
    assert {x.stride() for x in read} == {(64, 256, 64, 1)}


def test_results_have_the_contracts_strides(started: list[Any]) -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(seqlen_q=4, seqlen_k=4, heads=256, heads_kv=256, device="cpu"))
    asked = like(q, k, v, layout="bhsd")
    out, lse, _ = bound_forward(asked, q, k, v, Extras(), TileLangFA2().shape)(q, k, v, Extras())
    backward = Backward(asked, q, k, v, q, Extras(), False, NEEDS, TileLangFA2().shape)
    gradients = backward(q, k, v, out, lse, q, None, Extras())
    assert {x.stride() for x in (out, *gradients[:3])} == {q.stride()}
    assert (lse.shape, lse.dtype) == ((2, 4, 256), torch.float32)


def test_an_architecture_that_is_not_nvidias_is_an_error_of_ours(backend: TileLangFA2) -> None:
    with pytest.raises(InvalidRequestError, match="not gfx942"):
        backend.facts(problem(arch="gfx942", needs_grad=()))


@pytest.mark.parametrize("scale", [1e-40, 0.0, -0.1])
def test_a_scale_that_may_be_flushed_to_zero_is_multiplied_before_a_score_is_hidden(
    scale: float, backend: TileLangFA2
) -> None:
    (forward,) = [x for x in described(problem(scale=scale), torch.bool, backend.shape) if x.recipe.kernel == "forward"]
    assert not forward.recipe.plain


def test_a_softcap_beyond_all_scores_leaves_a_quotient_that_float32_has_a_normal_number_for(
    backend: TileLangFA2,
) -> None:
    (forward,) = [
        x for x in described(problem(softcap=1e37), torch.bool, backend.shape) if x.recipe.kernel == "forward"
    ]
    numbers = dict(zip(NUMBERS["forward"], forward.numbers, strict=True))
    assert numbers["scale"] > torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("needs", [("k",), ("v",)])
def test_one_gradient_of_keys_and_values_reads_the_tile_of_both_where_both_fit(
    needs: tuple[str, ...], backend: TileLangFA2
) -> None:
    asked = problem(needs_grad=needs)
    found = {launch.recipe.tile_name for launch in described(asked, torch.bool, backend.shape)}
    assert "dkdv" in found
    assert found - {"delta"} <= {*backend.kernels(asked)}
