"""The case list: stable ids, the edges it must have, and a case for every feature a backend can declare."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from flashdispatch_conformance.case import Case
from flashdispatch_conformance.cases import BY_ID, NAMED
from flashdispatch_conformance.inputs import problem_of
from flashdispatch_registry import HeadDims, Problem, Support
from flashdispatch_registry.support import declared_reasons

PROBLEMS = [problem_of(case, torch.bfloat16, "cpu", torch.device("cpu")) for case in NAMED]


def test_ids_are_the_committed_ones() -> None:
    """Ids are public: add to case_ids.txt, never rename."""
    committed = Path(__file__).with_name("case_ids.txt").read_text(encoding="utf-8").split()
    assert [case.id for case in NAMED] == committed


def test_ids_are_unique_and_plain() -> None:
    assert len(BY_ID) == len(NAMED)
    assert all(re.fullmatch(r"named/[a-z0-9_]+", case.id) for case in NAMED)


@pytest.mark.parametrize("case", NAMED, ids=[case.id for case in NAMED])
def test_a_case_says_why_and_contradicts_nothing(case: Case) -> None:
    assert len(case.why) > 5
    assert "\n" not in case.why
    assert case.heads[0] % case.heads[1] == 0
    for lens, limit in ((case.q_lens, case.seqlens[0]), (case.kv_lens, case.seqlens[1])):
        assert lens is None or (len(lens) == case.batch and all(0 <= length <= limit for length in lens))
    if case.mask is not None:
        full = (case.batch, case.heads[0], *case.seqlens)[-len(case.mask.shape) :]
        assert all(have in (1, want) for have, want in zip(case.mask.shape, full, strict=True))
        assert not (case.mask.grad and case.mask.kind == "bool")
    assert case.dout or case.dlse
    assert case.sinks or "sinks" not in case.grads
    assert case.needs_grad or not case.dlse


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
