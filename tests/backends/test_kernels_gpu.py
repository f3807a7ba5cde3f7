"""The backends with kernels of ours on a GPU: what public bug reports name, and how they launch.

The rest is in the named cases.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdispatch
from flashdispatch import attention
from flashdispatch_registry.errors import ColdKernelError

pytestmark = pytest.mark.gpu

BACKENDS = ("triton_fa2", "tilelang_fa2", "cuda_fa2")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The one under test."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch, _fresh: None) -> None:
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "allow")


def module_of(backend: str, part: str) -> Any:
    """A module of a backend's package."""
    return import_module(f"flashdispatch_backends.{backend}.{part}")


def tensors(
    batch: int = 2, seqlen_q: int = 130, seqlen_k: int = 130, heads: int = 4, heads_kv: int = 2, head_dim: int = 64,
    head_dim_v: int | None = None, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v as leaves, and dout."""
    dims = head_dim if head_dim_v is None else head_dim_v

    def make(seqlen: int, count: int, dim: int) -> Tensor:
        return torch.randn(batch, seqlen, count, dim, device="cuda", dtype=dtype)

    q, k, v = make(seqlen_q, heads, head_dim), make(seqlen_k, heads_kv, head_dim), make(seqlen_k, heads_kv, dims)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), make(seqlen_q, heads, dims)


def run(backend: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **arguments: Any) -> dict[str, Tensor]:
    out, lse = attention(q, k, v, return_lse=True, backend=backend, **arguments)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def truth(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """The reference in float64, on the same numbers."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    return run("torch_reference", *leaves, dout.double(), **arguments)


def assert_right(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 0.02) -> None:
    for name, tensor in got.items():
        expected = want[name]
        empty = expected == -math.inf
        assert torch.equal(tensor == -math.inf, empty), name
        difference = (tensor.double() - expected).masked_fill(empty, 0.0).norm()
        assert difference <= tolerance * expected.masked_fill(empty, 0.0).norm() + 1e-6, name


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_automatic_choice_takes_it_where_no_other_is_allowed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = tensors()
    assert flashdispatch.explain(q, k, v, causal=True).chosen in BACKENDS
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", ",".join(other for other in BACKENDS if other != backend))
    assert flashdispatch.explain(q, k, v, causal=True).chosen == backend


def test_fully_masked_rows_give_zeros(backend: str) -> None:
    q, k, v, dout = tensors()
    mask = torch.rand(2, 4, 130, 130, device="cuda") < 0.5
    mask[:, :, ::3] = False
    got = run(backend, q, k, v, dout, attn_mask=mask)
    assert not got["out"][:, ::3].any()
    assert not got["dq"][:, ::3].any()
    assert (got["lse"][:, :, ::3] == -math.inf).all()
    assert_right(got, truth(q, k, v, dout, attn_mask=mask))


def test_more_queries_than_keys_leave_the_first_causal_rows_empty(backend: str) -> None:
    q, k, v, dout = tensors(seqlen_q=200, seqlen_k=70)
    got = run(backend, q, k, v, dout, causal=True)
    assert not got["out"][:, :130].any()
    assert_right(got, truth(q, k, v, dout, causal=True))


# pytorch/pytorch#196678
@pytest.mark.parametrize("seqlen", [63, 64, 65, 192, 704])
def test_logits_of_minus_120(backend: str, seqlen: int) -> None:
    q, k, v, dout = tensors(seqlen_q=seqlen, seqlen_k=seqlen, dtype=torch.float16)
    with torch.no_grad():
        q.mul_(0.05).add_(1.0)
        k.mul_(0.5).sub_(15.0)
    got = run(backend, q, k, v, dout)
    assert ((got["lse"] > -130) & (got["lse"] < -100)).all()
    assert_right(got, truth(q, k, v, dout))


def test_nan_beyond_the_lengths_is_never_read(backend: str) -> None:
    q, k, v, dout = tensors(seqlen_q=100, seqlen_k=150)
    q_lens = torch.tensor([100, 37], dtype=torch.int32, device="cuda")
    kv_lens = torch.tensor([91, 150], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        k[0, 91:], v[0, 91:], q[1, 37:], dout[1, 37:] = (math.nan,) * 4
    got = run(backend, q, k, v, dout, q_lens=q_lens, kv_lens=kv_lens, causal=True)
    assert all(torch.isfinite(got[name]).all() for name in ("out", "dq", "dk", "dv"))
    assert not got["out"][1, 37:].any()
    assert not got["dk"][0, 91:].any()
    assert_right(got, truth(q, k, v, dout, q_lens=q_lens, kv_lens=kv_lens, causal=True))


HALVES = (torch.float16, torch.bfloat16)
HEAD_DIMS = [
    pytest.param(name, head_dims, dtype, id=f"{name}-{head_dims[0]}-{head_dims[1]}-{dtype}")
    for name, dtypes, of_its_own in (
        ("triton_fa2", (*HALVES, torch.float32), [(8, 8), (33, 33)]),
        ("tilelang_fa2", HALVES, [(16, 16), (72, 72), (64, 200)]),
        ("cuda_fa2", HALVES, [(16, 16), (72, 72), (64, 200)]),
    )
    for head_dims, dtype in product(
        [*of_its_own, (40, 40), (80, 80), (96, 96), (96, 32), (192, 128), (256, 256)], dtypes
    )
]


@pytest.mark.parametrize(("backend", "head_dims", "dtype"), HEAD_DIMS)
def test_any_head_dim(backend: str, head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v, dout = tensors(head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype)
    tolerance = 1e-5 if dtype.itemsize == 4 else 0.02
    assert_right(run(backend, q, k, v, dout, causal=True), truth(q, k, v, dout, causal=True), tolerance)


@pytest.mark.parametrize(("heads", "heads_kv"), [(7, 7), (21, 7), (5, 1)], ids=str)
def test_heads_that_do_not_fill_whole_turns_of_16_under_a_causal_mask(backend: str, heads: int, heads_kv: int) -> None:
    """21, 63 and 15 heads of queries, 21, 21 and 3 of keys."""
    given = tensors(batch=3, seqlen_q=300, seqlen_k=450, heads=heads, heads_kv=heads_kv)
    assert_right(run(backend, *given, causal=True), truth(*given, causal=True))


def test_an_expanded_dout(backend: str) -> None:
    q, k, v, _ = tensors()
    one = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 130, 4, 64)
    assert_right(run(backend, q, k, v, one, causal=True), truth(q, k, v, one, causal=True))
    out = attention(q, k, v, causal=True, backend=backend)
    out.sum().backward()
    assert torch.equal(q.grad, run(backend, q, k, v, one, causal=True)["dq"])


def test_a_second_shape_in_the_same_process(backend: str) -> None:
    for seqlen in (130, 64, 1, 257, 130):
        q, k, v, dout = tensors(seqlen_q=seqlen, seqlen_k=seqlen + 3)
        assert_right(run(backend, q, k, v, dout, causal=True), truth(q, k, v, dout, causal=True))


def test_unaligned_and_strided_views(backend: str) -> None:
    packed = torch.randn(2 * 130 * 12 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2, 130, 12, 64)
    q, k, v = (part.detach().requires_grad_() for part in (packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]))
    dout = torch.randn(2, 4, 130, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    assert q.data_ptr() % 16
    assert_right(run(backend, q, k, v, dout, window=(40, 3)), truth(q, k, v, dout, window=(40, 3)))


def test_negative_and_zero_scale(backend: str) -> None:
    for scale in (-0.3, 0.0):
        q, k, v, dout = tensors()
        assert_right(
            run(backend, q, k, v, dout, scale=scale, causal=True), truth(q, k, v, dout, scale=scale, causal=True)
        )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_of_a_mask_near_the_most_negative_number_have_right_gradients(backend: str, head_dim: int) -> None:
    """There a float32 LSE has no digits for log(l)."""
    q, k, v, dout = tensors(head_dim=head_dim, dtype=torch.float16)
    mask = torch.zeros(1, 1, 130, 130, device="cuda")
    mask[:, :, ::2] = torch.finfo(torch.float32).min
    with_dmask = backend == "triton_fa2"
    leaves = (q, k, v, mask.requires_grad_()) if with_dmask else (q, k, v)
    out = attention(q, k, v, attn_mask=mask, backend=backend)
    got = torch.autograd.grad(out, leaves, dout)
    # What is left of the scores there is rounded away, so every key weighs the same.
    flat = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", flat[0], flat[1].repeat_interleave(2, 2)) * head_dim**-0.5
    scores = scores * (torch.arange(130, device="cuda") % 2)[:, None]
    bias = torch.zeros(1, 1, 130, 130, device="cuda", dtype=torch.float64, requires_grad=True)
    weights = torch.softmax(scores + bias, -1)
    right = torch.einsum("bhij,bjhd->bihd", weights, flat[2].repeat_interleave(2, 2))
    _, _, dv, dbias = torch.autograd.grad(right, (*flat, bias), dout.double())
    for one, other in ((out, right), *zip(got[2:], (dv, dbias), strict=False)):
        assert (one.double() - other).norm() <= 0.01 * other.norm()


def test_work_goes_to_the_current_stream_forward_and_backward(backend: str) -> None:
    q, k, v, dout = tensors(seqlen_q=512, seqlen_k=512)
    wanted = run(backend, q, k, v, dout)
    late, side = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(q.detach())
        leaves = (x.detach().requires_grad_() for x in (late, k, v))
        got = run(backend, *leaves, dout)
    side.synchronize()
    assert all(torch.equal(got[name], wanted[name]) for name in got)


def test_nothing_synchronises(backend: str) -> None:
    q, k, v, dout = tensors()
    lens = torch.tensor([130, 40], dtype=torch.int32, device="cuda")
    run(backend, q, k, v, dout, causal=True, q_lens=lens, kv_lens=lens)
    with no_sync():
        run(backend, q, k, v, dout, causal=True, q_lens=lens, kv_lens=lens)


def test_a_graph_replays_forward_and_backward_with_new_values(backend: str) -> None:
    q, k, v, dout = tensors()
    flashdispatch.prepare(q, k, v, causal=True, return_lse=True, backend=backend)
    values = [x.detach() for x in (q, k, v)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(backend, *(x.detach().requires_grad_() for x in values), dout, causal=True)
    values[0].normal_()
    dout.normal_()
    graph.replay()
    want = run(backend, *(x.requires_grad_() for x in values), dout, causal=True)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_cold_kernel_under_capture_raises_and_names_itself(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of(backend, "compile"), "_compiled", {})
    monkeypatch.setattr(module_of(backend, "launch").backend, "_bound", {})
    q, k, v, _ = tensors(seqlen_q=77)
    with (
        pytest.raises(ColdKernelError, match=rf"forward kernel of {backend}.*prepare"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        attention(q.detach(), k.detach(), v.detach(), softcap=7.0, backend=backend)


def test_prepare_leaves_nothing_to_compile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = tensors(head_dim=48)
    flashdispatch.prepare(q, k, v, window=(9, 9), return_lse=True, backend=backend)
    monkeypatch.setattr(module_of(backend, "compile"), "build", lambda *_: pytest.fail("compiled after prepare()"))
    run(backend, q, k, v, dout, window=(9, 9))
    odd = torch.randn(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).requires_grad_()
    run(backend, odd, k, v, dout, window=(9, 9))


def test_gradients_are_bitwise_repeatable_under_load(backend: str) -> None:
    q, k, v, dout = tensors(seqlen_q=1024, seqlen_k=1024)
    first = run(backend, q, k, v, dout, causal=True)
    side = torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(100):
        with torch.cuda.stream(side):
            busy = busy @ busy
        again = run(backend, q, k, v, dout, causal=True)
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_offsets_past_two_to_the_31(backend: str) -> None:
    """One sequence whose rows lie 2**24 elements apart: the last one is past a 32-bit offset."""
    rows, stride = 160, 2**24
    memory = torch.empty(rows * stride, device="cuda", dtype=torch.float16)
    q = memory.as_strided((1, rows, 1, 64), (rows * stride, stride, 64, 1))
    q.normal_()
    k, v = (torch.randn(1, 65, 1, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    got = attention(q, k, v, backend=backend)
    assert torch.equal(got, attention(q.contiguous(), k, v, backend=backend))
    swapped = attention(k, q, q, backend=backend)
    assert torch.equal(swapped, attention(k, q.contiguous(), q.contiguous(), backend=backend))


@pytest.fixture
def here_and_there() -> tuple[list[Tensor], list[Tensor]]:
    """The same q, k, v and dout on two devices."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    here = tensors()
    return list(here), [x.detach().to("cuda:1").requires_grad_(x.requires_grad) for x in here]


# Dao-AILab/flash-attention#1782
@pytest.mark.parametrize("current", [0, 1])
def test_calls_on_two_devices_in_turns_whichever_is_current(
    backend: str, here_and_there: tuple[list[Tensor], list[Tensor]], current: int
) -> None:
    here, there = here_and_there
    with torch.cuda.device(current):
        for _ in range(2):
            got, want = run(backend, *there, causal=True), run(backend, *here, causal=True)
            assert all(torch.equal(got[name].cpu(), want[name].cpu()) for name in want)
            assert {x.device.index for x in got.values()} == {1}
        assert torch.cuda.current_device() == current


def test_prepare_compiles_for_the_device_of_the_tensors(
    backend: str, here_and_there: tuple[list[Tensor], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = here_and_there
    monkeypatch.setattr(module_of(backend, "compile"), "_compiled", {})
    flashdispatch.prepare(*there[:3], window=(11, 0), return_lse=True, backend=backend)
    monkeypatch.setattr(module_of(backend, "compile"), "build", lambda *_: pytest.fail("compiled after prepare()"))
    run(backend, *there, window=(11, 0))


def test_compiled_by_torch(backend: str) -> None:
    q, k, v, dout = tensors()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True, backend=backend), fullgraph=True)
    out = compiled(q, k, v)
    want = run(backend, q, k, v, dout, causal=True)
    assert torch.equal(out, want["out"])
    assert torch.equal(torch.autograd.grad(out, q, dout)[0], want["dq"])
