"""explain from the command line: the same checks and the same plan as the function, from options or from JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashdispatch
from flashdispatch_registry.masks import Band
from flashdispatch_registry.problem import Problem

Command = Callable[..., Any]
AddPlugin = Callable[[str, str], None]
Source = Callable[..., str]


def asked(command: Command, *args: str) -> Problem:
    """The Problem that `args` describe."""
    ran = command("explain", "--json", *args)
    assert ran.code == 0, ran.err
    return Problem.from_json(json.loads(ran.out)["problem"])


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (["--arch", "sm_120"], {"arch": "sm_120"}),
        (["--dtype", "float16"], {"dtype": torch.float16}),
        (["--batch", "3"], {"batch": 3}),
        (["--heads", "8"], {"heads_q": 8, "heads_kv": 8}),
        (["--heads", "8", "--heads-kv", "2"], {"heads_q": 8, "heads_kv": 2}),
        (["--seqlen", "64"], {"seqlen_q": 64, "seqlen_k": 64}),
        (["--seqlen", "64", "--seqlen-q", "1"], {"seqlen_q": 1, "seqlen_k": 64}),
        (["--seqlen-k", "0"], {"seqlen_k": 0}),
        (["--head-dim", "96"], {"head_dim": 96, "head_dim_v": 96, "scale": pytest.approx(96**-0.5)}),
        (["--head-dim-v", "64"], {"head_dim": 128, "head_dim_v": 64}),
        (["--layout", "bhsd", "--heads", "3", "--seqlen", "5"], {"layout": "bhsd", "heads_q": 3, "seqlen_q": 5}),
        (["--causal"], {"band": Band(None, 0)}),
        (["--top-left", "--seqlen-k", "9"], {"band": Band(None, 0, "top_left")}),
        (["--window", "128", "none"], {"band": Band(128, None)}),
        (["--window", "NONE", "7", "--causal"], {"band": Band(None, 0)}),
        (["--mask", "bool", "--seqlen", "6"], {"attn_mask": "bool", "attn_mask_shape": (1, 1, 6, 6)}),
        (["--mask", "float", "--mask-grad"], {"attn_mask": "float", "needs_grad": ("attn_mask",)}),
        (["--alibi"], {"alibi": True}),
        (["--sinks", "--sinks-grad"], {"sinks": True, "needs_grad": ("sinks",)}),
        (["--q-lens"], {"q_lens": True}),
        (["--kv-lens"], {"kv_lens": True}),
        (["--softcap", "30"], {"softcap": 30.0}),
        (["--dropout", "0.1"], {"dropout_p": 0.1}),
        (["--grad"], {"needs_grad": ("q", "k", "v")}),
        (["--no-grad"], {"needs_grad": ()}),
        (["--lse"], {"return_lse": True}),
        (["--deterministic"], {"deterministic": True}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_become_the_problem_they_describe(args: list[str], fields: dict[str, Any], command: Command) -> None:
    problem = asked(command, *args)
    assert {name: getattr(problem, name) for name in fields} == fields


def test_default_is_this_machine_forward_only(command: Command) -> None:
    problem = asked(command)
    assert problem.arch == ("cpu" if not torch.cuda.is_available() else problem.arch)
    assert problem.needs_grad == ()


def test_it_is_the_functions_own_plan(command: Command) -> None:
    ran = command("explain", "--json", "--arch", "sm_90", "--heads", "8", "--seqlen", "32", "--causal", "--grad")
    q, k, v = (torch.empty(1, 32, 8, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    plan = flashdispatch.explain(q, k, v, causal=True, arch="sm_90")
    assert json.loads(ran.out) == json.loads(json.dumps(plan.to_json()))


@pytest.mark.parametrize("width", [80, 120])
def test_the_plan_is_printed_for_people(command: Command, width: int) -> None:
    ran = command("explain", "--causal", "--arch", "cpu", width=width)
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= width
    assert "chosen torch_reference, automatically" in ran.words
    assert ran.err == ""


def test_a_plan_says_who_forced_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "auto")
    ran = command("explain", "--backend", "torch_reference")
    assert "forced torch_reference by backend argument" in ran.words
    assert "over auto by FLASHDISPATCH_BACKEND" in ran.words


def test_nothing_that_can_run_is_a_1_with_the_reasons(
    command: Command, add_plugin: AddPlugin, plugin_source: Source
) -> None:
    add_plugin("tiles", plugin_source("tiles"))
    ran = command("explain", "--backend", "tiles", "--softcap", "30", "--dtype", "float16")
    assert ran.code == 1
    assert "chosen none: tiles can't run this" in ran.words
    assert "SOFTCAP softcap is 30; takes None" in ran.words
    assert "DTYPE dtype is float16; takes bfloat16" in ran.words
    as_json = command("explain", "--backend", "tiles", "--softcap", "30", "--json")
    assert (as_json.code, json.loads(as_json.out)["chosen"]) == (1, None)


def test_a_disabled_forced_backend_is_our_error(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "torch_reference")
    ran = command("explain", "--backend", "torch_reference")
    assert (ran.code, ran.out) == (1, "")
    assert "which beats everything" in ran.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--heads", "8", "--heads-kv", "3"], "Hq must be a multiple of Hkv"),
        (["--head-dim", "0"], "--head-dim"),
        (["--batch", "-1"], "--batch"),
        (["--dropout", "1.5"], "--dropout"),
        (["--softcap", "0"], "softcap must be > 0"),
        (["--dtype", "int8"], "'bfloat16'"),
        (["--layout", "sbhd"], "'bshd'"),
        (["--window", "3", "some"], "each a number of keys or none"),
        (["--window", "-1", "0"], "must be >= 0"),
        (["--mask", "bool", "--mask-grad"], "add --mask float"),
        (["--sinks-grad"], "add --sinks"),
        (["--causal", "--kv-lens"], "causal=True with kv_lens and no q_lens"),
        (["--arch", "h100"], "try sm_90"),
        (["--backend", "torch_referense"], "Did you mean 'torch_reference'?"),
        (["--problem", "{}"], "this is no Problem"),
        (["--problem", "[1]"], "this is no Problem"),
        (["--problem", "not json"], "this is no Problem"),
        (["--problem", '{"dtype": "int8"}'], "KeyError: 'int8'"),
        (["--problem", '{"dtype": "float16", "colour": 1}'], "unknown Problem fields: colour"),
        (["--problem", "{}", "--heads-kv", "2"], "--heads-kv can't be combined with it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_a_usage_error_that_says_what_is_right(args: list[str], said: str, command: Command) -> None:
    ran = command("explain", *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())


def test_a_problem_is_read_from_json_from_stdin_and_from_an_earlier_plan(command: Command) -> None:
    earlier = command("explain", "--json", "--sinks", "--window", "5", "0", "--arch", "sm_80").out
    problem = json.dumps(json.loads(earlier)["problem"])
    for ran in (
        command("explain", "--json", "--problem", problem),
        command("explain", "--json", "--problem", earlier),
        command("explain", "--json", "--problem", "-", stdin=problem),
        command("explain", "--json", "--problem", "-", stdin=earlier),
    ):
        assert ran.code == 0
        assert json.loads(ran.out) == json.loads(earlier)


def test_a_problem_can_be_asked_about_on_another_architecture_and_backend(command: Command) -> None:
    problem = json.dumps(asked(command, "--arch", "sm_80").to_json())
    ran = command("explain", "--json", "--problem", problem, "--arch", "cpu", "--backend", "torch_reference")
    plan = json.loads(ran.out)
    assert plan["problem"]["arch"] == "cpu"
    assert plan["forced"]["names"] == ["torch_reference"]
