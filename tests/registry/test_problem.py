"""`Problem` as a value: hashable, comparable, JSON both ways, one line of text."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from flashdispatch_registry import Band, Problem
from flashdispatch_registry.problem import DTYPE_NAMES

EVERYTHING: dict[str, Any] = {
    "arch": "sm_90",
    "dtype": torch.bfloat16,
    "batch": 3,
    "heads_q": 8,
    "heads_kv": 2,
    "seqlen_q": 5,
    "seqlen_k": 7,
    "head_dim": 96,
    "head_dim_v": 32,
    "scale": 0.3,
    "band": Band(4, 0, "top_left"),
    "attn_mask": "float",
    "attn_mask_shape": (1, 8, 1, 7),
    "alibi": True,
    "sinks": True,
    "q_lens": True,
    "kv_lens": True,
    "softcap": 30.0,
    "dropout_p": 0.1,
    "layout": "bhsd",
    "needs_grad": ("q", "v", "attn_mask"),
    "return_lse": True,
    "deterministic": True,
    "fp32_precision": "tf32",
}


def test_everything_names_every_field() -> None:
    assert set(EVERYTHING) == {field.name for field in dataclasses.fields(Problem)}


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_json_round_trip_keeps_the_plain_problem(problem, dtype: torch.dtype) -> None:
    plain = problem(dtype=dtype)
    assert Problem.from_json(json.loads(json.dumps(plain.to_json()))) == plain


def test_json_round_trip_keeps_every_field() -> None:
    full = Problem(**EVERYTHING)
    back = Problem.from_json(json.loads(json.dumps(full.to_json())))
    assert back == full
    assert hash(back) == hash(full)


def test_json_may_leave_out_what_has_a_default(problem) -> None:
    data = problem().to_json()
    for name in ("band", "attn_mask", "attn_mask_shape", "needs_grad", "softcap"):
        del data[name]
    assert Problem.from_json(data) == problem()


def test_unknown_json_fields_are_refused_by_name(problem) -> None:
    with pytest.raises(ValueError, match="unknown Problem fields: blocks, tree"):
        Problem.from_json(problem().to_json() | {"tree": 1, "blocks": 2})


def test_from_json_leaves_its_argument_alone() -> None:
    data = Problem(**EVERYTHING).to_json()
    before = json.dumps(data)
    Problem.from_json(data)
    assert json.dumps(data) == before


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_field_takes_part_in_equality(problem, name: str) -> None:
    changed = problem(**{name: EVERYTHING[name]})
    assert changed != problem()
    assert len({changed, problem(), problem()}) == 2


def test_a_problem_is_frozen(problem) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem().batch = 3


def test_the_description_of_a_plain_problem(problem) -> None:
    assert problem().describe() == ("cpu float32, B2 Hq4 Hkv4 Sq16 Sk32 D64, full, forward only, layout bshd")


def test_the_description_of_a_problem_with_everything_is_one_line_and_names_all_of_it() -> None:
    assert Problem(**EVERYTHING).describe() == (
        "sm_90 bfloat16, B3 Hq8 Hkv2 Sq5 Sk7 D96 Dv32, window(4, 0) top_left, float attn_mask (1, 8, 1, 7), alibi, "
        "sinks, q_lens, kv_lens, softcap 30, dropout 0.1, scale 0.3, gradients of q, v, attn_mask, tf32 "
        "allowed, with LSE, deterministic, layout bhsd"
    )


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30])
def test_the_description_names_a_scale_that_is_not_the_default(problem, scale: float) -> None:
    assert f"scale {scale:g}" in problem(scale=scale).describe()


def test_empty_sizes_can_be_described(problem) -> None:
    assert (
        "B0 Hq0 Hkv0 Sq0 Sk0 D0"
        in problem(batch=0, heads_q=0, heads_kv=0, seqlen_q=0, seqlen_k=0, head_dim=0, head_dim_v=0).describe()
    )


@pytest.mark.parametrize(("heads", "group"), [((8, 2), 4), ((4, 4), 1), ((0, 0), 1)])
def test_group_is_query_heads_per_kv_head(problem, heads: tuple[int, int], group: int) -> None:
    assert problem(heads_q=heads[0], heads_kv=heads[1]).group == group


def test_an_lse_gradient_may_come_only_when_lse_and_gradients_are_asked(problem) -> None:
    assert problem(return_lse=True, needs_grad=("q",)).needs_lse_grad
    assert not problem(return_lse=True).needs_lse_grad
    assert not problem(needs_grad=("q",)).needs_lse_grad


def test_another_architecture_changes_nothing_else(problem) -> None:
    moved = problem(softcap=3.0).with_arch("sm_120")
    assert moved == problem(softcap=3.0, arch="sm_120")
    assert moved.device_type == "cuda"
