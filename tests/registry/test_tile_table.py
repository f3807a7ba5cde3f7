"""Which tile is in force: whose table comes first, which row, and that what is no tile never is."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashdispatch_registry import BackendSpec, Band, HeadDims, Problem, Support
from flashdispatch_registry.tile_table import SHARED_BYTES, Shape, TileTable, family, look_up, masks

PROBLEM = Problem(
    arch="sm_90", dtype=torch.bfloat16, batch=1, heads_q=1, heads_kv=1, seqlen_q=8, seqlen_k=8, head_dim=64,
    head_dim_v=64, scale=1.0,
)  # fmt: skip
CAUSAL, WINDOW = (replace(PROBLEM, band=band) for band in (Band(right=0), Band(left=9, right=0)))
ONE, TWO, CAREFUL = Shape(64, 32, 4, 1), Shape(128, 32, 8, 2), Shape(16, 16, 4, 1)
SPEC = BackendSpec(
    name="tiled", factory="tiled", support=Support(dtypes=frozenset({torch.bfloat16}), head_dims=HeadDims(8, 64))
)


def rows(problem: Problem, kernel: str) -> Sequence[str]:
    return [f"{kernel}/{mask}" for mask in masks(problem)]


def check(kernel: str, shape: Shape) -> None:
    if kernel != "forward" or shape.block_m < 1:
        raise ValueError(f"not of {kernel}: {shape}")


def table(shipped: Mapping[str, Shape]) -> TileTable:
    return TileTable(SPEC, shipped, rows, lambda *_: (ONE, TWO, ONE), lambda *_: CAREFUL, check)


def test_a_problem_reads_its_own_row_and_those_of_plainer_masks() -> None:
    assert rows(PROBLEM, "forward") == ["forward/full"]
    assert rows(CAUSAL, "forward") == ["forward/causal", "forward/full"]
    assert rows(WINDOW, "forward") == ["forward/window", "forward/causal", "forward/full"]
    assert table({}).key(WINDOW, "forward") == "forward/window"


def test_a_row_of_its_own_comes_before_any_of_a_plainer_mask_and_then_an_earlier_table() -> None:
    assert look_up(["own", "plainer"], {"plainer": ONE}, {"own": TWO}) == TWO
    assert look_up(["own", "plainer"], {"plainer": ONE}, {"plainer": TWO}) == ONE
    assert look_up(["own"], {"plainer": ONE}) is None


def test_what_was_set_comes_before_what_is_shipped_until_it_is_taken_back() -> None:
    found = table({"forward/full": ONE})
    assert found.shape(CAUSAL, "forward") == ONE
    found.set(CAUSAL, "forward", TWO._asdict())
    assert (found.shape(CAUSAL, "forward"), found.shape(WINDOW, "forward")) == (TWO, TWO)
    assert found.shape(PROBLEM, "forward") == ONE
    found.set(CAUSAL, "forward", None)
    found.set(CAUSAL, "forward", None)
    assert found.shape(CAUSAL, "forward") == ONE


def test_without_a_row_it_is_the_careful_one() -> None:
    assert table({"dq/full": ONE}).shape(PROBLEM, "forward") == CAREFUL


def test_the_tile_in_force_is_worth_measuring_and_none_is_measured_twice() -> None:
    assert table({}).worth_measuring(PROBLEM, "forward") == [CAREFUL, ONE, TWO]
    assert table({"forward/full": TWO}).worth_measuring(PROBLEM, "forward") == [TWO, ONE]


NO_TILES: list[dict[str, Any]] = [
    {"block_m": 64},
    ONE._asdict() | {"more": 1},
    ONE._asdict() | {"block_m": 0},
    ONE._asdict() | {"block_m": 64.0},
    ONE._asdict() | {"block_m": "64"},
]


@pytest.mark.parametrize("bad", NO_TILES, ids=str)
def test_what_is_no_tile_is_never_in_force(bad: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    found = table({})
    with pytest.raises(ValueError, match="block_m"):
        found.set(PROBLEM, "forward", bad)
    assert found.shape(PROBLEM, "forward") == CAREFUL
    with caplog.at_level(logging.WARNING, "flashdispatch"):
        assert found.legal({"forward/full": bad, "dq/full": ONE._asdict(), "forward/causal": TWO._asdict()}) == {
            "forward/causal": TWO
        }
    assert "the tuned tile of tiled for forward/full is not used" in caplog.text
    assert "the tuned tile of tiled for dq/full is not used" in caplog.text


def test_a_tile_is_set_for_a_kernel_and_for_nothing_else() -> None:
    for name in ("forward/full", "", "dq"):
        with pytest.raises(ValueError, match="not of"):
            table({}).set(PROBLEM, name, ONE._asdict())


@pytest.mark.parametrize(
    ("arch", "of"),
    [("sm_80", "sm_80"), ("sm_87", "sm_80"), ("sm_86", "sm_86"), ("sm_89", "sm_86"), ("sm_90", "sm_90"),
     ("sm_90a", "sm_90"), ("sm_100", "sm_100"), ("sm_103", "sm_100"), ("sm_120", "sm_86"), ("gfx942", "sm_86")],
)  # fmt: skip
def test_a_family_has_the_same_shared_memory(arch: str, of: str) -> None:
    assert family(arch) == of
    assert of in SHARED_BYTES
