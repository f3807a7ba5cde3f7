"""The noise model passes an honest tiled kernel on every named case; each seeded fault breaks the gate named for it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from flashdispatch_conformance import run_case
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.cases import BY_ID, NAMED
from flashdispatch_conformance.inputs import build
from flashdispatch_conformance.oracle import length, position, reduce_to
from flashdispatch_conformance.philox import keep_mask
from flashdispatch_conformance.tolerance import (
    GATES,
    Expected,
    Gates,
    Stats,
    W,
    accumulation,
    expect,
    judge,
    truncation,
)
from flashdispatch_registry import Extras, Problem
from flashdispatch_registry.problem import DTYPE_NAMES

NEG_INF = float("-inf")
TILE = 32


def truncate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A store that rounds toward zero, as cutting a float32 after 16 bits does."""
    rounded = x.to(dtype).float()
    over = rounded.abs() > x.abs()
    toward_zero = rounded * (1 - 2.0 ** (-8 if dtype == torch.bfloat16 else -11))
    return torch.where(over, toward_zero.to(dtype).float(), rounded).to(dtype)


def tf32(x: Tensor, *, cut: bool = False) -> Tensor:
    """float32 with the 10 bits of mantissa that a TF32 product reads: rounded to nearest, or the rest cut off."""
    return ((x.contiguous().view(torch.int32) + (0 if cut else 0x1000)) & ~0x1FFF).view(torch.float32)


def emulate(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    dout: Tensor | None,
    dlse: Tensor | None,
    fault: str = "",
) -> dict[str, Tensor]:
    """FlashAttention-2 as a kernel runs it: float32 sums tile by tile, P, dS and outputs rounded to the storage dtype.

    With TF32 the operands of products are rounded to it. `fault` seeds one mistake ("cut" is none: TF32 hardware may).
    """
    dtype, scale, cap = problem.dtype, problem.scale, problem.softcap
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    got = {
        "out": torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype),
        "lse": torch.full((batch, heads_q, seqlen_q), NEG_INF),
    }
    backward = dout is not None or dlse is not None
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    dsinks = torch.zeros(heads_q)
    dmask = (
        torch.zeros(extras.attn_mask.shape) if problem.attn_mask == "float" and extras.attn_mask is not None else None
    )
    if fault == "scale_1_percent":
        scale *= 1.01

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    def operand(x: Tensor) -> Tensor:
        return tf32(x, cut=fault == "cut") if problem.fp32_precision == "tf32" else rounded(x)

    for b, h in itertools.product(range(batch), range(heads_q)):
        n, m = length(extras.q_lens, b, seqlen_q), length(extras.kv_lens, b, seqlen_k)
        kv = h % heads_kv if fault == "wrong_gqa_map" else h // problem.group
        Q, K, V = (operand(x) for x in (q[b, :n, h], k[b, :m, kv], v[b, :m, kv]))
        band = problem.band
        if fault == "causal_off_by_one":
            band = replace(band, right=1)
        elif fault == "window_off_by_one":
            band = replace(band, left=(band.left or 0) + 1)
        elif fault == "wrong_diagonal":
            band = replace(band, align="top_left")
        visible = band.dense(n, m)
        bias = torch.zeros(n, m)
        if extras.attn_mask is not None:
            mask = extras.attn_mask[min(b, extras.attn_mask.shape[0] - 1), min(h, extras.attn_mask.shape[1] - 1)]
            mask = mask[: n if mask.shape[0] > 1 else 1, : m if mask.shape[1] > 1 else 1].expand(n, m)
            if mask.dtype == torch.bool:
                visible = visible & (mask | (fault == "mask_ignored"))
            else:
                bias = mask.float()
        if extras.alibi_slopes is not None:
            slopes = extras.alibi_slopes[b] if extras.alibi_slopes.dim() == 2 else extras.alibi_slopes
            p_i = torch.arange(n)[:, None] if fault == "alibi_top_left" else position(problem, n, m)
            bias = bias - slopes[h] * (p_i - torch.arange(m)).abs().float()
        if fault == "last_key_dropped":
            visible[:, m - 1 :] = False
        Z = torch.ones(n, m)
        if problem.dropout_p:
            assert extras.dropout_seed is not None
            seed, offset = extras.dropout_seed.tolist()
            kept = torch.from_numpy(keep_mask(seed, offset, b * heads_q + h, n, m, problem.dropout_p)).float()
            Z = kept / (1 - problem.dropout_p) if problem.dropout_p < 1 else torch.zeros(n, m)
            if fault == "dropout_unscaled":
                Z = kept

        def scores(j: slice, Q: Tensor = Q, K: Tensor = K, bias: Tensor = bias) -> tuple[Tensor, Tensor]:
            s = (Q @ K[j].T) * scale
            if fault == "scores_rounded":
                s = rounded(s)
            slope = torch.ones_like(s)
            if cap is not None:
                t = torch.tanh(s / cap)
                s, slope = t * cap, 1 - t * t
            return s + bias[:, j], slope

        sink = None if extras.sinks is None or fault == "sinks_ignored" else extras.sinks[h]
        top = torch.full((n,), NEG_INF) if sink is None else sink.expand(n).clone()
        total = torch.zeros(n) if sink is None else torch.ones(n)
        acc = torch.zeros(n, V.shape[1])
        tiles = [slice(start, min(start + TILE, m)) for start in range(0, m, TILE)]
        for j in tiles:
            s = torch.where(visible[:, j], scores(j)[0], NEG_INF)
            new = torch.maximum(top, s.amax(1))
            finite = torch.where(new == NEG_INF, 0.0, new)
            weights, rescale = torch.exp(s - finite[:, None]), torch.exp(top - finite)
            if fault == "tail_unmasked" and j.stop - j.start < TILE:
                total = total + (TILE - j.stop + j.start) * torch.exp(0.0 - finite)
            if fault == "no_rescale_of_last_tile" and j is tiles[-1]:
                rescale = torch.ones_like(rescale)
            total = total * rescale + weights.sum(1)
            acc = acc * rescale[:, None] + operand(weights * Z[:, j]) @ V[j]
            top = new
        some = total > 0
        O = torch.where(some[:, None], acc / total[:, None], 0.0)  # noqa: E741
        O = truncate(O, dtype) if fault == "truncating_store" else O.to(dtype)  # noqa: E741
        if fault == "one_wrong_element" and (b, h) == (0, heads_q - 1):
            O[n // 2, 3] += 0.05 * O[n // 2].abs().max()
        if fault == "stale_row":
            O[n // 2] = O[n // 2 - 1]
        if fault == "empty_rows_are_means":
            O[~visible.any(1)] = V.mean(0).to(dtype)
        lse = torch.where(some, top + torch.log(total), NEG_INF)
        got["out"][b, :n, h], got["lse"][b, h, :n] = O, lse
        if fault == "lse_base_2":
            got["lse"][b, h, :n] = lse / math.log(2)
        if not backward:
            continue

        dO = torch.zeros_like(O).float() if dout is None else dout[b, :n, h].float()
        dL = torch.zeros(n) if dlse is None else torch.where(some, dlse[b, h, :n], 0.0)
        delta = (dO * O.float()).sum(1) - (torch.zeros(n) if fault == "lse_gradient_ignored" else dL)
        if fault == "delta_of_next_row":
            delta = delta.roll(1)
        dO = operand(dO)
        dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        for j in tiles:
            s, slope = scores(j)
            weights = torch.where(
                visible[:, j] & some[:, None], torch.exp(s - torch.where(some, lse, 0.0)[:, None]), 0.0
            )
            dP = Z[:, j] * (dO @ V[j].T)
            dS = weights * (dP - delta[:, None])
            if dmask is not None and not (fault == "mask_gradient_of_last_batch" and b < batch - 1):
                full = torch.zeros(n, m)
                full[:, j] = dS
                reduce_to(dmask, full, b, h)
            dR = operand(dS * (1.0 if fault == "no_tanh_slope" else slope))
            if not (fault == "dq_misses_a_tile" and j is tiles[0]):
                dQ += dR @ K[j] * scale
            dK[j] += dR.T @ Q * scale
            dV[j] += operand(weights * Z[:, j]).T @ dO
        dq[b, :n, h] = dQ
        if fault != "dk_of_first_head" or h % problem.group == 0:
            dk[b, :m, kv] += rounded(dK)
        dv[b, :m, kv] += rounded(dV)
        if extras.sinks is not None:
            dsinks[h] -= (torch.exp(extras.sinks[h] - lse)[:n] * delta).sum()
    if fault == "reads_padding":
        got["out"] = got["out"] + 0 * q.amax().to(dtype)
    if backward:
        got |= {"dq": dq.to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}
        if dmask is not None and extras.attn_mask is not None:
            got["dattn_mask"] = dmask.to(extras.attn_mask.dtype)
        if extras.sinks is not None:
            got["dsinks"] = dsinks
    return got


def run(
    case: Case, dtype: torch.dtype, fault: str = "", precision: Literal["ieee", "tf32"] = "ieee"
) -> dict[str, Stats]:
    inputs = build(case, dtype, "cpu", "cpu")
    problem, arguments = replace(inputs.problem, fp32_precision=precision), inputs.canonical()
    got = emulate(problem, *arguments, fault=fault)
    expected = expect(problem, *arguments)
    assert expected.keys() == got.keys()
    return {name: judge(name, got[name], expected[name], dtype) for name in expected}


SHORT = [case for case in NAMED if case.heads[0] * case.seqlens[0] * case.seqlens[1] <= 500_000]
"""The longer ones would take minutes in this emulation, which goes head by head."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("case", SHORT, ids=[case.id for case in SHORT])
def test_an_honest_tiled_kernel_breaks_no_gate(case: Case, dtype: torch.dtype) -> None:
    failures = [failure for stats in run(case, dtype).values() for failure in stats.failures]
    assert not failures


@pytest.mark.parametrize("rounding", ["nearest", "cut"])
@pytest.mark.parametrize("case", SHORT, ids=[case.id for case in SHORT])
def test_an_honest_tf32_kernel_breaks_no_gate(case: Case, rounding: str) -> None:
    failures = [failure for stats in run(case, torch.float32, rounding, "tf32").values() for failure in stats.failures]
    assert not failures


LONG = [
    Case(id="test/long_keys", why="long sums in O, dQ", heads=(1, 1), seqlens=(8, 16384), values="shifted_v"),
    Case(id="test/long_queries", why="and in dK, dV", heads=(1, 1), seqlens=(16384, 8), values="shifted_v"),
]


@pytest.mark.parametrize("case", LONG, ids=[case.id for case in LONG])
def test_float32_holds_on_long_sums_of_one_sign(case: Case) -> None:
    """The term that grows with their length is what they need."""
    for stats in run(case, torch.float32).values():
        assert not stats.failures
    result = run_case(case, "torch_reference", torch.float32)
    assert result.outcome == "pass", result.report()


@pytest.mark.parametrize(
    "name",
    [
        "cross_wide", "gqa_8_2", "peaked", "softcap_peaked", "alibi_causal", "dropout", "sinks_window_gqa",
        "mask_float_grad", "mask_float_keys_grad", "mask_float_finfo_min", "lens_causal", "everything",
    ],
)  # fmt: skip
def test_sigma_is_of_the_size_of_the_noise(name: str) -> None:
    """A model that allows too much would pass anything: an honest kernel must use a fair part of what it is allowed."""
    for tensor, stats in run(BY_ID[f"named/{name}"], torch.bfloat16).items():
        assert (0.03 if tensor == "lse" else 0.1) < stats.rms < 0.6


FAULTS = [
    ("scale_1_percent", "named/length_65", "out", "rms"),
    ("scale_1_percent", "named/length_65", "lse", "rms"),
    ("last_key_dropped", "named/cross_wide", "out", "rms"),
    ("last_key_dropped", "named/cross_wide", "lse", "max"),
    ("causal_off_by_one", "named/length_65", "out", "rms"),
    ("window_off_by_one", "named/window_64", "out", "row"),
    ("wrong_diagonal", "named/causal_wide", "out", "rms"),
    ("wrong_gqa_map", "named/gqa_8_2", "out", "rms"),
    ("mask_ignored", "named/mask_bool_batch_of_keys", "out", "rms"),
    ("mask_ignored", "named/mask_bool_all_false", "out", "exact"),
    ("empty_rows_are_means", "named/causal_tall", "out", "exact"),
    ("lse_base_2", "named/length_64", "lse", "rms"),
    ("scores_rounded", "named/cross_wide", "lse", "rms"),
    ("tail_unmasked", "named/length_65", "lse", "rms"),
    ("tail_unmasked", "named/keys_200_minus_120", "lse", "finite"),
    ("no_rescale_of_last_tile", "named/peaked", "out", "rms"),
    ("truncating_store", "named/length_64", "out", "bias"),
    ("one_wrong_element", "named/cross_wide", "out", "max"),
    ("stale_row", "named/cross_wide", "out", "row"),
    ("reads_padding", "named/lens_causal", "out", "finite"),
    ("alibi_top_left", "named/alibi_causal", "out", "rms"),
    ("sinks_ignored", "named/sinks_window_gqa", "out", "rms"),
    ("dropout_unscaled", "named/dropout", "out", "rms"),
    ("dq_misses_a_tile", "named/cross_wide", "dq", "rms"),
    ("dk_of_first_head", "named/gqa_8_2", "dk", "rms"),
    ("delta_of_next_row", "named/cross_wide", "dq", "rms"),
    ("no_tanh_slope", "named/softcap_peaked", "dq", "rms"),
    ("no_tanh_slope", "named/softcap_peaked", "dk", "rms"),
    ("lse_gradient_ignored", "named/lse_gradient", "dq", "rms"),
    ("mask_gradient_of_last_batch", "named/mask_float32_shared_grad", "dattn_mask", "rms"),
]


NONE_IN_FLOAT32 = {"scores_rounded", "truncating_store"}
"""Rounding scores to the dtype, and cutting the last bit of what is stored: in float32 neither is a fault."""
IN_FLOAT32 = [fault for fault in FAULTS if fault[0] not in NONE_IN_FLOAT32]


@pytest.mark.parametrize(("fault", "case", "tensor", "gate"), IN_FLOAT32)
def test_a_seeded_fault_breaks_its_gate_in_float32(fault: str, case: str, tensor: str, gate: str) -> None:
    assert gate in {failure.gate for failure in run(BY_ID[case], torch.float32, fault)[tensor].failures}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get)
@pytest.mark.parametrize(("fault", "case", "tensor", "gate"), FAULTS)
def test_a_seeded_fault_breaks_its_gate(fault: str, case: str, tensor: str, gate: str, dtype: torch.dtype) -> None:
    broken = {failure.gate for failure in run(BY_ID[case], dtype, fault)[tensor].failures}
    assert gate in broken


@pytest.mark.parametrize(("fault", "case", "tensor", "gate"), IN_FLOAT32)
def test_a_seeded_fault_is_found_with_tf32_too(fault: str, case: str, tensor: str, gate: str) -> None:
    assert any(stats.failures for stats in run(BY_ID[case], torch.float32, fault, "tf32").values())


def judge_one(
    got: Tensor, truth: Tensor, sigma: float, dtype: torch.dtype = torch.bfloat16, drift: float = 0.0, rows: int = 64
) -> Stats:
    sigmas = torch.full(truth.shape, sigma, dtype=torch.float64)
    expected = Expected(truth.double(), sigmas, truth.double() == NEG_INF, drift * sigmas, rows)
    return judge("out", got, expected, dtype)


def test_the_gates_are_frozen() -> None:
    assert Gates(rms=1.5, row=4.0, max=8.0, bias=0.25, bias_numel=4096, bias_rows=64) == GATES


def test_statistics_are_over_rows_of_the_last_dim() -> None:
    truth = torch.ones(2, 1, 1, 4)
    got = truth.clone()
    got[1, 0, 0, 2] += 2.0
    stats = judge_one(got, truth, sigma=1.0)
    assert stats.max == 2.0
    assert stats.worst_index == (1, 0, 0, 2)
    assert stats.row == pytest.approx(1.0)  # sqrt(4 / 4)
    assert stats.rms == pytest.approx(math.sqrt(4 / 8))
    assert stats.bias == pytest.approx(2 / 8)
    assert not stats.failures


@pytest.mark.parametrize(("count", "broken"), [(4095, set()), (4096, {"bias"})])
def test_bias_is_gated_from_4096_elements_on(count: int, broken: set[str]) -> None:
    truth = torch.ones(1, 1, 1, count)
    assert {f.gate for f in judge_one(truth * 0.7, truth, sigma=1.0).failures} == broken


def test_bias_is_not_gated_where_a_few_rows_shift_everything() -> None:
    truth = torch.ones(1, 1, 1, 4096)
    assert not judge_one(truth * 0.7, truth, sigma=1.0, rows=63).failures


def test_a_nan_or_a_missing_infinity_breaks_finite_and_a_near_zero_breaks_exact() -> None:
    truth = torch.tensor([[[[1.0, NEG_INF]]]])
    assert {f.gate for f in judge_one(torch.tensor([[[[math.nan, NEG_INF]]]]), truth, 1.0).failures} == {"finite"}
    assert {f.gate for f in judge_one(torch.tensor([[[[1.0, -1e30]]]]), truth, 1.0).failures} == {"finite"}
    assert {f.gate for f in judge_one(torch.tensor([[[[1.0, math.inf]]]]), truth, 1.0).failures} == {"exact"}


def test_without_noise_only_the_truth_passes() -> None:
    truth = torch.ones(1, 1, 1, 4)
    assert not judge_one(truth, truth, sigma=0.0).failures
    assert {f.gate for f in judge_one(truth + 1e-30, truth, sigma=0.0).failures} == set()  # rounds to the truth
    assert "max" in {f.gate for f in judge_one(truth + 1e-6, truth, sigma=0.0).failures}


def test_a_wrong_shape_is_a_failure_of_its_own() -> None:
    assert [f.gate for f in judge_one(torch.ones(1, 1, 4), torch.ones(1, 1, 1, 4), 1.0).failures] == ["shape"]


def test_drift_widens_the_bias_gate_and_no_other() -> None:
    truth = torch.ones(1, 1, 1, 4096)
    assert {f.gate for f in judge_one(truth * 0.5, truth, 1.0).failures} == {"bias"}
    assert not judge_one(truth * 0.5, truth, 1.0, drift=0.3).failures
    assert {f.gate for f in judge_one(truth * 0.5, truth, 1.0, drift=0.2).failures} == {"bias"}
    assert {f.gate for f in judge_one(truth * -1.0, truth, 1.0, drift=9.0).failures} == {"rms"}


def test_the_histogram_counts_every_element_once() -> None:
    truth = torch.zeros(1, 1, 1, 5)
    stats = judge_one(torch.tensor([[[[-9.0, 0.0, 0.1, 3.9, 4.0]]]]), truth, 1.0)
    assert len(stats.histogram) == 34
    assert {at: count for at, count in enumerate(stats.histogram) if count} == {0: 1, 17: 2, 32: 1, 33: 1}
    assert not judge_one(torch.full((1,), NEG_INF), torch.full((1,), NEG_INF), 1.0).histogram


@pytest.mark.parametrize("signed", [True, False], ids=["one sign", "both signs"])
@pytest.mark.parametrize("terms", [100, 3000])
def test_accumulation_is_the_mean_square_of_partial_sums(terms: int, signed: bool) -> None:
    """Against what the formula stands for: the terms in 400 random orders, and all their partial sums."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(terms, dtype=torch.float64, generator=generator) + (3.0 if signed else 0.0)
    orders = torch.stack([x[torch.randperm(terms, generator=generator)].cumsum(0) for _ in range(400)])
    X1, X2 = x.sum(), x.square().sum()
    assert float(accumulation(terms, X1, X2)) == pytest.approx(W**2 * float(orders.square().sum(1).mean()), rel=0.1)
    cuts = 3 * W / 8 * float(orders.abs().sum(1).mean())
    assert 0.8 * cuts < float(truncation(terms, X1, X2)) < 3.0 * cuts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_sums_are_nothing_in_16_bit(dtype: torch.dtype) -> None:
    """The gates of 16 bit were calibrated without these terms, and stay what they were."""
    inputs = build(BY_ID["named/peaked"], dtype, "cpu", "cpu")
    for name, expected in expect(inputs.problem, *inputs.canonical()).items():
        if name != "lse":  # which is float32 in every dtype
            assert float((expected.drift / expected.sigma).mean()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_sigma_shrinks_with_the_dtype(dtype: torch.dtype) -> None:
    case = BY_ID["named/cross_wide"]

    def sigma(dtype: torch.dtype) -> float:
        inputs = build(case, dtype, "cpu", "cpu")
        return float(expect(inputs.problem, *inputs.canonical())["out"].sigma.mean())

    assert sigma(dtype) < sigma(torch.float16) / 100


def test_tf32_is_noisier_than_ieee_float32() -> None:
    inputs = build(BY_ID["named/cross_wide"], torch.float32, "cpu", "cpu")
    ieee = expect(inputs.problem, *inputs.canonical())
    tf32 = expect(replace(inputs.problem, fp32_precision="tf32"), *inputs.canonical())
    assert all((tf32[name].sigma > ieee[name].sigma).all() for name in ("out", "lse", "dq", "dk", "dv"))


def test_float64_is_held_to_its_own_digits() -> None:
    case = BY_ID["named/cross_wide"]
    inputs = build(case, torch.float64, "cpu", "cpu")
    expected = expect(inputs.problem, *inputs.canonical())["out"]
    assert not judge("out", expected.truth, expected, torch.float64).failures
    off = judge("out", expected.truth * (1 + 1e-8), expected, torch.float64)
    assert [f.gate for f in off.failures] == ["float64"]


def test_weights_below_the_smallest_number_may_be_flushed() -> None:
    """A key of weight 1e-60 has a gradient of that size; float32 rightly gives 0."""
    far = replace(BY_ID["named/decode_causal"], scale=30.0)
    failures = [failure for stats in run(far, torch.bfloat16).values() for failure in stats.failures]
    assert not failures


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (replace(BY_ID["named/cross_tall"], heads=(1, 1)), 113),
        (replace(BY_ID["named/cross_tall"], heads=(1, 1), scale=0.0), 1),
        (replace(BY_ID["named/window_1_1"], heads=(1, 1), scale=0.0), 2),
        (replace(BY_ID["named/decode_causal"], heads=(8, 2)), 8),
        (replace(BY_ID["named/causal_5_2"], heads=(1, 1)), 2),
    ],
    ids=["a query a row", "equal weights", "weights of 1/2 and 1/3", "one query a head", "one weight, and two more"],
)
def test_rows_with_errors_of_their_own_are_counted(case: Case, rows: int) -> None:
    inputs = build(case, torch.bfloat16, "cpu", "cpu")
    got = {expected.rows for expected in expect(inputs.problem, *inputs.canonical()).values()}
    assert got == {rows}
