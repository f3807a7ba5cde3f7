"""The list of checks: ids that stay, tiers inside each other, and all but the cases on a right backend."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flashdispatch_conformance.cases import ALL
from flashdispatch_conformance.catalogue import BY_ID, CHECKS, SMOKE, SMOKE_IN_ALL_DTYPES, unit, units
from flashdispatch_conformance.check import ALL_DTYPES, BF16, Unit
from flashdispatch_conformance.conditions import CONDITIONS
from flashdispatch_conformance.probes import PROBES
from flashdispatch_conformance.properties import PROPERTIES
from flashdispatch_conformance.result import NotRun
from flashdispatch_conformance.support_check import SUPPORT
from flashdispatch_conformance.trial import Target
from flashdispatch_conformance.verdict import MINIMUM

OTHERS = (*PROBES, *PROPERTIES, *CONDITIONS, *SUPPORT)
GPU_ONLY = {
    f"condition/{name}"
    for name in (
        "stream", "graph_new_values", "prepared", "second_device", "no_context_at_import", "determinism_under_load",
        "memory",
    )
}  # fmt: skip


def test_ids_are_the_committed_ones() -> None:
    """Ids are public: add to check_ids.txt, never rename. Those of cases are in case_ids.txt."""
    committed = Path(__file__).with_name("check_ids.txt").read_text(encoding="utf-8").split()
    assert [check.id for check in OTHERS] == committed


def test_every_check_has_an_id_of_its_own_and_says_why() -> None:
    assert len(BY_ID) == len(CHECKS) == len(ALL) + len(OTHERS)
    for check in CHECKS:
        assert re.fullmatch(r"[a-z]+/\w+", check.id)
        assert len(check.why) > 5
        assert check.dtypes


def test_each_tier_has_all_of_the_one_before() -> None:
    smoke, full, deep = ({one.id for one in units(tier)} for tier in ("smoke", "full", "deep"))
    assert smoke < full < deep


def test_the_smoke_tier_has_the_minimum_and_every_kind_and_dtype() -> None:
    smoke = units("smoke")
    assert set(MINIMUM) <= {one.check.id for one in smoke}
    assert {one.check.id.split("/")[0] for one in smoke} == {"named", "probe", "condition", "support"}
    assert {one.dtype for one in smoke} == set(ALL_DTYPES)
    assert set(BY_ID) >= SMOKE | SMOKE_IN_ALL_DTYPES


def test_a_unit_is_found_by_its_id_and_nothing_else_is() -> None:
    assert unit("named/d128-bfloat16") == Unit(BY_ID["named/d128"], BF16)
    with pytest.raises(KeyError):
        unit("named/d128")


@pytest.mark.parametrize("check", OTHERS, ids=[check.id for check in OTHERS])
def test_a_right_backend_passes_what_is_no_case(check) -> None:
    result = check.run(Target(backend="torch_reference", dtype=BF16, device=torch.device("cpu")))
    if check.id in GPU_ONLY:
        assert (result.outcome, result.not_run) == ("not_run", NotRun.NO_CUDA)
    else:
        assert result.outcome == "pass", result.report()


def test_float16_of_what_is_in_bfloat16_too_is_deep_but_for_the_minimum() -> None:
    full = {one.id for one in units("full")}
    assert "named/gqa_6_3-bfloat16" in full
    assert "named/gqa_6_3-float16" not in full
    assert "named/gqa_6_3-float16" in {one.id for one in units("deep")}
    assert {f"{case}-{dtype}" for case in MINIMUM for dtype in ("float16", "bfloat16")} <= full
    assert {one.dtype for one in full_of("pairwise")} == set(ALL_DTYPES)


def full_of(kind: str) -> list[Unit]:
    return [one for one in units("full") if one.check.id.startswith(f"{kind}/")]
