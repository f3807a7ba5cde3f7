"""A check: what the suite holds a backend to, under an id that never changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target, Trial, run_trial
from flashdispatch_registry.problem import DTYPE_NAMES

Tier = Literal["smoke", "full", "deep"]
"""smoke: first contact, under a minute. full: what a verdict is given for. deep: hours, or much memory."""

TIERS: tuple[Tier, ...] = ("smoke", "full", "deep")
"""From small to large; each has all of those before it."""

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ALL_DTYPES = (F16, BF16, F32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to hold a backend to, in one or more dtypes."""

    id: str
    """``kind/name``: ``"named/length_63"``, ``"probe/counting_causal"``. Public, and never renamed."""
    why: str
    """The edge, the property or the public report that it stands for, in one line."""
    run: Callable[[Target], Result]
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    tier: Tier = "full"
    """The smallest tier that has it, where `smoke_dtypes` does not say otherwise."""
    smoke_dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes in which the smoke tier has it too."""
    deep_dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes in which only the deep tier has it."""
    alone: bool = False
    """It needs the machine to itself: a runner runs it after the others, and nothing beside it."""

    @classmethod
    def of(
        cls,
        id: str,  # noqa: A002  the field's name
        why: str,
        body: Callable[[Trial], None],
        *,
        dtypes: tuple[torch.dtype, ...] = ALL_DTYPES,
        tier: Tier = "full",
        smoke_dtypes: tuple[torch.dtype, ...] = (),
        alone: bool = False,
    ) -> Check:
        """A check whose body makes calls on a Trial and notes what does not hold."""

        def run(target: Target) -> Result:
            return run_trial(id, body, target)

        return cls(id=id, why=why, run=run, dtypes=dtypes, tier=tier, smoke_dtypes=smoke_dtypes, alone=alone)

    def tier_in(self, dtype: torch.dtype) -> Tier:
        """The smallest tier that has it in `dtype`."""
        if dtype in self.smoke_dtypes:
            return "smoke"
        return "deep" if dtype in self.deep_dtypes else self.tier


@dataclass(frozen=True, slots=True)
class Unit:
    """A check in one dtype: one line of a report, one test of pytest, one task of a worker."""

    check: Check
    dtype: torch.dtype

    @property
    def id(self) -> str:
        """``<check id>-<dtype>``."""
        return f"{self.check.id}-{DTYPE_NAMES[self.dtype]}"
