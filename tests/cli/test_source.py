"""What kernels compile to, from the command line: facts for people and machines, texts for those who read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flashdispatch.cli import source
from flashdispatch_registry.kernels import KernelFacts
from flashdispatch_registry.problem import Problem

Command = Callable[..., Any]


class Compiled:
    """A backend whose compiler says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Problem] = []

    def facts(self, problem: Problem) -> Sequence[KernelFacts]:
        self.asked.append(problem)
        return [self.one(problem, name) for name in (("forward", "dq") if problem.needs_grad else ("forward",))]

    def one(self, problem: Problem, name: str) -> KernelFacts:
        return KernelFacts(
            kernel=name,
            arch=problem.arch,
            tile={"block_m": 128, "num_warps": 8},
            registers=168,
            spill_bytes=96 if name == "dq" else 0,
            shared_bytes=96 * 1024,
            threads=256,
            instructions={"wgmma": 16, "cp.async": 8},
            texts={"ttgir": f"module {{ {name} }}", "ptx": f".version 8.7\n.entry {name} [bold]\n"},
        )

    def forward(self, *args: Any) -> Any: ...

    def backward(self, *args: Any) -> Any: ...

    def prepare(self, problem: Problem) -> None: ...


@pytest.fixture
def compiled(add_backend: Any) -> Compiled:
    backend: Compiled = add_backend("compiled", Compiled(), softcap=False)
    return backend


@pytest.mark.parametrize("width", [80, 120])
def test_the_facts_of_each_kernel_are_a_table(width: int, compiled: Compiled, command: Command) -> None:
    ran = command("source", "--backend", "compiled", "--grad", "--arch", "sm_90", width=width)
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= width
    (forward,) = (line for line in ran.out.splitlines() if line.startswith("forward"))
    (dq,) = (line for line in ran.out.splitlines() if line.startswith("dq"))
    assert forward.split()[:6] == ["forward", "168", "none", "96.0", "KiB", "256"]
    assert dq.split()[:7] == ["dq", "168", "96", "bytes", "96.0", "KiB", "256"]
    for words in ("block_m 128", "num_warps 8", "wgmma 16", "cp.async 8", "stages ttgir, ptx"):
        assert words in ran.words


def test_the_call_is_described_as_for_explain(compiled: Compiled, command: Command) -> None:
    options = ("--head-dim", "64", "--causal", "--grad", "--kv-lens", "--q-lens", "--dtype", "fp16", "--arch", "sm_120")
    assert command("source", "--backend", "compiled", *options).code == 0
    explained = json.loads(command("explain", "--backend", "compiled", "--json", *options).out)["problem"]
    assert compiled.asked == [Problem.from_json(explained)]


def test_a_problem_as_json_is_taken_too(compiled: Compiled, command: Command) -> None:
    plan = command("explain", "--json", "--grad", "--sinks", "--arch", "sm_80").out
    assert command("source", "--backend", "compiled", "--problem", "-", stdin=plan).code == 0
    assert compiled.asked == [Problem.from_json(json.loads(plan)["problem"])]
    ran = command("source", "--backend", "compiled", "--problem", plan, "--head-dim", "64")
    assert ran.code == 2
    assert "--head-dim can't be combined with it" in ran.err


@pytest.mark.parametrize(("gpus", "arch"), [((), "sm_90"), ((SimpleNamespace(arch="sm_120"),), "sm_120")])
def test_the_architecture_is_this_machines_or_one_that_many_have(
    gpus: tuple[Any, ...], arch: str, compiled: Compiled, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "this_machine", lambda: SimpleNamespace(gpus=gpus))
    assert command("source", "--backend", "compiled").code == 0
    assert [problem.arch for problem in compiled.asked] == [arch]


def test_a_stage_is_printed_as_it_is(compiled: Compiled, command: Command) -> None:
    ran = command("source", "--backend", "compiled", "--grad", "--kernel", "dq", "--stage", "ptx")
    assert (ran.code, ran.out) == (0, ".version 8.7\n.entry dq [bold]\n")
    assert command("source", "--backend", "compiled", "--stage", "ttgir").out == "module { forward }\n"


def test_all_variants_of_a_kernel_are_printed(
    compiled: Compiled, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "facts", lambda problem: [compiled.one(problem, "forward")] * 2)
    assert command("source", "--backend", "compiled", "--stage", "ttgir").out == "module { forward }\n" * 2


def test_facts_as_json_have_the_names_of_the_stages_and_not_their_texts(compiled: Compiled, command: Command) -> None:
    ran = command("source", "--backend", "compiled", "--grad", "--kernel", "dq", "--arch", "sm_90", "--json")
    found = json.loads(ran.out)
    assert found["backend"] == "compiled"
    assert Problem.from_json(found["problem"]) == compiled.asked[0]
    assert found["kernels"] == [
        {
            "kernel": "dq",
            "arch": "sm_90",
            "tile": {"block_m": 128, "num_warps": 8},
            "registers": 168,
            "spill_bytes": 96,
            "shared_bytes": 98304,
            "threads": 256,
            "variant": "",
            "instructions": {"wgmma": 16, "cp.async": 8},
            "stages": ["ttgir", "ptx"],
        }
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--kernel", "dqq"], "no kernel 'dqq'; it has forward, dq. Did you mean 'dq'?"),
        (["--stage", "ptx"], "Add --kernel with one of forward, dq"),
        (["--kernel", "dq", "--stage", "sas"], "dq has no stage 'sas'; it has ttgir, ptx."),
        (["--stage", "ptx", "--json"], "--stage and --json exclude each other"),
        (["--backend", "compiled,torch_reference"], "one backend by its name"),
        (["--backend", "compile"], "Did you mean 'compiled'?"),
        (["--arch", "h100"], "arch must be an architecture"),
        (["--heads", "8", "--heads-kv", "3"], "Hq must be a multiple of Hkv"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_not_understood_is_a_2(args: list[str], said: str, compiled: Compiled, command: Command) -> None:
    ran = command("source", "--backend", "compiled", "--grad", *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())


def test_a_call_that_the_backend_refuses_is_a_1_with_the_reasons(compiled: Compiled, command: Command) -> None:
    ran = command("source", "--backend", "compiled", "--softcap", "30")
    assert ran.code == 1
    assert "SOFTCAP softcap is 30; takes None" in ran.words
    as_json = command("source", "--backend", "compiled", "--softcap", "30", "--json")
    assert (as_json.code, json.loads(as_json.out)["chosen"]) == (1, None)
    assert compiled.asked == []


def test_a_backend_that_can_not_be_inspected_names_those_that_can(compiled: Compiled, command: Command) -> None:
    ran = command("source", "--backend", "torch_reference")
    assert (ran.code, ran.out) == (1, "")
    assert "backend torch_reference can't be inspected; these can: " in ran.err
    assert "compiled" in ran.err


def test_a_backend_that_does_not_load_is_not_forgotten_in_that_list(
    compiled: Compiled, add_backend: Any, command: Command
) -> None:
    add_backend("absent", factory="no_such_module")
    ran = command("source", "--backend", "torch_reference")
    assert "not known of absent, which failed to load" in ran.err
    broken = command("source", "--backend", "absent")
    assert broken.code == 1
    assert "No module named 'no_such_module'" in broken.words
