"""The oracle against the definition of visibility, float64 autograd, published Philox vectors and its own edges."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashdispatch_conformance.oracle import inside_band, position, truth
from flashdispatch_conformance.philox import keep_mask, philox4x32
from flashdispatch_registry import Band, Extras, Problem

NEG_INF = float("-inf")


def problem_of(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "arch": "cpu",
        "dtype": q.dtype,
        "batch": q.shape[0],
        "heads_q": q.shape[2],
        "heads_kv": k.shape[2],
        "seqlen_q": q.shape[1],
        "seqlen_k": k.shape[1],
        "head_dim": q.shape[3],
        "head_dim_v": v.shape[3],
        "scale": q.shape[3] ** -0.5,
    }
    return Problem(**(fields | changes))


def random_qkv(
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int = 7,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (3, 2),
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return (
        normal(batch, seqlen_q, heads[0], dims[0]),
        normal(batch, seqlen_k, heads[1], dims[0]),
        normal(batch, seqlen_k, heads[1], dims[1]),
    )


def by_autograd(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same call as one batched, differentiable expression: out (B, Sq, Hq, Dv) and lse (B, Hq, Sq)."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k = k.shape[1]
    k, v = (x.repeat_interleave(heads_q // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale
    if problem.softcap is not None:
        s = torch.tanh(s / problem.softcap) * problem.softcap
    rows, visible = torch.ones(batch, 1, seqlen_q, 1, dtype=torch.bool), torch.ones_like(s, dtype=torch.bool)
    distance = torch.zeros_like(s)
    for b in range(batch):
        n = seqlen_q if extras.q_lens is None else int(extras.q_lens[b])
        m = seqlen_k if extras.kv_lens is None else int(extras.kv_lens[b])
        rows[b, :, n:] = False
        visible[b, :, :, m:] = False
        visible[b, :, :n, :m] &= problem.band.dense(n, m)
        i, j = torch.arange(n)[:, None], torch.arange(m)[None]
        shift = m - n if problem.band.align == "bottom_right" else 0
        distance[b, :, :n, :m] = (i + shift - j).abs().double()
    if extras.alibi_slopes is not None:
        slopes = extras.alibi_slopes.double()
        s = s - (slopes[:, :, None, None] if slopes.dim() == 2 else slopes[None, :, None, None]) * distance
    if extras.attn_mask is not None:
        if extras.attn_mask.dtype == torch.bool:
            visible = visible & extras.attn_mask
        else:
            hidden = extras.attn_mask == NEG_INF
            visible = visible & ~hidden
            s = s + extras.attn_mask.masked_fill(hidden, 0.0)
    visible = visible & rows
    s = s.masked_fill(~visible, NEG_INF)
    some = visible.any(-1)
    columns = s
    if extras.sinks is not None:
        columns = torch.cat([s, extras.sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
        some = some | rows[..., 0]
    # A fully masked row is replaced before the softmax, so that no NaN enters autograd.
    columns = torch.where(some[..., None], columns, torch.zeros_like(columns))
    lse = torch.logsumexp(columns, -1)
    p = torch.where(visible, torch.exp(columns[..., :seqlen_k] - lse[..., None]), 0.0)
    if kept is not None:
        p = p * kept / (1 - problem.dropout_p)
    out = torch.einsum("bhij,bjhe->bihe", p, v)
    return out, torch.where(some, lse, NEG_INF)


def assert_matches_autograd(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, *, lse_grad: bool = True
) -> None:
    generator = torch.Generator().manual_seed(5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = extras.attn_mask
    if mask is not None and mask.is_floating_point():
        mask = mask.clone().requires_grad_()
        leaves.append(mask)
    sinks = None if extras.sinks is None else extras.sinks.double().clone().requires_grad_()
    if sinks is not None:
        leaves.append(sinks)
    kept = None
    if problem.dropout_p:
        assert extras.dropout_seed is not None
        seed, offset = extras.dropout_seed.tolist()
        streams = range(problem.batch * problem.heads_q)
        kept = torch.stack(
            [
                torch.from_numpy(keep_mask(seed, offset, x, q.shape[1], k.shape[1], problem.dropout_p)).double()
                for x in streams
            ]
        ).reshape(problem.batch, problem.heads_q, q.shape[1], k.shape[1])
    out, lse = by_autograd(problem, leaves[0], leaves[1], leaves[2], extras._replace(attn_mask=mask, sinks=sinks), kept)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    finite = lse.isfinite()
    loss = (out * dout).sum()
    if lse_grad:
        loss = loss + (lse[finite] * dlse[finite]).sum()
    expected = torch.autograd.grad(loss, leaves, allow_unused=True)
    # What must be ignored is NaN: rows past q_lens, and dLSE of rows that see nothing.
    dlse = torch.where(finite, dlse, torch.nan)
    if extras.q_lens is not None:
        for b, n in enumerate(extras.q_lens.tolist()):
            dout[b, n:] = torch.nan
    got = truth(problem, q, k, v, extras, dout, dlse if lse_grad else None)
    assert_close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-12)
    assert_close(got.out, out.detach())
    assert_close(got.lse, lse.detach())
    names = (
        ["dq", "dk", "dv"]
        + ["dattn_mask"] * (mask is not None and mask.requires_grad)
        + ["dsinks"] * (sinks is not None)
    )
    for name, leaf, want in zip(names, leaves, expected, strict=True):
        assert_close(getattr(got, name), torch.zeros_like(leaf) if want is None else want)


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", [None, (0, None), (None, 0), (0, 0), (2, 1), (30, 30)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_visibility_is_the_band_of_the_registry(align: Any, window: Any, causal: bool) -> None:
    q, k, v = random_qkv()
    band = Band.of(causal=causal, align=align, window=window)
    for n, m in itertools.product(range(6), repeat=2):
        assert torch.equal(inside_band(problem_of(q, k, v, band=band), n, m), band.dense(n, m))


def test_position_is_the_registrys() -> None:
    q, k, v = random_qkv()
    for align in ("bottom_right", "top_left"):
        band = Band(align=align)
        expected = [band.position(i, 5, 7) for i in range(5)]
        assert position(problem_of(q, k, v, band=band), 5, 7)[:, 0].tolist() == expected


BANDS = {
    "full": Band(),
    "causal": Band(right=0),
    "causal_top_left": Band(right=0, align="top_left"),
    "window": Band(left=1, right=2),
    "window_top_left": Band(left=2, right=0, align="top_left"),
}


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (1, 6), (4, 0)], ids=str)
def test_gradients_agree_with_autograd_for_every_band(band: Band, sizes: tuple[int, int]) -> None:
    q, k, v = random_qkv(seqlen_q=sizes[0], seqlen_k=sizes[1])
    assert_matches_autograd(problem_of(q, k, v, band=band), q, k, v, Extras())


def float_mask(*shape: int) -> Tensor:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.where(mask < -1.0, NEG_INF, mask)


def bool_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[..., 1:2, :] = False  # a row that sees nothing
    return mask


LENS = {"q_lens": torch.tensor([3, 5], dtype=torch.int32), "kv_lens": torch.tensor([7, 2], dtype=torch.int32)}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
FEATURES: dict[str, tuple[dict[str, Any], Extras]] = {
    "softcap": ({"softcap": 1.5}, Extras()),
    "scale_zero": ({"scale": 0.0}, Extras()),
    "scale_negative": ({"scale": -0.7, "softcap": 2.0}, Extras()),
    "alibi": ({}, Extras(alibi_slopes=SLOPES)),
    "alibi_per_batch": ({}, Extras(alibi_slopes=torch.stack([SLOPES, 2 * SLOPES]))),
    "sinks": ({"band": Band(right=0)}, Extras(sinks=SINKS)),
    "sinks_on_empty_rows": ({}, Extras(sinks=SINKS, attn_mask=bool_mask(2, 4, 5, 7))),
    "bool_mask": ({}, Extras(attn_mask=bool_mask(2, 4, 5, 7))),
    "bool_mask_broadcast": ({}, Extras(attn_mask=bool_mask(1, 4, 5, 1))),
    "float_mask": ({}, Extras(attn_mask=float_mask(2, 4, 5, 7))),
    "float_mask_rows": ({}, Extras(attn_mask=float_mask(2, 1, 5, 1))),
    "float_mask_keys": ({"band": Band(right=0)}, Extras(attn_mask=float_mask(1, 1, 1, 7))),
    "float_mask_heads": ({}, Extras(attn_mask=float_mask(1, 4, 1, 1))),
    "lens": ({"band": Band(right=0)}, Extras(**LENS)),
    "lens_zero": ({}, Extras(q_lens=torch.tensor([0, 5]), kv_lens=torch.tensor([7, 0]))),
    "dropout": ({"dropout_p": 0.4}, Extras(dropout_seed=torch.tensor([-3, 9]))),
    "everything": (
        {"band": Band(left=4, right=1), "softcap": 3.0, "dropout_p": 0.3},
        Extras(float_mask(1, 4, 5, 7), SLOPES, SINKS, **LENS, dropout_seed=torch.tensor([2**40 + 1, 0])),
    ),
}


@pytest.mark.parametrize(("changes", "extras"), FEATURES.values(), ids=FEATURES.keys())
def test_gradients_agree_with_autograd_for_every_feature(changes: dict[str, Any], extras: Extras) -> None:
    q, k, v = random_qkv()
    assert_matches_autograd(problem_of(q, k, v, **changes), q, k, v, extras)


def test_lse_gradient_may_be_absent() -> None:
    q, k, v = random_qkv()
    assert_matches_autograd(problem_of(q, k, v), q, k, v, Extras(), lse_grad=False)


def test_autograds_own_formula_passes_gradcheck() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(batch=1, seqlen_q=3, seqlen_k=5, heads=(2, 1), dims=(4, 4)))
    problem = problem_of(q, k, v, band=Band(right=0), softcap=2.0)
    assert torch.autograd.gradcheck(lambda q, k, v: by_autograd(problem, q, k, v, Extras()), (q, k, v))


def test_values_past_the_lengths_never_matter() -> None:
    q, k, v = random_qkv()
    problem, extras = problem_of(q, k, v), Extras(**LENS, attn_mask=float_mask(2, 4, 5, 7))
    dout, dlse = torch.ones(2, 5, 4, 2, dtype=torch.float64), torch.ones(2, 4, 5, dtype=torch.float64)
    clean = truth(problem, q, k, v, extras, dout, dlse)
    assert extras.attn_mask is not None
    q[0, 3:], k[1, 2:], v[1, 2:], dout[0, 3:], dlse[0, :, 3:] = (torch.nan,) * 5
    extras.attn_mask[0, :, 3:], extras.attn_mask[1, :, :, 2:] = torch.nan, torch.nan
    poisoned = truth(problem, q, k, v, extras, dout, dlse)
    for field in dataclasses.fields(clean):
        before, after = getattr(clean, field.name), getattr(poisoned, field.name)
        assert (before is None and after is None) or torch.equal(before, after)


def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity() -> None:
    q, k, v = random_qkv(seqlen_q=7, seqlen_k=5)
    got = truth(problem_of(q, k, v, band=Band(right=0)), q, k, v, Extras(), torch.ones(2, 7, 4, 2), torch.ones(2, 4, 7))
    assert (got.lse[:, :, :2] == NEG_INF).all()
    assert not got.out[:, :2].any()
    assert got.dq is not None
    assert not got.dq[:, :2].any()
    assert got.out[:, 2:].all()


def test_an_empty_row_has_the_sink_as_lse() -> None:
    q, k, v = random_qkv(seqlen_k=0)
    extras = Extras(sinks=SINKS, q_lens=torch.tensor([5, 3]))
    got = truth(problem_of(q, k, v), q, k, v, extras, None, torch.ones(2, 4, 5))
    torch.testing.assert_close(got.lse[0], SINKS.double()[:, None].expand(4, 5))
    assert (got.lse[1, :, 3:] == NEG_INF).all()
    assert got.dsinks is not None
    assert got.dsinks.tolist() == pytest.approx([8.0] * 4)  # one for each of the 5 + 3 rows


def test_a_forward_has_no_gradients() -> None:
    q, k, v = random_qkv()
    got = truth(problem_of(q, k, v), q, k, v, Extras(sinks=SINKS))
    assert got.dq is got.dk is got.dv is got.dsinks is None


KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""From kat_vectors of Random123, "philox4x32 10"."""


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: Any, key: Any, words: Any) -> None:
    arrays = tuple(np.array([word], np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox4x32(arrays, key)) == words


def test_dropout_lane_counter_and_key_are_the_contracts() -> None:
    seed, offset, stream, p = (0xA4093822 | (0x299F31D0 << 32)) - 2**64, 0x03707344, 0x13198A2E, 0.5
    kept = keep_mask(seed, offset, stream, 3, 11, p)
    for i, j in itertools.product(range(3), range(11)):
        counter = tuple(np.array([word], np.uint64) for word in (j // 4, i, stream, offset))
        word = int(philox4x32(counter, (0xA4093822, 0x299F31D0))[j % 4][0])
        assert kept[i, j] == (word >= round(p * 2**32))


def test_dropout_keeps_one_minus_p_and_p_one_keeps_nothing() -> None:
    kept = keep_mask(7, 0, 3, 256, 256, 0.17)
    assert kept.mean() == pytest.approx(0.83, abs=4 * math.sqrt(0.17 * 0.83) / 256)
    assert not keep_mask(7, 0, 3, 5, 5, 1.0).any()
    q, k, v = random_qkv()
    got = truth(
        problem_of(q, k, v, dropout_p=1.0), q, k, v, Extras(dropout_seed=torch.tensor([1, 0])), torch.ones(2, 5, 4, 2)
    )
    assert not got.out.any()
    assert got.lse.isfinite().all()
    assert got.dv is not None
    assert not got.dv.any()
