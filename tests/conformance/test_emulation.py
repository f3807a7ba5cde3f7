"""The emulation that the self-test calls honest is FlashAttention-2: right, tiled, rounded where a kernel rounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import flashdispatch
from flashdispatch_conformance import run_case
from flashdispatch_conformance.cases import BY_ID
from flashdispatch_conformance.emulation import Emulation, LargeTiles, NarrowTiles, spec
from flashdispatch_registry import Extras, Needs, Problem
from flashdispatch_registry.problem import DTYPE_NAMES

DTYPES = (torch.bfloat16, torch.float32)
SPREAD = (
    "named/length_1", "named/no_keys", "named/no_queries", "named/causal_tall", "named/decode_window", "named/d63",
    "named/d256_outliers", "named/d192_dv128", "named/gqa_6_3", "named/window_65_1", "named/mask_float_rows_grad",
    "named/mask_float_band", "named/mask_float_finfo_min_row", "named/lens_window_gqa_mask", "named/alibi_batch_lens",
    "named/softcap_lens", "named/sinks_empty_rows", "named/dropout_lens_gqa", "named/dropout_everything",
    "named/grad_mask_only", "named/view_expanded", "named/everything",
)  # fmt: skip
"""One case a feature; the self-test runs others, and float16."""


@pytest.fixture(params=[Emulation, NarrowTiles, LargeTiles], scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    flashdispatch.register(spec("emulation_under_test", request.param))
    yield "emulation_under_test"
    flashdispatch.unregister("emulation_under_test")


@pytest.mark.parametrize(
    ("case", "dtype"),
    list(itertools.product(SPREAD, DTYPES)),
    ids=lambda value: DTYPE_NAMES[value] if isinstance(value, torch.dtype) else value,
)
def test_it_is_conformant_in_every_tile_size(backend: str, case: str, dtype: torch.dtype) -> None:
    result = run_case(BY_ID[case], backend, dtype)
    assert result.outcome == "pass", result.report()
    assert not result.refused


def _problem(**changes: object) -> Problem:
    fields: dict[str, object] = {
        "arch": "cpu", "dtype": torch.float32, "batch": 2, "heads_q": 4, "heads_kv": 4, "seqlen_q": 70, "seqlen_k": 90,
        "head_dim": 32, "head_dim_v": 32, "scale": 32**-0.5, "needs_grad": ("q", "k", "v"),
    }  # fmt: skip
    return Problem(**(fields | changes))  # type: ignore[arg-type]  # a test's own keywords


def test_output_lse_and_gradients_are_those_of_autograd_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 70, 4, 32, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 90, 4, 32, generator=generator) for _ in range(2))
    dlse = torch.randn(2, 4, 70, generator=generator)
    problem, emulation = _problem(), Emulation()
    out, lse, saved = emulation.forward(problem, q, k, v, Extras())
    got = emulation.backward(problem, saved, dout, dlse, Needs(q=True, k=True, v=True, attn_mask=False, sinks=False))

    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = 32**-0.5 * leaves[0] @ leaves[1].mT
    true_lse = scores.logsumexp(-1)
    true_out = scores.softmax(-1) @ leaves[2]
    wanted = torch.autograd.grad([true_out, true_lse], leaves, [dout.double().transpose(1, 2), dlse.double()])
    assert lse is not None
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double().transpose(1, 2), true_out, rtol=1e-5, atol=1e-6)
    for gradient, true in zip((got.q, got.k, got.v), wanted, strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient.double().transpose(1, 2), true, rtol=1e-5, atol=1e-5)


def test_it_works_in_tiles() -> None:
    assert Emulation().key_tiles(torch.empty(1, 130, 1, 8)) == [slice(0, 64), slice(64, 128), slice(128, 130)]
    assert NarrowTiles().query_tiles(torch.empty(1, 40, 1, 8)) == [slice(0, 32), slice(32, 40)]
    assert LargeTiles().key_tiles(torch.empty(1, 0, 1, 8)) == []


@pytest.mark.parametrize("dtype", [torch.float16, *DTYPES])
def test_weights_and_outputs_are_rounded_once_to_the_storage_dtype(dtype: torch.dtype) -> None:
    seen: list[torch.Tensor] = []

    class Watched(Emulation):
        def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            seen.append(a)
            return super().matmul(a, b)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 1, 32, generator=generator).to(dtype) for _ in range(3))
    problem = _problem(dtype=dtype, batch=1, heads_q=1, heads_kv=1, seqlen_q=40, seqlen_k=40, needs_grad=())
    out, lse, saved = Watched().forward(problem, q, k, v, Extras())
    assert len(seen) == 2  # Q K^T and P V, in float32 with operands of the storage dtype
    for operand in seen:
        assert operand.dtype == torch.float32
        assert torch.equal(operand, operand.to(dtype).float())
    assert (out.dtype, lse, saved) == (dtype, None, ())


def test_it_is_never_chosen_unless_it_is_named(backend: str) -> None:
    q = torch.randn(1, 16, 2, 16)
    candidate = flashdispatch.explain(q, q, q).candidate(backend)
    assert flashdispatch.explain(q, q, q).chosen != backend
    assert "NOT_AUTO" in {str(reason.code) for reason in candidate.reasons}
