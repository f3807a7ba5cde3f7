"""Every check of the suite, and which of them a tier has. Nothing here knows any backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch

from flashdispatch_conformance.case import Case
from flashdispatch_conformance.case_check import check_case
from flashdispatch_conformance.cases import ALL
from flashdispatch_conformance.check import ALL_DTYPES, BF16, F16, TIERS, Check, Tier, Unit
from flashdispatch_conformance.conditions import CONDITIONS
from flashdispatch_conformance.probes import PROBES
from flashdispatch_conformance.properties import PROPERTIES
from flashdispatch_conformance.support_check import SUPPORT
from flashdispatch_conformance.verdict import MINIMUM
from flashdispatch_registry.problem import DTYPES

SMOKE = frozenset(
    {
        "named/length_1", "named/length_65", "named/length_704_minus_120", "named/causal_tall", "named/causal_wide",
        "named/d128", "named/gqa_8_2", "named/window_63", "named/mask_bool_empty_rows", "named/mask_float_grad",
        "named/lens_causal", "named/softcap_peaked", "named/sinks_window_gqa", "named/alibi_causal", "named/length_63",
        "named/length_64", "named/all_equal", "named/d128_full", "named/forward_only",
    }
)  # fmt: skip
"""Cases of the first contact, in bfloat16: one for each feature, and the minimum."""

SMOKE_IN_ALL_DTYPES = frozenset({"named/length_65", "named/causal_tall"})
"""Those of them that every dtype is tried with."""


def _smoke_dtypes(case: Case) -> tuple[torch.dtype, ...]:
    if case.id in SMOKE_IN_ALL_DTYPES:
        return ALL_DTYPES
    return (BF16,) if case.id in SMOKE else ()


def _deep_dtypes(case: Case) -> tuple[torch.dtype, ...]:
    """float16 of a case that is in bfloat16 too: it is the same code, and a third of the compiling.

    Range and rounding of float16 have the pairwise and pinned cases, and the minimum is asked in both.
    """
    both = {"float16", "bfloat16"} <= set(case.dtypes)
    return (F16,) if both and case.id not in MINIMUM and case.id not in SMOKE else ()


def _of_case(case: Case) -> Check:
    return Check(
        id=case.id,
        why=case.why,
        run=partial(check_case, case),
        dtypes=tuple(DTYPES[name] for name in case.dtypes),
        tier=case.tier,
        smoke_dtypes=_smoke_dtypes(case),
        deep_dtypes=_deep_dtypes(case),
    )


CHECKS: tuple[Check, ...] = (*map(_of_case, ALL), *PROBES, *PROPERTIES, *CONDITIONS, *SUPPORT)
"""In the order of reports."""

BY_ID: Mapping[str, Check] = MappingProxyType({check.id: check for check in CHECKS})


def units(tier: Tier) -> tuple[Unit, ...]:
    """What a tier runs, in the order of reports."""
    reach = TIERS.index(tier)
    return tuple(
        Unit(check, dtype) for check in CHECKS for dtype in check.dtypes if TIERS.index(check.tier_in(dtype)) <= reach
    )


def unit(id: str) -> Unit:  # noqa: A002  the field's name
    """By its id. Raises KeyError when there is none."""
    return {unit.id: unit for unit in units("deep")}[id]
