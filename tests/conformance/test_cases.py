"""The case list: stable ids, the edges it must have, and a case for every feature a backend can declare."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from flashdispatch_conformance.case import Case, Mask, MaskPattern, Replay, Values, View, contradictions
from flashdispatch_conformance.cases import ALL, BY_ID, NAMED, PAIRWISE, PINNED
from flashdispatch_conformance.inputs import problem_of
from flashdispatch_registry import HeadDims, Problem, Support
from flashdispatch_registry.support import declared_reasons

PROBLEMS = [problem_of(case, torch.bfloat16, "cpu", torch.device("cpu")) for case in ALL]


def test_ids_are_the_committed_ones() -> None:
    """Ids are public: add to case_ids.txt, never rename."""
    committed = Path(__file__).with_name("case_ids.txt").read_text(encoding="utf-8").split()
    assert [case.id for case in ALL] == committed


def test_ids_are_unique_and_plain() -> None:
    assert len(BY_ID) == len(ALL)
    for cases, form in (
        (NAMED, r"named/[a-z0-9_]+"),
        (PINNED, r"pinned/B\d+(_[a-z0-9_]+)?"),
        (PAIRWISE, r"pairwise/\d{3}"),
    ):
        assert all(re.fullmatch(form, case.id) for case in cases)


def test_a_case_says_why_and_contradicts_nothing() -> None:
    for case in ALL:
        assert len(case.why) > 5
        assert "\n" not in case.why
        assert contradictions(case) == [], case.id


def test_named_and_pairwise_cases_are_for_every_run() -> None:
    assert {case.tier for case in (*NAMED, *PAIRWISE)} == {"full"}
    of_one_dtype = [case.id for case in NAMED if len(case.dtypes) < 3]
    assert len(of_one_dtype) < len(NAMED) / 10, of_one_dtype


def test_a_case_goes_to_json_and_back() -> None:
    for case in ALL:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_json_holds_what_differs_from_the_defaults() -> None:
    case = Case(id="named/x", why="a test", mask=Mask(shape=(1, 1, 64, 64)), window=(3, None), heads=(2, 2))
    assert case.to_json() == {
        "id": "named/x", "why": "a test", "mask": {"shape": [1, 1, 64, 64]}, "window": [3, None]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"id": "x", "why": "y", "seqlen": 3}, "unknown Case fields: seqlen"),
        ({"why": "y"}, "Case needs id"),
        ({"id": "x", "why": "y", "mask": {"shape": [1, 1], "colour": 1}}, "unknown Mask fields: colour"),
        ({"id": "x", "why": "y", "mask": {"kind": "bool"}}, "Mask needs shape"),
    ],
)
def test_json_that_is_not_understood_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case.from_json(data)


def test_one_line_replays_a_case() -> None:
    replay = Replay(case=BY_ID["named/everything"], dtype="bfloat16", seed=7)
    assert "\n" not in replay.line()
    assert Replay.parse(replay.line()) == replay


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object like"),
        ('{"case": {"id": "x", "why": "y"}}', "Replay needs dtype"),
        ('{"case": {"id": "x", "why": "y"}, "dtype": "bfloat16", "device": "cpu"}', "unknown Replay fields: device"),
        ('{"case": {"id": "x", "why": "y"}, "dtype": "int8"}', "dtype must be one of float16"),
        ('{"case": {"id": "x", "why": "y"}, "dtype": "float16", "seed": 1.5}', "seed must be an integer"),
        ('{"case": {"id": "x", "why": "y", "heads": [4, 3]}, "dtype": "float16"}', "Hq must be a multiple of Hkv"),
    ],
)
def test_a_line_that_is_no_problem_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Replay.parse(line)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"heads": (4, 3)}, "Hq must be a multiple of Hkv"),
    "no heads": ({"heads": (0, 0)}, "heads must be two integers >= 1"),
    "three lengths": ({"seqlens": (1, 2, 3)}, "seqlens must be two integers >= 0"),
    "a float length": ({"seqlens": (1.0, 2)}, "seqlens must be two integers >= 0"),
    "head dim 0": ({"dims": (0, 64)}, "dims must be two integers >= 1"),
    "batch": ({"batch": -1}, "batch must be an integer >= 0"),
    "a dtype": ({"dtypes": ("int8",)}, "dtypes must be different words of float16"),
    "a dtype twice": ({"dtypes": ("float16", "float16")}, "dtypes must be different words"),
    "no dtype": ({"dtypes": ()}, "would never be run"),
    "tier": ({"tier": "smoke"}, "tier must be one of 'full', 'deep'"),
    "values": ({"values": "random"}, "values must be one of 'normal'"),
    "view": ({"k_view": "reversed"}, "k_view must be one of 'contiguous'"),
    "causal 1": ({"causal": 1}, "causal must be one of True"),
    "bare window": ({"window": 3}, "window must be (left, right)"),
    "negative window": ({"window": (-1, 0)}, "window must be (left, right)"),
    "lengths past the end": ({"batch": 2, "q_lens": (64, 65)}, "must be within 0..64"),
    "too few lengths": ({"batch": 2, "kv_lens": (3,)}, "has 1 lengths for a batch of 2"),
    "kv_lens and causal": ({"kv_lens": (3,), "causal": True}, "give q_lens too"),
    "kv_lens and a right side of 0": ({"kv_lens": (3,), "window": (5, 0)}, "give q_lens too"),
    "padding that is shared": (
        {"batch": 2, "kv_lens": (3, 64), "v_view": "expanded_batch"},
        "its padding would be their values",
    ),
    "padding that is everywhere": (
        {"batch": 2, "q_lens": (0, 1), "dout_view": "expanded_all"},
        "its padding would be their values",
    ),
    "mask shape": ({"mask": Mask(shape=(1, 3, 64, 64))}, "can't be broadcast to (1, 2, 64, 64)"),
    "mask of one dim": ({"mask": Mask(shape=(64,))}, "a mask has 2 to 4 dims"),
    "mask kind": ({"mask": Mask(shape=(64, 64), kind="int")}, "a mask's kind must be one of 'bool'"),  # type: ignore[arg-type]
    "gradient of a bool mask": ({"mask": Mask(shape=(64, 64), grad=True)}, "a bool mask has no gradient"),
    "finfo.min of a bool mask": ({"mask": Mask(shape=(64, 64), pattern="finfo_min")}, "needs a float mask"),
    "scale": ({"scale": float("nan")}, "scale must be a finite number"),
    "scale 0 and values made of it": ({"scale": 0.0, "values": "needle"}, "made from the scale, which is 0"),
    "values past float16": ({"scale": 1e-4, "values": "logits_minus_120"}, "float16 ends at 65504"),
    "softcap": ({"softcap": 0.0}, "softcap must be > 0"),
    "dropout": ({"dropout_p": 1.5}, "dropout_p must be within 0..1"),
    "no dropout": ({"dropout_p": None}, "dropout_p must be a finite number"),
    "seed": ({"dropout_seed": 2**63}, "an integer of 64 bits"),
    "sinks": ({"grads": ("sinks",)}, "a gradient of sinks is wanted, and there are none"),
    "nothing arrives": ({"dout": False}, "nothing to differentiate"),
    "nothing wants dlse": ({"grads": (), "dlse": True}, "nothing wants a gradient"),
    "distinct": ({"batch": 5, "distinct": 2}, "must divide the batch 5"),
    "distinct lengths": (
        {"batch": 4, "distinct": 2, "q_lens": (1, 2, 3, 4)},
        "q_lens must repeat every 2 sequences",
    ),
    "distinct and dropout": ({"batch": 4, "distinct": 2, "dropout_p": 0.1}, "no two sequences"),
    "distinct and sinks": (
        {"batch": 4, "distinct": 2, "sinks": True, "grads": ("q", "sinks")},
        "summed over the whole batch",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_contradiction_is_named(name: str) -> None:
    changes, message = WRONG[name]
    (said,) = contradictions(replace(Case(id="named/x", why="a test"), **changes))
    assert message in said


def test_every_contradiction_comes_at_once() -> None:
    case = Case(id="named/x", why="a test", heads=(4, 3), softcap=-1.0, dout=False)
    assert len(contradictions(case)) == 3


@pytest.mark.parametrize("values", get_args(Values))
def test_every_family_of_values_has_a_case(values: str) -> None:
    assert any(case.values == values for case in ALL)


@pytest.mark.parametrize("view", get_args(View))
def test_every_view_has_a_case(view: str) -> None:
    assert any(view in (case.q_view, case.k_view, case.v_view, case.dout_view) for case in ALL)


@pytest.mark.parametrize("pattern", get_args(MaskPattern))
def test_every_mask_pattern_has_a_case(pattern: str) -> None:
    assert any(case.mask is not None and case.mask.pattern == pattern for case in ALL)


def with_(name: str, value: object) -> Callable[[Case], bool]:
    return lambda case: getattr(case, name) == value


GRADIENTS = (*(names for n in (1, 2, 3) for names in itertools.combinations("qkv", n)), ("attn_mask",), ("sinks",))
EDGES: dict[str, Callable[[Case], bool]] = {
    "Sq < Sk, bottom-right": lambda c: c.seqlens[0] < c.seqlens[1] and c.causal is True,
    "Sq < Sk, top-left": lambda c: c.seqlens[0] < c.seqlens[1] and c.causal == "top_left",
    "Sq > Sk, bottom-right": lambda c: c.seqlens[0] > c.seqlens[1] and c.causal is True,
    "Sq > Sk, top-left": lambda c: c.seqlens[0] > c.seqlens[1] and c.causal == "top_left",
    **{f"S = {s}": with_("seqlens", (s, s)) for s in (1, 63, 64, 65, 704)},
    **{f"D = {d}": with_("dims", (d, d)) for d in (8, 40, 64, 96, 128, 256)},
    "Sk = 0": lambda c: c.seqlens[1] == 0,
    "Sq = 0": lambda c: c.seqlens[0] == 0,
    "decode": lambda c: c.seqlens[0] == 1 and c.seqlens[1] > 1,
    "empty rows by position": lambda c: c.seqlens[0] > c.seqlens[1] and c.causal is True,
    "empty rows by mask": lambda c: c.mask is not None and c.mask.pattern in ("empty_rows", "all_false"),
    "scores near -120": lambda c: c.values == "logits_minus_120",
    "NaN past kv_lens": lambda c: c.kv_lens is not None and min(c.kv_lens) < c.seqlens[1],
    "NaN past q_lens": lambda c: c.q_lens is not None and min(c.q_lens) < c.seqlens[0],
    "lengths 0 and full": lambda c: c.kv_lens is not None and {0, c.seqlens[1]} <= set(c.kv_lens),
    **{
        f"{tensor} {view}": with_(f"{tensor}_view", view)
        for tensor in ("q", "k", "v", "dout")
        for view in ("transposed", "sliced")
    },
    "expanded inputs": lambda c: {c.q_view, c.k_view, c.v_view} <= {"expanded_batch", "expanded_heads"},
    "expanded dout": lambda c: c.dout_view == "expanded_all",
    "a last dim that is not contiguous": lambda c: c.q_view == "last_dim_strided",
    **{f"heads {h}": with_("heads", h) for h in ((8, 2), (6, 3), (4, 1))},
    "Dv < D": lambda c: c.dims[1] < c.dims[0],
    "Dv > D": lambda c: c.dims[1] > c.dims[0],
    "window of one": lambda c: c.window == (0, 0),
    "window past S": lambda c: c.window is not None and c.window >= (c.seqlens[1], c.seqlens[1]),
    "scale 0": lambda c: c.scale == 0.0,
    "scale negative": lambda c: c.scale is not None and c.scale < 0,
    "layout bhsd": lambda c: c.layout == "bhsd",
    **{f"gradients of {' and '.join(names)} alone": with_("needs_grad", names) for names in GRADIENTS},
    "forward only": lambda c: not c.grads,
    "LSE gradient alone": lambda c: not c.dout and c.dlse,
    "dropout of everything": lambda c: c.dropout_p == 1.0,
    "mask broadcast over keys": lambda c: c.mask is not None and c.mask.shape[-1] == 1,
    "mask broadcast over queries": lambda c: c.mask is not None and c.mask.shape[-2] == 1,
    "mask broadcast over the batch": lambda c: c.mask is not None and c.batch > 1 and c.mask.shape[0] == 1,
    "mask of two dims": lambda c: c.mask is not None and len(c.mask.shape) == 2,
    "a float32 mask gradient": lambda c: c.mask is not None and c.mask.grad and c.mask.kind == "float32",
    "a seed tensor": lambda c: isinstance(c.dropout_seed, tuple),
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_every_edge_has_a_case(edge: Callable[[Case], bool]) -> None:
    assert any(edge(case) for case in NAMED)


FULL = Support(
    dtypes=frozenset({torch.bfloat16}),
    head_dims=HeadDims(),
    devices=frozenset({"cpu"}),
    head_dims_v=HeadDims(),
    causal=frozenset({"bottom_right", "top_left"}),
    window=True,
    attn_mask=frozenset({"bool", "float"}),
    attn_mask_grad=True,
    alibi=True,
    sinks=True,
    sinks_grad=True,
    lengths=True,
    softcap=True,
    dropout=True,
    gqa=True,
    backward=True,
    lse=True,
    lse_grad=True,
    deterministic=True,
)
FORWARD_ONLY = replace(
    FULL, backward=False, attn_mask_grad=False, sinks_grad=False, lse_grad=False, deterministic=False
)
WITHOUT: dict[str, list[Support]] = {
    "head_dims": [replace(FULL, head_dims=HeadDims(multiple=8)), replace(FULL, head_dims=HeadDims(maximum=128))],
    "head_dims_v": [replace(FULL, head_dims_v=None)],
    "backward_head_dims": [replace(FULL, backward_head_dims=HeadDims(maximum=128))],
    "causal": [replace(FULL, causal=frozenset({align})) for align in ("bottom_right", "top_left")],
    "window": [replace(FULL, window=False)],
    "attn_mask": [
        replace(FULL, attn_mask=frozenset({"float"})),
        replace(FULL, attn_mask=frozenset({"bool"}), attn_mask_grad=False),
    ],
    "attn_mask_grad": [replace(FULL, attn_mask_grad=False)],
    "alibi": [replace(FULL, alibi=False)],
    "sinks": [replace(FULL, sinks=False, sinks_grad=False)],
    "sinks_grad": [replace(FULL, sinks_grad=False)],
    "lengths": [replace(FULL, lengths=False)],
    "softcap": [replace(FULL, softcap=False)],
    "dropout": [replace(FULL, dropout=False)],
    "gqa": [replace(FULL, gqa=False)],
    "backward": [FORWARD_ONLY],
    "lse_grad": [replace(FULL, lse_grad=False)],
    "deterministic": [replace(FULL, deterministic=False)],
}
"""Support without one feature (or without half of it): a case must meet each."""
RUN_TIME = {"dtypes", "devices", "min_arch", "impossible"}
"""What a run chooses, and no case fixes."""


def reasons(support: Support, problem: Problem) -> bool:
    return bool(declared_reasons(support, problem))


def test_full_support_covers_every_case() -> None:
    assert not [problem.describe() for problem in PROBLEMS if reasons(FULL, problem)]


def test_every_field_of_support_is_looked_at() -> None:
    assert {field.name for field in fields(Support)} == {*WITHOUT, *RUN_TIME, "lse"}


@pytest.mark.parametrize("feature", WITHOUT)
def test_every_declared_feature_has_a_case(feature: str) -> None:
    for support in WITHOUT[feature]:
        assert any(reasons(support, problem) for problem in PROBLEMS)


def test_every_case_asks_for_the_lse() -> None:
    """The suite makes an LSE call for each case, so a backend without LSE is refused in all of them."""
    without = replace(FULL, lse=False, lse_grad=False)
    assert all(reasons(without, replace(problem, return_lse=True, needs_grad=())) for problem in PROBLEMS)
