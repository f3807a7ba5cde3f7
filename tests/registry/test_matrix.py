"""The support table: every declaration has its place in it, and nothing else has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashdispatch_registry import BackendSpec, Code, HeadDims, Reason, Support
from flashdispatch_registry.matrix import NO, ROWS, matrix_json, matrix_markdown, matrix_rows, matrix_view
from flashdispatch_registry.render import plain
from flashdispatch_registry.select import Entry

MakeSpec = Callable[..., BackendSpec]

# One changed declaration for each field of Support, and the row it must be seen in.
DECLARED: list[tuple[str, Any, str]] = [
    ("dtypes", frozenset({torch.bfloat16}), "dtypes"),
    ("head_dims", HeadDims(16, 256, 8), "head dims"),
    ("devices", frozenset({"cuda"}), "devices"),
    ("min_arch", "sm_80", "oldest GPU architecture"),
    ("impossible", {"sm_75": "no bf16"}, "impossible on"),
    ("head_dims_v", HeadDims(maximum=512), "Dv ≠ D"),
    ("backward_head_dims", HeadDims(maximum=128), "backward"),
    ("causal", frozenset({"bottom_right"}), "causal, bottom-right"),
    ("causal", frozenset({"top_left"}), "causal, top-left"),
    ("window", True, "window"),
    ("attn_mask", frozenset({"bool"}), "bool attn_mask"),
    ("attn_mask", frozenset({"float"}), "float attn_mask"),
    ("attn_mask_grad", True, "float attn_mask gradient"),
    ("alibi", True, "ALiBi"),
    ("sinks", True, "sinks"),
    ("sinks_grad", True, "sinks gradient"),
    ("lengths", True, "q_lens, kv_lens"),
    ("softcap", True, "softcap"),
    ("dropout", True, "dropout"),
    ("gqa", True, "GQA"),
    ("backward", True, "backward"),
    ("lse", True, "LSE"),
    ("lse_grad", True, "LSE gradient"),
    ("deterministic", True, "deterministic backward"),
]

# A declaration without which the one tested would contradict itself.
NEEDS: dict[str, dict[str, Any]] = {
    "attn_mask_grad": {"attn_mask": frozenset({"float"}), "backward": True},
    "sinks_grad": {"sinks": True, "backward": True},
    "lse_grad": {"lse": True, "backward": True},
    "deterministic": {"backward": True},
    "backward_head_dims": {"backward": True},
}


def entry(spec: BackendSpec) -> Entry:
    return Entry(spec.name, spec, "flashdispatch", "0.1.0")


def column(spec: BackendSpec) -> dict[str, str]:
    return matrix_json([entry(spec)])[spec.name]


def test_every_field_of_support_is_covered_here() -> None:
    assert {field for field, _, _ in DECLARED} == {field.name for field in dataclasses.fields(Support)}


@pytest.mark.parametrize(("field", "value", "row"), DECLARED, ids=[f"{f}-{r}" for f, _, r in DECLARED])
def test_a_declaration_is_seen_in_its_row_and_no_other(field: str, value: Any, row: str, spec: MakeSpec) -> None:
    needed = NEEDS.get(field, {})
    before, after = column(spec("one", **needed)), column(spec("one", **needed, **{field: value}))
    assert [label for label in before if before[label] != after[label]] == [row]


@pytest.mark.parametrize(
    ("field", "value", "row", "cell"),
    [
        ("memory", "chunked", "extra memory", "chunked"),
        ("fused", False, "fused", "no"),
        ("numerics", "low_precision_accum", "numerics", "low precision accum"),
        ("requires", ("triton>=3.4", "numpy"), "needs", "triton>=3.4, numpy"),
    ],
)
def test_what_a_backend_is_like_is_in_the_table(field: str, value: Any, row: str, cell: str, spec: MakeSpec) -> None:
    assert column(spec("one", **{field: value}))[row] == cell


def test_what_is_not_declared_is_shown_as_a_dash(spec: MakeSpec) -> None:
    assert column(spec("one"))["window"] == NO


def test_dtypes_are_listed_from_small_to_large(spec: MakeSpec) -> None:
    some = spec("one", dtypes=frozenset({torch.float64, torch.float16, torch.float32, torch.bfloat16}))
    assert column(some)["dtypes"] == "bfloat16, float16, float32, float64"


def test_markdown_is_a_rectangle_with_one_column_for_each_backend(spec: MakeSpec) -> None:
    lines = matrix_markdown([entry(spec("one", window=True)), entry(spec("two"))]).splitlines()
    assert len(lines) == len(ROWS) + 2
    assert len({len(line) for line in lines}) == 1
    assert {line.count("|") for line in lines} == {4}
    assert [part.strip() for part in lines[0].split("|")] == ["", "", "`one`", "`two`", ""]
    window = next(line for line in lines if line.startswith("| window"))
    assert [part.strip() for part in window.split("|")] == ["", "window", "yes", NO, ""]


def test_a_bar_in_a_declaration_does_not_break_the_markdown(spec: MakeSpec) -> None:
    lines = matrix_markdown([entry(spec("one", impossible={"sm_75": "a|b"}))]).splitlines()
    assert "sm_75: a\\|b" in next(line for line in lines if line.startswith("| impossible"))


def test_columns_keep_the_order_of_the_entries(spec: MakeSpec) -> None:
    header, _ = matrix_rows([entry(spec("b")), entry(spec("a"))])
    assert header == ("feature", "b", "a")


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_table_fits_and_names_who_has_no_column(width: int, spec: MakeSpec) -> None:
    fault = Reason(Code.LOAD_FAILED, "plugin", "ImportError", "a plugin that imports")
    silent = Entry("silent", None, "acme", "1", (fault,))
    text = plain(matrix_view([entry(spec("one")), silent]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "silent: not loaded, see `flashdispatch doctor`" in text
    assert "silent" not in matrix_markdown([entry(spec("one")), silent])
