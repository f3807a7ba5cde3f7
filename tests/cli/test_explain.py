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
        (["--dtype", "fp16"], {"dtype": torch.float16}),
        (["--dtype", "bf16"], {"dtype": torch.bfloat16}),
        (["--dtype", "fp32"], {"dtype": torch.float32}),
        (["--dtype", "fp64"], {"dtype": torch.float64}),
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
        (["--kv-lens", "--causal", "--q-lens"], {"band": Band(None, 0), "kv_lens": True, "q_lens": True}),
        (["--kv-lens", "--top-left"], {"band": Band(None, 0, "top_left"), "kv_lens": True}),
        (["--kv-lens", "--causal", "--seqlen-q", "1"], {"band": Band(None, 0), "kv_lens": True}),
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
        (["--dtype", "int8"], "'int8' is none of float16, bfloat16, float32, float64, fp16, bf16, fp32, fp64."),
        (["--dtype", "flaot32"], "Did you mean 'float32'?"),
        (["--layout", "sbhd"], "'--layout': 'sbhd' is not one of 'bshd'"),
        (["--mask", "int"], "'--mask': 'int' is not one of 'bool'"),
        (["--window", "3", "some"], "each a number of keys or none"),
        (["--window", "-1", "0"], "must be >= 0"),
        (["--mask", "bool", "--mask-grad"], "add --mask float"),
        (["--sinks-grad"], "add --sinks"),
        (["--causal", "--kv-lens"], "--causal with --kv-lens: which query is the last one? Add --q-lens"),
        (["--window", "7", "0", "--kv-lens"], "--window with --kv-lens: which query is the last one? Add --q-lens"),
        (["--arch", "h100"], "arch must be an architecture such as 'sm_90', 'sm_120' or 'cpu', got 'h100'"),
        (["--arch", ""], "arch must be an architecture"),
        (["--arch", "sm_9"], "got 'sm_9'"),
        (["--seqlen", f"{10**23}"], "larger than any that torch can describe"),
        (["--seqlen", f"{10**18}"], f"a tensor of 1 x {10**18} x 16 x 128 is larger than any"),
        (["--seqlen-k", f"{2**63 - 1}", "--batch", "0"], "larger than any"),
        (["--seqlen", f"{10**10}", "--mask", "bool"], f"a tensor of 1 x 1 x {10**10} x {10**10} is larger than any"),
        (["--heads", f"{10**20}", "--heads-kv", "3"], "larger than any"),
        (["--head-dim", "9" * 5000], "--head-dim"),
        (["--head-dim-v", f"{2**62}"], "larger than any"),
        (["--window", f"{10**23}", "0"], "must fit 32 bits"),
        (["--window", "9" * 5000, "0"], "each a number of keys or none"),
        (["--softcap", "1e400"], "softcap must be finite"),
        (["--backend", "torch_referense"], "Did you mean 'torch_reference'?"),
        (["--problem", "{}"], "this is no Problem"),
        (["--problem", "[1]"], "this is no Problem"),
        (["--problem", "not json"], "this is no Problem"),
        (["--problem", "[" * 100_000], "nested too deeply"),
        (["--problem", '{"arch": 5}'], "arch must be a text, got 5"),
        (["--problem", '{"arch": "cpu"}'], "it lacks dtype, batch, heads_q"),
        (["--problem", '{"dtype": "float16", "colour": 1}'], "it has no field colour."),
        (["--problem", '{"problem": {"hed_dim": 1}}'], "it has no field hed_dim. Did you mean 'head_dim'?"),
        (["--problem", '{"problem": 7}'], "it must be an object with fields, {...}, got 7"),
        (["--problem", "{}", "--heads-kv", "2"], "--heads-kv can't be combined with it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_a_usage_error_that_says_what_is_right(args: list[str], said: str, command: Command) -> None:
    ran = command("explain", *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())


def test_an_error_does_not_show_the_tensors_that_stand_for_the_question(command: Command) -> None:
    ran = command("explain", "--heads", "8", "--heads-kv", "3")
    assert "asked: q (1, 4096, 8, 128) bfloat16, k (1, 4096, 3, 128)" in ran.err
    assert "meta" not in ran.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": 5}, "arch must be a text, got 5"),
        ({"arch": "h100"}, "arch must be an architecture"),
        ({"dtype": "int8"}, 'dtype must be float16 or bfloat16 or float32 or float64, got "int8"'),
        ({"dtype": None}, "dtype must be float16"),
        ({"batch": "2"}, 'batch must be a whole number from 0 on, got "2"'),
        ({"batch": 2.5}, "batch must be a whole number"),
        ({"batch": True}, "batch must be a whole number"),
        ({"seqlen_q": -1}, "seqlen_q must be a whole number from 0 on, got -1"),
        ({"seqlen_k": 10**30}, "seqlen_k must be a whole number"),
        ({"heads_q": 0}, "heads_q must be at least 1"),
        ({"heads_kv": 3}, "heads_q must be a multiple of heads_kv, got 4 and 3"),
        ({"head_dim": 10**400}, "head_dim must be a whole number"),
        ({"scale": "small"}, "scale must be a finite number"),
        ({"scale": float("nan")}, "scale must be a finite number, got NaN"),
        ({"scale": 10**400}, "scale must be a finite number"),
        ({"band": 3}, "band must be an object with fields, {...}, got 3"),
        ({"band": {"left": "2"}}, "band.left must be a whole number from 0 on or null"),
        ({"band": {"left": -1}}, "band.left must be a whole number"),
        ({"band": {"align": "up"}}, "band.align must be bottom_right or top_left"),
        ({"band": {"up": 1}}, "it has no field band.up."),
        ({"attn_mask": "float", "attn_mask_shape": 5}, "attn_mask_shape must be 4 times a whole number"),
        ({"attn_mask": "float", "attn_mask_shape": [1, 2]}, "attn_mask_shape must be 4 times a whole number"),
        ({"attn_mask": "float"}, "attn_mask and attn_mask_shape come together"),
        ({"alibi": 1}, "alibi must be true or false, got 1"),
        ({"softcap": "x"}, "softcap must be a finite number or null"),
        ({"softcap": -1.0}, "softcap must be more than 0"),
        ({"dropout_p": 2}, "dropout_p must be within 0..1"),
        ({"needs_grad": "q"}, "needs_grad must be a list of q or k or v or attn_mask or sinks"),
        ({"needs_grad": ["z"]}, "needs_grad must be a list of"),
        ({"needs_grad": ["attn_mask"]}, "only a float attn_mask has a gradient"),
        ({"needs_grad": ["sinks"]}, "no gradient of sinks without sinks"),
        ({"layout": {"bshd": 1}}, "layout must be bshd or bhsd"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_wrong_in_a_problem_is_said_in_words(changes: dict[str, Any], said: str, command: Command) -> None:
    good = asked(command, "--heads", "4", "--arch", "sm_90").to_json()
    ran = command("explain", "--problem", json.dumps(good | changes))
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())


def test_bytes_on_stdin_are_no_problem(command: Command) -> None:
    ran = command("explain", "--problem", "-", stdin=b"\xff\xfe\x00")
    assert ran.code == 2
    assert "stdin is no text" in ran.err


def test_a_refused_fallback_leaves_nothing_and_says_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "error")
    on_a_gpu = ("explain", "--arch", "sm_90", "--dtype", "float64")  # no kernel takes it, only the reference
    ran = command(*on_a_gpu, "--backend", "auto")
    assert ran.code == 1
    assert "chosen none: no backend can run this" in ran.words
    assert "FALLBACK FLASHDISPATCH_FALLBACK is error" in ran.words
    plan = json.loads(command(*on_a_gpu, "--json").out)
    assert plan["chosen"] is None
    reference = next(candidate for candidate in plan["candidates"] if candidate["name"] == "torch_reference")
    assert [reason["code"] for reason in reference["reasons"]] == ["FALLBACK"]
    assert command(*on_a_gpu, "--backend", "torch_reference").code == 0
    assert command("explain", "--arch", "cpu").code == 0


def test_a_plugin_that_may_not_load_is_a_reason(
    command: Command, add_plugin: AddPlugin, plugin_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD", "1")
    add_plugin("tiles", plugin_source("tiles"))
    ran = command("explain", "--backend", "tiles")
    assert ran.code == 1
    assert "NOT_ALLOWED plugin is not allowed to load" in ran.words


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
