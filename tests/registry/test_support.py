"""Declared support -> reasons: closed by default, nothing ignored, everything said at once."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from flashdispatch_registry import Band, Code, HeadDims, KnownIssue, Problem, Reason, Support
from flashdispatch_registry.support import CHECKS, COVERED, NEUTRAL, declared_reasons

CLOSED: dict[str, Any] = {
    "dtypes": frozenset({torch.float32}),
    "head_dims": HeadDims(maximum=128, multiple=8),
    "devices": frozenset({"cpu"}),
}

GRAD = {"needs_grad": ("q", "k", "v")}
BACKWARD = {"backward": True}

# What is asked, the code it must yield from a backend that does not declare it, and the declaration that takes it.
FEATURES: list[tuple[dict[str, Any], Code, dict[str, Any]]] = [
    ({"arch": "sm_90"}, Code.DEVICE, {"devices": frozenset({"cuda"})}),
    ({"dtype": torch.float16}, Code.DTYPE, {"dtypes": frozenset({torch.float16})}),
    ({"head_dim": 256, "head_dim_v": 256}, Code.HEAD_DIM, {"head_dims": HeadDims()}),
    ({"head_dim": 60, "head_dim_v": 60}, Code.HEAD_DIM, {"head_dims": HeadDims(multiple=4)}),
    ({"head_dim_v": 32}, Code.HEAD_DIM_V, {"head_dims_v": HeadDims()}),
    ({"heads_kv": 2}, Code.GQA, {"gqa": True}),
    ({"band": Band(right=0)}, Code.CAUSAL, {"causal": frozenset({"bottom_right"})}),
    ({"band": Band(right=0, align="top_left")}, Code.CAUSAL, {"causal": frozenset({"top_left"})}),
    ({"band": Band(4, 4)}, Code.WINDOW, {"window": True}),
    ({"band": Band(None, 4)}, Code.WINDOW, {"window": True}),
    ({"attn_mask": "bool"}, Code.ATTN_MASK, {"attn_mask": frozenset({"bool"})}),
    ({"attn_mask": "float"}, Code.ATTN_MASK, {"attn_mask": frozenset({"float"})}),
    ({"alibi": True}, Code.ALIBI, {"alibi": True}),
    ({"sinks": True}, Code.SINKS, {"sinks": True}),
    ({"q_lens": True}, Code.LENGTHS, {"lengths": True}),
    ({"kv_lens": True}, Code.LENGTHS, {"lengths": True}),
    ({"softcap": 30.0}, Code.SOFTCAP, {"softcap": True}),
    ({"dropout_p": 0.1}, Code.DROPOUT, {"dropout": True}),
    ({"return_lse": True}, Code.LSE, {"lse": True}),
    (GRAD, Code.BACKWARD, BACKWARD),
]

# The same for what can only be asked of a backend that has a backward.
GRADIENT_FEATURES: list[tuple[dict[str, Any], dict[str, Any], Code, dict[str, Any]]] = [
    ({"return_lse": True}, {"lse": True}, Code.LSE_GRAD, {"lse_grad": True}),
    (
        {"attn_mask": "float", "needs_grad": ("attn_mask",)},
        {"attn_mask": frozenset({"float"})},
        Code.ATTN_MASK_GRAD,
        {"attn_mask_grad": True},
    ),
    ({"sinks": True, "needs_grad": ("sinks",)}, {"sinks": True}, Code.SINKS_GRAD, {"sinks_grad": True}),
    ({"deterministic": True}, {}, Code.DETERMINISM, {"deterministic": True}),
]


def support(**changes: Any) -> Support:
    return Support(**(CLOSED | changes))


def codes(declared: Support, asked: Problem) -> list[Code]:
    return [reason.code for reason in declared_reasons(declared, asked)]


def test_every_problem_field_has_a_rule_or_needs_none() -> None:
    fields = {field.name for field in dataclasses.fields(Problem)}
    assert set(CHECKS) | COVERED | NEUTRAL == fields
    assert len(CHECKS) + len(COVERED) + len(NEUTRAL) == len(fields)


def test_a_plain_problem_needs_nothing_declared(problem) -> None:
    assert declared_reasons(support(), problem()) == ()


@pytest.mark.parametrize(("asked", "code", "declared"), FEATURES, ids=str)
def test_an_undeclared_feature_is_refused_by_its_code(problem, asked, code, declared) -> None:
    assert codes(support(), problem(**asked)) == [code]
    assert codes(support(**declared), problem(**asked)) == []


@pytest.mark.parametrize(("asked", "base", "code", "declared"), GRADIENT_FEATURES, ids=str)
def test_an_undeclared_gradient_is_refused_by_its_code(problem, asked, base, code, declared) -> None:
    wanted = problem(**(GRAD | asked))
    assert codes(support(**BACKWARD, **base), wanted) == [code]
    assert codes(support(**(BACKWARD | base | declared)), wanted) == []


def test_the_tables_above_name_every_code_of_declared_support() -> None:
    seen = (
        {row[1] for row in FEATURES}
        | {row[2] for row in GRADIENT_FEATURES}
        | {Code.ARCH_IMPOSSIBLE, Code.HEAD_DIM_BACKWARD}
    )
    every = list(Code)
    assert seen == set(every[: every.index(Code.BACKEND_LIMIT)])


def test_all_reasons_come_at_once(problem) -> None:
    asked = problem(
        arch="sm_90", dtype=torch.float16, head_dim=512, head_dim_v=64, heads_kv=1, band=Band(3, 0), attn_mask="bool",
        alibi=True, sinks=True, q_lens=True, kv_lens=True, softcap=1.0, dropout_p=0.5, return_lse=True, **GRAD,
    )  # fmt: skip
    assert codes(support(), asked) == [
        Code.DEVICE, Code.DTYPE, Code.HEAD_DIM, Code.HEAD_DIM_V, Code.GQA, Code.WINDOW, Code.CAUSAL, Code.ATTN_MASK,
        Code.ALIBI, Code.SINKS, Code.LENGTHS, Code.SOFTCAP, Code.DROPOUT, Code.LSE, Code.BACKWARD,
    ]  # fmt: skip


def test_lengths_are_named_as_they_were_given(problem) -> None:
    (reason,) = declared_reasons(support(), problem(q_lens=True, kv_lens=True))
    assert reason.field == "q_lens and kv_lens"


def test_a_neutral_field_never_refuses(problem) -> None:
    asked = problem(
        batch=0, seqlen_q=0, seqlen_k=10**6, scale=-3.0, layout="bhsd", fp32_precision="tf32",
        attn_mask_shape=(1, 1, 1, 1),
    )  # fmt: skip
    assert declared_reasons(support(), asked) == ()


def test_a_backward_that_takes_smaller_heads_refuses_only_gradients_and_names_each_size(problem) -> None:
    declared = support(**BACKWARD, head_dims_v=HeadDims(), backward_head_dims=HeadDims(maximum=64))
    large = {"head_dim": 96, "head_dim_v": 128}
    assert declared_reasons(declared, problem(**large)) == ()
    reasons = declared_reasons(declared, problem(**large, **GRAD))
    assert [(reason.code, reason.field) for reason in reasons] == [
        (Code.HEAD_DIM_BACKWARD, "head_dim"),
        (Code.HEAD_DIM_BACKWARD, "head_dim_v"),
    ]
    same = declared_reasons(declared, problem(head_dim=96, head_dim_v=96, **GRAD))
    assert [reason.field for reason in same] == ["head_dim"]
    assert declared_reasons(declared, problem(**GRAD)) == ()


def test_determinism_is_no_question_without_a_backward(problem) -> None:
    assert declared_reasons(support(), problem(deterministic=True)) == ()


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_a_window_that_is_not_causal_needs_its_alignment_only_when_it_is_not_the_default(problem, align) -> None:
    expected = [] if align == "bottom_right" else [Code.CAUSAL]
    assert codes(support(window=True), problem(band=Band(2, 3, align))) == expected


def test_a_causal_window_needs_both(problem) -> None:
    assert codes(support(window=True), problem(band=Band(2, 0))) == [Code.CAUSAL]
    assert codes(support(causal=frozenset({"bottom_right"})), problem(band=Band(2, 0))) == [Code.WINDOW]


def test_a_full_band_needs_no_alignment(problem) -> None:
    assert codes(support(), problem(band=Band(align="top_left"))) == []


def test_an_older_architecture_is_impossible_with_the_reason(problem) -> None:
    cuda = support(devices=frozenset({"cuda"}), min_arch="sm_90")
    (reason,) = declared_reasons(cuda, problem(arch="sm_80"))
    assert reason.code is Code.ARCH_IMPOSSIBLE
    assert "sm_90 and newer" in reason.allowed
    assert declared_reasons(cuda, problem(arch="sm_90")) == ()


def test_there_is_no_upper_bound_on_architectures(problem) -> None:
    cuda = support(devices=frozenset({"cuda"}), min_arch="sm_80")
    assert declared_reasons(cuda, problem(arch="sm_999")) == ()


def test_a_listed_architecture_is_impossible_with_its_technical_reason(problem) -> None:
    cuda = support(devices=frozenset({"cuda"}), impossible={"sm_120": "needs 160 KiB of shared memory, it has 99 KiB"})
    (reason,) = declared_reasons(cuda, problem(arch="sm_120"))
    assert reason.code is Code.ARCH_IMPOSSIBLE
    assert "160 KiB of shared memory" in reason.allowed
    assert declared_reasons(cuda, problem(arch="sm_100")) == ()


def test_every_reason_names_its_field_and_what_is_taken(problem) -> None:
    for asked, _, _ in FEATURES:
        for reason in declared_reasons(support(), problem(**asked)):
            assert isinstance(reason, Reason)
            assert reason.field
            assert reason.got
            assert reason.allowed


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtypes": frozenset()}, "could never run"),
        ({"attn_mask_grad": True, "attn_mask": frozenset({"float"})}, "attn_mask_grad needs backward=True"),
        ({"sinks_grad": True, "sinks": True}, "sinks_grad needs backward=True"),
        ({"lse_grad": True, "lse": True}, "lse_grad needs backward=True"),
        ({"deterministic": True}, "deterministic needs backward=True"),
        ({"lse_grad": True, **BACKWARD}, "lse_grad needs lse=True"),
        ({"attn_mask_grad": True, "attn_mask": frozenset({"bool"}), **BACKWARD}, 'needs "float" in attn_mask'),
        ({"sinks_grad": True, **BACKWARD}, "sinks_grad needs sinks=True"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        support(**changes)


@pytest.mark.parametrize(
    ("dims", "inside", "outside", "text"),
    [
        (HeadDims(), (1, 7, 4096), (0,), "1 or more"),
        (HeadDims(16, 128, 16), (16, 64, 128), (8, 24, 144), "16..128 in steps of 16"),
        (HeadDims(maximum=256), (1, 256), (0, 257), "1..256"),
    ],
)
def test_head_dims_are_a_range_with_steps(dims: HeadDims, inside, outside, text: str) -> None:
    assert all(size in dims for size in inside)
    assert not any(size in dims for size in outside)
    assert str(dims) == text


def test_the_declaration_is_a_frozen_copy_that_pickles() -> None:
    impossible = {"sm_75": "no bfloat16"}
    declared = support(impossible=impossible)
    impossible["sm_90"] = "no"
    assert declared.impossible == {"sm_75": "no bfloat16"}
    assert pickle.loads(pickle.dumps(declared)) == declared
    with pytest.raises(dataclasses.FrozenInstanceError):
        declared.gqa = True  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dims": 64}, {"head_dims": None}, {"head_dims_v": 64}, {"causal": True},
        {"causal": frozenset({"bottomright"})},
        {"attn_mask": True}, {"min_arch": 90}, {"min_arch": "sm90"}, {"dtypes": "float32"}, {"dtypes": torch.float32},
        {"dtypes": frozenset({"float32"})}, {"dtypes": frozenset()}, {"devices": "cpu"}, {"devices": frozenset()},
        {"devices": frozenset({"gpu"})}, {"gqa": "no"}, {"backward": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_declaration_with_a_word_that_means_nothing_is_refused_where_it_is_made(changes: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        support(**changes)


@pytest.mark.parametrize(
    "sizes", [{"multiple": 0}, {"minimum": 0}, {"minimum": 9, "maximum": 8}, {"maximum": "64"}], ids=str
)
def test_head_dims_that_no_size_fits_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        HeadDims(**sizes)


@pytest.mark.parametrize(
    "changes",
    [
        {"requires": "triton"}, {"fused": "no"}, {"api_version": "1"}, {"why_not": "x"}, {"factory": "a:b:c"},
        {"priority": {"*": "high"}}, {"support": {}}, {"portable": 1}, {"by_name_only": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_spec_of_wrong_types_is_refused_where_it_is_made(spec, changes: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        spec("odd", **changes)


@pytest.mark.parametrize(
    "changes", [{"when": None}, {"backend": None}, {"url": None}, {"versions": "abc"}, {"priority": "9"}], ids=str
)
def test_a_known_issue_of_wrong_types_is_refused_where_it_is_made(changes: dict[str, Any]) -> None:
    fields = {"backend": "x", "reason": "wrong", "url": "https://example.org", "when": lambda _: True}
    with pytest.raises((TypeError, ValueError)):
        KnownIssue(**(fields | changes))
