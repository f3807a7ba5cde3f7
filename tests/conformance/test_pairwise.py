"""The covering array: what it covers, that it is the committed one, and that a right backend passes a spread of it."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest

from flashdispatch_conformance.case import Case
from flashdispatch_conformance.case_check import run_case
from flashdispatch_conformance.cases import PAIRWISE
from flashdispatch_conformance.pairwise import (
    AXES,
    BUDGET,
    BY_NAME,
    FILE,
    HEADS,
    TRIPLE,
    Row,
    case_of,
    completed,
    generate,
    plain_row,
    text_of,
)
from flashdispatch_registry.problem import DTYPES

PAIRS = tuple(itertools.combinations((axis.name for axis in AXES), 2))


@cache
def rows() -> list[Row]:
    return generate()


def test_the_committed_file_is_what_is_generated() -> None:
    assert FILE.read_text(encoding="utf-8") == text_of(rows())


def test_the_rows_are_the_cases() -> None:
    assert [case_of(row, case.id) for row, case in zip(rows(), PAIRWISE, strict=True)] == list(PAIRWISE)


def meet(*names: str) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Combinations of levels of these axes: those that the rows have, and all that go with plain levels elsewhere."""
    have = {tuple(row[name] for name in names) for row in rows()}
    every = itertools.product(*(BY_NAME[name].levels for name in names))
    return have, {levels for levels in every if completed(dict(zip(names, levels, strict=True)))}


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_two_levels_meet(pair: tuple[str, str]) -> None:
    have, wanted = meet(*pair)
    assert wanted <= have


def test_every_dtype_head_dim_and_mask_meet() -> None:
    have, wanted = meet(*TRIPLE)
    assert wanted <= have
    assert len(wanted) == 3 * 8 * 9


def test_nothing_but_the_contract_and_the_budget_keeps_levels_apart() -> None:
    apart = {
        (first.name, second.name)
        for first, second in itertools.combinations(AXES, 2)
        if len(meet(first.name, second.name)[1]) < len(first.levels) * len(second.levels)
    }
    assert apart == {
        ("mask", "mask form"),  # the form of no mask
        ("mask", "padding"),  # kv_lens alone and causal
        ("lengths", "heads"),  # BUDGET
        ("lengths", "batch"),  # BUDGET
        ("heads", "batch"),  # HEADS
        ("batch", "extra"),  # dropout and a batch that repeats itself
        ("dout", "gradients"),  # no dout in a forward
        ("values", "scale"),  # values that are made from a scale that is not 0
        ("gradients", "order"),  # no sum in a forward
    }


@pytest.mark.parametrize("axis", [axis.name for axis in AXES])
def test_every_level_has_several_cases(axis: str) -> None:
    count = Counter(row[axis] for row in rows())
    assert min(count[level] for level in BY_NAME[axis].levels) >= 3


def test_long_sums_are_there_in_every_dtype() -> None:
    long = [case for case in PAIRWISE if case.seqlens[1] >= 8192 and case.seqlens[0] >= 16]
    for dtype in ("float16", "bfloat16", "float32"):
        assert {"normal", "shifted_v"} <= {case.values for case in long if case.dtypes == (dtype,)}


def test_cases_are_small_and_have_one_dtype() -> None:
    assert 200 <= len(PAIRWISE) <= 300
    for case in PAIRWISE:
        heads = case.sequences * case.heads[0]
        assert heads <= HEADS
        assert heads * case.seqlens[0] * case.seqlens[1] <= BUDGET
        assert len(case.dtypes) == 1


def test_a_row_says_in_words_what_it_is() -> None:
    row: Row = plain_row(mask="bool mask", lengths="(65, 129)", values="peaked", extra="softcap")
    row["mask form"] = "of keys"
    case = case_of(row, "pairwise/x")
    assert case.why == "bfloat16, D 64, bool mask of keys, lengths (65, 129), peaked, softcap"
    assert case.mask is not None
    assert case.mask.shape == (1, 1, 1, 129)


SOME = PAIRWISE[7::9]


@pytest.mark.parametrize("case", SOME, ids=[case.id for case in SOME])
def test_a_right_backend_passes(case: Case) -> None:
    result = run_case(case, "torch_reference", DTYPES[case.dtypes[0]])
    assert result.outcome == "pass", result.report()
    assert not result.refused
