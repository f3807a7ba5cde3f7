"""Which of our backends automatic choice prefers on an H200, and where it is another one. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashdispatch
from flashdispatch_registry import Band, Problem

PLAIN = Problem(
    arch="sm_90", dtype=torch.bfloat16, batch=2, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_k=1024, head_dim=64,
    head_dim_v=64, scale=0.125, needs_grad=("q", "k", "v"),
)  # fmt: skip
MASK: dict[str, Any] = {"attn_mask_shape": (1, 1, 1024, 1024)}


def order(**changes: Any) -> list[str]:
    """Our fused backends that can run it, the preferred one first."""
    plan = flashdispatch.explain(replace(PLAIN, **changes), backend="auto")
    return [c.name for c in plan.candidates if c.can_run and c.name in ("tilelang_fa2", "triton_fa2")]


@pytest.mark.parametrize(
    "changes",
    [{}, {"band": Band(right=0)}, {"softcap": 9.0}, {"kv_lens": True}, {"needs_grad": (), "q_lens": True}],
    ids=str,
)
def test_on_sm_90_tilelang_comes_first(changes: dict[str, Any]) -> None:
    assert order(**changes) == ["tilelang_fa2", "triton_fa2"]


@pytest.mark.parametrize(
    "changes", [{"attn_mask": "bool"} | MASK, {"attn_mask": "float"} | MASK, {"q_lens": True}], ids=str
)
def test_with_masks_and_in_a_backward_with_q_lens_triton_comes_first(changes: dict[str, Any]) -> None:
    assert order(**changes) == ["triton_fa2", "tilelang_fa2"]


def test_elsewhere_where_tilelang_was_only_compiled_triton_comes_first() -> None:
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        assert order(arch=arch) == ["triton_fa2", "tilelang_fa2"], arch


def test_without_triton_a_mask_is_tilelangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "triton_fa2")
    assert order(attn_mask="bool", **MASK) == ["tilelang_fa2"]


def test_where_cuda_is_known_to_be_wrong_it_is_not_chosen_even_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "triton_fa2,tilelang_fa2,torch_reference")
    with_lengths = replace(PLAIN, attn_mask="float", q_lens=True, **MASK)
    assert flashdispatch.explain(with_lengths, backend="auto").chosen is None
    assert flashdispatch.explain(replace(with_lengths, needs_grad=("k", "v")), backend="auto").chosen == "cuda_fa2"
    assert flashdispatch.explain(replace(PLAIN, attn_mask="float", **MASK), backend="auto").chosen == "cuda_fa2"
