"""The choice as a pure function, with backends that are only data and no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from flashdispatch_registry import BackendSpec, Band, Code, KnownIssue, Problem, Reason
from flashdispatch_registry.errors import (
    BackendUnsupportedError,
    DisabledBackendError,
    NoBackendError,
    UnknownBackendError,
)
from flashdispatch_registry.plan import Adapter, Forced
from flashdispatch_registry.select import Entry, nearest, require, select


def entry(spec: BackendSpec, *faults: Reason, distribution: str = "outside", version: str = "1.2") -> Entry:
    return Entry(spec.name, spec, distribution, version, faults)


def forced(*names: str, **more: Any) -> Forced:
    return Forced(names, more.pop("source", "backend argument"), **more)


def issue(backend: str = "fast", **changes: Any) -> KnownIssue:
    fields: dict[str, Any] = {
        "backend": backend,
        "reason": "wrong gradients for odd Sk",
        "url": "https://example.org/issues/7",
        "when": lambda p: p.seqlen_k % 2 == 0,
    }
    return KnownIssue(**(fields | changes))


def names(plan: Any) -> list[str]:
    return [candidate.name for candidate in plan.candidates]


def codes(plan: Any, name: str) -> list[Code]:
    return [reason.code for reason in plan.candidate(name).reasons]


# Order


def test_the_highest_priority_wins_and_candidates_are_in_that_order(spec, problem) -> None:
    entries = [entry(spec(name, priority={"*": rank})) for name, rank in (("low", 1), ("high", 9), ("mid", 5))]
    plan = select(problem(), entries)
    assert plan.chosen == "high"
    assert names(plan) == ["high", "mid", "low"]


def test_a_tie_is_broken_by_name(spec, problem) -> None:
    assert names(select(problem(), [entry(spec(name)) for name in ("c", "a", "b")])) == ["a", "b", "c"]


def test_priority_is_per_architecture(spec, problem) -> None:
    entries = [entry(spec("hopper", priority={"sm_90": 9})), entry(spec("other", priority={"*": 5, "sm_90": 1}))]
    assert select(problem(arch="sm_90"), entries).chosen == "hopper"
    assert select(problem(arch="sm_80"), entries).chosen == "other"


def test_what_can_run_comes_before_what_can_not(spec, problem) -> None:
    entries = [entry(spec("unable", priority={"*": 9})), entry(spec("able", softcap=True))]
    plan = select(problem(softcap=1.0), entries)
    assert plan.chosen == "able"
    assert names(plan) == ["able", "unable"]
    assert codes(plan, "unable") == [Code.SOFTCAP]


def test_the_same_inputs_give_the_same_plan_whatever_their_order(spec, problem) -> None:
    entries = [entry(spec(name, priority={"*": rank})) for name, rank in (("a", 1), ("b", 1), ("c", 2))]
    plans = [select(problem(), order) for order in (entries, entries[::-1], entries[1:] + entries[:1])]
    assert plans[0] == plans[1] == plans[2]


def test_no_backends_means_no_choice_and_the_error_says_how_to_get_some(problem) -> None:
    plan = select(problem(), [])
    assert plan.chosen is None
    with pytest.raises(NoBackendError, match=r"no backend is registered; .*pip install -e \."):
        require(plan)


# Asked for by name


def test_a_forced_backend_is_taken_over_a_better_one(spec, problem) -> None:
    entries = [entry(spec("best", priority={"*": 9})), entry(spec("asked"))]
    plan = select(problem(), entries, forced=forced("asked"))
    assert plan.chosen == "asked"
    assert names(plan) == ["asked", "best"]
    assert require(plan) == "asked"


def test_a_forced_backend_that_can_not_run_raises_with_all_its_reasons_and_who_could(spec, problem) -> None:
    entries = [entry(spec("able", alibi=True, softcap=True)), entry(spec("asked"))]
    plan = select(problem(alibi=True, softcap=2.0), entries, forced=forced("asked", source="use_backend()"))
    assert plan.chosen is None
    with pytest.raises(BackendUnsupportedError) as caught:
        require(plan)
    text = str(caught.value)
    assert text.startswith("asked by use_backend() can't run this problem.")
    assert "ALIBI" in text
    assert "SOFTCAP" in text
    assert "can run it: able" in text
    assert caught.value.plan is plan


def test_a_chain_is_tried_in_its_own_order(spec, problem) -> None:
    entries = [entry(spec("best", priority={"*": 9})), entry(spec("first")), entry(spec("second", priority={"*": 5}))]
    plan = select(problem(), entries, forced=forced("first", "second"))
    assert plan.chosen == "first"
    assert names(plan) == ["first", "second", "best"]


def test_a_chain_moves_on_to_its_next_name(spec, problem) -> None:
    entries = [entry(spec("first")), entry(spec("second", gqa=True))]
    assert select(problem(heads_kv=2), entries, forced=forced("first", "second")).chosen == "second"


def test_a_chain_is_exclusive(spec, problem) -> None:
    entries = [entry(spec("able", gqa=True)), entry(spec("first")), entry(spec("second"))]
    plan = select(problem(heads_kv=2), entries, forced=forced("first", "second"))
    with pytest.raises(BackendUnsupportedError) as caught:
        require(plan)
    assert "first (outside 1.2):" in str(caught.value)
    assert "second (outside 1.2):" in str(caught.value)
    assert "able (outside" not in str(caught.value)


def test_an_unknown_name_raises_with_the_registered_and_the_nearest(spec, problem) -> None:
    entries = [entry(spec("triton_fa2")), entry(spec("torch_reference"))]
    with pytest.raises(UnknownBackendError) as caught:
        select(problem(), entries, forced=forced("triton_fa", source="FLASHDISPATCH_BACKEND"))
    text = str(caught.value)
    assert "no backend is called 'triton_fa' (asked for by FLASHDISPATCH_BACKEND)" in text
    assert "Did you mean 'triton_fa2'?" in text
    assert "registered: torch_reference, triton_fa2" in text
    assert problem().describe() in text
    assert caught.value.problem == problem()


def test_an_unknown_name_in_a_chain_raises_even_when_another_could_run(spec, problem) -> None:
    with pytest.raises(UnknownBackendError, match="'typo'"):
        select(problem(), [entry(spec("able"))], forced=forced("able", "typo"))


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    assert nearest("zzz", ["torch_reference"]) == ""


def test_who_forced_and_who_was_overridden_stay_in_the_plan(spec, problem) -> None:
    by = forced("a", overridden=(("FLASHDISPATCH_BACKEND", "b"),))
    plan = select(problem(), [entry(spec("a"))], forced=by)
    assert plan.forced == by
    assert str(by) == "a by backend argument, over b by FLASHDISPATCH_BACKEND"
    assert json.loads(json.dumps(plan.to_json()))["forced"]["source"] == "backend argument"


# Disabled


def test_a_disabled_backend_is_passed_over(spec, problem) -> None:
    entries = [entry(spec("best", priority={"*": 9})), entry(spec("next"))]
    plan = select(problem(), entries, disabled=frozenset({"best"}))
    assert plan.chosen == "next"
    assert codes(plan, "best") == [Code.DISABLED]


def test_disabled_and_forced_is_an_error_that_names_both_sides(spec, problem) -> None:
    with pytest.raises(DisabledBackendError) as caught:
        select(problem(), [entry(spec("a"))], forced=forced("a"), disabled=frozenset({"a"}))
    assert "asked for by backend argument" in str(caught.value)
    assert "FLASHDISPATCH_DISABLE=a" in str(caught.value)
    assert problem().describe() in str(caught.value)


def test_a_chain_steps_over_its_disabled_names(spec, problem) -> None:
    plan = select(problem(), [entry(spec("a")), entry(spec("b"))], forced=forced("a", "b"), disabled=frozenset({"a"}))
    assert plan.chosen == "b"


def test_disabling_a_name_that_is_not_there_changes_nothing(spec, problem) -> None:
    entries = [entry(spec("a"))]
    assert select(problem(), entries, disabled=frozenset({"gone"})) == select(problem(), entries)


# What automatic choice never takes


def test_a_known_issue_excludes_in_auto_with_its_link(spec, problem) -> None:
    entries = [entry(spec("fast", priority={"*": 9})), entry(spec("slow"))]
    plan = select(problem(), entries, issues=[issue()])
    assert plan.chosen == "slow"
    (reason,) = plan.candidate("fast").reasons
    assert reason.code is Code.KNOWN_ISSUE
    assert reason.got == "wrong gradients for odd Sk"
    assert reason.fix == "see https://example.org/issues/7"


def test_a_known_issue_is_a_note_when_its_backend_is_forced(spec, problem) -> None:
    plan = select(problem(), [entry(spec("fast"))], forced=forced("fast"), issues=[issue()], notes=("before",))
    assert plan.chosen == "fast"
    assert plan.notes == (
        "before",
        "known issue with fast: wrong gradients for odd Sk (https://example.org/issues/7)",
    )


def test_a_known_issue_holds_only_for_its_problems_and_its_backend(spec, problem) -> None:
    entries = [entry(spec("fast"))]
    assert select(problem(seqlen_k=33), entries, issues=[issue()]).chosen == "fast"
    assert select(problem(), entries, issues=[issue("other")]).chosen == "fast"


@pytest.mark.parametrize(
    ("versions", "hit"), [("", True), ("<2", True), ("<=1.2", True), ("<1.2", False), (">=1,<1.1", False)]
)
def test_a_known_issue_holds_only_for_its_versions(spec, problem, versions: str, hit: bool) -> None:
    plan = select(problem(), [entry(spec("fast"), version="1.2")], issues=[issue(versions=versions)])
    assert (plan.chosen is None) == hit


def test_a_pre_release_has_the_known_issues_too(spec, problem) -> None:
    plan = select(problem(), [entry(spec("fast"), version="1.2.dev3")], issues=[issue(versions="<1.3")])
    assert plan.chosen is None


def test_a_known_issue_that_can_not_answer_stands(spec, problem) -> None:
    def broken(_: Problem) -> bool:
        raise KeyError("seqlen")

    plan = select(problem(), [entry(spec("fast"))], issues=[issue(when=broken)])
    assert codes(plan, "fast") == [Code.KNOWN_ISSUE]


# Right, and slow


def slow(priority: int, **changes: Any) -> KnownIssue:
    return issue("masked", reason="masks are slow", priority=priority, **changes)


def test_where_a_backend_is_slow_another_one_comes_first_and_the_plan_says_why(spec, problem) -> None:
    entries = [entry(spec("masked", priority={"*": 9})), entry(spec("steady", priority={"*": 5}))]
    plan = select(problem(), entries, issues=[slow(4)], notes=("before",))
    assert names(plan) == ["steady", "masked"]
    assert plan.candidate("masked").priority == 4
    assert codes(plan, "masked") == []
    assert plan.notes == ("before", "masked has priority 4 here: masks are slow (https://example.org/issues/7)")
    assert select(problem(seqlen_k=33), entries, issues=[slow(4)]).chosen == "masked"


def test_where_a_backend_is_slow_and_alone_it_is_chosen(spec, problem) -> None:
    entries = [entry(spec("masked", priority={"*": 9})), entry(spec("steady", priority={"*": 5}))]
    plan = select(problem(), entries, issues=[slow(4)], disabled=frozenset({"steady"}))
    assert plan.chosen == "masked"


def test_the_lowest_of_several_priorities_holds_and_none_is_raised(spec, problem) -> None:
    entries = [entry(spec("masked", priority={"*": 5}))]
    plan = select(problem(), entries, issues=[slow(4), slow(3), slow(9)])
    assert plan.candidate("masked").priority == 3
    assert len(plan.notes) == 1
    plan = select(problem(), entries, issues=[slow(9)])
    assert (plan.candidate("masked").priority, plan.notes) == (5, ())


def test_a_slow_backend_that_can_not_run_needs_no_note(spec, problem) -> None:
    entries = [entry(spec("masked", priority={"*": 9})), entry(spec("steady"))]
    plan = select(problem(), entries, issues=[slow(4)], disabled=frozenset({"masked"}))
    assert (plan.chosen, plan.notes) == ("steady", ())


def test_a_slow_backend_that_is_forced_is_used_with_a_note(spec, problem) -> None:
    plan = select(problem(), [entry(spec("masked", priority={"*": 9}))], forced=forced("masked"), issues=[slow(4)])
    assert plan.chosen == "masked"
    assert plan.notes == ("known issue with masked: masks are slow (https://example.org/issues/7)",)


@pytest.mark.parametrize("numerics", ["low_precision_accum", "quantized", "approximate"])
def test_what_is_not_exact_is_never_chosen_automatically(spec, problem, numerics: str) -> None:
    entries = [entry(spec("rough", numerics=numerics, priority={"*": 9})), entry(spec("exact"))]
    plan = select(problem(), entries)
    assert plan.chosen == "exact"
    (reason,) = plan.candidate("rough").reasons
    assert (reason.code, reason.got) == (Code.NOT_AUTO, numerics)
    assert reason.fix == 'ask for it with backend="rough"'
    assert select(problem(), entries, forced=forced("rough")).chosen == "rough"


@pytest.mark.parametrize("others", [(), ("exact",)], ids=["alone", "beside one that can run"])
def test_who_is_to_be_named_is_never_chosen_automatically(spec, problem, others: tuple[str, ...]) -> None:
    entries = [entry(spec("emulated", by_name_only="an emulator", priority={"*": 9}))]
    entries += [entry(spec(name)) for name in others]
    plan = select(problem(), entries)
    assert plan.chosen == next(iter(others), None)
    assert [str(reason) for reason in plan.candidate("emulated").reasons] == [
        'NOT_AUTO: backend is auto; takes its name only: an emulator (fix: ask for it with backend="emulated")'
    ]
    named = select(problem(), entries, forced=forced("emulated"))
    assert (named.chosen, named.candidate("emulated").reasons) == ("emulated", ())


def test_what_only_runs_by_name_is_in_the_message_when_nothing_runs(spec, problem) -> None:
    plan = select(problem(), [entry(spec("emulated", by_name_only="an emulator"))])
    with pytest.raises(NoBackendError, match=r'what would help: for emulated, ask for it with backend="emulated"'):
        require(plan)


# Architectures


def test_an_impossible_architecture_carries_its_technical_reason(spec, problem) -> None:
    why = {"sm_120": "needs 160 KiB of shared memory and has 99 KiB"}
    entries = [entry(spec("big", impossible=why))]
    plan = select(problem(arch="sm_120"), entries)
    candidate = plan.candidate("big")
    assert candidate.arch_state == "impossible"
    assert [reason.code for reason in candidate.reasons] == [Code.ARCH_IMPOSSIBLE]
    assert "160 KiB" in str(candidate.reasons[0])


def test_forcing_does_not_make_an_impossible_architecture_possible(spec, problem) -> None:
    entries = [entry(spec("new", min_arch="sm_100"))]
    with pytest.raises(BackendUnsupportedError, match="sm_100 and newer"):
        require(select(problem(arch="sm_90"), entries, forced=forced("new")))


def test_an_architecture_nobody_has_seen_is_untested_and_may_run(spec, problem) -> None:
    plan = select(problem(arch="sm_130"), [entry(spec("some", min_arch="sm_80"))])
    assert plan.chosen == "some"
    assert plan.candidate("some").arch_state == "untested"


def test_portable_code_needs_no_test_per_architecture(spec, problem) -> None:
    assert select(problem(), [entry(spec("any", portable=True))]).candidate("any").arch_state == "portable"


# Fallback


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fused": False}, "plain is not a fused kernel"),
        ({"memory": "quadratic"}, "plain needs O(S^2) memory"),
    ],
)
def test_auto_on_a_gpu_says_what_a_slow_path_means(spec, problem, changes, text: str) -> None:
    plan = select(problem(arch="sm_90"), [entry(spec(**changes))])
    assert plan.chosen == "plain"
    assert plan.fallback is not None
    assert text in plan.fallback


@pytest.mark.parametrize("changes", [{"fused": False}, {"memory": "quadratic"}])
def test_a_slow_path_is_no_event_on_a_cpu_or_when_asked_for(spec, problem, changes) -> None:
    entries = [entry(spec(**changes))]
    assert select(problem(arch="cpu"), entries).fallback is None
    assert select(problem(arch="sm_90"), entries, forced=forced("plain")).fallback is None


def test_a_fused_backend_is_no_fallback(spec, problem) -> None:
    assert select(problem(arch="sm_90"), [entry(spec())]).fallback is None


# A backend's own why_not


def test_why_not_only_adds(spec, problem) -> None:
    limit = Reason(Code.BACKEND_LIMIT, "seqlen_k", "32", "up to 16")
    entries = [entry(spec("own", why_not=lambda _: [limit]))]
    assert codes(select(problem(), entries), "own") == [Code.BACKEND_LIMIT]
    assert codes(select(problem(alibi=True), entries), "own") == [Code.ALIBI, Code.BACKEND_LIMIT]


def test_an_empty_why_not_opens_nothing_that_is_not_declared(spec, problem) -> None:
    assert codes(select(problem(alibi=True), [entry(spec("own", why_not=lambda _: []))]), "own") == [Code.ALIBI]


def _raises(_: Problem) -> Iterable[Reason]:
    raise ZeroDivisionError("no blocks")


def _raises_late(_: Problem) -> Iterable[Reason]:
    yield Reason(Code.BACKEND_LIMIT, "batch", "2", "1")
    raise ZeroDivisionError("no blocks")


def _yields_text(_: Problem) -> Iterable[Any]:
    return ["it is Monday"]


@pytest.mark.parametrize("why_not", [_raises, _raises_late, _yields_text, lambda _: None])
@pytest.mark.parametrize("by", [None, forced("good")])
def test_a_why_not_that_breaks_rejects_only_its_own_backend(spec, problem, why_not, by) -> None:
    entries = [entry(spec("bad", why_not=why_not, priority={"*": 9})), entry(spec("good"))]
    plan = select(problem(), entries, forced=by)
    assert plan.chosen == "good"
    (reason,) = plan.candidate("bad").reasons
    assert reason.code is Code.WHY_NOT_RAISED
    assert json.dumps(plan.to_json())
    with pytest.raises(BackendUnsupportedError, match="report it to bad's authors"):
        require(select(problem(), entries, forced=forced("bad")))


def test_what_a_why_not_raised_is_in_its_reason(spec, problem) -> None:
    (reason,) = select(problem(), [entry(spec("bad", why_not=_raises))]).candidate("bad").reasons
    assert reason.got == "ZeroDivisionError: no blocks"


# Faults of the installation


def test_a_fault_of_the_installation_comes_before_the_problems_reasons(spec, problem) -> None:
    missing = Reason(Code.DEP_MISSING, "triton", "not installed", "triton>=3.4", "pip install triton")
    plan = select(problem(alibi=True), [entry(spec("kernels"), missing)])
    assert codes(plan, "kernels") == [Code.DEP_MISSING, Code.ALIBI]


def test_a_plugin_that_did_not_load_is_a_candidate_with_its_reason(spec, problem) -> None:
    failed = Reason(Code.LOAD_FAILED, "plugin", "ImportError: no CUDA", "a plugin that imports")
    entries = [entry(spec("good")), Entry("broken", None, "outside", "0.1", (failed,))]
    plan = select(problem(), entries)
    assert plan.chosen == "good"
    assert plan.candidate("broken").arch_state == "unknown"
    with pytest.raises(BackendUnsupportedError, match="ImportError: no CUDA"):
        require(select(problem(), entries, forced=forced("broken")))


# The plan and the error


def test_no_backend_raises_with_everyones_reasons(spec, problem) -> None:
    entries = [entry(spec("one")), entry(spec("two", alibi=True))]
    asked = problem(alibi=True, band=Band(right=0))
    with pytest.raises(NoBackendError) as caught:
        require(select(asked, entries))
    lines = str(caught.value).splitlines()
    assert lines[0] == "No backend can run this problem."
    assert lines[1] == f"  asked: {asked.describe()}"
    assert "  one (outside 1.2):" in lines
    assert "  two (outside 1.2):" in lines
    assert sum("CAUSAL" in line for line in lines) == 2
    assert sum("ALIBI" in line for line in lines) == 1
    assert lines[-1].startswith("  versions: python 3.")
    assert f"torch {torch.__version__}" in lines[-1]


def test_what_would_help_is_for_the_backend_with_the_fewest_reasons(spec, problem) -> None:
    entries = [entry(spec("far")), entry(spec("near", dtypes=frozenset({torch.float16}), gqa=True))]
    with pytest.raises(NoBackendError, match="what would help: for far, expand k and v"):
        require(select(problem(heads_kv=2, dtype=torch.float32), [entries[0]]))
    with pytest.raises(NoBackendError, match="what would help: for near, cast q, k and v to float16"):
        require(select(problem(heads_kv=2, dtype=torch.bfloat16), entries))


def test_adapters_and_notes_pass_through(spec, problem) -> None:
    adapter = Adapter("copy", "q", 4096, "the last dim is not contiguous")
    plan = select(problem(), [entry(spec())], adapters=(adapter,), notes=("a note",))
    assert plan.adapters == (adapter,)
    assert plan.notes == ("a note",)


def test_a_candidate_can_be_asked_for_by_name(spec, problem) -> None:
    plan = select(problem(), [entry(spec("a"))])
    assert plan.candidate("a").can_run
    with pytest.raises(KeyError, match="b"):
        plan.candidate("b")


def test_a_plan_is_json(spec, problem) -> None:
    failed = Reason(Code.LOAD_FAILED, "plugin", "ImportError", "a plugin that imports")
    entries = [entry(spec("good")), Entry("broken", None, "outside", "0.1", (failed,))]
    data = json.loads(json.dumps(select(problem(), entries).to_json()))
    assert data["chosen"] == "good"
    assert data["request"] == problem().describe()
    assert Problem.from_json(data["problem"]) == problem()
    assert [candidate["can_run"] for candidate in data["candidates"]] == [True, False]
    assert data["candidates"][1]["reasons"][0]["code"] == "LOAD_FAILED"
    assert data["versions"]["torch"] == torch.__version__
