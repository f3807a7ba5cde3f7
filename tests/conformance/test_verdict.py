"""The verdict as a pure function of the outcomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashdispatch_conformance.cases import BY_ID
from flashdispatch_conformance.result import NOT_OF_THIS_MACHINE, NotRun, Result
from flashdispatch_conformance.verdict import MINIMUM, NOT_RUN_WORDS, Verdict, decide, minimum_set


def result(check: str = "named/gqa_8_2", dtype: str = "float16", **changes: Any) -> Result:
    return Result(**({"check": check, "backend": "any", "dtype": dtype, "outcome": "pass"} | changes))


def not_run(why: NotRun) -> Result:
    return result("mode/other_gpu", outcome="not_run", not_run=why)


def minimum(dtype: str = "float16", **changes: Any) -> list[Result]:
    return [result(case, dtype, **changes) for case in MINIMUM]


def verdict(*more: Result, **changes: Any) -> Verdict:
    return decide([*minimum(), *more], **({"tier": "full", "modified": False} | changes))


def test_all_passed_is_conformant() -> None:
    assert verdict(result()) == Verdict(
        "conformant", "pass", (f"{len(MINIMUM) + 1} units passed, 0 refused as declared, 0 waived",)
    )


@pytest.mark.parametrize("outcome", ["fail", "error", "unexpected_pass"])
def test_one_bad_outcome_is_nonconformant(outcome: Any) -> None:
    said = verdict(result(outcome=outcome))
    assert said.word == "nonconformant"
    assert said.reasons == (f"1 unit ended as {outcome}",)


def test_what_fails_says_more_than_what_was_left_out() -> None:
    assert (
        verdict(result(outcome="fail"), not_run(NotRun.FILTERED), tier="smoke", modified=True).word == "nonconformant"
    )


def test_waivers_that_are_wrong_are_nonconformant() -> None:
    said = verdict(waiver_faults=("the waiver x expired",))
    assert said == Verdict("nonconformant", "pass", ("the waiver x expired",))


def test_what_is_waived_or_refused_is_conformant() -> None:
    more = (result(outcome="waived", waiver="x"), result("named/d8", outcome="unsupported", refused={"out": ("GQA",)}))
    assert verdict(*more).word == "conformant"


@pytest.mark.parametrize("why", sorted(NOT_OF_THIS_MACHINE))
def test_what_the_machine_can_not_do_is_said_and_changes_nothing(why: NotRun) -> None:
    said = verdict(not_run(why), not_run(why))
    assert said.word == "conformant"
    assert said.reasons[-1] == f"2 units not run: {NOT_RUN_WORDS[why]}"


@pytest.mark.parametrize("why", sorted(set(NotRun) - NOT_OF_THIS_MACHINE))
def test_any_other_reason_for_less_makes_it_partial(why: NotRun) -> None:
    said = verdict(not_run(why))
    assert said.word == "partial"
    assert NOT_RUN_WORDS[why] in said.reasons[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"tier": "smoke"}, "the smoke tier is less than the full one"), ({"modified": True}, "the suite was modified")],
)
def test_less_than_the_full_suite_is_partial(changes: dict[str, Any], reason: str) -> None:
    assert verdict(**changes) == Verdict("partial", "pass", (reason,))


def test_the_deep_tier_is_more_than_enough_and_an_unknown_tree_changes_nothing() -> None:
    assert verdict(tier="deep").word == "conformant"
    assert verdict(modified=None).word == "conformant"


def test_every_reason_has_words() -> None:
    assert set(NOT_RUN_WORDS) == set(NotRun)


# The minimum


def test_the_minimum_is_made_of_plain_cases_of_both_head_dims_causal_and_not() -> None:
    cases = [BY_ID[case] for case in MINIMUM]
    assert {case.dims for case in cases} == {(64, 64), (128, 128)}
    assert {case.causal for case in cases} == {True, False}
    for case in cases:
        assert case.seqlens[0] == case.seqlens[1]
        assert case.heads[0] == case.heads[1]
        assert (case.window, case.mask, case.alibi, case.q_lens, case.kv_lens, case.softcap) == (None,) * 6
        assert not case.sinks
        assert not case.dropout_p


def test_one_16_bit_dtype_is_enough() -> None:
    refused = {"gradients": ("DTYPE",), "out": ("DTYPE",), "lse": ("DTYPE",)}
    assert minimum_set([*minimum("bfloat16"), *minimum(outcome="unsupported", refused=refused)]) == ("pass", ())


def test_float32_is_not() -> None:
    assert minimum_set(minimum("float32")) == ("not_run", MINIMUM)


def test_a_backward_is_not_part_of_it() -> None:
    assert minimum_set(minimum(refused={"gradients": ("BACKWARD",)})) == ("pass", ())


@pytest.mark.parametrize("part", ["out", "lse"])
def test_forward_and_lse_are(part: str) -> None:
    results = minimum()
    results[2] = replace(results[2], refused={part: ("LSE",)})
    assert minimum_set(results) == ("fail", (MINIMUM[2],))
    said = decide(results, tier="full", modified=False)
    assert said.word == "nonconformant"
    assert said.reasons == (f"the minimum does not pass in float16 or bfloat16 (no waiver counts): {MINIMUM[2]}",)


@pytest.mark.parametrize("outcome", ["fail", "error", "waived", "unsupported"])
def test_nobody_declares_or_waives_it_away(outcome: Any) -> None:
    results = minimum()
    results[0] = replace(results[0], outcome=outcome, refused={"out": ("HEAD_DIM",)})
    assert minimum_set(results) == ("fail", (MINIMUM[0],))


def test_what_was_not_run_of_it_is_not_answered() -> None:
    results = minimum(outcome="not_run", not_run=NotRun.FILTERED)
    assert minimum_set(results) == ("not_run", MINIMUM)
    assert minimum_set([]) == ("not_run", MINIMUM)
    assert decide([result()], tier="full", modified=False).word == "partial"


@pytest.mark.parametrize("code", ["DEVICE", "ARCH_IMPOSSIBLE"])
def test_another_device_than_the_backends_is_no_fault_of_it(code: str) -> None:
    refused = {"gradients": (code, "DTYPE"), "out": (code,), "lse": (code,)}
    said = decide(minimum(outcome="unsupported", refused=refused), tier="full", modified=False)
    assert (said.word, said.minimum) == ("partial", "not_run")
    assert "nothing passed: no call that the backend declares was run" in said.reasons
