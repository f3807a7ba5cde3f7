"""The verdict on a backend, as a pure function of what came of its checks. A report carries it, `verify` works it out.

nonconformant  anything failed, or the minimum is not there: the backend is not right, or says too little
partial        nothing failed, but less was run than the full tier of an unmodified suite
conformant     everything the backend declares holds, as far as its machine can show
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashdispatch_conformance.check import TIERS, Tier
from flashdispatch_conformance.result import NOT_OF_THIS_MACHINE, NotRun, Outcome, Result
from flashdispatch_registry.reasons import Code

Word = Literal["conformant", "partial", "nonconformant"]
MinimumSet = Literal["pass", "fail", "not_run"]

MINIMUM = (
    "named/length_1", "named/length_63", "named/length_64", "named/length_65", "named/all_equal", "named/d128",
    "named/d128_full", "named/forward_only",
)  # fmt: skip
"""Cases whose forward and LSE every backend must support in float16 or bfloat16: D 64 and 128, causal and not, Sq = Sk,
one KV head per query head. Without them, "all passed" says nothing."""

MINIMUM_DTYPES = ("float16", "bfloat16")
MINIMUM_PARTS = ("out", "lse")

BAD: tuple[Outcome, ...] = ("error", "fail", "unexpected_pass")
"""Outcomes that make a verdict nonconformant, the worst first."""

ELSEWHERE = frozenset({str(Code.DEVICE), str(Code.ARCH_IMPOSSIBLE)})
"""Refusals that are about this machine: they leave the minimum unanswered, not unmet."""

NOT_RUN_WORDS: Mapping[NotRun, str] = {
    NotRun.NO_CUDA: "they need a CUDA GPU, and this machine has none",
    NotRun.ONE_GPU: "they need a second GPU, and this machine has one",
    NotRun.NO_COMPILER: "torch.compile has no C++ compiler to work with on this machine",
    NotRun.INTERPRETER: "a kernel language's interpreter can't do them",
    NotRun.NO_MEMORY: "the device had too little memory",
    NotRun.NOT_INSTALLED: "the backend can't be loaded here, or is disabled",
    NotRun.FILTERED: "an option of the run left them out",
    NotRun.INTERRUPTED: "the run ended before their turn",
}
"""Why units were not run, as a clause that follows their number."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The word, what became of the minimum, and why, one sentence each."""

    word: Word
    minimum: MinimumSet
    reasons: tuple[str, ...]


def decide(
    results: Sequence[Result], *, tier: Tier, modified: bool | None, waiver_faults: Sequence[str] = ()
) -> Verdict:
    """The verdict on one result for each planned unit.

    Args:
        results: What came of the units; those that were planned and have none stand as not_run.
        tier: What was planned. Only the full tier and above can make a backend conformant.
        modified: Whether the suite is another than the one of its version. None: nobody can tell, and nothing follows.
        waiver_faults: Waivers that have expired or match nothing, in words.
    """
    counts = Counter(result.outcome for result in results)
    minimum, missing = minimum_set(results)
    wrong = [f"{_units(counts[word])} ended as {word}" for word in BAD if counts[word]]
    wrong += waiver_faults
    if minimum == "fail":
        wrong.append(f"the minimum does not pass in float16 or bfloat16 (no waiver counts): {', '.join(missing)}")
    not_run = Counter(result.not_run for result in results if result.not_run is not None)
    here = [_left_out(why, count) for why, count in not_run.items() if why in NOT_OF_THIS_MACHINE]
    if wrong:
        return Verdict("nonconformant", minimum, (*wrong, *here))
    less = [_left_out(why, count) for why, count in not_run.items() if why not in NOT_OF_THIS_MACHINE]
    if minimum == "not_run" and not less:
        less.append(f"the minimum was not run: {', '.join(missing)}")
    if TIERS.index(tier) < TIERS.index("full"):
        less.append(f"the {tier} tier is less than the full one")
    if modified:
        less.append("the suite was modified")
    if not counts["pass"]:
        less.append("nothing passed: no call that the backend declares was run")
    if less:
        return Verdict("partial", minimum, (*less, *here))
    held = f"{_units(counts['pass'])} passed, {counts['unsupported']} refused as declared, {counts['waived']} waived"
    return Verdict("conformant", minimum, (held, *here))


def minimum_set(results: Iterable[Result]) -> tuple[MinimumSet, tuple[str, ...]]:
    """What became of MINIMUM, and the cases that stand in the way of "pass".

    A case counts when it passed in a 16-bit dtype with its forward and its LSE run. One that was run nowhere, or is
    refused because of the device, is not answered.
    """
    by_case: dict[str, list[Result]] = {case: [] for case in MINIMUM}
    for result in results:
        if result.check in by_case and result.dtype in MINIMUM_DTYPES:
            by_case[result.check].append(result)
    unmet: list[str] = []
    unanswered: list[str] = []
    for case, found in by_case.items():
        if any(result.outcome == "pass" and not set(MINIMUM_PARTS) & set(result.refused) for result in found):
            continue
        ran = [r for r in found if r.outcome != "not_run" and not _elsewhere(r.refused.values())]
        (unmet if ran else unanswered).append(case)
    if unmet:
        return "fail", tuple(unmet)
    return ("not_run", tuple(unanswered)) if unanswered else ("pass", ())


def _elsewhere(refusals: Collection[Sequence[str]]) -> bool:
    return bool(refusals) and all(ELSEWHERE & set(codes) for codes in refusals)


def _left_out(why: NotRun, count: int) -> str:
    return f"{_units(count)} not run: {NOT_RUN_WORDS[why]}"


def _units(count: int) -> str:
    return f"{count} {'unit' if count == 1 else 'units'}"
