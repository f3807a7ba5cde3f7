"""The numeric contract, point by point: each test names the point it holds (docs/contract.md has them in words).

float64 on the floor backend, against the float64 oracle, so that agreement is to rounding; the conformance cases hold
every backend to the same points in its own dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flashdispatch
from flashdispatch import attention, explain
from flashdispatch_backends import torch_reference
from flashdispatch_conformance.oracle import truth
from flashdispatch_registry import Extras

F64 = torch.float64


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(q: Any, k: Any, v: Any, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs forward and backward (dout and dlse random), holds both to the oracle, returns (out, lse)."""
    names = ("q", "k", "v", "attn_mask", "sinks")
    inputs = {"q": q, "k": k, "v": v} | {name: arguments[name] for name in names[3:] if arguments.get(name) is not None}
    leaves = {name: t.detach().requires_grad_(t.dtype.is_floating_point) for name, t in inputs.items()}
    arguments = arguments | {name: leaves[name] for name in names[3:] if name in leaves}
    out, lse = attention(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **arguments)
    plan = explain(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **arguments)
    dout, dlse = torch.randn(out.shape, dtype=F64), torch.randn(lse.shape, dtype=F64)
    dlse = torch.where(torch.isneginf(lse), torch.nan, dlse)  # where no key is seen dLSE never matters
    wanted_for = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    got = dict(zip(wanted_for, torch.autograd.grad((out, lse), list(wanted_for.values()), (dout, dlse)), strict=True))

    bhsd = arguments.get("layout") == "bhsd"
    mask = leaves.get("attn_mask")
    extras = Extras(
        attn_mask=None if mask is None else mask.detach()[(None,) * (4 - mask.dim())],
        alibi_slopes=arguments.get("alibi_slopes"),
        sinks=arguments.get("sinks"),
        q_lens=arguments.get("q_lens"),
        kv_lens=arguments.get("kv_lens"),
        dropout_seed=arguments.get("dropout_seed"),
    )

    def view(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().transpose(1, 2) if bhsd else tensor.detach()

    true = truth(plan.problem, view(q), view(k), view(v), extras, view(dout), dlse)
    close(view(out), true.out)
    close(lse.detach(), true.lse)
    for name in ("q", "k", "v"):
        close(view(got[name]), getattr(true, f"d{name}"))
    if "attn_mask" in got:
        close(got["attn_mask"][(None,) * (4 - got["attn_mask"].dim())], true.dattn_mask)
    if "sinks" in got:
        torch.testing.assert_close(got["sinks"].double(), true.dsinks, rtol=1e-5, atol=1e-5)  # sinks are float32
    return out.detach(), lse.detach()


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=1e-9, atol=1e-9)


@pytest.fixture
def f64(qkv: Any) -> Any:
    return lambda **sizes: qkv(**({"dtype": F64, "head_dim": 8} | sizes))


class TestLayout:
    def test_bshd_is_the_default_and_bhsd_is_its_transpose(self, f64: Any) -> None:
        q, k, v = f64(heads_kv=2)
        out, lse = check(q, k, v)
        other, other_lse = check(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), layout="bhsd")
        close(other.transpose(1, 2), out)
        close(other_lse, lse)

    @pytest.mark.parametrize("form", ["sliced", "transposed", "expanded", "padded"])
    def test_any_strides_with_a_contiguous_last_dim_run_without_a_copy(self, f64: Any, form: str) -> None:
        q, k, v = f64()
        views = {
            "sliced": [torch.cat([t, t], 2)[:, :, 4:] for t in (q, k, v)],
            "transposed": [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
            "expanded": [t[:1].expand(2, -1, -1, -1) for t in (q, k, v)],
            "padded": [torch.nn.functional.pad(t, (0, 5))[..., :8] for t in (q, k, v)],
        }[form]
        assert explain(*views).adapters == ()
        check(*views)

    def test_other_strides_are_copied_and_the_plan_says_so(self, f64: Any) -> None:
        q, k, v = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in f64())
        assert [adapter.tensor for adapter in explain(q, k, v).adapters] == ["q", "k", "v"]
        check(q, k, v)

    @pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)], ids=str)
    @pytest.mark.parametrize("layout", ["bshd", "bhsd"])
    def test_output_strides_are_empty_likes(self, order: Any, layout: Any) -> None:
        back = [order.index(dim) for dim in range(3)]
        q = torch.randn(2, 5, 3, 8).permute(*order, 3).contiguous().permute(*back, 3)
        k, v = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
        assert attention(q, k, v, layout=layout).stride() == torch.empty_like(q).stride()


class TestOrder:
    def test_scale_softcap_mask_alibi_softmax_sinks_dropout(self, f64: Any) -> None:
        q, k, v = f64(heads_kv=2, head_dim_v=5)
        check(
            q, k, v, scale=0.7, softcap=1.5, attn_mask=torch.randn(2, 1, 9, 9, dtype=F64), alibi_slopes=torch.rand(4),
            causal=True, window=(6, None), sinks=torch.randn(4), dropout_p=0.3, dropout_seed=torch.tensor([11, 2]),
        )  # fmt: skip


class TestCausal:
    # pytorch/pytorch#103082, ml-explore/mlx#2835, Dao-AILab/flash-attention#1778
    @pytest.mark.parametrize("sizes", [(1, 8), (2, 5), (5, 2), (9, 9), (4, 9), (8, 4)], ids=str)
    def test_true_is_bottom_right(self, f64: Any, sizes: tuple[int, int]) -> None:
        seqlen_q, seqlen_k = sizes
        q, k, v = f64(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        out, lse = check(q, k, v, causal=True)
        empty = max(0, seqlen_q - seqlen_k)
        assert torch.equal(out[:, :empty], torch.zeros_like(out[:, :empty]))
        assert torch.isneginf(lse[..., :empty]).all()
        assert torch.isfinite(lse[..., empty:]).all()

    @pytest.mark.parametrize("sizes", [(1, 8), (2, 5), (5, 2), (9, 9)], ids=str)
    def test_top_left_is_pytorchs_is_causal(self, f64: Any, sizes: tuple[int, int]) -> None:
        q, k, v = f64(seqlen_q=sizes[0], seqlen_k=sizes[1])
        out, _ = check(q, k, v, causal="top_left")
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        close(out, theirs.transpose(1, 2))

    def test_positions_follow_each_sequences_own_lengths(self, f64: Any) -> None:
        q, k, v = f64()
        out, _ = check(q, k, v, causal=True, q_lens=lens(3, 9), kv_lens=lens(5, 9))
        alone = attention(q[:1, :3], k[:1, :5], v[:1, :5], causal=True)
        close(out[:1, :3], alone)


class TestWindow:
    @pytest.mark.parametrize("window", [(0, 0), (1, 0), (0, 1), (3, None), (None, 2), (None, None), (99, 99)], ids=str)
    @pytest.mark.parametrize("causal", [False, True, "top_left"])
    def test_both_ends_are_inclusive(self, f64: Any, window: Any, causal: Any) -> None:
        check(*f64(seqlen_q=6, seqlen_k=9), window=window, causal=causal)

    # vllm-project/vllm#3385
    def test_the_number_of_visible_keys_is_left_plus_one(self) -> None:
        q, k, v = torch.zeros(1, 64, 1, 8), torch.zeros(1, 64, 1, 8), torch.ones(1, 64, 1, 8)
        _, lse = attention(q, k, v, causal=True, window=(15, None), return_lse=True)
        counts = lse.exp().round().int().flatten().tolist()
        assert counts == [min(i + 1, 16) for i in range(64)]


class TestAttnMask:
    @pytest.mark.parametrize("shape", [(9, 9), (1, 9), (9, 1), (4, 1, 9), (2, 1, 1, 9), (2, 4, 9, 9), ()], ids=str)
    def test_float_masks_of_any_broadcast_are_added_and_get_their_gradient(self, f64: Any, shape: Any) -> None:
        check(*f64(heads_kv=2), attn_mask=torch.randn(shape, dtype=F64))

    @pytest.mark.parametrize("shape", [(9, 9), (2, 1, 1, 9), (2, 4, 9, 9)], ids=str)
    def test_bool_masks_attend_where_true_and_are_anded(self, f64: Any, shape: Any) -> None:
        check(*f64(), attn_mask=torch.rand(shape) > 0.4, causal=True, kv_lens=lens(9, 4), q_lens=lens(9, 9))

    # jax-ml/jax#32242
    def test_float32_masks_go_with_16_bit_inputs_and_are_added_in_float32(self, qkv: Any) -> None:
        q, k, v = qkv(dtype=torch.bfloat16, requires_grad=True)
        mask = (torch.randn(1, 4, 9, 9) * 1e-3).requires_grad_()
        attention(q, k, v, attn_mask=mask).sum().backward()
        assert mask.grad.dtype is torch.float32
        assert torch.isfinite(mask.grad).all()

    def test_minus_infinity_masks_and_finfo_min_is_a_number(self, f64: Any) -> None:
        q, k, v = f64()
        mask = torch.zeros(9, 9, dtype=F64)
        mask[0] = -torch.inf
        mask[1] = torch.finfo(torch.float32).min
        out, lse = check(q, k, v, attn_mask=mask)
        assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
        assert torch.isneginf(lse[..., 0]).all()
        assert torch.isfinite(lse[..., 1]).all()

    # huggingface/diffusers#12605
    def test_a_mask_that_differs_by_query_is_not_reduced_to_padding(self, f64: Any) -> None:
        q, k, v = f64()
        mask = torch.eye(9, dtype=torch.bool)
        out, _ = check(q, k, v, attn_mask=mask)
        close(out, v)


class TestAlibi:
    @pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
    @pytest.mark.parametrize("causal", [False, True, "top_left"])
    def test_adds_minus_slope_times_distance(self, f64: Any, shape: Any, causal: Any) -> None:
        check(*f64(seqlen_q=5, seqlen_k=9), alibi_slopes=torch.rand(shape), causal=causal)


class TestSinks:
    def test_one_more_column_with_zero_value_in_output_lse_and_gradient(self, f64: Any) -> None:
        q, k, v = f64(heads_kv=2)
        _, lse = check(q, k, v, sinks=torch.randn(4))
        assert (lse > attention(q, k, v, return_lse=True)[1]).all()

    def test_an_empty_row_has_the_sink_as_lse(self, f64: Any) -> None:
        sinks = torch.randn(4)
        out, lse = check(*f64(seqlen_q=5, seqlen_k=2), causal=True, sinks=sinks)
        assert torch.equal(out[:, :3], torch.zeros_like(out[:, :3]))
        close(lse[..., :3], sinks.double()[None, :, None].expand(2, 4, 3))


class TestLengths:
    def test_rows_past_q_lens_are_zero_with_lse_minus_infinity(self, f64: Any) -> None:
        out, lse = check(*f64(), q_lens=lens(0, 4))
        assert torch.equal(out[1, 4:], torch.zeros_like(out[1, 4:]))
        assert torch.isneginf(lse[0]).all()
        assert torch.isneginf(lse[1, :, 4:]).all()

    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_values_past_the_lengths_never_matter_forward_or_backward(self, f64: Any, poison: float) -> None:
        clean = f64(requires_grad=True)
        q_lens, kv_lens = lens(3, 9), lens(9, 5)
        dirty = [t.detach().clone() for t in clean]
        dout = torch.randn(2, 9, 4, 8, dtype=F64)
        bad_dout = dout.clone()
        dirty[0][0, 3:], bad_dout[0, 3:] = poison, poison
        dirty[1][1, 5:], dirty[2][1, 5:] = poison, poison
        results = []
        for (q, k, v), d in ((clean, dout), ([t.requires_grad_() for t in dirty], bad_dout)):
            out, lse = attention(q, k, v, q_lens=q_lens, kv_lens=kv_lens, causal=True, return_lse=True)
            dlse = torch.where(torch.isneginf(lse), poison, 0.5)
            results.append((out, lse, *torch.autograd.grad((out, lse), (q, k, v), (d, dlse))))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


class TestEmptyRows:
    def test_no_keys_at_all(self, f64: Any) -> None:
        out, lse = check(*f64(seqlen_k=0))
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.isneginf(lse).all()

    @pytest.mark.parametrize("sizes", [(0, 5), (0, 0), (5, 0)], ids=str)
    def test_empty_tensors_run(self, f64: Any, sizes: tuple[int, int]) -> None:
        check(*f64(seqlen_q=sizes[0], seqlen_k=sizes[1]))
        check(*f64(batch=0, seqlen_q=sizes[0], seqlen_k=sizes[1]))

    def test_dlse_of_an_empty_row_is_ignored_even_if_nan(self, f64: Any) -> None:
        # `check` sends NaN there.
        check(*f64(), attn_mask=torch.arange(9)[:, None].expand(9, 9) > 3)


class TestScaleAndSoftcap:
    # pytorch/pytorch#105202, pytorch/pytorch#174049
    @pytest.mark.parametrize("scale", [None, 0.5, 1, 0.0, -0.125])
    def test_any_finite_scale(self, f64: Any, scale: Any) -> None:
        check(*f64(), scale=scale)

    def test_default_scale_uses_the_true_head_dim(self, f64: Any) -> None:
        q, k, v = f64(head_dim=5, head_dim_v=3)
        assert explain(q, k, v).problem.scale == 5**-0.5
        check(q, k, v)

    def test_softcap(self, f64: Any) -> None:
        q, k, v = f64()
        check(q * 10, k, v, softcap=2.0, causal=True)


class TestGqa:
    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3)], ids=str)
    def test_query_head_h_uses_kv_head_h_over_group(self, f64: Any, heads: tuple[int, int]) -> None:
        q, k, v = f64(heads_q=heads[0], heads_kv=heads[1])
        out, _ = check(q, k, v)
        group = heads[0] // heads[1]
        close(out, attention(q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))


class TestLse:
    def test_natural_log_float32_bhs_before_dropout(self, qkv: Any) -> None:
        q, k, v = qkv(dtype=torch.bfloat16)
        out, lse = attention(q, k, v, return_lse=True)
        assert (lse.dtype, tuple(lse.shape)) == (torch.float32, (2, 4, 9))
        assert out.dtype is torch.bfloat16
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / 4
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
        dropped = attention(q, k, v, return_lse=True, dropout_p=0.5, dropout_seed=1)[1]
        assert torch.equal(dropped, lse)

    # flashinfer-ai/flashinfer#50
    def test_asking_for_the_lse_does_not_change_the_output(self, qkv: Any) -> None:
        inputs = qkv(dtype=torch.bfloat16)
        assert torch.equal(attention(*inputs), attention(*inputs, return_lse=True)[0])


class TestDropout:
    def test_the_mask_is_philox_by_position(self, f64: Any) -> None:
        check(*f64(heads_kv=2), dropout_p=0.4, dropout_seed=torch.tensor([2**40 + 7, 3]))

    def test_an_int_seed_is_seed_and_offset_zero(self, qkv: Any) -> None:
        inputs = qkv()
        one = attention(*inputs, dropout_p=0.5, dropout_seed=2**64 - 2)
        assert torch.equal(one, attention(*inputs, dropout_p=0.5, dropout_seed=torch.tensor([-2, 0])))
        assert not torch.equal(one, attention(*inputs, dropout_p=0.5, dropout_seed=torch.tensor([-2, 1])))

    def test_no_seed_draws_one_from_torchs_generator(self, qkv: Any) -> None:
        inputs = qkv()
        draws = []
        for _ in range(2):
            torch.manual_seed(5)
            draws.append([attention(*inputs, dropout_p=0.5) for _ in range(2)])
        assert torch.equal(draws[0][0], draws[1][0])
        assert torch.equal(draws[0][1], draws[1][1])
        assert not torch.equal(draws[0][0], draws[0][1])

    def test_p_one_gives_zero_and_p_zero_draws_nothing(self, qkv: Any) -> None:
        inputs = qkv(requires_grad=True)
        out = attention(*inputs, dropout_p=1.0, dropout_seed=0)
        assert torch.equal(out, torch.zeros_like(out))
        out.sum().backward()
        assert torch.equal(inputs[0].grad, torch.zeros_like(inputs[0]))
        torch.manual_seed(3)
        attention(*inputs)
        drawn = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(1))


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_output_and_gradients_keep_the_dtype(self, qkv: Any, dtype: torch.dtype) -> None:
        q, k, v = qkv(dtype=dtype, requires_grad=True)
        out, lse = attention(q, k, v, return_lse=True)
        out.sum().backward()
        assert {out.dtype, q.grad.dtype, k.grad.dtype, v.grad.dtype} == {dtype}
        assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)

    # pytorch/pytorch#196678, NVIDIA/cudnn-frontend#1072, NVIDIA/cudnn-frontend#160
    def test_all_logits_at_minus_120_are_ordinary(self, f64: Any) -> None:
        q, k, v = f64(seqlen_q=5, seqlen_k=65, head_dim=64)
        q, k = q * 0.1, k * 0.1
        q[..., 0], k[..., 0] = 1.0, -120 * 8.0
        for dtype in (torch.float16, torch.bfloat16):
            inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
            out, lse = attention(*inputs, return_lse=True)
            assert ((lse > -130) & (lse < -100)).all()
            out.sum().backward()
            assert all(torch.isfinite(t.grad).all() for t in inputs)
        check(q, k, v)


class TestDeterminism:
    def test_forward_and_deterministic_backward_repeat_bitwise(self, qkv: Any) -> None:
        q, k, v = qkv(seqlen_q=65, heads_kv=1, dtype=torch.bfloat16, requires_grad=True)
        runs = []
        for _ in range(5):
            out = attention(q, k, v, causal=True, deterministic=True)
            runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for run in runs[1:]:
            assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


class TestRefusals:
    def test_what_no_backend_declares_is_refused_with_reasons_never_ignored(self, qkv: Any, add_backend: Any) -> None:
        undeclared: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
            "window": ({"window": False}, {"window": (1, 1)}, "WINDOW"),
            "softcap": ({"softcap": False}, {"softcap": 1.0}, "SOFTCAP"),
            "alibi": ({"alibi": False}, {"alibi_slopes": torch.ones(4)}, "ALIBI"),
            "sinks": ({"sinks": False, "sinks_grad": False}, {"sinks": torch.ones(4)}, "SINKS"),
            "lengths": ({"lengths": False}, {"kv_lens": lens(1, 2)}, "LENGTHS"),
            "dropout": ({"dropout": False}, {"dropout_p": 0.1}, "DROPOUT"),
            "mask": ({"attn_mask": frozenset(), "attn_mask_grad": False},
                     {"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, "ATTN_MASK"),
            "causal": ({"causal": frozenset()}, {"causal": True}, "CAUSAL"),
            "lse": ({"lse": False, "lse_grad": False}, {"return_lse": True}, "LSE"),
        }  # fmt: skip
        for name, (support, arguments, code) in undeclared.items():
            spy = add_backend(f"no_{name}", **support)
            with pytest.raises(flashdispatch.BackendUnsupportedError, match=code):
                attention(*qkv(), backend=f"no_{name}", **arguments)
            assert spy.problems == []


class TestDeviceValues:
    """On the device "meta" no value can be read: whatever tries raises. There the whole path runs, as on a GPU."""

    @pytest.fixture
    def call(self, add_backend: Any) -> Any:
        add_backend("meta_reference", devices=frozenset({"meta"}))

        def call() -> Any:
            def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

            q, k, v, mask, sinks = meta(2, 9, 4, 16), meta(2, 9, 2, 16), meta(2, 9, 2, 16), meta(2, 1, 9, 9), meta(4)
            lengths, slopes = meta(2, dtype=torch.int32), meta(4).detach()
            results = attention(
                q, k, v, causal=True, window=(5, None), attn_mask=mask, alibi_slopes=slopes, sinks=sinks,
                q_lens=lengths, kv_lens=lengths, softcap=9.0, dropout_p=0.5, return_lse=True,
                dropout_seed=meta(2, dtype=torch.int64), backend="meta_reference",
            )  # fmt: skip
            return torch.autograd.grad(results, (q, k, v, mask, sinks), [torch.empty_like(r) for r in results])

        return call

    def test_they_are_not_read_on_the_host_forward_or_backward(self, call: Any) -> None:
        for _ in range(2):  # the second call comes from the cache
            assert [tuple(gradient.shape) for gradient in call()] == [
                (2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), (2, 1, 9, 9), (4,)
            ]  # fmt: skip

    def test_lengths_are_read_only_when_asked(self, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLASHDISPATCH_CHECK", "1")
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            call()

    def test_lengths_on_the_cpu_are_checked(self, f64: Any) -> None:
        with pytest.raises(flashdispatch.InvalidRequestError, match=r"within 0\.\.9, got values from 1 to 10"):
            attention(*f64(), kv_lens=lens(1, 10))


class TestDerivatives:
    def test_a_second_raises(self, f64: Any) -> None:
        q, k, v = f64(requires_grad=True)
        (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(flashdispatch.SecondDerivativeError):
            dq.sum().backward()

    def test_a_forward_mode_tangent_raises(self, f64: Any) -> None:
        q, k, v = f64()
        with forward_ad.dual_level(), pytest.raises(flashdispatch.ForwardModeError):
            attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)

    def test_torch_func_is_refused(self, f64: Any) -> None:
        q, k, v = f64()
        with pytest.raises(RuntimeError, match="functorch transforms"):
            torch.func.grad(lambda q: attention(q, k, v).sum())(q)

    def test_activation_checkpointing_gives_the_same_gradients(self, f64: Any) -> None:
        inputs = f64(requires_grad=True)
        wanted = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
        out = checkpoint(attention, *inputs, use_reentrant=False)
        for one, other in zip(torch.autograd.grad(out.square().sum(), inputs), wanted, strict=True):
            assert torch.equal(one, other)

    def test_a_recompute_on_another_backend_raises(self, f64: Any, add_backend: Any) -> None:
        add_backend("other", priority={"*": -1})
        with flashdispatch.use_backend("other"):
            out = checkpoint(attention, *f64(requires_grad=True), use_reentrant=False)
        with pytest.raises(flashdispatch.RecomputeError):
            out.sum().backward()


class Spoilt:
    """The reference, whose results are changed before they are returned."""

    def __init__(self, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.changes = changes

    def _spoil(self, results: Any) -> Any:
        mine = {name: change for name, change in self.changes.items() if name in results._fields}
        return results._replace(**{name: change(getattr(results, name)) for name, change in mine.items()})

    def forward(self, *arguments: Any) -> Any:
        return self._spoil(torch_reference.forward(*arguments))

    def backward(self, *arguments: Any) -> Any:
        return self._spoil(torch_reference.backward(*arguments))

    def prepare(self, problem: Any) -> None: ...


class TestResults:
    @pytest.mark.parametrize("name", ["out", "lse", "q", "k", "v"])
    @pytest.mark.parametrize(
        "change", [lambda t: t[:, :-1], lambda t: t.half()], ids=["another shape", "another dtype"]
    )
    def test_another_shape_or_dtype_raises(self, f64: Any, add_backend: Any, name: str, change: Any) -> None:
        add_backend("spoilt", backend=Spoilt(**{name: change}))
        inputs = f64(requires_grad=True)
        said = name if name in ("out", "lse") else f"d{name}"
        with pytest.raises(flashdispatch.BackendContractError, match=f"backend spoilt returned {said} "):
            torch.autograd.grad(attention(*inputs, return_lse=True, backend="spoilt")[0].sum(), inputs)

    def test_other_output_strides_are_put_right(self, f64: Any, add_backend: Any) -> None:
        add_backend("spoilt", backend=Spoilt(out=lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)))
        inputs = f64()
        out = attention(*inputs, backend="spoilt")
        assert out.stride() == torch.empty_like(inputs[0]).stride()
        assert torch.equal(out, attention(*inputs))

    def test_other_lse_strides_are_put_right(self, f64: Any, add_backend: Any) -> None:
        add_backend("spoilt", backend=Spoilt(lse=lambda t: t.mT.contiguous().mT))
        inputs = f64(requires_grad=True)
        (out, lse), wanted = attention(*inputs, return_lse=True, backend="spoilt"), attention(*inputs, return_lse=True)
        assert lse.is_contiguous()
        assert torch.equal(lse, wanted[1])
        for one, other in zip(*(torch.autograd.grad(o.sum(), inputs) for o in (out, wanted[0])), strict=True):
            assert torch.equal(one, other)
