"""The same call under other conditions: streams, graphs, load, other devices, torch.compile, threads.

Each compares with a plain call of the same values, bit for bit wherever the contract promises it: the forward always,
gradients when the call asks for deterministic ones. Gradients that nobody promised to repeat are held to the gates.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashdispatch
from flashdispatch_conformance.case import Case, Part
from flashdispatch_conformance.check import BF16, F16, Check
from flashdispatch_conformance.inputs import Inputs, as_truth
from flashdispatch_conformance.result import NotRun
from flashdispatch_conformance.tolerance import expect
from flashdispatch_conformance.trial import NotRunError, Trial, backward, same_bits

CASE = Case(id="condition/case", why="", batch=2, heads=(4, 2), seqlens=(130, 203), causal=True)
"""What is called under each condition, if nothing else is said."""

LOAD = Case(id="condition/load", why="", batch=60, heads=(4, 2), seqlens=(130, 257), causal=True, deterministic=True)
"""Enough blocks to fill a large GPU: races need company."""

SLEEP = 20_000_000
"""GPU cycles, about 10 ms: long enough that work on another stream would overtake."""

Got = Mapping[str, Tensor]


def _needs_cuda(trial: Trial) -> torch.device:
    if trial.target.device.type != "cuda":
        raise NotRunError(NotRun.NO_CUDA, f"needs a CUDA device, ran on {trial.target.device}")
    return trial.target.device


def _part(trial: Trial, inputs: Inputs) -> Part | None:
    """The largest part of the call that is declared: with gradients, or the output alone."""
    if inputs.case.needs_grad and trial.declared(inputs, "gradients"):
        return "gradients"
    return "out" if trial.declared(inputs, "out") else None


def _run(trial: Trial, inputs: Inputs, part: Part) -> Got:
    return trial.differentiable_call(inputs) if part == "gradients" else trial.call(inputs, part)


def _compare(trial: Trial, inputs: Inputs, got: Got, plain: Got, said: str) -> None:
    """Bit for bit where that is promised, else by the gates."""
    expected = None
    for name, tensor in got.items():
        if same_bits(tensor, plain[name]):
            continue
        if name in ("out", "lse") or inputs.problem.deterministic:
            off = int((tensor.double() != plain[name].double()).sum())
            trial.fail(f"{name} is not bitwise that of a plain call {said}: {off} of {tensor.numel()} elements")
        else:
            expected = expected or expect(inputs.problem, *inputs.canonical())
            trial.judge(name, as_truth(name, tensor, inputs.case.layout), expected[name], said)


def _values_of(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(x for x in (inputs.q, inputs.k, inputs.v, inputs.dout) if x is not None)


def _second_shape(trial: Trial) -> None:
    first, other = trial.inputs(CASE), trial.inputs(replace(CASE, id="condition/other", seqlens=(67, 350), batch=3))
    part = _part(trial, first)
    if part is None:
        return
    before = _run(trial, first, part)
    got = _run(trial, other, part)
    expected = expect(other.problem, *other.canonical())
    for name, tensor in got.items():
        trial.judge(name, as_truth(name, tensor, CASE.layout), expected[name], "second shape")
    _compare(trial, first, _run(trial, first, part), before, "after another shape")


def _two_layers(trial: Trial) -> None:
    """Forward, forward, backward, backward, as two layers of a model: what is saved for one must outlive the other."""
    both = [trial.inputs(CASE, seed=seed) for seed in (trial.target.seed, trial.target.seed + 1)]
    if not all(trial.declared(inputs, "gradients") for inputs in both):
        return
    plain = [trial.differentiable_call(inputs) for inputs in both]
    plain = [{name: x.detach().clone() for name, x in one.items()} for one in plain]
    outs = [trial.call(inputs, "gradients") for inputs in both]
    for layer, (inputs, out, one) in enumerate(zip(both, outs, plain, strict=True), 1):
        got = {name: x.detach().clone() for name, x in (out | backward(inputs, out)).items()}
        _compare(trial, inputs, got, one, f"in layer {layer} of two")


def _second_backward(trial: Trial) -> None:
    """Two backwards of one graph: the first must leave what the forward saved."""
    inputs = trial.inputs(CASE)
    if not trial.declared(inputs, "gradients"):
        return
    out = trial.call(inputs, "gradients")
    first = {name: x.clone() for name, x in backward(inputs, out, retain_graph=True).items()}
    _compare(trial, inputs, backward(inputs, out), first, "in the second backward of one graph")


def _kept_results(trial: Trial) -> None:
    """Results are the caller's: a later call of the same shape must not write into them."""
    inputs, other = trial.inputs(CASE), trial.inputs(CASE, seed=trial.target.seed + 1)
    part = _part(trial, inputs)
    if part is None:
        return
    got = _run(trial, inputs, part)
    before = {name: x.detach().clone() for name, x in got.items()}
    _run(trial, other, part)
    for name, tensor in got.items():
        if not same_bits(tensor, before[name]):
            trial.fail(f"{name} of an earlier call is not what it was after another call")


def _uninitialised_memory(trial: Trial) -> None:
    inputs = trial.inputs(replace(CASE, deterministic=False))
    part = _part(trial, inputs)
    if part is None:
        return
    plain = _run(trial, inputs, part)
    with _nan_in_new_memory():
        got = _run(trial, inputs, part)
    _compare(trial, inputs, got, plain, "in new memory full of NaN")


@contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel does not write comes out."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _repeats(trial: Trial) -> None:
    inputs = trial.inputs(replace(CASE, deterministic=True))
    part = _part(trial, inputs)
    if part is None:
        return
    plain = _run(trial, inputs, part)
    for turn in range(1, 20):
        for name, tensor in _run(trial, inputs, part).items():
            if not same_bits(tensor, plain[name]):
                trial.fail(f"{name} of call {turn + 1} is not bitwise that of the first")
                return


def _threads(trial: Trial) -> None:
    """Four threads at once, each with values of its own."""
    all_inputs = [trial.inputs(CASE, seed=seed) for seed in range(4)]
    part = _part(trial, all_inputs[0])
    if part is None:
        return
    plain = [_run(trial, inputs, part) for inputs in all_inputs]
    got: list[list[Got]] = [[] for _ in all_inputs]
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(all_inputs))

    def work(at: int) -> None:
        try:
            barrier.wait()
            for _ in range(5):
                got[at].append(_run(trial, all_inputs[at], part))
        except BaseException as error:  # noqa: BLE001  raised again below, in the thread that reports
            raised.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(all_inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    for inputs, results, one in zip(all_inputs, got, plain, strict=True):
        for result in results:
            _compare(trial, inputs, result, one, "beside three other threads")


def _stream(trial: Trial) -> None:
    """Values arrive late on a side stream: a kernel on any other stream would read NaN."""
    device = _needs_cuda(trial)
    inputs = trial.inputs(CASE)
    part = _part(trial, inputs)
    if part is None:
        return
    plain = {name: x.clone() for name, x in _run(trial, inputs, part).items()}
    kept = [x.detach().clone() for x in _values_of(inputs)]
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    for tensor in _values_of(inputs):
        tensor.detach().fill_(torch.nan)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]  # noqa: SLF001  torch has no public one
        for tensor, value in zip(_values_of(inputs), kept, strict=True):
            tensor.detach().copy_(value)
        got = _run(trial, inputs, part)
    side.synchronize()
    _compare(trial, inputs, got, plain, "on a stream that is not the default")


def _graph(trial: Trial) -> None:
    """Captured once, replayed with new values in the same memory."""
    device = _needs_cuda(trial)
    inputs = trial.inputs(CASE)
    part = _part(trial, inputs)
    if part is None:
        return
    _run(trial, inputs, part)  # compiles, and lets autograd and the allocator warm up
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        _run(trial, inputs, part)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = _run(trial, inputs, part)
    for seed in (1, 2):
        fresh = trial.inputs(CASE, seed=trial.target.seed + seed)
        for tensor, value in zip(_values_of(inputs), _values_of(fresh), strict=True):
            tensor.detach().copy_(value.detach())
        for tensor in got.values():
            tensor.detach().fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(device)
        replayed = {name: x.clone() for name, x in got.items()}
        _compare(trial, inputs, replayed, _run(trial, inputs, part), f"when a graph is replayed with values {seed}")


def _prepared(trial: Trial) -> None:
    """After `flashdispatch.prepare` a call that nobody made before may be captured."""
    _needs_cuda(trial)
    inputs = trial.inputs(replace(CASE, id="condition/prepared", dims=(72, 72), grads=()))
    if not trial.declared(inputs, "out"):
        return
    with torch.no_grad():
        flashdispatch.prepare(inputs.q, inputs.k, inputs.v, **trial.arguments(inputs, "out"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flashdispatch.attention(inputs.q, inputs.k, inputs.v, **trial.arguments(inputs, "out"))
    graph.replay()
    torch.cuda.synchronize(trial.target.device)
    _compare(trial, inputs, {"out": out.clone()}, trial.call(inputs, "out"), "captured after prepare()")


def _determinism_under_load(trial: Trial) -> None:
    device = _needs_cuda(trial)
    inputs = trial.inputs(LOAD)
    part = _part(trial, inputs)
    if part is None:
        inputs = trial.inputs(replace(LOAD, deterministic=None))
        part = _part(trial, inputs)
        if part is None:
            return
    plain = _run(trial, inputs, part)
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    a = torch.randn(2048, 2048, device=device)
    flush = torch.empty(64 * 2**20, device=device)
    for turn in range(50):
        with torch.cuda.stream(other):
            for _ in range(4):
                torch.mm(a, a)
        if turn % 2:
            flush.zero_()
        for name, tensor in _run(trial, inputs, part).items():
            promised = name in ("out", "lse") or inputs.problem.deterministic
            if promised and not same_bits(tensor, plain[name]):
                trial.fail(f"{name} of call {turn + 2} under load is not bitwise that of the first")
                return


def _second_device(trial: Trial) -> None:
    device = _needs_cuda(trial)
    if torch.cuda.device_count() < 2:
        raise NotRunError(NotRun.ONE_GPU, "needs a second CUDA device")
    other = torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
    if torch.cuda.get_device_capability(other) != torch.cuda.get_device_capability(device):
        raise NotRunError(NotRun.ONE_GPU, "the second CUDA device is of another architecture")
    there = Trial(replace(trial.target, device=other))
    inputs = there.inputs(CASE)
    part = _part(there, inputs)
    trial.refused.update(there.refused)
    if part is None:
        return
    trial.ran = True
    current = torch.cuda.current_device()
    got = _run(there, inputs, part)
    if torch.cuda.current_device() != current:
        trial.fail("the current device is another one after the call")
    expected = expect(inputs.problem, *inputs.canonical())
    for name, tensor in got.items():
        if tensor.device != other:
            trial.fail(f"{name} is on {tensor.device}, the inputs on {other}")
        trial.judge(name, as_truth(name, tensor, CASE.layout), expected[name], f"on {other}")


def _compile(trial: Trial) -> None:
    """fullgraph, forward and backward. Without a GPU the graph is traced and run, and no code is generated."""
    inputs = trial.inputs(CASE)
    part = _part(trial, inputs)
    if part is None:
        return
    plain = _run(trial, inputs, part)
    arguments = trial.arguments(inputs, part)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashdispatch.attention(q * 1, k, v, **arguments)

    cuda = trial.target.device.type == "cuda"
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="inductor" if cuda else "aot_eager", dynamic=False)
    with torch.set_grad_enabled(part == "gradients"):
        got = {"out": compiled(inputs.q, inputs.k, inputs.v)}
    if part == "gradients":
        got |= backward(inputs, got)
    torch.compiler.reset()
    if got["out"].stride() != plain["out"].stride():
        trial.fail(f"compiled, out has strides {got['out'].stride()}, a plain call {plain['out'].stride()}")
    _compare(trial, inputs, got, plain, "when compiled")


def _memory(trial: Trial) -> None:
    """Twice the length needs twice the extra memory, where the backend declares that it is linear."""
    device = _needs_cuda(trial)
    if trial.plan(trial.inputs(CASE), "out").candidate(trial.target.backend).memory != "linear":
        trial.ran = True  # what is not declared linear has nothing to hold here
        return
    extra = {}
    for length in (2048, 4096):
        inputs = trial.inputs(Case(id="condition/memory", why="", heads=(8, 8), seqlens=(length, length), causal=True))
        part = _part(trial, inputs)
        if part is None:
            return
        _run(trial, inputs, part)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _run(trial, inputs, part)
        torch.cuda.synchronize(device)
        extra[length] = torch.cuda.max_memory_allocated(device) - before
    small, large = extra.values()
    if large > 2.5 * small + 2**20:
        trial.fail(f"extra memory is {small:,} bytes at length 2048 and {large:,} at 4096: more than linear")


_IMPORTS = """
import torch
import flashdispatch
flashdispatch.backends()
assert not torch.cuda.is_initialized(), "discovering the backends started a CUDA context"
"""


def _no_context_at_import(trial: Trial) -> None:
    """In a process of its own: a CUDA context that exists before a fork breaks every worker."""
    _needs_cuda(trial)
    done = subprocess.run([sys.executable, "-c", _IMPORTS], check=False, capture_output=True, text=True)  # noqa: S603
    trial.ran = True
    if done.returncode:
        trial.fail(done.stderr.strip())


_BODIES: tuple[tuple[str, str, Callable[[Trial], None], dict[str, Any]], ...] = (
    ("second_shape", "another shape in the same process, and back", _second_shape, {"smoke_dtypes": (BF16,)}),
    ("two_layers", "forward, forward, backward, backward", _two_layers, {}),
    ("second_backward", "two backwards of one graph", _second_backward, {}),
    ("kept_results", "a later call writes into no earlier result", _kept_results, {}),
    ("uninitialised_memory", "vllm-project/vllm#34570: every element is written", _uninitialised_memory, {}),
    ("repeats", "20 calls, bit for bit", _repeats, {}),
    ("threads", "four threads at once", _threads, {"dtypes": (F16, BF16)}),
    ("stream", "flashinfer-ai/flashinfer#452: work goes to the current stream", _stream, {}),
    ("graph_new_values", "thu-ml/SageAttention#392: a CUDA graph replayed with new values", _graph, {}),
    ("prepared", "prepare() compiles ahead what a captured call needs", _prepared, {"dtypes": (BF16,)}),
    ("compile", "pytorch/pytorch#174049: torch.compile gives what eager gives", _compile, {}),
    ("second_device", "Dao-AILab/flash-attention#1782: a GPU that is not the current one", _second_device, {}),
    ("no_context_at_import", "facebookresearch/xformers#1030", _no_context_at_import, {"dtypes": (BF16,)}),
    (
        "determinism_under_load",
        "Dao-AILab/flash-attention#359: 50 calls with the GPU busy and its caches flushed",
        _determinism_under_load,
        {},
    ),
    ("memory", "pytorch/pytorch#114173: extra memory grows with S, not with its square", _memory, {}),
)

CONDITIONS: tuple[Check, ...] = tuple(
    Check.of(f"condition/{name}", why, body, alone=body in (_determinism_under_load, _memory), **more)
    for name, why, body, more in _BODIES
)
"""All conditions."""
