"""A call seen before costs little, and keeps every promise even so."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

import flashdispatch
from flashdispatch import _registry, _settings, attention
from flashdispatch_registry import Binds, Forward


class Binding:
    """A backend whose `bind` counts; its `forward` must not be called."""

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.runs = 0
        self.states: list[tuple[bool, bool]] = []

    def forward(self, problem: Any, q: Any, k: Any, v: Any, extras: Any) -> Any:
        raise AssertionError("a backend that binds is not called through forward in eager calls")

    def bind(self, problem: Any, q: Any, k: Any, v: Any, extras: Any) -> Any:
        self.bound.append((q.stride(), k.stride(), v.stride(), extras))
        self.states.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        reference = _registry.registry().load("torch_reference")

        def run(q: Any, k: Any, v: Any, extras: Any) -> Forward:
            self.runs += 1
            self.states.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return reference.forward(problem, q, k, v, extras)

        return run

    def backward(self, problem: Any, *given: Any) -> Any:
        return _registry.registry().load("torch_reference").backward(problem, *given)

    def prepare(self, problem: Any) -> None: ...


@pytest.fixture
def binding(add_backend: Any) -> Binding:
    return add_backend("binding", backend=Binding())


def test_a_backend_is_bound_once_for_all_calls_of_one_metadata(qkv: Any, binding: Binding) -> None:
    assert isinstance(binding, Binds)
    for _ in range(2):
        inputs = qkv()
        wanted = attention(*inputs, backend="torch_reference")
        assert torch.equal(attention(*inputs, backend="binding"), wanted)
    assert (len(binding.bound), binding.runs) == (1, 2)


@pytest.mark.parametrize("which", range(3))
def test_other_strides_are_bound_anew(qkv: Any, binding: Binding, which: int) -> None:
    inputs = list(qkv())
    attention(*inputs, backend="binding")
    inputs[which] = torch.cat([inputs[which], inputs[which]], -1)[..., :16]
    attention(*inputs, backend="binding")
    inputs[which] = torch.cat([inputs[which], inputs[which], inputs[which]], -1)[..., :16]
    attention(*inputs, backend="binding")
    assert [strides[which] for strides in binding.bound] == [
        (9 * 4 * width, 4 * width, width, 1) for width in (16, 32, 48)
    ]


def test_what_is_bound_is_what_the_backend_gets(qkv: Any, binding: Binding) -> None:
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in qkv())
    for _ in range(2):
        attention(q, k, v, layout="bhsd", attn_mask=torch.ones(9, 9, dtype=torch.bool), backend="binding")
    ((strides, *_, extras),) = binding.bound
    assert strides == q.transpose(1, 2).stride()
    assert extras.attn_mask.shape == (1, 1, 9, 9)


def test_binding_happens_without_grad_mode_and_autocast(qkv: Any, binding: Binding) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(*qkv(requires_grad=True), backend="binding").sum().backward()
        attention(*qkv(), backend="binding")
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert binding.states == [(False, False)] * 4


def test_traced_calls_come_through_forward(qkv: Any, add_backend: Any) -> None:
    class Both(Binding):
        def forward(self, problem: Any, *given: Any) -> Any:
            return _registry.registry().load("torch_reference").forward(problem, *given)

    both = add_backend("both", backend=Both())
    inputs = qkv()
    compiled = torch.compile(lambda *given: attention(*given, backend="both"), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), attention(*inputs, backend="torch_reference"))
    assert both.bound == []


class Raising(Binding):
    def bind(self, *given: Any) -> Any:
        raise ZeroDivisionError("in bind")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_backend_that_raises_leaves_the_modes_as_they_were(qkv: Any, add_backend: Any, requires_grad: bool) -> None:
    add_backend("raising", backend=Raising())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="in bind") as caught:
                attention(*qkv(requires_grad=requires_grad), backend="raising")
            assert "in the forward of backend raising" in caught.value.__notes__[0]
            assert torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")


def test_the_environment_counts_at_the_very_next_call(
    qkv: Any, add_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, inputs = add_backend("one"), add_backend("two"), qkv()

    def ran() -> tuple[int, int]:
        attention(*inputs)
        counts = len(one.problems), len(two.problems)
        one.problems.clear()
        two.problems.clear()
        return counts

    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "one")
    for _ in range(2):  # the second time around every call is cached
        os.environ["FLASHDISPATCH_BACKEND"] = "one"
        assert ran() == (1, 0)
        os.environ["FLASHDISPATCH_BACKEND"] = "two"
        assert ran() == (0, 1)
        with mock.patch.dict(os.environ, {"FLASHDISPATCH_BACKEND": "one"}):
            assert ran() == (1, 0)
        assert ran() == (0, 1)
        with monkeypatch.context() as patch:
            patch.delenv("FLASHDISPATCH_BACKEND")
            patch.setenv("FLASHDISPATCH_DISABLE", "one,two")
            assert ran() == (0, 0)
            patch.setattr(os, "environ", {"FLASHDISPATCH_BACKEND": "one"})
            assert ran() == (1, 0)
            patch.setattr(os, "environ", dict(os.environ, FLASHDISPATCH_DISABLE="one"))
            with pytest.raises(flashdispatch.DisabledBackendError):
                ran()
        assert ran() == (0, 1)


def test_what_is_in_force_reads_as_from_os_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [_settings.text(raw) for raw in _settings.in_force()] == [None, None]
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "größer")
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "")
    assert [_settings.text(raw) for raw in _settings.in_force()] == ["größer", ""]


@pytest.mark.parametrize("extras", [False, True])
def test_each_tensor_is_saved_once(qkv: Any, add_backend: Any, extras: bool) -> None:
    packed: list[Any] = []
    q, k, v = qkv(requires_grad=True)
    given = {"attn_mask": torch.randn(1, 1, 9, 9, requires_grad=True), "sinks": torch.randn(4)} if extras else {}
    with torch.autograd.graph.saved_tensors_hooks(lambda it: packed.append(it) or it, lambda it: it):
        out, lse = attention(q, k, v, **given, return_lse=True)
    numbers = [tensor for tensor in packed if tensor.dim() == 0]
    assert len(numbers) == 1  # which backend it was
    addresses = [tensor.data_ptr() for tensor in packed if tensor.dim()]
    assert len(addresses) == len(set(addresses)) == 5 + len(given)
    assert {tensor.data_ptr() for tensor in (q, k, v, out, lse, *given.values())} == set(addresses)
    out.sum().backward()


@pytest.mark.parametrize("saves", ["inputs elsewhere", "only some", "nothing"])
def test_inputs_are_found_again_whatever_a_backend_saves(qkv: Any, add_backend: Any, saves: str) -> None:
    class Saving:
        def forward(self, problem: Any, q: Any, k: Any, v: Any, extras: Any) -> Any:
            out, lse, saved = _registry.registry().load("torch_reference").forward(problem, q, k, v, extras)
            self.kept = saved
            elsewhere = (out, v, lse, q, k)
            return Forward(out, lse, {"inputs elsewhere": elsewhere, "only some": (lse, k), "nothing": ()}[saves])

        def backward(self, problem: Any, saved: Any, *given: Any) -> Any:
            assert len(saved) == {"inputs elsewhere": 5, "only some": 2, "nothing": 0}[saves]
            return _registry.registry().load("torch_reference").backward(problem, self.kept, *given)

        def prepare(self, problem: Any) -> None: ...

    add_backend("saving", backend=Saving())
    inputs = qkv(requires_grad=True)
    wanted = torch.autograd.grad(attention(*inputs, backend="torch_reference").square().sum(), inputs)
    for _ in range(2):
        got = torch.autograd.grad(attention(*inputs, backend="saving").square().sum(), inputs, create_graph=True)
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other)
        with pytest.raises(flashdispatch.SecondDerivativeError):
            got[0].square().sum().backward()


@pytest.mark.parametrize("which", range(4))
def test_changing_any_input_in_place_before_the_backward_is_noticed(qkv: Any, which: int) -> None:
    inputs = [tensor * 1 for tensor in (*qkv(requires_grad=True), torch.randn(1, 1, 9, 9, requires_grad=True))]
    for _ in range(2):
        out = attention(*inputs[:3], attn_mask=inputs[3])
        with torch.no_grad():
            inputs[which].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_what_a_transform_left_behind_is_a_plain_tensor_again(qkv: Any, add_backend: Any) -> None:
    spy, left = add_backend("spy"), []
    q, k, v = qkv(requires_grad=True)
    torch.func.grad(lambda q: (left.append(q * 1), q.sum())[1])(q.detach())
    forward = spy.forward
    seen: list[bool] = []

    def look(problem: Any, q: Any, *given: Any) -> Any:
        seen.append(torch._C._functorch.is_functorch_wrapped_tensor(q))
        return forward(problem, q, *given)

    spy.forward = look
    attention(left[0], k, v, backend="spy").sum().backward()
    assert seen == [False]
    assert k.grad is not None


@pytest.mark.parametrize(
    "changed", [{"causal": 1}, {"return_lse": 0}, {"deterministic": 0}, {"scale": True}, {"dropout_p": False}]
)  # fmt: skip
def test_a_cached_call_does_not_let_a_wrong_type_through(qkv: Any, changed: dict[str, Any]) -> None:
    inputs = qkv()
    right = {"causal": True, "return_lse": False, "deterministic": False, "scale": 1.0, "dropout_p": 0.0}
    attention(*inputs, **right)
    with pytest.raises((TypeError, ValueError)):
        attention(*inputs, **(right | changed))


def test_the_small_extras_arrive_contiguous(add_backend: Any, qkv: Any) -> None:
    given: list[Any] = []

    spy = add_backend("seen")
    forward = spy.forward
    spy.forward = lambda problem, q, k, v, extras: (given.append(extras), forward(problem, q, k, v, extras))[1]
    strided = torch.tensor([3, 99, 5, 99], dtype=torch.int32)[::2]
    attention(
        *qkv(), q_lens=strided, kv_lens=strided, sinks=torch.ones(1).expand(4), alibi_slopes=torch.rand(4, 2).t(),
        dropout_p=0.5, dropout_seed=torch.tensor([1, 9, 2, 9])[::2], backend="seen",
    )  # fmt: skip
    assert given[0].q_lens.tolist() == [3, 5]
    assert given[0].dropout_seed.tolist() == [1, 2]
    assert all(extra.is_contiguous() for extra in given[0][1:])
