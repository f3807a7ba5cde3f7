"""triton_fa2 before anything runs: which tile, which kernels, and with which arguments. Needs Triton, and no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from flashdispatch_backends.triton_fa2 import tiles
from flashdispatch_backends.triton_fa2.arguments import Launch, backward_launches, described, forward_launch
from flashdispatch_backends.triton_fa2.compile import KERNELS
from flashdispatch_backends.triton_fa2.launch import TritonFA2
from flashdispatch_backends.triton_fa2.tiles import SHIPPED, padded
from flashdispatch_registry import Band, Extras, Needs, Problem
from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.kernels import Inspectable, PreparesTiles, Tunable
from flashdispatch_registry.tile_table import SHARED_BYTES, Shape, family

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
ALL = ("q", "k", "v", "attn_mask", "sinks")


def problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "arch": "sm_90", "dtype": torch.bfloat16, "batch": 2, "heads_q": 4, "heads_kv": 4, "seqlen_q": 256,
        "seqlen_k": 256, "head_dim": 64, "head_dim_v": 64, "scale": 0.125, "needs_grad": ("q", "k", "v"),
    }  # fmt: skip
    return Problem(**(fields | changes))


@pytest.fixture
def backend() -> TritonFA2:
    """One of its own, so that no test sets another's tiles."""
    return TritonFA2()


def test_it_offers_what_the_tools_ask_for(backend: TritonFA2) -> None:
    assert isinstance(backend, Tunable)
    assert isinstance(backend, PreparesTiles)
    assert isinstance(backend, Inspectable)


# Tiles


@pytest.mark.parametrize(
    ("head_dim", "on_chip"), [(1, 16), (16, 16), (17, 32), (40, 64), (64, 64), (96, 128), (192, 256), (256, 256)]
)
def test_a_head_dim_is_a_power_of_two_on_the_chip_and_16_at_least(head_dim: int, on_chip: int) -> None:
    assert padded(head_dim, "sm_80") == on_chip
    assert padded(head_dim, "sm_90") == max(on_chip, 64)


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
    "float32": {"dtype": torch.float32},
    "float32 as tf32": {"dtype": torch.float32, "fp32_precision": "tf32"},
    "wider": {"head_dim": 128, "head_dim_v": 128},
    "wider values": {"head_dim_v": 128},
    "causal": {"band": Band(right=0)},
    "window": {"band": Band(left=64, right=0)},
    "softcap": {"softcap": 20.0},
    "dropout": {"dropout_p": 0.1},
    "float mask": {"attn_mask": "float"},
    "dropout and softcap": {"dropout_p": 0.1, "softcap": 20.0},
}
SAME: dict[str, dict[str, Any]] = {
    "the other 16 bit": {"dtype": torch.float16},
    "a head dim that is padded": {"head_dim": 40},
    "more of it": {"batch": 9, "heads_q": 8, "heads_kv": 2, "seqlen_q": 999, "seqlen_k": 1, "scale": 1.0},
    "lengths and sinks": {"q_lens": True, "kv_lens": True, "sinks": True},
    "what comes out": {"return_lse": True, "needs_grad": (), "deterministic": True, "layout": "bhsd"},
}


def test_a_key_tells_apart_what_a_tile_depends_on(backend: TritonFA2) -> None:
    kernels = ("forward", "dq", "dkdv")
    keys = [backend.tile_key(problem(**changes), kernel) for changes in DISTINCT.values() for kernel in kernels]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_a_key_is_the_same_for_what_a_tile_does_not_depend_on(changes: dict[str, Any], backend: TritonFA2) -> None:
    assert backend.tile_key(problem(**changes), "dq") == backend.tile_key(problem(), "dq")


def test_architectures_of_one_family_share_a_key(backend: TritonFA2) -> None:
    assert backend.tile_key(problem(arch="sm_89"), "dq") == backend.tile_key(problem(arch="sm_120"), "dq")


def test_a_tile_set_is_in_force_for_its_key_until_it_is_taken_back(backend: TritonFA2) -> None:
    shipped = backend.tile(problem(), "dq")
    other = {"block_m": 16, "block_n": 128, "num_warps": 4, "num_stages": 1}
    assert other != shipped
    backend.set_tile(problem(), "dq", other)
    assert backend.tile(problem(seqlen_q=33), "dq") == other  # the same key
    assert backend.tile(problem(), "dkdv") != other
    assert backend.tile(problem(head_dim=128, head_dim_v=128), "dq") != other
    (launch,) = (x for x in described(problem(), torch.bool, backend.shape) if x.recipe.kernel == "dq")
    assert dict(launch.recipe.constants)["BLOCK_N"] == 128
    assert launch.recipe.shape == Shape(**other)
    backend.set_tile(problem(), "dq", None)
    backend.set_tile(problem(), "dq", None)
    assert backend.tile(problem(), "dq") == shipped


def test_a_tile_set_for_a_plainer_mask_does_not_displace_a_shipped_one(backend: TritonFA2) -> None:
    wide, causal = {"head_dim": 128, "head_dim_v": 128}, {"band": Band(right=0)}
    assert {"forward/sm_90/16bit/d128/causal", "forward/sm_90/16bit/d128/full"} <= set(SHIPPED)
    assert "dq/sm_90/16bit/d128/causal" not in SHIPPED
    other = {"block_m": 16, "block_n": 128, "num_warps": 4, "num_stages": 1}
    for kernel in ("forward", "dq"):
        backend.set_tile(problem(**wide), kernel, other)
    assert backend.shape(problem(**wide, **causal), "forward") == SHIPPED["forward/sm_90/16bit/d128/causal"]
    assert backend.tile(problem(**wide, **causal), "dq") == other  # it has no row of its own, and reads the plainer one


SPACE = [
    pytest.param(arch, dtype, d, changes, id=f"{arch}-{str(dtype)[6:]}-d{d}-{name}")
    for arch, dtype, d, (name, changes) in product(
        ARCHS, (torch.bfloat16, torch.float32), (64, 128, 256), {"plain": {}, "extra": {"softcap": 9.0}}.items()
    )
]


@pytest.mark.parametrize(("arch", "dtype", "d", "changes"), SPACE)
def test_the_space_holds_the_tile_in_force_once_and_only_tiles_that_can_be_launched(
    arch: str, dtype: torch.dtype, d: int, changes: dict[str, Any], backend: TritonFA2
) -> None:
    asked = problem(arch=arch, dtype=dtype, head_dim=d, head_dim_v=d, **changes)
    for kernel in backend.kernels(asked):
        space = [tuple(tile.values()) for tile in backend.tile_space(asked, kernel)]
        assert tuple(backend.tile(asked, kernel).values()) in space
        assert len(set(space)) == len(space)
        assert len(space) >= 2  # else there is nothing to tune
        for shape in (Shape(*tile) for tile in space):
            assert all(size >= 16 and size & (size - 1) == 0 for size in (shape.block_m, shape.block_n))
            assert shape.num_warps in (4, 8)
            assert at_least(shape, kernel, dtype.itemsize, d, d) <= SHARED_BYTES[family(arch)]


KINDS: dict[str, list[dict[str, Any]]] = {
    "extra": [{"softcap": 9.0}, {"alibi": True}, {"attn_mask": "bool"}],
    "bias": [{"attn_mask": "float"}, {"attn_mask": "float", "alibi": True}],
    "heavy": [{"dropout_p": 0.1, "alibi": True}, {"attn_mask": "float", "softcap": 9.0}],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [64, 128])
def test_calls_that_share_a_tile_share_the_space_it_was_found_in(kind: str, d: int, backend: TritonFA2) -> None:
    # Triton streams a mask through shared memory, so that what fits without one may not fit with one.
    asked = [problem(head_dim=d, head_dim_v=d, **changes) for changes in KINDS[kind]]
    for kernel in ("forward", "dq", "dkdv"):
        assert len({backend.tile_key(each, kernel) for each in asked}) == 1
        found = [set(tiles.space(each, kernel)) for each in asked]
        assert all(space == found[0] for space in found)
        scores = max(shape.block_m * shape.block_n * shape.num_stages for shape in found[0])
        plain = max(shape.block_m * shape.block_n * shape.num_stages for shape in tiles.space(problem(), kernel))
        assert scores <= plain


def at_least(shape: Shape, kernel: str, itemsize: int, d: int, dv: int) -> int:
    """Bytes of shared memory that the operands of one tile take, at least: one block of what streams.

    The forward keeps Q, and dV's own pass K; the others two tensors.
    """
    resident, streamed = (shape.block_n, shape.block_m) if kernel in ("dkdv", "dk", "dv") else shape[:2]
    copies = max(1, shape.num_stages - 1)
    return itemsize * (resident * (d if kernel in ("forward", "dv") else d + dv) + copies * streamed * (d + dv))


ROW = re.compile(r"(?P<kernel>\w+)/(?P<family>sm_\d+)/(?P<bits>16|32)bit(-\w+)?/d(?P<d>\d+)(x(?P<dv>\d+))?/.+")


@pytest.mark.parametrize("row", SHIPPED)
def test_a_shipped_tile_fits_and_its_row_is_one_that_some_problem_reads(row: str, backend: TritonFA2) -> None:
    found = ROW.fullmatch(row)
    assert found is not None
    d = int(found["d"])
    size = at_least(SHIPPED[row], found["kernel"], int(found["bits"]) // 8, d, int(found["dv"] or d))
    assert size <= SHARED_BYTES[found["family"]]
    asked = problem(
        arch=found["family"], head_dim=d, head_dim_v=d, dtype=torch.float32 if found["bits"] == "32" else torch.float16
    )
    of_kind = (
        replace(asked, band=band, softcap=softcap, dropout_p=p, attn_mask=mask, attn_mask_shape=mask and (1, 1, 1, 1),
                fp32_precision=precision, needs_grad=ALL)
        for band, softcap, p, mask, precision in product(
            (Band(), Band(right=0), Band(left=3, right=0)), (None, 9.0), (0.0, 0.5), (None, "float"), ("ieee", "tf32")
        )
    )  # fmt: skip
    assert any(found["kernel"] in backend.kernels(p) and backend.tile_key(p, found["kernel"]) == row for p in of_kind)
    assert found["family"] in SHARED_BYTES


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dims", [(64, 64), (8, 8), (256, 64), (64, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_problem_has_a_tile_that_fits(
    dtype: torch.dtype, dims: tuple[int, int], arch: str, backend: TritonFA2
) -> None:
    on_chip = [padded(dim, arch) for dim in dims]
    for changes in DISTINCT.values():
        changes = {"needs_grad": ALL, "attn_mask": "float", "attn_mask_shape": (2, 4, 256, 256)} | changes
        asked = replace(problem(**changes), arch=arch, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1])
        for kernel in backend.kernels(asked):
            shape = backend.shape(asked, kernel)
            assert at_least(shape, kernel, dtype.itemsize, *on_chip) <= SHARED_BYTES[family(arch)]


def test_where_dk_and_dv_do_not_fit_beside_each_other_each_has_its_pass(backend: TritonFA2) -> None:
    wide = {"head_dim": 256, "head_dim_v": 64}
    assert backend.kernels(problem(head_dim=128, head_dim_v=128)) == ("forward", "dq", "dkdv")
    assert backend.kernels(problem(**wide)) == ("forward", "dq", "dk", "dv")
    assert backend.kernels(problem(needs_grad=())) == ("forward",)
    assert backend.kernels(problem(attn_mask="float", attn_mask_shape=(1, 4, 256, 256), needs_grad=ALL))[-1] == "dmask"


# Launches


def names(launches: list[Launch]) -> list[str]:
    return [launch.recipe.kernel for launch in launches]


@pytest.mark.parametrize(
    ("needs", "launched"),
    [
        ((), []),
        (("q",), ["dq"]),
        (("k",), ["dq", "dkdv"]),  # for Delta
        (("v",), ["dkdv"]),
        (("q", "k", "v"), ["dq", "dkdv"]),
        (("sinks",), ["dq"]),
    ],
)
def test_a_backward_launches_what_its_gradients_need(
    needs: tuple[str, ...], launched: list[str], backend: TritonFA2
) -> None:
    asked = problem(needs_grad=needs, sinks="sinks" in needs)
    assert names(described(asked, torch.bool, backend.shape)) == ["forward", *launched]


@pytest.mark.parametrize("needs", [("v",), ("attn_mask",), ALL])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_launches_described_are_the_kernels_named(
    needs: tuple[str, ...], head_dim: int, backend: TritonFA2
) -> None:
    asked = problem(
        head_dim=head_dim, head_dim_v=head_dim, attn_mask="float", attn_mask_shape=(2, 1, 256, 256), sinks=True,
        needs_grad=needs, return_lse=True,
    )  # fmt: skip
    found = described(asked, torch.float32, backend.shape)
    assert set(names(found)) <= set(backend.kernels(asked))
    if needs == ALL:
        assert set(names(found)) == set(backend.kernels(asked))
    assert names(found).count("dq") == 2  # with and without a gradient of the LSE
    for launch in found:
        arguments = KERNELS[launch.recipe.kernel].arg_names
        assert len(launch.pointers) + len(launch.rest) == len(launch.recipe.types) == len(arguments)


def test_a_gradient_that_nobody_wants_is_compiled_out(backend: TritonFA2) -> None:
    for needs, there in (("k", ["dk"]), ("v", ["dv"]), ("q", [])):
        found = described(problem(needs_grad=(needs,)), torch.bool, backend.shape)
        outputs = [name for launch in found if launch.recipe.kernel == "dkdv" for name in launch.pointers]
        assert [name for name in outputs if name in ("dk", "dv")] == there


def qkv(head_dim: int = 64, seqlen_q: int = 256, seqlen_k: int = 256, batch: int = 2) -> list[torch.Tensor]:
    return [
        torch.empty(batch, seqlen, 4, head_dim, dtype=torch.bfloat16, device="meta")
        for seqlen in (seqlen_q, seqlen_k, seqlen_k)
    ]


def launches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras | None = None, **changes: Any
) -> Iterator[Launch]:
    """Of the forward, and of the backward with all gradients."""
    extras = extras or Extras()
    asked = problem(
        batch=q.shape[0], seqlen_q=q.shape[1], seqlen_k=k.shape[1], head_dim=q.shape[3], head_dim_v=v.shape[3],
        attn_mask_shape=None if extras.attn_mask is None else tuple(extras.attn_mask.shape), **changes,
    )  # fmt: skip
    shape_of = TritonFA2().shape
    needs = Needs(*(name in asked.needs_grad for name in Needs._fields))
    dout = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    yield forward_launch(asked, q, k, v, extras, shape_of)
    yield from backward_launches(asked, q, k, v, dout, dout, extras, False, needs, shape_of)


def argument(launch: Launch, name: str) -> tuple[str, Any]:
    """(type, value) of an argument that is no tensor."""
    arguments = KERNELS[launch.recipe.kernel].arg_names
    at = arguments.index(name)
    return launch.recipe.types[at], launch.rest[at - len(launch.pointers)]


def test_nothing_is_launched_where_nothing_comes_out() -> None:
    assert all(launch.grid == 0 for launch in launches(*qkv(batch=0)))
    grids = {launch.recipe.kernel: launch.grid for launch in launches(*qkv(seqlen_q=0))}
    assert grids["forward"] == grids["dq"] == 0
    assert grids["dkdv"] > 0  # dK and dV are 0 there, and somebody has to write it
    grids = {launch.recipe.kernel: launch.grid for launch in launches(*qkv(seqlen_k=0))}
    assert grids["forward"] > 0
    assert grids["dkdv"] == 0


def test_a_grid_has_a_program_for_each_block_of_each_head() -> None:
    q, k, v = qkv(seqlen_q=257, seqlen_k=129, batch=3)
    k, v = k[:, :, :2], v[:, :, :2]
    for launch in launches(q, k, v, heads_kv=2):
        block_m, block_n = launch.recipe.shape[:2]
        blocks = 2 * -(-129 // block_n) if launch.recipe.kernel == "dkdv" else 4 * -(-257 // block_m)
        assert launch.grid == 3 * blocks


def test_rows_that_are_no_multiple_of_16_bytes_rule_wide_loads_out() -> None:
    assert all(launch.recipe.aligned for launch in launches(*qkv()))
    for at in range(3):
        tensors = qkv()
        tensors[at] = torch.empty(2, 256, 4, 68, dtype=torch.bfloat16, device="meta")[..., :64]
        assert not any(launch.recipe.aligned for launch in launches(*tensors) if "qkv"[at] in launch.pointers)
    assert not any(launch.recipe.aligned for launch in launches(*qkv(head_dim=63)))


def test_the_stride_of_a_dim_of_size_1_says_nothing() -> None:
    q, k, v = (x[:1].as_strided((1, 256, 4, 64), (3, 256, 64, 1)) for x in qkv())
    assert all(launch.recipe.aligned for launch in launches(q, k, v))


def test_addresses_that_are_no_multiple_of_16_bytes_rule_wide_loads_out() -> None:
    for launch in launches(*qkv()):
        assert launch.on(True) is launch
        assert launch.on(False).recipe == replace(launch.recipe, aligned=False)
        assert launch.on(False).on(True) == launch.on(False)


def test_offsets_are_64_bit() -> None:
    wide = [torch.empty_strided((2, 256, 4, 64), (2**41, 2**32, 64, 1), dtype=torch.bfloat16, device="meta")] * 3
    slopes = torch.empty(2, 4, device="meta")
    mask = torch.empty_strided((2, 4, 256, 256), (2**41, 2**40, 2**32, 1), device="meta")
    extras = Extras(attn_mask=mask, alibi_slopes=slopes)
    seen = 0
    for launch in launches(*wide, extras, attn_mask="float", alibi=True, needs_grad=("q", "k", "v", "attn_mask")):
        for name in KERNELS[launch.recipe.kernel].arg_names:
            if name.startswith("stride_") and name != "stride_mn":
                assert argument(launch, name)[0] == "i64"
                seen += argument(launch, name)[1] >= 2**31
    assert seen > 20


MASKS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[Any, ...]]] = {
    # mask made of a (2, 4, 256, 256) one -> (type, value) of stride_mb, stride_mh, stride_mm, stride_mn
    "whole": (lambda m: m, (("i64", 262144), ("i64", 65536), ("i64", 256), ("constexpr", 1))),
    "of keys": (lambda m: m[:, :1, :1], (("i64", 262144), ("i64", 0), ("constexpr", 0), ("constexpr", 1))),
    "of rows": (lambda m: m[:1, :, :, :1], (("i64", 0), ("i64", 65536), ("i64", 256), ("constexpr", 0))),
    "expanded": (
        lambda m: m[..., :1].expand(-1, -1, -1, 256),
        (("i64", 262144), ("i64", 65536), ("i64", 256), ("constexpr", 0)),
    ),
    "transposed": (lambda m: m.mT, (("i64", 262144), ("i64", 65536), ("constexpr", 1), ("i64", 256))),
    "every other key": (
        lambda m: m.repeat(1, 1, 1, 2)[..., ::2],
        (("i64", 524288), ("i64", 131072), ("i64", 512), ("i64", 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("made", "strides"), MASKS.values(), ids=MASKS)
def test_a_masks_strides_of_0_and_1_are_known_to_the_compiler(
    made: Callable[[torch.Tensor], torch.Tensor], strides: tuple[Any, ...]
) -> None:
    mask = made(torch.empty(2, 4, 256, 256, dtype=torch.bool, device="meta"))
    for launch in launches(*qkv(), Extras(attn_mask=mask), attn_mask="bool"):
        assert tuple(argument(launch, f"stride_m{dim}") for dim in "bhmn") == strides
        compiled_in = dict(launch.recipe.constants)
        for dim, (kind, value) in zip("bhmn", strides, strict=True):
            assert compiled_in.get(f"stride_m{dim}", "given") == (value if kind == "constexpr" else "given")


@pytest.mark.parametrize(
    ("shape", "strides", "aligned"),
    [
        ((2, 4, 256, 256), (262144, 65536, 256, 1), True),
        ((2, 4, 256, 250), (256000, 64000, 250, 1), False),  # rows of 250
        ((2, 1, 1, 256), (256, 0, 0, 1), True),
        ((2, 1, 1, 256), (1, 0, 0, 1), False),  # sequences one number apart: a sliding view
        ((2, 1, 1, 1), (1, 1, 1, 1), False),
    ],
)
def test_wide_loads_of_a_mask_need_its_rows_at_multiples_of_16(
    shape: tuple[int, ...], strides: tuple[int, ...], aligned: bool
) -> None:
    mask = torch.empty_strided(shape, strides, dtype=torch.bool, device="meta")
    q, k, v = qkv(seqlen_k=max(shape[3], 250))
    for launch in launches(q, k, v, Extras(attn_mask=mask), attn_mask="bool"):
        assert launch.recipe.aligned_mask == aligned


def test_numbers_have_the_types_that_the_kernels_compute_with() -> None:
    (forward, *_) = launches(
        *qkv(), Extras(dropout_seed=torch.empty(2, dtype=torch.int64, device="meta")), dropout_p=1.0
    )
    assert argument(forward, "threshold") == ("u32", 2**32 - 1)
    assert argument(forward, "kept") == ("fp32", 0.0)
    assert argument(forward, "seqlen_q") == ("i32", 256)
    assert argument(forward, "scale")[0] == "fp32"


@pytest.mark.parametrize("scale", [1, 0, -2])
def test_a_scale_that_is_a_whole_number_is_a_float_to_the_kernel(scale: int) -> None:
    for launch in launches(*qkv(), scale=scale, attn_mask="float",
                           extras=Extras(attn_mask=torch.empty(1, 1, 256, 256, device="meta"))):  # fmt: skip
        assert argument(launch, "scale")[0] == "fp32"


@pytest.mark.parametrize(
    ("changes", "at_once"),
    [
        ({}, 8),  # as many as there are
        ({"batch": 9}, 16),
        ({"heads_kv": 1}, 8),
        ({"band": Band(right=5)}, 8),
        ({"band": Band(right=0, align="top_left")}, 8),
        ({"seqlen_k": 0}, 8),
        # 16384 keys and values of a head, 64 numbers each in 16 bit, are 4 MiB.
        ({"seqlen_k": 16384}, 4),
        ({"seqlen_k": 16385}, 3),
        ({"seqlen_k": 16384, "head_dim_v": 192}, 2),
        ({"seqlen_k": 16384, "dtype": torch.float32}, 2),
        ({"seqlen_k": 2**20}, 1),
    ],
)
def test_up_to_16_heads_with_16_mib_of_keys_and_values_take_turns_under_a_causal_mask(
    changes: dict[str, Any], at_once: int, backend: TritonFA2
) -> None:
    asked = problem(
        **({"band": Band(right=0), "batch": 2, "head_dim": 64, "head_dim_v": 64, "seqlen_k": 256} | changes)
    )
    for launch in described(asked, torch.bool, backend.shape):
        assert argument(launch, "heads_at_once") == ("i32", at_once)


@pytest.mark.parametrize("band", [Band(), Band(left=5, right=0), Band(left=5)], ids=str)
def test_no_heads_take_turns_where_blocks_have_much_the_same_work(band: Band) -> None:
    for launch in launches(*qkv(), band=band):
        assert argument(launch, "heads_at_once") == ("constexpr", None)


def test_no_distance_overflows_32_bits() -> None:
    (forward, *_) = launches(*qkv(), band=Band(left=2**40, right=2**40))
    assert argument(forward, "left") == ("i32", 512)
    assert argument(forward, "right") == ("i32", 512)


@pytest.mark.parametrize(
    "tile",
    [
        {"block_m": 64},
        {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2, "more": 1},
        {"block_m": -16, "block_n": 64, "num_warps": 4, "num_stages": 2},
        {"block_m": 0, "block_n": 64, "num_warps": 4, "num_stages": 2},
        {"block_m": 48, "block_n": 64, "num_warps": 4, "num_stages": 2},
        {"block_m": 64, "block_n": 64, "num_warps": 3, "num_stages": 2},
        {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 0},
    ],
)
def test_what_is_no_tile_is_never_used(tile: dict[str, int], backend: TritonFA2, caplog: Any) -> None:
    with pytest.raises(ValueError, match=r"block_m"):
        backend.set_tile(problem(), "forward", tile)
    good = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 1}
    assert backend.table.legal({"forward/bad": tile, "forward/good": good}) == {"forward/good": Shape(**good)}
    assert "the tuned tile of triton_fa2 for forward/bad is not used" in caplog.text


def test_a_kernel_that_there_is_not_has_no_tile(backend: TritonFA2) -> None:
    with pytest.raises(ValueError, match="no kernel 'nope'; it has forward"):
        backend.set_tile(problem(), "nope", SHIPPED["forward/sm_90/16bit/d64/full"]._asdict())


def test_every_kernel_has_tiles() -> None:
    assert set(tiles.KERNELS) == set(KERNELS)


def test_a_tuned_tile_serves_kindred_masks(backend: TritonFA2) -> None:
    tile = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 1}
    backend.set_tile(problem(band=Band(None, 0)), "forward", tile)
    assert backend.tile(problem(band=Band(9, 0)), "forward") == tile  # a window reads the causal row
    assert backend.tile(problem(), "forward") != tile


def test_an_architecture_that_triton_can_not_compile_for_is_an_error_of_ours(backend: TritonFA2) -> None:
    with pytest.raises(InvalidRequestError, match="can't compile for sm_999"):
        backend.facts(problem(arch="sm_999", needs_grad=()))
