"""torch.compile: one graph, no break, the plan of trace time, the backend's name in the graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import flashdispatch
from flashdispatch import _compile, attention, use_backend
from flashdispatch._compile import Attributes
from flashdispatch_registry import Code, Reason

ATTRIBUTES = Attributes(
    left=None, right=0, align="bottom_right", scale=0.25, softcap=None, dropout_p=0.0, needs_grad="", return_lse=True,
    deterministic=False, layout="bshd", backend="torch_reference",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_compiled_code_left() -> None:
    torch.compiler.reset()


def graphs() -> tuple[Any, list[Any]]:
    """A compiler that keeps the lowered graphs it is given, and runs them as they are."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    kept: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        kept.append(graph)
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep), kept


def ops(graph: Any) -> list[Any]:
    return [node for node in graph.graph.nodes if "flashdispatch" in str(node.target)]


def everything(q: Any, k: Any, v: Any, mask: Any, sinks: Any, slopes: Any, lens: Any) -> Any:
    out, lse = attention(
        q, k, v, causal=True, window=(5, None), attn_mask=mask, sinks=sinks, alibi_slopes=slopes, q_lens=lens,
        kv_lens=lens, softcap=10.0, scale=0.3, return_lse=True, deterministic=True,
    )  # fmt: skip
    return (out * torch.arange(16.0)).sum() + lse.clamp_min(-10.0).sum()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_every_argument_compiles_fullgraph_with_the_same_gradients(qkv: Any, compiler: str) -> None:
    compiled = torch.compile(everything, fullgraph=True, backend=compiler)
    for seqlen in (9, 12, 13):
        lens = torch.tensor([seqlen, 4], dtype=torch.int32)
        inputs = [*qkv(seqlen_q=seqlen, heads_kv=2), torch.randn(4, seqlen, seqlen), torch.randn(4)]
        eager = [tensor.clone().requires_grad_() for tensor in inputs]
        traced = [tensor.clone().requires_grad_() for tensor in inputs]
        slopes = torch.rand(4)
        wanted, got = everything(*eager, slopes, lens), compiled(*traced, slopes, lens)
        torch.testing.assert_close(got, wanted)
        wanted.backward()
        got.backward()
        for one, other in zip(traced, eager, strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_growing_lengths_compile_twice_at_most(qkv: Any) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend=counter)
    for seqlen in (3, 5, 8, 13, 21):
        compiled(*qkv(seqlen_q=seqlen))
    assert counter.frame_count == 2


def test_all_dims_dynamic_compiles(qkv: Any) -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen in ((2, 9), (3, 5)):
        inputs = qkv(batch=batch, seqlen_q=seqlen)
        assert torch.equal(compiled(*inputs), attention(*inputs))


def test_the_backends_name_is_an_argument_of_the_op_in_the_graph(qkv: Any) -> None:
    compiler, kept = graphs()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend=compiler)
    compiled(*qkv(requires_grad=True)).sum().backward()
    forward, backward = kept
    (op,) = ops(forward)
    assert op.target is torch.ops.flashdispatch.forward.default
    assert op.args[-1] == "torch_reference"
    (op,) = ops(backward)
    assert op.target is torch.ops.flashdispatch.backward.default
    assert op.args[-1] == "torch_reference"


def test_no_dlse_reaches_the_backward_when_the_lse_is_unused(qkv: Any) -> None:
    compiler, kept = graphs()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, return_lse=True)[0], fullgraph=True, backend=compiler)
    compiled(*qkv(requires_grad=True)).sum().backward()
    (op,) = ops(kept[1])
    assert op.args[1] is None


def test_use_backend_around_a_compiled_call_is_guarded(qkv: Any, add_backend: Any) -> None:
    one, two = add_backend("one"), add_backend("two")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")
    inputs = qkv()
    for spy, other in ((one, two), (two, one), (one, two)):
        before = len(other.problems)
        with use_backend("one" if spy is one else "two"):
            compiled(*inputs)
        assert len(other.problems) == before
    assert (len(one.problems), len(two.problems)) == (2, 1)


def test_use_backend_inside_a_compiled_function_works(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy")

    def inside(q: Any, k: Any, v: Any) -> Any:
        with use_backend("spy"):
            return attention(q, k, v)

    torch.compile(inside, fullgraph=True, backend="aot_eager")(*qkv())
    assert len(spy.problems) == 1
    assert flashdispatch.explain(*qkv()).forced is None


def test_a_thread_of_its_own_can_compile(qkv: Any) -> None:
    inputs = qkv()
    got: list[Any] = []
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")
    thread = threading.Thread(target=lambda: got.append(compiled(*inputs)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], attention(*inputs))


def test_the_environment_counts_as_of_trace_time(qkv: Any, add_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = add_backend("spy", priority={"*": -1})
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")
    monkeypatch.setenv("FLASHDISPATCH_BACKEND", "spy")
    compiled(*qkv())
    monkeypatch.delenv("FLASHDISPATCH_BACKEND")
    compiled(*qkv())
    assert len(spy.problems) == 2


def test_the_plan_of_a_traced_call_says_that_it_was_traced(qkv: Any, add_backend: Any) -> None:
    add_backend("narrow", softcap=False)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in qkv()]
        with pytest.raises(flashdispatch.BackendUnsupportedError) as caught:
            attention(*fakes, softcap=1.0, backend="narrow")
    assert caught.value.plan.notes == (_compile.TRACED_NOTE,)


def test_a_forward_mode_tangent_is_refused_in_compiled_code(qkv: Any) -> None:
    from torch.autograd import forward_ad

    q, k, v = qkv()
    compiled = torch.compile(lambda q: attention(q, k, v), backend="aot_eager")
    compiled(q)
    with forward_ad.dual_level(), pytest.raises(Exception, match="reverse-mode derivatives only"):
        compiled(forward_ad.make_dual(q, torch.randn_like(q)))


def test_a_second_derivative_on_the_ops_is_refused_in_words(qkv: Any) -> None:
    q, k, v = qkv(requires_grad=True)
    attributes = ATTRIBUTES._replace(needs_grad="q,k,v", return_lse=False)
    out, _ = torch.ops.flashdispatch.forward(q, k, v, *(None,) * 6, *attributes)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(flashdispatch.SecondDerivativeError, match="differentiable once"):
        torch.autograd.grad(dq.sum(), k)


def test_a_changed_default_backend_compiles_anew(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy", priority={"*": -1})
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")
    compiled(*qkv())
    flashdispatch.set_default_backend("spy")
    compiled(*qkv())
    assert len(spy.problems) == 1


def test_lengths_on_the_cpu_are_checked_in_compiled_code_too(qkv: Any) -> None:
    compiled = torch.compile(
        lambda q, k, v, lens: attention(q, k, v, kv_lens=lens), fullgraph=True, backend="aot_eager"
    )
    compiled(*qkv(), torch.tensor([3, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"kv_lens must be within 0\.\.9, got values from 3 to 99"):
        compiled(*qkv(), torch.tensor([3, 99], dtype=torch.int32))


def test_sizes_that_the_traced_backend_cannot_run_say_where_it_was_chosen(qkv: Any, add_backend: Any) -> None:
    def small(problem: flashdispatch.Problem) -> Any:
        if problem.seqlen_q > 16:
            yield Reason(Code.BACKEND_LIMIT, "seqlen_q", str(problem.seqlen_q), "up to 16")

    add_backend("small", priority={"*": 50}, why_not=small)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*qkv(seqlen_q=9))
    with pytest.raises(flashdispatch.BackendUnsupportedError, match="fixed while tracing, with other sizes") as caught:
        compiled(*qkv(seqlen_q=40))
    assert "small by torch.compile" in str(caught.value)


def test_training_a_graph_exported_without_gradients_says_so(qkv: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v)

    program = torch.export.export(Model(), qkv())
    out = program.module()(*qkv(requires_grad=True))
    with pytest.raises(flashdispatch.InvalidRequestError, match="traced without gradients"):
        out.sum().backward()


def test_a_forced_backend_that_cannot_run_raises_while_compiling(qkv: Any, add_backend: Any) -> None:
    add_backend("narrow", softcap=False)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, softcap=2.0, backend="narrow"), fullgraph=True)
    with pytest.raises(Exception, match="SOFTCAP: softcap is 2"):
        compiled(*qkv())


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("form", ["dense", "transposed", "expanded", "strided"])
def test_strides_are_those_of_eager(qkv: Any, layout: Any, form: str) -> None:
    q, k, v = qkv(head_dim_v=8)
    if layout == "bhsd":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    q = {
        "dense": q,
        "transposed": q.transpose(1, 2).contiguous().transpose(1, 2),
        "expanded": q[:1].expand(2, -1, -1, -1),
        "strided": q.transpose(1, 3).contiguous().transpose(1, 3),
    }[form]
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, layout=layout), fullgraph=True, backend="aot_eager")
    wanted, got = attention(q, k, v, layout=layout), compiled(q, k, v)
    assert got.stride() == wanted.stride()
    assert torch.equal(got, wanted)


def test_dropout_compiles_with_a_given_and_a_drawn_seed(qkv: Any) -> None:
    inputs = qkv(requires_grad=True)
    for seed in (3, torch.tensor([5, 1])):
        compiled = torch.compile(
            lambda q, k, v, s: attention(q, k, v, dropout_p=0.5, dropout_seed=s), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(*inputs, seed), attention(*inputs, dropout_p=0.5, dropout_seed=seed))
    drawn = torch.compile(lambda q, k, v: attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    assert not torch.equal(drawn(*inputs), drawn(*inputs))


def test_autocast_is_traced(qkv: Any) -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")
    inputs = qkv(requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, wanted = compiled(*inputs), attention(*inputs)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, wanted)
    got.sum().backward()


def test_a_backend_that_keeps_a_tensor_of_its_own_is_refused_in_words(qkv: Any, add_backend: Any) -> None:
    class Keeping:
        def forward(self, problem: Any, q: Any, k: Any, v: Any, extras: Any) -> Any:
            return q * 1, q.new_zeros(q.shape[0], q.shape[2], q.shape[1]), (q * 2,)

        def backward(self, problem: Any, saved: Any, dout: Any, dlse: Any, needs: Any) -> Any: ...
        def prepare(self, problem: Any) -> None: ...

    add_backend("keeping", backend=Keeping())
    inputs = qkv(requires_grad=True)
    assert attention(*inputs, backend="keeping").requires_grad  # eager has no such limit
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, backend="keeping"), fullgraph=True, backend="aot_eager")
    with pytest.raises(flashdispatch.BackendUnsupportedError, match=r"keeps a tensor .* of its own for the backward"):
        compiled(*inputs)


def test_the_ops_pass_torchs_own_checks(qkv: Any) -> None:
    q, k, v = qkv(requires_grad=True, heads_kv=2, head_dim_v=8)
    nothing = (None,) * 6
    opcheck(torch.ops.flashdispatch.forward.default, (q, k, v, *nothing, *ATTRIBUTES._replace(needs_grad="q,k,v")))
    opcheck(
        torch.ops.flashdispatch.forward.default,
        (*(t.detach().bfloat16() for t in (q, k, v)), *nothing, *ATTRIBUTES._replace(return_lse=False)),
    )


def test_fake_tensors_get_the_shape_dtype_and_strides_of_a_real_call(qkv: Any) -> None:
    q, k, v = qkv(heads_kv=2, head_dim_v=8, dtype=torch.bfloat16)
    real, real_lse = attention(q, k, v, return_lse=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (q, k, v)]
        out, lse = attention(*fakes, return_lse=True)
    assert type(out).__name__ == "FakeTensor"
    assert (out.shape, out.dtype, out.stride()) == (real.shape, real.dtype, real.stride())
    assert (lse.shape, lse.dtype, lse.stride()) == (real_lse.shape, real_lse.dtype, real_lse.stride())


def test_a_cached_real_call_does_not_catch_fake_tensors(qkv: Any) -> None:
    q, k, v = qkv()
    attention(q, k, v)
    with FakeTensorMode() as mode:
        assert type(attention(*(mode.from_tensor(tensor) for tensor in (q, k, v)))).__name__ == "FakeTensor"


def test_export_keeps_the_op(qkv: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, causal=True)

    inputs = qkv()
    program = torch.export.export(Model(), inputs)
    assert [node.args[-1] for node in ops(program.graph_module)] == ["torch_reference"]
    assert torch.equal(program.module()(*inputs), attention(*inputs, causal=True))
