"""The pinned cases: a right backend passes those that are small, and each meets the condition that made it a report."""

from __future__ import annotations

import math

import pytest
import torch

from flashdispatch_conformance.bug_reports import BY_ID as REPORTS
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.case_check import run_case
from flashdispatch_conformance.cases import BY_ID, PINNED
from flashdispatch_conformance.inputs import FAR, WIDTH_BESIDE, build
from flashdispatch_registry.problem import DTYPES


def test_each_says_which_report_it_is() -> None:
    for case in PINNED:
        report = REPORTS[case.id.removeprefix("pinned/").partition("_")[0]]
        assert case.why.startswith(report.report + ": ")
        assert case.id in report.cases


def small(case: Case) -> bool:
    """What a CPU checks in a fraction of a second."""
    heads = case.batch * case.heads[0]
    return heads <= 64 and heads * case.seqlens[0] * case.seqlens[1] <= 300_000


SMALL = [(case, DTYPES[name]) for case in PINNED if small(case) for name in case.dtypes]


@pytest.mark.parametrize(("case", "dtype"), SMALL, ids=lambda value: value.id if isinstance(value, Case) else None)
def test_a_right_backend_passes(case: Case, dtype: torch.dtype) -> None:
    result = run_case(case, "torch_reference", dtype)
    assert result.outcome == "pass", result.report()
    assert not result.refused


def elements(case: Case) -> int:
    return case.batch * case.heads[0] * case.seqlens[0] * case.dims[0]


def test_large_ones_pass_the_numbers_that_overflowed() -> None:
    case = BY_ID["pinned/B37"]
    assert elements(case) == 1600 * 16 * 729 * 72
    assert 2 * elements(case) > 2**31
    case = BY_ID["pinned/B38"]
    assert case.batch * case.heads[0] * 128 * case.dims[0] > 2**31
    case = BY_ID["pinned/B40"]
    width = case.heads[0] * case.dims[0] + WIDTH_BESIDE
    assert width == 9728
    assert case.batch * case.seqlens[0] * width > 2**31
    case = BY_ID["pinned/B41"]
    assert case.batch * case.heads[0] * 128 * case.dims[0] > 2**31
    assert BY_ID["pinned/B43"].batch > 65535
    case = BY_ID["pinned/B46"]
    assert case.seqlens[1] > 2**15
    case = BY_ID["pinned/B47"]
    assert (case.seqlens[0] - 1) * FAR > 2**31
    case = BY_ID["pinned/B145"]
    assert case.batch * case.heads[0] * case.seqlens[0] * 4 > 2**31


def test_large_ones_are_cheap_to_draw_and_to_judge() -> None:
    for case in PINNED:
        if case.batch > 32 or case.tier == "deep":
            heads = case.sequences * case.heads[0]
            assert heads * math.prod(case.seqlens) <= 2**30, case.id


def test_a_bias_of_43_keys_has_the_strides_of_its_report() -> None:
    mask = build(BY_ID["pinned/B56"], torch.float16, "cpu", "cpu").attn_mask
    assert mask is not None
    assert mask.stride() == (688, 43, 43, 1)


def test_dout_of_a_sum_is_one_number() -> None:
    dout = build(BY_ID["pinned/B52_sum"], torch.float16, "cpu", "cpu").dout
    assert dout is not None
    assert dout.stride() == (0, 0, 0, 0)
