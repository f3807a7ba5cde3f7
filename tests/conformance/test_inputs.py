"""The tensors of a case: the same numbers in every form, poison around and beyond them, no change unnoticed."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from flashdispatch_conformance.case import Case, View
from flashdispatch_conformance.cases import BY_ID, NAMED
from flashdispatch_conformance.inputs import GUARD, bshd, build, lay_out

CASE = Case(id="named/test", why="a test", batch=2, heads=(4, 2), seqlens=(5, 7), dims=(8, 6), dlse=True)


@pytest.mark.parametrize("view", get_args(View))
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_a_view_holds_the_logical_values_and_poison_surrounds_it(view: View, heads_dim: int) -> None:
    logical = torch.arange(2 * 3 * 5 * 4, dtype=torch.float64).reshape(2, 3, 5, 4)
    tensor, flat = lay_out(logical, torch.float32, torch.device("cpu"), view, heads_dim)
    assert tensor.shape == logical.shape
    kept = logical.clone()
    if view in ("expanded_batch", "expanded_all"):
        kept = kept[:1].expand_as(logical)
    if view in ("expanded_heads", "expanded_all"):
        kept = kept.narrow(heads_dim, 0, 1).expand_as(logical)
    if view == "expanded_all":
        kept = torch.zeros_like(logical)
    assert torch.equal(tensor.double(), kept)
    assert flat[:GUARD].isnan().all()
    assert flat[-GUARD:].isnan().all()
    assert int((~flat.isnan()).sum()) == len(set(tensor.flatten().tolist()))  # nothing else is a number


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        ("contiguous", (60, 20, 4, 1)),
        ("transposed", (60, 4, 12, 1)),
        ("sliced", (180, 60, 4, 1)),
        ("padded_rows", (180, 60, 12, 1)),
        ("every_other", (120, 20, 4, 1)),
        ("unaligned", (60, 20, 4, 1)),
        ("expanded_batch", (0, 20, 4, 1)),
        ("expanded_heads", (12, 4, 0, 1)),
        ("last_dim_strided", (120, 40, 8, 2)),
        ("expanded_all", (0, 0, 0, 0)),
    ],
)
def test_a_view_has_the_strides_of_its_form(view: View, strides: tuple[int, ...]) -> None:
    tensor, _ = lay_out(torch.zeros(2, 3, 5, 4), torch.bfloat16, torch.device("cpu"), view)
    assert tensor.stride() == strides
    assert tensor.storage_offset() % 2 == (1 if view == "unaligned" else 0)


def test_numbers_depend_on_the_case_and_the_seed_alone() -> None:
    first, again = build(CASE, torch.float64, "cpu", "cpu"), build(CASE, torch.float64, "cpu", "cpu")
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, build(CASE, torch.float64, "cpu", "cpu", seed=1).q)
    low = build(CASE, torch.bfloat16, "cpu", "cpu")
    assert torch.equal(low.q, first.q.to(torch.bfloat16))
    views = replace(CASE, layout="bhsd", q_view="transposed", k_view="sliced", dout_view="every_other")
    other = build(views, torch.float64, "cpu", "cpu")
    for name in ("q", "k", "v", "dout"):
        assert torch.equal(bshd(getattr(other, name), "bhsd"), getattr(first, name))
    assert other.dlse is not None
    assert first.dlse is not None
    assert torch.equal(other.dlse, first.dlse)


def test_everything_past_the_lengths_is_nan() -> None:
    inputs = build(BY_ID["named/lens_causal"], torch.bfloat16, "cpu", "cpu")
    case = inputs.case
    assert case.q_lens is not None
    assert case.kv_lens is not None
    assert inputs.dout is not None
    assert inputs.dlse is not None
    for b, (n, m) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        for tensor, length in ((inputs.q, n), (inputs.k, m), (inputs.v, m), (inputs.dout, n)):
            assert tensor[b, length:].isnan().all()
            assert tensor[b, :length].isfinite().all()
        assert inputs.dlse[b, :, n:].isnan().all()
    assert inputs.dlse[3].isnan().all()  # no key to see
    mask = build(BY_ID["named/lens_window_gqa_mask"], torch.bfloat16, "cpu", "cpu").attn_mask
    assert mask is not None
    assert mask[0, :, :, 31:].isnan().all()
    assert mask[1, :, 21:].isnan().all()
    assert not mask[0, :, :, :31].isnan().any()


def test_only_what_wants_a_gradient_is_a_leaf_that_does() -> None:
    inputs = build(BY_ID["named/everything"], torch.bfloat16, "cpu", "cpu")
    assert list(inputs.leaves()) == ["q", "k", "v", "attn_mask", "sinks"]
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in inputs.leaves().values())
    inputs = build(BY_ID["named/grad_v_only"], torch.bfloat16, "cpu", "cpu")
    assert list(inputs.leaves()) == ["v"]
    assert not inputs.q.requires_grad


def test_a_change_is_noticed_also_in_the_guards() -> None:
    inputs = build(CASE, torch.bfloat16, "cpu", "cpu")
    assert inputs.changed() == ()
    inputs.k.detach()[0, 0, 0, 0] += 1
    next(storage for storage in inputs.storages if storage.name == "v").flat[0] = 0.0
    assert inputs.changed() == ("k", "v")


@pytest.mark.parametrize("case", NAMED, ids=[case.id for case in NAMED])
def test_every_case_builds(case: Case) -> None:
    inputs = build(case, torch.float16, "cpu", "cpu")
    seq, head = (1, 2) if case.layout == "bshd" else (2, 1)
    assert (inputs.q.shape[seq], inputs.q.shape[head]) == (case.seqlens[0], case.heads[0])
    assert (inputs.k.shape[seq], inputs.k.shape[head]) == (case.seqlens[1], case.heads[1])
    assert not inputs.changed()
