"""The tensors of a case: the same numbers in every form, poison around and beyond them, no change unnoticed."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from flashdispatch_conformance.case import Case, Mask, MaskPattern, View
from flashdispatch_conformance.cases import BY_ID, NAMED, PAIRWISE, PINNED
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
        ("sequence_first", (20, 40, 4, 1)),
        ("wide_tokens", (3 * 8212, 8212, 4, 1)),
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


def test_far_rows_of_a_mask_are_2_to_the_24_apart() -> None:
    tensor, flat = lay_out(torch.ones(1, 1, 2, 5), torch.float16, torch.device("cpu"), "far_rows")
    assert tensor.stride() == (2**25, 2**25, 2**24, 1)
    assert int(flat.nansum()) == 10


REPEATED = replace(
    CASE, batch=6, distinct=2, q_lens=(5, 2) * 3, kv_lens=(7, 4) * 3, mask=Mask(shape=(6, 1, 5, 7), kind="float"),
    alibi="batch",
)  # fmt: skip


@pytest.mark.parametrize("view", get_args(View))
def test_sequences_of_a_repeated_batch_have_the_values_of_the_first_ones(view: View) -> None:
    case = replace(REPEATED, q_view=view, k_view=view, v_view=view, dout_view=view)
    inputs = build(case, torch.bfloat16, "cpu", "cpu")
    for name in ("q", "k", "v", "dout", "dlse", "attn_mask", "alibi_slopes", "q_lens"):
        tensor = getattr(inputs, name).detach()
        assert len(tensor) == 6
        assert torch.equal(tensor.nan_to_num(99.0), tensor[:2].repeat(3, *[1] * (tensor.dim() - 1)).nan_to_num(99.0))


def test_the_oracle_gets_the_sequences_that_differ() -> None:
    inputs = build(REPEATED, torch.float32, "cpu", "cpu")
    q, k, v, extras, dout, dlse = inputs.canonical()
    given = (q, k, v, dout, dlse, extras.attn_mask, extras.alibi_slopes, extras.q_lens, extras.kv_lens)
    assert [len(x) for x in given if x is not None] == [2] * 9
    assert torch.equal(q.nan_to_num(99.0), inputs.q[:2].nan_to_num(99.0))
    assert [len(x) for x in build(CASE, torch.float32, "cpu", "cpu").canonical()[:3]] == [2, 2, 2]


def weights(case: Case) -> torch.Tensor:
    """Softmax of the scores of the first head, (Sq, Sk), in float64."""
    inputs = build(case, torch.float64, "cpu", "cpu")
    scores = inputs.problem.scale * torch.einsum("id,jd->ij", inputs.q[0, :, 0].detach(), inputs.k[0, :, 0].detach())
    return torch.softmax(scores, -1)


PLAIN = Case(id="named/values", why="a test", seqlens=(33, 45))


def test_a_needle_is_all_that_counts() -> None:
    P = weights(replace(PLAIN, values="needle"))
    assert (P.amax(-1) > 1 - 1e-9).all()
    assert len(set(P.argmax(-1).tolist())) == 1


def test_equal_keys_have_equal_weights() -> None:
    assert torch.allclose(weights(replace(PLAIN, values="all_equal")), torch.full((33, 45), 1 / 45).double())


def test_subnormal_values_are_subnormal() -> None:
    inputs = build(replace(PLAIN, values="subnormal"), torch.float16, "cpu", "cpu")
    tiny = torch.finfo(torch.float16).tiny
    assert (inputs.q.detach().abs() < tiny).float().mean() > 0.99
    assert (inputs.v.detach()[..., ::2].abs() < tiny).all()
    assert inputs.v.detach()[..., ::2].count_nonzero() > 2000
    wide = build(replace(PLAIN, values="subnormal"), torch.float32, "cpu", "cpu").v.detach()[..., 1::2].abs()
    assert ((wide > 0) & (wide < torch.finfo(torch.float32).tiny)).float().mean() > 0.9


def test_huge_scores_are_near_1e5() -> None:
    inputs = build(replace(PLAIN, values="huge", scale=-0.3), torch.float64, "cpu", "cpu")
    scores = -0.3 * torch.einsum("bihd,bjhd->bhij", inputs.q.detach(), inputs.k.detach())
    assert 5e4 < scores.std() < 2e5


def rows(pattern: MaskPattern, seqlen_q: int, seqlen_k: int) -> list[set[int]]:
    """The keys that each query sees by the mask."""
    mask = Mask(shape=(seqlen_q, seqlen_k), pattern=pattern)
    built = build(replace(PLAIN, seqlens=(seqlen_q, seqlen_k), mask=mask), torch.float32, "cpu", "cpu").attn_mask
    assert built is not None
    return [set(row.nonzero().flatten().tolist()) for row in built]


def test_masks_say_what_their_patterns_say() -> None:
    assert rows("corner", 4, 6) == [{0, 1, 2}, {0, 1, 2}, set(), set()]
    assert rows("last_row_empty", 3, 5) == [{0}, {0, 1}, set()]
    assert rows("blocks", 66, 130)[63:65] == [set(range(64)), set(range(64, 128))]
    segments = rows("segments", 20, 20)  # of 7 keys
    assert segments[6] == {2, 3, 4, 5, 6}
    assert segments[7] == {7}
    assert segments[19] == {15, 16, 17, 18, 19}


SMALL = [case for case in PINNED if case.sequences * case.heads[0] * case.seqlens[0] * case.seqlens[1] <= 2**15]
SOME = (*NAMED, *(case for case in SMALL if case.batch < 1000), *PAIRWISE[::8])


@pytest.mark.parametrize("case", SOME, ids=[case.id for case in SOME])
def test_a_case_builds(case: Case) -> None:
    inputs = build(case, torch.float16, "cpu", "cpu")
    seq, head = (1, 2) if case.layout == "bshd" else (2, 1)
    assert (inputs.q.shape[seq], inputs.q.shape[head]) == (case.seqlens[0], case.heads[0])
    assert (inputs.k.shape[seq], inputs.k.shape[head]) == (case.seqlens[1], case.heads[1])
    assert not inputs.changed()
