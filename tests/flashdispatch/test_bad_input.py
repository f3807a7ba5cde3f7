"""Bad input gets a clear typed error before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashdispatch
from flashdispatch import InvalidRequestError, InvalidTypeError, UnknownBackendError


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(**changes: Any) -> Any:
    tensors = {name: torch.randn(2, 8, 4, 16) for name in ("q", "k", "v")}
    arguments = tensors | changes
    return flashdispatch.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


T = torch.randn

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q is no tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "rank 3": ({"q": T(2, 8, 16)}, ValueError, r"q must have 4 dims \(B, S, H, D\), got 3"),
    # pytorch/pytorch#141218
    "rank 9": ({"q": torch.zeros(0, 1, 7, 2, 8, 9, 0, 0, 3)}, ValueError, "4 dims"),
    "Hq % Hkv": ({"q": T(2, 8, 6, 16)}, ValueError, "multiple of Hkv"),
    # ROCm/rocm-libraries#5888
    "K and V heads differ": ({"v": T(2, 8, 2, 16)}, ValueError, "one number of heads"),
    "batch differs": ({"k": T(1, 8, 4, 16)}, ValueError, "one batch size, got 2, 1 and 2"),
    "key lengths differ": ({"v": T(2, 7, 4, 16)}, ValueError, "one sequence length"),
    "head dims differ": ({"k": T(2, 8, 4, 8)}, ValueError, "one head dim"),
    "no heads": ({name: torch.zeros(2, 8, 0, 16) for name in "qkv"}, ValueError, "at least one head"),
    # pytorch/pytorch#174950
    "head dim 0": (
        {name: torch.zeros(0, 0, 2, 0) for name in "qkv"},
        ValueError,
        "head dims must be at least 1",
    ),
    "mixed dtypes": ({"k": T(2, 8, 4, 16).half()}, ValueError, "one dtype; cast them"),
    "integer q": ({name: torch.ones(2, 8, 4, 16, dtype=torch.int32) for name in "qkv"}, TypeError, "float16, bfloat16"),
    "mixed devices": ({"k": torch.empty(2, 8, 4, 16, device="meta")}, ValueError, "one device"),
    "sparse q": ({"q": T(2, 8, 4, 16).to_sparse()}, ValueError, "dense"),
    "layout": ({"layout": "sbhd"}, ValueError, "layout must be 'bshd'"),
    "bare int window": ({"window": 4}, TypeError, r"window=\(3, 0\)"),
    "window of three": ({"window": (1, 2, 3)}, TypeError, r"tuple \(left, right\)"),
    "negative window": ({"window": (-1, 0)}, ValueError, "no limit is None"),
    "float window": ({"window": (1.0, 0)}, TypeError, "ints or None"),
    "causal text": ({"causal": "lower_right"}, ValueError, "causal must be False, True"),
    "causal number": ({"causal": 2}, ValueError, "causal must be False, True"),
    "mask dtype": ({"attn_mask": torch.ones(8, 8, dtype=torch.int64)}, TypeError, "bool"),
    "mask of half": ({"attn_mask": torch.ones(8, 8).half()}, TypeError, "float32 or q's dtype"),
    "mask that can't broadcast": (
        {"attn_mask": torch.ones(3, 8, 8)},
        ValueError,
        r"\(B, Hq, Sq, Sk\) = \(2, 4, 8, 8\)",
    ),
    "mask of rank 5": ({"attn_mask": torch.ones(1, 1, 1, 8, 8)}, ValueError, "can't be broadcast"),
    "mask elsewhere": ({"attn_mask": torch.ones(8, 8, device="meta")}, ValueError, r"attn_mask is on meta"),
    "mask is a list": ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a torch.Tensor"),
    "alibi dtype": ({"alibi_slopes": torch.ones(4).double()}, TypeError, "alibi_slopes must be float32"),
    "alibi shape": ({"alibi_slopes": torch.ones(3)}, ValueError, r"\(Hq,\) or \(B, Hq\)"),
    "alibi gradient": ({"alibi_slopes": torch.ones(4, requires_grad=True)}, ValueError, "have no gradient"),
    "sinks dtype": ({"sinks": torch.ones(4).half()}, TypeError, "sinks must be float32"),
    "sinks shape": ({"sinks": torch.ones(2)}, ValueError, r"sinks must have shape \(Hq,\)"),
    "lengths of int64": ({"kv_lens": torch.tensor([1, 2])}, TypeError, r"kv_lens.to\(torch.int32\)"),
    "lengths shape": ({"kv_lens": lens(1, 2, 3)}, ValueError, r"kv_lens must have shape \(B,\)"),
    "negative length": ({"kv_lens": lens(-1, 2)}, ValueError, r"kv_lens must be within 0..8, got values from -1"),
    "length past the end": ({"q_lens": lens(1, 9)}, ValueError, r"q_lens must be within 0..8, got values from 1 to 9"),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale must be finite"),
    "scale past float32": ({"scale": 1e39}, ValueError, "finite in float32"),
    "scale past any float": ({"scale": 10**400}, ValueError, "finite in float32"),
    "softcap past float32": ({"softcap": 1e39}, ValueError, "finite in float32"),
    "window past 32 bits": ({"window": (2**70, 0)}, ValueError, "fit 32 bits"),
    "sparse mask": ({"attn_mask": torch.ones(8, 8).to_sparse()}, ValueError, "attn_mask must be a dense"),
    "nested q": ({"q": torch.nested.nested_tensor([T(8, 4, 16)] * 2, layout=torch.jagged)}, ValueError, "dense"),
    "scale tensor": ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a number"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "no softcap is None"),
    "softcap negative": ({"softcap": -1.0}, ValueError, "softcap must be > 0"),
    "dropout 1.5": ({"dropout_p": 1.5}, ValueError, "within 0..1"),
    "dropout text": ({"dropout_p": "no"}, TypeError, "dropout_p must be a number"),
    "seed float": ({"dropout_p": 0.5, "dropout_seed": 1.0}, TypeError, "dropout_seed must be an int"),
    "seed too large": ({"dropout_p": 0.5, "dropout_seed": 2**64}, ValueError, "64 bits"),
    "seed tensor": ({"dropout_p": 0.5, "dropout_seed": torch.zeros(2)}, ValueError, "int64"),
    "return_lse text": ({"return_lse": "yes"}, TypeError, "return_lse must be True or False"),
    "deterministic number": ({"deterministic": 2}, TypeError, "deterministic must be True or False"),
    "unhashable backend": ({"backend": ["torch_reference"]}, TypeError, "a tuple of strings, got"),
    "backend object": ({"backend": object()}, TypeError, "named by a string"),
    "empty backend": ({"backend": " , "}, ValueError, "no backend name"),
    "auto in a chain": ({"backend": "torch_reference,auto"}, ValueError, "stands alone"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_raises_its_builtin_and_ours(name: str) -> None:
    changes, kind, message = BAD[name]
    with pytest.raises(kind, match=message) as caught:
        call(**changes)
    assert isinstance(caught.value, flashdispatch.FlashDispatchError)
    ours = InvalidTypeError if kind is TypeError else InvalidRequestError
    assert isinstance(caught.value, ours)


def test_a_message_shows_the_request() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"asked: q \(2, 8, 4, 16\) float32 cpu, k \(2, 8, 3, 16\) float32 cpu"
    ):
        call(k=T(2, 8, 3, 16), v=T(2, 8, 3, 16))


def test_causal_with_kv_lens_and_no_q_lens_shows_both_fixes() -> None:
    with pytest.raises(ValueError, match="which query is the last one") as caught:
        call(causal=True, kv_lens=lens(3, 8))
    assert "q_lens=kv_lens" in str(caught.value)
    assert "q_lens=torch.full_like(kv_lens, 8)" in str(caught.value)
    full = lens(8, 8)
    assert call(causal=True, kv_lens=lens(3, 8), q_lens=lens(3, 8)).shape == (2, 8, 4, 16)
    assert call(causal=True, kv_lens=lens(3, 8), q_lens=full).shape == (2, 8, 4, 16)
    assert call(causal="top_left", kv_lens=lens(3, 8)).shape == (2, 8, 4, 16)


def test_one_query_needs_no_q_lens() -> None:
    assert call(q=T(2, 1, 4, 16), causal=True, kv_lens=lens(3, 8)).shape == (2, 1, 4, 16)


def test_heads_and_length_swapped_hints_at_the_layout() -> None:
    with pytest.raises(ValueError, match="layout='bhsd'"):
        flashdispatch.attention(T(2, 4, 7, 16), T(2, 4, 5, 16), T(2, 4, 5, 16))


def test_bad_length_values_raise_on_a_cached_call_too() -> None:
    assert call(kv_lens=lens(1, 2)).shape == (2, 8, 4, 16)
    with pytest.raises(ValueError, match="kv_lens must be within"):
        call(kv_lens=lens(1, 99))


def test_bad_input_launches_nothing(add_backend: Any) -> None:
    spy = add_backend("spy")
    for changes, kind, message in BAD.values():
        with pytest.raises(kind, match=message):
            call(**({"backend": "spy"} | changes))
    assert spy.problems == []


def test_explain_and_prepare_check_like_attention() -> None:
    q, k, v = (T(2, 8, 4, 16) for _ in range(3))
    for check in (flashdispatch.explain, flashdispatch.prepare):
        with pytest.raises(TypeError, match="window must be a tuple"):
            check(q, k, v, window=4)
        with pytest.raises(TypeError, match="needs q, k and v"):
            check(q)
        with pytest.raises(UnknownBackendError, match="Did you mean 'torch_reference'"):
            check(q, k, v, backend="torch_referense")


def test_an_equal_call_in_the_cache_lets_no_wrong_type_through() -> None:
    good = {"causal": True, "scale": 1.0, "return_lse": False, "deterministic": False}
    call(**good)
    for name, value in {"causal": 1, "scale": True, "return_lse": 0, "deterministic": 0}.items():
        with pytest.raises((TypeError, ValueError), match=name):
            call(**(good | {name: value}))


def test_the_shim_and_the_merge_name_what_is_no_tensor() -> None:
    q = T(2, 4, 8, 16)
    with pytest.raises(TypeError, match=r"value must be a torch\.Tensor, got NoneType"):
        flashdispatch.sdpa(q, q, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"out1 must be a torch\.Tensor"):
        flashdispatch.merge_attention(None, q, q, q)  # type: ignore[arg-type]


def test_a_bad_seed_is_refused_in_a_cached_call_too() -> None:
    call(dropout_p=0.5, dropout_seed=1)
    with pytest.raises(ValueError, match="64 bits"):
        call(dropout_p=0.5, dropout_seed=2**64)


def test_a_list_window_is_taken_as_a_tuple() -> None:
    q, k, v = (T(2, 8, 4, 16) for _ in range(3))
    listed = flashdispatch.attention(q, k, v, window=[2, 0])  # type: ignore[call-overload]
    assert torch.equal(listed, flashdispatch.attention(q, k, v, window=(2, 0)))


def test_a_gradient_that_vmap_would_lose_is_refused(qkv: Any) -> None:
    q, k, v = qkv()
    mapped = torch.stack([q, q]).requires_grad_()
    with pytest.raises(InvalidRequestError, match=r"q is mapped over by torch\.func\.vmap and requires a gradient"):
        torch.vmap(lambda one: flashdispatch.attention(one, k, v))(mapped)
    out = torch.vmap(lambda one: flashdispatch.attention(one, k, v, backend="torch_reference"))(mapped.detach())
    # vmap makes one batched product of two, for which PyTorch may take another kernel: not the same bits on every CPU.
    torch.testing.assert_close(out[0], flashdispatch.attention(q, k, v, backend="torch_reference"))


def test_nested_tensors_are_refused_with_what_would_help(qkv: Any) -> None:
    _, k, v = qkv()
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([torch.randn(3, 4, 16), torch.randn(5, 4, 16)])
    with pytest.raises(InvalidRequestError, match=r"q must be a dense \(strided\) tensor; pad it and give q_lens"):
        flashdispatch.attention(nested, k, v)
