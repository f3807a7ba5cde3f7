"""Gradients: any subset of inputs, through the LSE, under autocast and checkpointing, from any dout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashdispatch
from flashdispatch import _registry, attention
from flashdispatch_registry import Forward


def restrided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with no dim contiguous."""
    return tensor if not tensor.dim() else torch.stack((tensor, tensor), -1)[..., 0]


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def test_gradcheck_in_float64(qkv: Any) -> None:
    q, k, v = qkv(batch=1, seqlen_q=3, seqlen_k=5, heads_q=4, heads_kv=2, head_dim=3, head_dim_v=2, dtype=torch.float64,
                  requires_grad=True)  # fmt: skip
    mask = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)

    def run(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attention(q, k, v, causal=True, attn_mask=mask, softcap=2.0, return_lse=True)

    assert torch.autograd.gradcheck(run, (q, k, v, mask))


@pytest.mark.parametrize("subset", [s for n in range(1, 6) for s in itertools.combinations(range(5), n)], ids=str)
def test_any_subset_of_inputs_gets_the_same_gradients(qkv: Any, add_backend: Any, subset: tuple[int, ...]) -> None:
    spy = add_backend("spy")
    inputs = [*qkv(), torch.randn(9, 9), torch.randn(4)]
    every = leaves(*inputs)

    def run(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
        return attention(q, k, v, attn_mask=mask, sinks=sinks, backend="spy").square().sum()

    run(*every).backward()
    some = [tensor.clone().requires_grad_(at in subset) for at, tensor in enumerate(inputs)]
    run(*some).backward()
    for at, (one, other) in enumerate(zip(some, every, strict=True)):
        assert (one.grad is not None) == (at in subset)
        if one.grad is not None:
            assert torch.equal(one.grad, other.grad)
    assert spy.problems[-1].needs_grad == tuple(("q", "k", "v", "attn_mask", "sinks")[at] for at in subset)
    assert tuple(at for at, needed in enumerate(spy.backwards[-1]) if needed) == subset


def test_no_dlse_tensor_is_made_when_the_lse_is_unused(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy")
    out, _ = attention(*qkv(requires_grad=True), return_lse=True, backend="spy")
    out.sum().backward()
    assert spy.dlse == [None]


def test_only_the_lse_used_gives_the_gradients_of_logsumexp(qkv: Any) -> None:
    q, k, v = qkv(dtype=torch.float64, requires_grad=True)
    _, lse = attention(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.sin().sum(), (q, k))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    wanted = torch.autograd.grad(scores.logsumexp(-1).sin().sum(), (q, k))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_an_unused_output_costs_no_backward(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy")
    q, k, v = qkv(requires_grad=True)
    attention(q, k, v, backend="spy")
    q.sum().backward()
    assert spy.backwards == []


def test_an_expanded_dout_reaches_the_backend_with_a_contiguous_last_dim(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy")
    q, k, v = qkv(requires_grad=True)
    attention(q, k, v, backend="spy").sum().backward()
    assert spy.dout_strides[0][-1] == 1
    expanded = q.grad.clone()
    q.grad = None
    attention(q, k, v, backend="spy").backward(torch.ones(2, 9, 4, 16))
    assert torch.equal(expanded, q.grad)


@pytest.mark.parametrize("form", ["transposed", "sliced", "strided"])
def test_dout_of_any_strides_gives_the_same_gradients(qkv: Any, form: str) -> None:
    q, k, v = qkv(requires_grad=True)
    dout = torch.randn(2, 9, 4, 16)
    views = {
        "transposed": dout.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": torch.cat([dout, dout], -1)[..., :16],
        "strided": torch.stack([dout, dout], 0).transpose(0, 1).flatten(0, 1)[::2],
    }
    wanted = torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
    for one, other in zip(torch.autograd.grad(attention(q, k, v), (q, k, v), views[form]), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("through_dout", [False, True])
def test_a_second_derivative_is_refused_in_words_and_never_dropped(qkv: Any, through_dout: bool) -> None:
    q, k, v = qkv(requires_grad=True)
    out = attention(q, k, v)
    loss = out.square().sum() if through_dout else out.sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    penalty = dq.square().sum() + q.sum()
    with pytest.raises(flashdispatch.SecondDerivativeError, match="differentiable once"):
        penalty.backward()


def test_no_way_of_asking_for_a_second_derivative_gets_a_wrong_one(qkv: Any) -> None:
    q, k, v = qkv(requires_grad=True)
    weight = torch.randn(16, 16, requires_grad=True)
    hidden = q.detach() @ weight
    out = attention(hidden, k, v)
    (dhidden,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    asked = [
        lambda: torch.autograd.grad(out.sum() + dhidden.square().sum(), weight),
        lambda: (out.sum() + dhidden.square().sum()).backward(inputs=[weight]),
        lambda: torch.autograd.functional.hessian(lambda q: attention(q, k, v).square().sum(), q),
        lambda: torch.autograd.functional.jvp(lambda q: attention(q, k, v), q, torch.randn_like(q)),
    ]
    for ask in asked:
        with pytest.raises(flashdispatch.SecondDerivativeError):
            ask()


def test_inference_mode_leaves_nothing_in_the_cache_that_breaks_training(qkv: Any) -> None:
    inputs = qkv(requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():
        assert not attention(*inputs).requires_grad
    attention(*inputs).sum().backward()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vjp(lambda q: attention(q, *inputs[1:]), inputs[0])
    attention(*inputs).sum().backward()


def test_nothing_a_backend_does_is_recorded(qkv: Any, add_backend: Any) -> None:
    class Scaling(Wrong):
        weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, *given: Any) -> Any:
            out, lse, saved = super().forward(*given)
            return Forward(out * self.weight, lse, saved)

    add_backend("scaling", backend=Scaling("nothing"))
    assert not attention(*qkv(), backend="scaling").requires_grad


def test_a_graph_kept_for_more_first_derivatives_still_gives_them(qkv: Any) -> None:
    q, k, v = qkv(requires_grad=True)
    out = attention(q, k, v)
    first = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), q)[0])


def test_a_forward_mode_tangent_is_refused_and_never_dropped(qkv: Any) -> None:
    from torch.autograd import forward_ad

    q, k, v = qkv()
    attention(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(attention(q, k, v), attention(q, k, v))
        dual = forward_ad.make_dual(q, torch.randn_like(q))
        with pytest.raises(flashdispatch.ForwardModeError, match="q carries a forward-mode tangent"):
            attention(dual, k, v)


def test_checkpointing_that_recomputes_with_another_backend_is_noticed(qkv: Any, add_backend: Any) -> None:
    add_backend("one", priority={"*": -1})
    inputs = qkv(requires_grad=True)
    with flashdispatch.use_backend("one"):
        out = checkpoint(lambda *given: attention(*given), *inputs, use_reentrant=False)
        torch.autograd.grad(out.sum(), inputs[0], retain_graph=True)
    with pytest.raises(flashdispatch.RecomputeError, match="inside the same use_backend block"):
        out.sum().backward()
    out = checkpoint(lambda *given: attention(*given, backend="one"), *inputs, use_reentrant=False)
    out.sum().backward()


class Wrong:
    """The reference with one result changed."""

    def __init__(self, what: str) -> None:
        self.what = what

    def forward(self, problem: Any, q: Any, k: Any, v: Any, extras: Any) -> Any:
        out, lse, saved = _registry.registry().load("torch_reference").forward(problem, q, k, v, extras)
        changed = {
            "no lse": (out, None),
            "lse of another shape": (out, lse.transpose(1, 2)),
            "half lse": (out, lse.half()),
            "out of another shape": (out[:, :-1], lse),
            "double out": (out.double(), lse),
            "out elsewhere": (out.to("meta"), lse),
            "out that is a list": ([out], lse),
        }.get(self.what, (out, lse))
        if self.what == "nothing from forward":
            return None
        if self.what == "two values from forward":
            return changed
        return Forward(*changed, [*saved] if self.what == "a list saved from forward" else saved)

    def backward(self, problem: Any, saved: Any, dout: Any, dlse: Any, needs: Any) -> Any:
        right = _registry.registry().load("torch_reference").backward(problem, saved, dout, dlse, needs)
        if self.what == "three values from backward":
            return right[:3]
        changed = {"no dk": None, "dk of another shape": right.k[:, :-1], "double dk": right.k.double()}
        return right._replace(k=changed.get(self.what, right.k))

    def prepare(self, problem: Any) -> None: ...


@pytest.mark.parametrize(
    "what",
    ["no lse", "lse of another shape", "half lse", "out of another shape", "double out", "no dk", "dk of another shape",
     "double dk", "out elsewhere", "out that is a list", "nothing from forward", "two values from forward",
     "a list saved from forward", "three values from backward"],
)  # fmt: skip
def test_a_result_that_breaks_the_contract_is_an_error_that_names_the_backend(
    qkv: Any, add_backend: Any, what: str
) -> None:
    add_backend("wrong", backend=Wrong(what))
    inputs = qkv(requires_grad=True, seqlen_q=8)
    named = [name for name in ("dk", "lse", "out") if name in what.split()]
    name = f"{named[0]} " if named else ""
    with pytest.raises(flashdispatch.BackendContractError, match=f"backend wrong returned {name}") as caught:
        attention(*inputs, return_lse=True, backend="wrong")[0].sum().backward()
    assert "FLASHDISPATCH_DISABLE=wrong keeps it from being used" in str(caught.value)


def test_changing_a_saved_input_in_place_is_noticed(qkv: Any) -> None:
    q, k, v = qkv(requires_grad=True)
    hidden = q * 1
    out = attention(hidden, k, v)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_backend_runs_without_grad_mode_and_autocast(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*qkv(requires_grad=True), backend="spy")
        assert out.dtype is torch.bfloat16
        out.sum().backward()
    assert spy.states == [{"grad": False, "autocast": False}] * 2


def test_autocast_casts_q_k_v_as_sdpa_does(qkv: Any) -> None:
    q, k, v = qkv(requires_grad=True)
    mixed = (q, k.detach().bfloat16(), v.detach().half())
    mask = torch.randn(9, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attention(*mixed, attn_mask=mask, layout="bshd")
    assert ours.dtype is torch.bfloat16
    plain = attention(*(tensor.bfloat16() for tensor in mixed), attn_mask=mask)
    assert torch.equal(ours, plain)
    ours.sum().backward()
    assert q.grad.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*qkv(dtype=torch.float64)).dtype is torch.float64


def test_a_cached_call_follows_autocast_in_and_out(qkv: Any) -> None:
    inputs = qkv()
    for _ in range(2):
        assert attention(*inputs).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attention(*inputs).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert attention(*inputs).dtype is torch.float16


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same_dropout(qkv: Any, reentrant: bool) -> None:
    q, k, v = qkv(requires_grad=True)

    def run(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(7)
    wanted = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(7)
    checkpoint(run, q, k, v, use_reentrant=reentrant).square().sum().backward()
    for tensor, gradient in zip((q, k, v), wanted, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_inference_mode_runs(qkv: Any) -> None:
    with torch.inference_mode():
        out, lse = attention(*qkv(), return_lse=True)
    assert out.shape == (2, 9, 4, 16)
    assert not lse.requires_grad


def test_parameters_are_plain_tensors(qkv: Any) -> None:
    sinks = torch.nn.Parameter(torch.zeros(4))
    attention(*qkv(), sinks=sinks).sum().backward()
    assert sinks.grad is not None


def test_a_backend_with_other_output_strides_is_put_right(qkv: Any, add_backend: Any) -> None:
    class Transposing:
        def forward(self, problem: Any, q: Any, k: Any, v: Any, extras: Any) -> Any:
            out, lse, saved = _registry.registry().load("torch_reference").forward(problem, q, k, v, extras)
            other = out.transpose(1, 2).contiguous().transpose(1, 2)
            return other, lse, tuple(other if tensor is out else tensor for tensor in saved)

        def backward(self, problem: Any, saved: Any, dout: Any, dlse: Any, needs: Any) -> Any:
            return _registry.registry().load("torch_reference").backward(problem, saved, dout, dlse, needs)

        def prepare(self, problem: Any) -> None: ...

    add_backend("transposing", backend=Transposing())
    q, k, v = qkv(requires_grad=True)
    out = attention(q, k, v, backend="transposing")
    assert out.stride() == q.stride()
    wanted = attention(q, k, v, backend="torch_reference")
    assert torch.equal(out, wanted)
    for one, other in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(wanted.square().sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_an_lse_with_other_strides_is_made_contiguous(qkv: Any, add_backend: Any) -> None:
    class Strided(Wrong):
        def forward(self, *given: Any) -> Any:
            out, lse, saved = super().forward(*given)
            other = lse.transpose(1, 2).contiguous().transpose(1, 2)
            return Forward(out, other, tuple(other if tensor is lse else tensor for tensor in saved))

    add_backend("strided", backend=Strided("nothing"))
    q, k, v = qkv(requires_grad=True)
    out, lse = attention(q, k, v, return_lse=True, backend="strided")
    assert lse.is_contiguous()
    (out.sum() + lse.sum()).backward()


def test_the_global_deterministic_flag_is_the_default(qkv: Any) -> None:
    assert not flashdispatch.explain(*qkv()).problem.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert flashdispatch.explain(*qkv()).problem.deterministic
        assert not flashdispatch.explain(*qkv(), deterministic=False).problem.deterministic
        attention(*qkv())
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_backend_gets_what_it_saved_with_the_strides_it_knows_or_contiguous(qkv: Any, add_backend: Any) -> None:
    # A kernel bound to a call's strides would read whatever lies beside a tensor that a hook unpacked elsewhere.
    seen: list[tuple[torch.Tensor, ...]] = []
    reference = _registry.registry().load("torch_reference")

    class Watching:
        def forward(self, *given: Any) -> Any:
            return reference.forward(*given)

        def backward(self, problem: Any, saved: Any, *given: Any) -> Any:
            seen.append(saved)
            return reference.backward(problem, saved, *given)

        def prepare(self, problem: Any) -> None: ...

    add_backend("watching", Watching())
    q, k, v = leaves(*qkv())
    expanded = torch.zeros(1, 1, 9, 1).expand(1, 1, 9, 9)
    kv_lens = torch.tensor([5, 9], dtype=torch.int32)
    extras = {"attn_mask": expanded, "alibi_slopes": torch.rand(2, 4), "kv_lens": kv_lens}

    def gradients(unpack: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda it: it, unpack):
            out = attention(q, k, v, backend="watching", **extras)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    wanted, got = gradients(lambda it: it), gradients(restrided)
    assert all(map(torch.equal, got, wanted))
    untouched, moved = seen
    assert any(0 in tensor.stride() for tensor in untouched)  # the expanded mask: nothing is copied without need
    assert all(tensor.is_contiguous() for tensor in moved)
    assert len(moved) == len(untouched) >= 8
