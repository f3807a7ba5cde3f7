"""`Band` against its definition, spelled out key by key: p - left <= j <= p + right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashdispatch_registry import Band

SIDES = (None, 0, 1, 3)
LENGTHS = (0, 1, 2, 5)
ALIGNS = ("bottom_right", "top_left")

limits = st.none() | st.integers(0, 12)
bands = st.builds(Band, limits, limits, st.sampled_from(ALIGNS))


def sees(band: Band, i: int, j: int, seqlen_q: int, seqlen_k: int) -> bool:
    p = i + seqlen_k - seqlen_q if band.align == "bottom_right" else i
    return (band.left is None or p - band.left <= j) and (band.right is None or j <= p + band.right)


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("left", "right"), list(itertools.product(SIDES, SIDES)))
def test_dense_is_the_definition(left: int | None, right: int | None, align: Any) -> None:
    band = Band(left, right, align)
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        expected = [[sees(band, i, j, seqlen_q, seqlen_k) for j in range(seqlen_k)] for i in range(seqlen_q)]
        dense = band.dense(seqlen_q, seqlen_k)
        assert dense.shape == (seqlen_q, seqlen_k)
        assert dense.dtype == torch.bool
        assert dense.tolist() == expected


def test_causal_is_bottom_right_by_default() -> None:
    assert Band.of(causal=True).dense(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]


def test_top_left_causal_is_pytorchs() -> None:
    band = Band.of(causal=True, align="top_left")
    assert band.dense(2, 4).tolist() == [[True, False, False, False], [True, True, False, False]]


@given(band=bands, seqlen_q=st.integers(1, 20), seqlen_k=st.integers(0, 20), data=st.data())
def test_key_range_is_the_hull_of_what_the_queries_see(
    band: Band, seqlen_q: int, seqlen_k: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, seqlen_q - 1))
    last = data.draw(st.integers(first, seqlen_q - 1))
    seen = band.dense(seqlen_q, seqlen_k)[first : last + 1].any(dim=0).nonzero().flatten().tolist()
    hull = (seen[0], seen[-1] + 1) if seen else (0, 0)
    assert band.key_range(first, last, seqlen_q, seqlen_k) == hull


@given(left=limits, right=limits, causal=st.booleans(), align=st.sampled_from(ALIGNS))
def test_causal_and_window_are_anded(left: int | None, right: int | None, causal: bool, align: Any) -> None:
    both = Band.of(causal=causal, align=align, window=(left, right)).dense(5, 7)
    alone = Band.of(causal=causal, align=align).dense(5, 7)
    assert torch.equal(both, alone & Band(left, right, align).dense(5, 7))


@given(band=bands)
def test_properties_say_what_dense_shows(band: Band) -> None:
    size = 30  # more than any limit drawn
    dense = band.dense(size, size)
    lower = torch.ones(size, size, dtype=torch.bool).tril()
    assert band.is_full == bool(dense.all())
    assert band.is_causal == (not bool((dense & ~lower).any()))
    assert band.has_window == (not (torch.equal(dense, lower) or bool(dense.all())))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_negative_limit_is_refused(side: str) -> None:
    with pytest.raises(ValueError, match=rf"Band\.{side} must be >= 0 or None, got -1"):
        Band(**{side: -1})


@pytest.mark.parametrize(
    ("band", "text"),
    [
        (Band(), "full"),
        (Band(align="top_left"), "full"),
        (Band(right=0), "causal"),
        (Band(right=0, align="top_left"), "causal top_left"),
        (Band(4, 0), "window(4, 0)"),
        (Band(None, 2, "top_left"), "window(None, 2) top_left"),
    ],
)
def test_text_of_a_band(band: Band, text: str) -> None:
    assert str(band) == text
