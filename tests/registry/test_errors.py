"""The error tree: one base, the builtin a caller expects, and everything needed to act on it."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from flashdispatch_registry import errors
from flashdispatch_registry.errors import FlashDispatchError, FlashDispatchWarning, NoBackendError, PluginError
from flashdispatch_registry.plan import Plan
from flashdispatch_registry.select import Entry, require, select

TREE = {
    "InvalidRequestError": ValueError,
    "InvalidTypeError": TypeError,
    "UnknownBackendError": ValueError,
    "DisabledBackendError": ValueError,
    "SettingsError": ValueError,
    "BackendUnsupportedError": NotImplementedError,
    "NoBackendError": NotImplementedError,
    "SecondDerivativeError": RuntimeError,
    "ForwardModeError": NotImplementedError,
    "RecomputeError": RuntimeError,
    "BackendContractError": RuntimeError,
    "ColdKernelError": RuntimeError,
    "FallbackError": RuntimeError,
    "PluginError": RuntimeError,
    "BackendLoadError": RuntimeError,
}


@pytest.fixture
def plan(problem, spec) -> Plan:
    return select(problem(alibi=True), [Entry("plain", spec(), "outside", "1.2")])


@pytest.mark.parametrize(("name", "builtin"), TREE.items())
def test_an_error_is_ours_and_the_builtin_a_caller_expects(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, FlashDispatchError)
    assert issubclass(kind, builtin)


def test_the_tree_is_complete_and_drawn_in_the_docstring() -> None:
    defined = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, FlashDispatchError) and kind is not FlashDispatchError
    }
    assert defined == set(TREE)
    drawn = dict(re.findall(r"── (\w+) \((\w+)\)", errors.__doc__ or ""))
    assert drawn == {name: builtin.__name__ for name, builtin in TREE.items()}


@pytest.mark.parametrize("name", ["FallbackWarning", "SettingsWarning"])
def test_warnings_have_one_base(name: str) -> None:
    assert issubclass(getattr(errors, name), FlashDispatchWarning)
    assert issubclass(FlashDispatchWarning, UserWarning)


@pytest.mark.parametrize("name", TREE)
def test_an_error_survives_pickling_with_its_plan_and_problem(name: str, plan: Plan) -> None:
    error = getattr(errors, name)("what went wrong", plan=plan)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == "what went wrong"
    assert back.plan == plan
    assert back.problem == plan.problem


def test_the_problem_comes_from_the_plan(plan: Plan) -> None:
    assert PluginError("x").problem is None
    assert PluginError("x", plan=plan).problem == plan.problem


def test_a_message_holds_the_request_the_reasons_what_would_help_and_the_versions(plan: Plan, spec, problem) -> None:
    with pytest.raises(NoBackendError) as caught:
        require(plan)
    text = str(caught.value)
    assert plan.problem.describe() in text
    assert "plain (outside 1.2):" in text
    assert "ALIBI: alibi_slopes is given; takes None" in text
    assert re.search(r"versions: python [\d.]+, torch \S+", text)
    with pytest.raises(NoBackendError, match=r"what would help: for plain, expand k and v"):
        require(select(problem(heads_kv=2), [Entry("plain", spec(), "outside", "1.2")]))


def test_an_error_raised_by_the_choice_survives_pickling(plan: Plan) -> None:
    with pytest.raises(NoBackendError) as caught:
        require(plan)
    back = pickle.loads(pickle.dumps(caught.value))
    assert str(back) == str(caught.value)
    assert back.plan == plan
