"""torch_reference against the float64 truth of the conformance suite, and what is particular to it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashdispatch_backends.torch_reference as backend
from flashdispatch_backends.torch_reference import tiles
from flashdispatch_conformance.oracle import truth
from flashdispatch_registry import Backend, Band, Extras, Gradients, Needs, Problem, empty_gradient, empty_output

INF = float("inf")
ALL = Needs(q=True, k=True, v=True, attn_mask=True, sinks=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call in short form. Lengths, masks and seeds are drawn from `seed`."""

    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 2
    seqlen_q: int = 9
    seqlen_k: int = 11
    head_dim: int = 5
    head_dim_v: int = 3
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    causal: bool = False
    align: Any = "bottom_right"
    window: tuple[int | None, int | None] | None = None
    bool_mask: tuple[int, int, int, int] | None = None
    """1 for a broadcast dim, anything else for a full one."""
    float_mask: tuple[int, int, int, int] | None = None
    alibi: int = 0
    """Dims of the slopes."""
    sinks: bool = False
    q_lens: bool = False
    kv_lens: bool = False
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int = 0


@dataclass
class Call:
    """The tensors of a case, ready to run."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    extras: Extras = field(default_factory=Extras)

    def run(self, needs: Needs = ALL, *, dlse: bool = True) -> tuple[Tensor, Tensor, Gradients]:
        result = backend.forward(self.problem, self.q, self.k, self.v, self.extras)
        assert result.lse is not None
        grads = backend.backward(self.problem, result.saved, self.dout, self.dlse if dlse else None, needs)
        return result.out, result.lse, grads

    def tensors(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.dout, self.dlse, *(x for x in self.extras if x is not None)]


def build(case: Case) -> Call:
    rng = torch.Generator().manual_seed(case.seed)
    B, Hq, Hkv, Sq, Sk = case.batch, case.heads_q, case.heads_kv, case.seqlen_q, case.seqlen_k

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    def lens(padded: int) -> Tensor:
        return torch.randint(0, padded + 1, (B,), generator=rng, dtype=torch.int32)

    def mask_shape(dims: tuple[int, int, int, int]) -> tuple[int, ...]:
        return tuple(1 if dim == 1 else full for dim, full in zip(dims, (B, Hq, Sq, Sk), strict=True))

    attn_mask = None
    if case.bool_mask:
        attn_mask = torch.rand(mask_shape(case.bool_mask), generator=rng) < 0.7
    if case.float_mask:
        attn_mask = normal(*mask_shape(case.float_mask))
        attn_mask[torch.rand(attn_mask.shape, generator=rng) < 0.2] = -INF
    extras = Extras(
        attn_mask=attn_mask,
        alibi_slopes=normal(*((Hq,) if case.alibi == 1 else (B, Hq)), dtype=torch.float32) if case.alibi else None,
        sinks=normal(Hq, dtype=torch.float32) if case.sinks else None,
        q_lens=lens(Sq) if case.q_lens else None,
        kv_lens=lens(Sk) if case.kv_lens else None,
        dropout_seed=torch.tensor([2**40 + case.seed, 5]) if case.dropout_p else None,
    )
    problem = Problem(
        arch="cpu",
        dtype=case.dtype,
        batch=B,
        heads_q=Hq,
        heads_kv=Hkv,
        seqlen_q=Sq,
        seqlen_k=Sk,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        band=Band.of(causal=case.causal, align=case.align, window=case.window),
        attn_mask=None if attn_mask is None else "bool" if case.bool_mask else "float",
        attn_mask_shape=None if attn_mask is None else tuple(attn_mask.shape),  # type: ignore[arg-type]
        alibi=bool(case.alibi),
        sinks=case.sinks,
        q_lens=case.q_lens,
        kv_lens=case.kv_lens,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        needs_grad=("q", "k", "v"),
        return_lse=True,
    )
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    return Call(
        problem=problem,
        q=normal(B, Sq, Hq, case.head_dim),
        k=normal(B, Sk, Hkv, case.head_dim),
        v=normal(B, Sk, Hkv, case.head_dim_v),
        dout=normal(B, Sq, Hq, case.head_dim_v),
        dlse=normal(B, Hq, Sq, dtype=lse_dtype),
        extras=extras,
    )


@pytest.fixture
def tile_size(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the elements that a tile may have."""
    return lambda elements: monkeypatch.setattr(tiles, "TILE_ELEMENTS", elements)


@pytest.fixture
def tiny_tiles(tile_size: Callable[[int], None]) -> None:
    """Tiles of at most 4 x 4 for the 8 heads of a default case."""
    tile_size(8 * 16)


def named(out: Tensor, lse: Tensor | None, grads: Gradients) -> dict[str, Tensor | None]:
    return {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in grads._asdict().items()}}


def check(call: Call, rtol: float = 1e-12) -> None:
    """Everything the backend returns, against the truth: error at most `rtol` of the tensor's largest value."""
    got = named(*call.run())
    true = truth(call.problem, call.q, call.k, call.v, call.extras, call.dout, call.dlse)
    pairs = {
        "out": true.out, "lse": true.lse, "dq": true.dq, "dk": true.dk, "dv": true.dv,
        "dattn_mask": true.dattn_mask, "dsinks": true.dsinks,
    }  # fmt: skip
    if call.problem.attn_mask == "bool":
        assert true.dattn_mask is None
        got["dattn_mask"] = None
    for name, expected in pairs.items():
        result = got[name]
        if expected is None:
            assert result is None, name
            continue
        assert result is not None, name
        assert result.shape == expected.shape, name
        assert torch.equal(result.isneginf(), expected.isneginf()), name
        finite = expected.masked_fill(expected.isneginf(), 0.0)
        largest = max(finite.abs().max().item() if finite.numel() else 0.0, 1.0)
        error = (result.double().masked_fill(expected.isneginf(), 0.0) - finite).abs()
        allowed = max(rtol, 2.0**-23 if result.dtype == torch.float32 else 0.0) * largest  # dsinks is always float32
        assert not error.numel() or error.max().item() <= allowed, (name, error.max().item(), allowed)


def same(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> None:
    """Equal bit for bit, where both have it."""
    for name in a:
        x, y = a[name], b[name]
        assert x is None or y is None or torch.equal(x, y), name


# --- the truth ---

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal_top_left": {"causal": True, "align": "top_left"},
    "window": {"window": (3, 2)},
    "window_top_left": {"window": (3, 2), "align": "top_left"},
    "window_left": {"window": (2, None)},
    "window_right": {"window": (None, 1)},
    "window_of_one_key": {"window": (0, 0)},
    "window_without_end": {"window": (2**63 - 1, 2**63 - 1), "q_lens": True, "kv_lens": True},
    "causal_window": {"causal": True, "window": (4, None)},
    "bool_mask": {"bool_mask": (2, 4, 9, 11)},
    "bool_mask_of_keys": {"bool_mask": (2, 1, 1, 11)},
    "bool_mask_of_queries": {"bool_mask": (1, 4, 9, 1)},
    "float_mask": {"float_mask": (2, 4, 9, 11)},
    "float_mask_shared": {"float_mask": (1, 1, 9, 11)},
    "float_mask_of_keys": {"float_mask": (2, 4, 1, 11)},
    "float_mask_of_queries": {"float_mask": (1, 4, 9, 1)},
    "float_mask_of_one_number": {"float_mask": (1, 1, 1, 1)},
    "alibi": {"alibi": 1},
    "alibi_per_sequence_top_left": {"alibi": 2, "align": "top_left"},
    "sinks": {"sinks": True},
    "q_lens": {"q_lens": True},
    "kv_lens": {"kv_lens": True},
    "lens_causal": {"q_lens": True, "kv_lens": True, "causal": True},
    "lens_causal_top_left": {"q_lens": True, "kv_lens": True, "causal": True, "align": "top_left"},
    "lens_alibi": {"q_lens": True, "kv_lens": True, "alibi": 1},
    "lens_sinks": {"q_lens": True, "kv_lens": True, "sinks": True},
    "softcap": {"softcap": 0.5},
    "dropout": {"dropout_p": 0.4},
    "dropout_of_everything": {"dropout_p": 1.0},
    "negative_scale": {"scale": -0.7},
    "zero_scale": {"scale": 0.0},
}
LENGTHS = [(9, 11), (11, 9), (1, 8), (8, 1), (5, 5), (2, 0), (0, 3), (6, 24)]
HEADS = [(4, 4), (4, 2), (4, 1), (1, 1)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.usefixtures("tiny_tiles")
def test_each_feature_equals_the_truth(feature: str, lengths: tuple[int, int]) -> None:
    check(build(Case(seqlen_q=lengths[0], seqlen_k=lengths[1], **FEATURES[feature])))


def combination(number: int) -> Case:
    """About half of all features at once."""
    rng = random.Random(number)
    masks = [(rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 2]))]
    heads_q, heads_kv = rng.choice(HEADS)
    return Case(
        batch=rng.choice([1, 2, 3]),
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=rng.choice([1, 3, 9, 16, 17]),
        seqlen_k=rng.choice([1, 4, 11, 15, 33]),
        head_dim=rng.choice([1, 4, 7]),
        head_dim_v=rng.choice([1, 4, 6]),
        causal=rng.random() < 0.5,
        align=rng.choice(["bottom_right", "top_left"]),
        window=rng.choice([None, (4, 3), (None, 2), (5, None)]),
        **rng.choice([{}, {"bool_mask": masks[0]}, {"float_mask": masks[0]}]),  # type: ignore[arg-type]
        alibi=rng.choice([0, 1, 2]),
        sinks=rng.random() < 0.5,
        q_lens=rng.random() < 0.5,
        kv_lens=rng.random() < 0.5,
        softcap=rng.choice([None, 1.5]),
        dropout_p=rng.choice([0.0, 0.3]),
        seed=number,
    )


@pytest.mark.parametrize("number", range(80))
@pytest.mark.usefixtures("tiny_tiles")
def test_features_combined_equal_the_truth(number: int) -> None:
    check(build(combination(number)))


@pytest.mark.parametrize("seqlen_k", [63, 64, 65])
@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 65])
def test_lengths_around_a_tile_edge_equal_the_truth(
    seqlen_q: int, seqlen_k: int, tile_size: Callable[[int], None]
) -> None:
    tile_size(2 * 64 * 64)
    check(build(Case(batch=1, heads_q=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True, sinks=True)))


@pytest.mark.parametrize("heads", [(6, 3), (6, 2), (8, 1), (3, 3)], ids=str)
@pytest.mark.usefixtures("tiny_tiles")
def test_query_heads_share_key_heads_in_blocks(heads: tuple[int, int]) -> None:
    check(build(Case(heads_q=heads[0], heads_kv=heads[1], alibi=1, sinks=True, float_mask=(1, 2, 1, 2), dropout_p=0.2)))


@pytest.mark.parametrize("number", range(8))
def test_the_result_does_not_depend_on_the_tile_size(number: int, tile_size: Callable[[int], None]) -> None:
    call = build(combination(number))
    whole = named(*call.run())
    for elements in (1, 100, 700):
        tile_size(elements)
        for name, tensor in named(*call.run()).items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-12, atol=1e-12, msg=name)


ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("number", range(6))
@pytest.mark.usefixtures("tiny_tiles")
def test_lower_precision_is_computed_in_float32_and_rounded_once(number: int, dtype: torch.dtype) -> None:
    call = build(replace(combination(number), dtype=dtype))
    check(call, rtol=4 * ROUNDOFF[dtype])  # the gradients also see the rounding of the stored O
    out, lse, grads = call.run()
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert grads.q is not None
    assert grads.q.dtype == dtype


class _Attention(torch.autograd.Function):
    """The smallest possible core around the backend."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, extras: Extras, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, attn_mask, sinks = tensors
        result = backend.forward(problem, q, k, v, extras._replace(attn_mask=attn_mask, sinks=sinks))
        assert result.lse is not None
        ctx.problem = problem
        ctx.save_for_backward(*result.saved)
        return result.out, result.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[None, None, *tuple[Tensor | None, ...]]:  # type: ignore[override]
        return (None, None, *backend.backward(ctx.problem, ctx.saved_tensors, dout, dlse, ALL))


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"dropout_p": 0.4}, {"causal": True}], ids=str)
@pytest.mark.usefixtures("tiny_tiles")
def test_gradients_are_the_derivatives_of_the_forward(extra: dict[str, Any]) -> None:
    call = build(
        Case(batch=1, heads_q=2, heads_kv=1, seqlen_q=3, seqlen_k=4, head_dim=3, head_dim_v=2, alibi=1, **extra)
    )
    assert torch.autograd.gradcheck(
        lambda *tensors: _Attention.apply(replace(call.problem, attn_mask="float", sinks=True), call.extras, *tensors),
        [
            tensor.requires_grad_()
            for tensor in (call.q, call.k, call.v, torch.randn(1, 2, 1, 4).double(), torch.randn(2).double())
        ],
    )


# --- rows without keys ---

EMPTY_ROWS: dict[str, Case] = {
    "no_keys_at_all": Case(seqlen_k=0),
    "causal_with_more_queries_than_keys": Case(seqlen_q=11, seqlen_k=4, causal=True),
    "window_off_the_end": Case(seqlen_q=11, seqlen_k=4, align="top_left", window=(1, 0)),
    "bool_mask": Case(bool_mask=(1, 1, 2, 1), seed=1),
    "float_mask_of_minus_infinity": Case(float_mask=(1, 1, 2, 1), seed=1),
    "kv_lens": Case(batch=6, kv_lens=True, seqlen_k=2),
    "q_lens": Case(q_lens=True, seed=3),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", EMPTY_ROWS)
@pytest.mark.usefixtures("tiny_tiles")
def test_a_row_that_sees_no_key_gives_zeros_and_minus_infinity_and_ignores_its_dlse(
    kind: str, dtype: torch.dtype
) -> None:
    call = build(replace(EMPTY_ROWS[kind], dtype=dtype))
    true = truth(call.problem, call.q, call.k, call.v, call.extras)
    empty = true.lse.isneginf()
    assert empty.any()
    clean = named(*call.run())
    call.dlse[empty] = float("nan")
    out, lse, grads = call.run()
    same(clean, named(out, lse, grads))
    assert torch.equal(lse.isneginf(), empty)
    assert not out.transpose(1, 2)[empty].any()
    assert grads.q is not None
    assert not grads.q.transpose(1, 2)[empty].any()
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@pytest.mark.usefixtures("tiny_tiles")
def test_whole_key_blocks_may_be_hidden_before_the_first_visible_key() -> None:
    call = build(Case(seqlen_k=33, bool_mask=(1, 1, 1, 2)))
    assert call.extras.attn_mask is not None
    call.extras.attn_mask[..., :30] = False
    call.extras.attn_mask[..., 31] = True
    check(call)


@pytest.mark.usefixtures("tiny_tiles")
def test_an_empty_row_with_a_sink_has_the_sink_as_lse_and_passes_its_dlse_to_the_sink() -> None:
    call = build(Case(seqlen_k=0, sinks=True))
    out, lse, grads = call.run()
    assert call.extras.sinks is not None
    assert not out.any()
    assert torch.equal(lse, call.extras.sinks.double()[None, :, None].expand_as(lse))
    assert grads.sinks is not None
    torch.testing.assert_close(grads.sinks, call.dlse.sum(dim=(0, 2)).float())


@pytest.mark.parametrize("kind", [*EMPTY_ROWS, "plain"])
def test_a_sink_of_minus_infinity_is_no_sink(kind: str) -> None:
    call = build(EMPTY_ROWS.get(kind, Case()))
    without = named(*call.run())
    call.extras = call.extras._replace(sinks=torch.full((4,), -INF))
    call.problem = replace(call.problem, sinks=True)
    out, lse, grads = call.run()
    assert grads.sinks is not None
    assert not grads.sinks.any()
    same(without, named(out, lse, grads))


# --- values past the lengths ---


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF], ids=str)
@pytest.mark.parametrize("number", range(0, 40, 4))
@pytest.mark.usefixtures("tiny_tiles")
def test_values_past_the_lengths_never_matter(number: int, poison: float) -> None:
    call = build(replace(combination(number), q_lens=True, kv_lens=True))
    clean = named(*call.run())
    extras = call.extras
    assert extras.q_lens is not None
    assert extras.kv_lens is not None
    for b, (n, m) in enumerate(zip(extras.q_lens.tolist(), extras.kv_lens.tolist(), strict=True)):
        call.q[b, n:] = poison
        call.dout[b, n:] = poison
        call.dlse[b, :, n:] = poison
        call.k[b, m:] = poison
        call.v[b, m:] = poison
        mask = extras.attn_mask
        if mask is not None and mask.is_floating_point() and mask.shape[0] == call.q.shape[0]:
            if mask.shape[2] > 1:
                mask[b, :, n:] = poison
            if mask.shape[3] > 1:
                mask[b, :, :, m:] = poison
    poisoned = named(*call.run())
    same(clean, poisoned)
    assert all(tensor is None or not tensor.isnan().any() for tensor in poisoned.values())


def test_lengths_outside_the_tensor_are_clamped() -> None:
    call = build(Case(batch=3, q_lens=True, kv_lens=True, causal=True))

    def with_lens(q_lens: list[int], kv_lens: list[int]) -> dict[str, Tensor | None]:
        call.extras = call.extras._replace(
            q_lens=torch.tensor(q_lens, dtype=torch.int32), kv_lens=torch.tensor(kv_lens, dtype=torch.int32)
        )
        return named(*call.run())

    same(with_lens([9, 0, 9], [11, 5, 0]), with_lens([2**31 - 1, -5, 9], [2**31 - 1, 5, -1]))


def test_a_large_sink_and_rows_past_the_lengths_give_finite_gradients() -> None:
    call = build(Case(q_lens=True, sinks=True))
    assert call.extras.sinks is not None
    call.extras.sinks.fill_(1000.0)
    check(call)


# --- hard numbers ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"kv_lens": True, "seed": 2}, {"bool_mask": (1, 1, 2, 2)}], ids=str
)
@pytest.mark.usefixtures("tiny_tiles")
def test_logits_of_minus_120_give_finite_and_right_gradients(dtype: torch.dtype, mask: dict[str, Any]) -> None:
    call = build(Case(seqlen_q=17, seqlen_k=21, head_dim=8, dtype=dtype, scale=0.25, **mask))
    call.q.mul_(0.1)[..., 0] = 1.0
    call.k.mul_(0.1)[..., 0] = -480.0
    check(call, rtol=8 * ROUNDOFF[dtype] + 120 * 2.0**-22)


@pytest.mark.parametrize("logit", [1e6, -1e6])
@pytest.mark.usefixtures("tiny_tiles")
def test_huge_equal_logits_average_the_values(logit: float) -> None:
    call = build(Case(dtype=torch.float32, scale=1.0, head_dim=4))
    call.q.fill_(1.0)
    call.k.fill_(logit / 4)
    out, lse, grads = call.run()
    mean = call.v.mean(dim=1, keepdim=True).repeat_interleave(2, dim=2).expand_as(out)
    torch.testing.assert_close(out, mean)
    assert (lse - logit).abs().max() < 3.0
    true = truth(call.problem, call.q, call.k, call.v, call.extras, call.dout, call.dlse)
    ulp = 2.0**-4  # of a float32 at 1e6, and so of the LSE that P is made from
    assert true.dv is not None
    assert grads.v is not None
    torch.testing.assert_close(grads.v.double(), true.dv, rtol=ulp, atol=ulp * true.dv.abs().max().item())
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("tiny_tiles")
def test_a_row_masked_by_the_smallest_float_averages_the_values_and_has_that_gradient(dtype: torch.dtype) -> None:
    call = build(Case(dtype=dtype, float_mask=(1, 1, 2, 1), sinks=False))
    assert call.extras.attn_mask is not None
    call.extras.attn_mask.fill_(torch.finfo(dtype).min)
    if dtype == torch.float16:  # 65504 leaves float32 some digits of the scores
        call.q.zero_()
    out, _, grads = call.run(dlse=False)
    assert grads.v is not None
    mean = call.v.float().mean(dim=1, keepdim=True).repeat_interleave(2, dim=2).expand_as(out)
    torch.testing.assert_close(out, mean.to(dtype))
    share = call.dout.float().sum(dim=1).unflatten(1, (2, 2)).sum(dim=2) / 11  # (B, Hkv, Dv)
    torch.testing.assert_close(grads.v, share[:, None].expand_as(grads.v).to(dtype))


# --- tensors as they come ---


def strided(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The values of x in another memory order, at an offset, with gaps between rows."""
    padded = torch.full([size + 1 for size in (x.shape[dim] for dim in order)], float("nan")).to(x.dtype)
    view = padded.permute([order.index(dim) for dim in range(4)])
    view = view[(*tuple(slice(1, None) for _ in range(3)), slice(0, x.shape[3]))]
    return view.copy_(x)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)], ids=str)
@pytest.mark.usefixtures("tiny_tiles")
def test_strides_do_not_change_the_result(order: tuple[int, ...]) -> None:
    call = build(Case(dtype=torch.float32, causal=True))
    dense = named(*call.run())
    for name in ("q", "k", "v", "dout"):
        setattr(call, name, strided(getattr(call, name), order))
    out, lse, grads = call.run()
    same(dense, named(out, lse, grads))
    assert out.stride() == empty_output(call.problem, call.q).stride()
    assert grads.k is not None
    assert grads.k.stride() == empty_gradient(call.k).stride()
    assert lse.is_contiguous()


@pytest.mark.usefixtures("tiny_tiles")
def test_expanded_tensors_give_the_result_of_their_copies() -> None:
    call = build(Case(dtype=torch.float32, float_mask=(2, 4, 9, 11)))
    call.q = call.q[:1].expand(2, -1, -1, -1)
    call.k = call.k[:, :, :1].expand(-1, -1, 2, -1)
    call.v = call.v[:, :1].expand(-1, 11, -1, -1)
    call.dout = torch.ones(()).expand(2, 9, 4, 3)
    call.dlse = torch.ones(()).expand(2, 4, 9)
    assert call.extras.attn_mask is not None
    mask = call.extras.attn_mask[:, :1].expand(-1, 4, -1, -1)
    call.extras = call.extras._replace(attn_mask=mask)
    expanded = named(*call.run())
    for name in ("q", "k", "v", "dout", "dlse"):
        setattr(call, name, getattr(call, name).clone(memory_format=torch.contiguous_format))
    call.extras = call.extras._replace(attn_mask=mask.contiguous())
    same(expanded, named(*call.run()))


@pytest.mark.parametrize("case", [combination(number) for number in range(12)] + [Case(batch=1, heads_q=1, heads_kv=1)])
def test_inputs_are_not_written_to(case: Case) -> None:
    for dtype in (torch.float64, torch.float32):
        call = build(replace(case, dtype=dtype))
        before = [(tensor.clone(), tensor._version) for tensor in call.tensors()]
        call.run()
        for tensor, (copy, version) in zip(call.tensors(), before, strict=True):
            assert tensor._version == version
            assert torch.equal(tensor, copy)


@pytest.mark.parametrize("number", range(0, 24, 3))
def test_only_tensors_of_the_call_are_saved(number: int) -> None:
    call = build(combination(number))
    result = backend.forward(call.problem, call.q, call.k, call.v, call.extras)
    known = {id(tensor) for tensor in (*call.tensors(), result.out, result.lse)}
    assert {id(tensor) for tensor in result.saved} <= known


def test_nothing_is_saved_without_gradients() -> None:
    call = build(Case())
    assert backend.forward(replace(call.problem, needs_grad=()), call.q, call.k, call.v, call.extras).saved == ()


@pytest.mark.parametrize(
    "shape", [{"batch": 0}, {"heads_q": 0, "heads_kv": 0}, {"seqlen_q": 0}, {"seqlen_q": 0, "seqlen_k": 0}], ids=str
)
def test_empty_tensors_give_empty_results(shape: dict[str, int]) -> None:
    call = build(Case(**shape, float_mask=(2, 2, 2, 2), alibi=2, sinks=True, q_lens=True, kv_lens=True, dropout_p=0.5))
    out, lse, grads = call.run()
    assert out.shape == call.dout.shape
    assert lse.shape == call.dlse.shape
    for grad, tensor in zip(grads[:3], (call.q, call.k, call.v), strict=True):
        assert grad is not None
        assert grad.shape == tensor.shape
        assert not grad.any()


# --- gradients on demand, determinism, dropout ---


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=5)), ids=str)
def test_only_the_needed_gradients_are_given_and_they_are_the_same(wanted: tuple[bool, ...]) -> None:
    call = build(Case(float_mask=(1, 2, 1, 2), sinks=True, softcap=2.0, dropout_p=0.2))
    everything = call.run()[2]
    some = call.run(Needs(*wanted))[2]
    for grad, full, need in zip(some, everything, wanted, strict=True):
        assert (grad is not None) == need
        assert grad is None or (full is not None and torch.equal(grad, full))


@pytest.mark.parametrize("number", range(0, 20, 5))
@pytest.mark.usefixtures("tiny_tiles")
def test_two_runs_are_equal_bit_for_bit(number: int) -> None:
    call = build(replace(combination(number), dtype=torch.float32))
    same(named(*call.run()), named(*call.run()))


def test_a_missing_lse_gradient_is_a_gradient_of_zero() -> None:
    call = build(Case(sinks=True))
    missing = named(*call.run(dlse=False))
    call.dlse.zero_()
    same(missing, named(*call.run()))


def test_dropout_keeps_the_mean_and_the_lse() -> None:
    call = build(Case(seqlen_k=2000, seqlen_q=64, dropout_p=0.5))
    without = backend.forward(replace(call.problem, dropout_p=0.0), call.q, call.k, call.v, call.extras)
    out, lse, _ = call.run()
    assert without.lse is not None
    torch.testing.assert_close(lse, without.lse)
    assert (out - without.out).mean().abs() < 0.01
    assert not torch.allclose(out, without.out, atol=1e-3)


# --- tiles and the host ---


@pytest.mark.parametrize(
    ("band", "visited"),
    [
        (Band(), 16),
        (Band(right=0), 10),
        (Band(right=0, align="top_left"), 10),
        (Band(left=15, right=0), 7),
        (Band(left=0, right=0), 4),
    ],
    ids=str,
)
def test_tiles_that_the_band_hides_are_skipped(
    band: Band, visited: int, tile_size: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tile_size(8 * 16 * 16)
    call = build(Case(seqlen_q=64, seqlen_k=64))
    call.problem = replace(call.problem, band=band)
    seen: list[bool] = []
    scores = backend._scores

    def counted(tiles: tiles.Tiles, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        seen.append(tiles.band_cuts(rows, keys))
        return scores(tiles, Q_i, K_j, rows, keys)

    monkeypatch.setattr(backend, "_scores", counted)
    call.run()
    assert len(seen) == 2 * visited  # forward and backward
    if band == Band(right=0):
        assert sum(seen) == 2 * 4  # only the diagonal is masked


@pytest.mark.parametrize("number", range(0, 30, 3))
@pytest.mark.usefixtures("tiny_tiles")
def test_no_value_of_a_tensor_is_read_on_the_host(number: int) -> None:
    call = build(replace(combination(number), dtype=torch.float32))
    with FakeTensorMode() as fake:  # it has no values: reading one raises
        for name in ("q", "k", "v", "dout", "dlse"):
            setattr(call, name, fake.from_tensor(getattr(call, name)))
        call.extras = Extras(*(None if x is None else fake.from_tensor(x) for x in call.extras))
        out, lse, grads = call.run()
    assert out.shape == call.dout.shape
    assert lse.shape == call.dlse.shape
    assert grads.q is not None


def test_the_lengths_in_the_problem_are_only_hints() -> None:
    call = build(Case(causal=True, float_mask=(2, 2, 2, 2)))
    exact = named(*call.run())
    call.problem = replace(call.problem, batch=7, seqlen_q=1000, seqlen_k=3, attn_mask_shape=(1, 1, 1, 1))
    same(exact, named(*call.run()))


def test_a_tile_never_has_more_elements_than_allowed() -> None:
    for heads, seqlen_q, seqlen_k in itertools.product([1, 4, 2**21], [1, 100, 10**6], [1, 1000, 10**6]):
        q, k = (
            torch.empty(1, device="meta").expand(1, seqlen_q, heads, 8),
            torch.empty(1, device="meta").expand(1, seqlen_k, heads, 8),
        )
        cut = tiles.Tiles.of(build(Case()).problem, q, k, Extras())
        assert heads * cut.block_m * cut.block_n <= max(tiles.TILE_ELEMENTS, heads)


# --- the declaration ---


def test_the_module_is_the_backend_that_its_spec_names() -> None:
    (spec,) = backend.flashdispatch_backends()
    assert spec.name == "torch_reference"
    assert spec.factory == backend.__name__
    assert isinstance(backend, Backend)
    assert spec.portable
    assert not spec.fused
    backend.prepare(build(Case()).problem)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_new_values_and_a_fresh_dropout_mask() -> None:
    call = build(replace(combination(3), dtype=torch.bfloat16, q_lens=True, kv_lens=True, dropout_p=0.3, sinks=True))
    other = build(
        replace(combination(3), dtype=torch.bfloat16, q_lens=True, kv_lens=True, dropout_p=0.3, sinks=True, seed=9)
    )
    for each in (call, other):
        for name in ("q", "k", "v", "dout", "dlse"):
            setattr(each, name, getattr(each, name).cuda())
        each.extras = Extras(*(None if x is None else x.cuda() for x in each.extras))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = named(*call.run())
    for mine, new in zip(call.tensors(), other.tensors(), strict=True):
        mine.copy_(new)
    graph.replay()
    same(replayed, named(*other.run()))
