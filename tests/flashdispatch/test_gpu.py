"""The core on a CUDA device: arch, fallback event, lengths, streams, graphs, no synchronisation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flashdispatch
from flashdispatch import FallbackError, FallbackWarning, attention, explain

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch, _fresh: None) -> None:
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "allow")  # the reference is what these tests run, knowingly


@pytest.fixture
def on_gpu(qkv: Any) -> Any:
    return lambda **sizes: tuple(tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in qkv(**sizes))


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside it, a synchronising call raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_arch_is_the_tensors_device(on_gpu: Any) -> None:
    major, minor = torch.cuda.get_device_capability()
    assert explain(*on_gpu()).problem.arch == f"sm_{major}{minor}"


def test_the_reference_on_a_gpu_is_an_event(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [backend.name for backend in flashdispatch.backends() if backend.name != "torch_reference"]
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", ",".join(others))
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "warn")
    with pytest.warns(FallbackWarning, match="not a fused kernel"):
        attention(*on_gpu())
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "error")
    flashdispatch.reload_settings()
    with pytest.raises(FallbackError):
        attention(*on_gpu())


def test_same_numbers_as_on_the_cpu(qkv: Any) -> None:
    inputs = qkv(seqlen_q=65, heads_kv=2, dtype=torch.float64, requires_grad=True)
    there = [tensor.detach().cuda().requires_grad_() for tensor in inputs]
    for tensors in (inputs, there):
        attention(*tensors, causal=True, backend="torch_reference").square().sum().backward()
    for one, other in zip(there, inputs, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)


def test_nothing_synchronises_forward_or_backward(on_gpu: Any) -> None:
    q, k, v = on_gpu(requires_grad=True)
    lens, sinks = torch.full((2,), 5, dtype=torch.int32, device="cuda"), torch.ones(4, device="cuda")
    with no_sync():
        for _ in range(2):  # the first call makes the plan
            out = attention(q, k, v, causal=True, q_lens=lens, kv_lens=lens, dropout_p=0.5, sinks=sinks)
            out.sum().backward()


def test_lengths_on_the_gpu_are_clamped_and_checked_only_when_asked(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = on_gpu()
    wrong = torch.tensor([-3, 99], dtype=torch.int32, device="cuda")
    right = torch.tensor([0, 9], dtype=torch.int32, device="cuda")
    assert torch.equal(attention(q, k, v, kv_lens=wrong), attention(q, k, v, kv_lens=right))
    monkeypatch.setenv("FLASHDISPATCH_CHECK", "1")
    flashdispatch.reload_settings()
    with pytest.raises(ValueError, match=r"within 0\.\.9, got values from -3 to 99"):
        attention(q, k, v, kv_lens=wrong)


def test_lengths_on_the_cpu_for_a_call_on_the_gpu_are_refused(on_gpu: Any) -> None:
    with pytest.raises(ValueError, match="kv_lens is on cpu and q on cuda"):
        attention(*on_gpu(), kv_lens=torch.ones(2, dtype=torch.int32))


def test_work_goes_to_the_current_stream(on_gpu: Any) -> None:
    q, k, v = on_gpu(seqlen_q=65)
    wanted = attention(q, k, v)
    side = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = attention(late, k, v)
    side.synchronize()
    assert torch.equal(out, wanted)


def test_a_graph_replays_with_new_values_and_fresh_dropout(on_gpu: Any) -> None:
    q, k, v = on_gpu()
    attention(q, k, v)
    attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
        dropped = attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = dropped.clone()
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, attention(q, k, v))
    graph.replay()
    assert not torch.equal(dropped, first)


def test_tf32_is_in_the_plan_only_when_torch_asks_for_it(on_gpu: Any) -> None:
    inputs, matmul = on_gpu(), torch.backends.cuda.matmul
    name, tf32 = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    assert explain(*inputs).problem.fp32_precision == "ieee"
    before = getattr(matmul, name)
    setattr(matmul, name, tf32)
    try:
        assert explain(*inputs).problem.fp32_precision == "tf32"
        attention(*inputs)
    finally:
        setattr(matmul, name, before)


def test_autocast_on_the_gpu(on_gpu: Any) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert attention(*on_gpu()).dtype is torch.bfloat16


def test_compiled_on_the_gpu(on_gpu: Any) -> None:
    q, k, v = on_gpu(requires_grad=True, dtype=torch.bfloat16)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True)
    out, wanted = compiled(q, k, v), attention(q, k, v, causal=True)
    assert torch.equal(out, wanted)
    dout = torch.randn_like(out)
    gradients = (torch.autograd.grad(result, (q, k, v), dout) for result in (out, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# Dao-AILab/flash-attention#1782
def test_another_device_than_the_current_one(on_gpu: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    q, k, v = (tensor.to("cuda:1") for tensor in on_gpu())
    assert torch.equal(attention(q, k, v).cpu(), attention(*(t.to("cuda:0") for t in (q, k, v))).cpu())
    assert torch.cuda.current_device() == 0
