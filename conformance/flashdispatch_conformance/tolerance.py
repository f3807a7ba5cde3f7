"""One tolerance for every backend, shape and tensor: the error divided by the rounding noise that exact attention has.

An absolute or relative tolerance must be wide enough for the noisiest row and so hides a wrong element in a quiet one;
"k times PyTorch's error" depends on how bad PyTorch is. Here every element has its own sigma, a first-order model of
the rounding that the contract allows, and the z-score ``(got - truth) / sigma`` is held by the same `GATES` everywhere.
They are frozen with the suite's version and never widened for a backend.

What a backend may round: products and sums are float32; the weights P and the dS of the backward are rounded once to
the storage dtype; O once; the backward recomputes P from the LSE and takes Delta from the stored O; dK and dV may be
rounded per query head before they are summed over a GQA group (FlashAttention-2, arXiv 2307.08691, does just that).
Unit roundoff u: bfloat16 2^-8, float16 2^-11, float32 w = 2^-24; u_m is the rounding of matmul operands (2^-11 with
TF32, else 0); u_o the rounding of outputs (u, but w with TF32). Elementwise variances, o being the elementwise product
and X2 = X o X; A = P o Z are the weights after dropout, t = dT/dR the slope of the softcap:

    vT  = (2 u_m^2 + 4 w^2) scale^2 (Q2 K2^T)                      scores
          with a softcap: t^2 (that + (2w)^2 R2) + (2w)^2 T2       through tanh, which is rounded itself
    vS  = vT + (2w)^2 S2                                           the argument of exp
          with a bias: + (2w)^2 (T2 + bias2)                       the bias is rounded and added (ALiBi, float mask)
    r   = rowsum(P2 o vS)                                          LSE; with a sink: + p_s^2 (2w)^2 sink^2
    vO  = (u^2 + u_m^2) A2 V2 + (A2 o vS) V2 + r O2 + u_o^2 O2
    vd  = rowsum(dO2 o vO) + (2w)^2 (rowsum(dO2 o O2) + dlse^2)    Delta, from the stored O
    vdP = Z2 o (2 u_m^2 + 4 w^2) (dO2 V2^T)
    vdS = u^2 dS2 + dS2 o vS + P2 o vdP                            without the row's common part, r and vd
    vdR = t^2 vdS + dS2 o ((2 T / cap^2)^2 vT + (2w)^2)            t has noise too; 0 without a softcap
    vdQ = scale^2 [vdR K2 + vd ((P o t) K)^2 + u_m^2 dR2 K2] + r dQ2 + u_o^2 dQ2
    vdK = sum_h scale^2 [vdR^T Q2 + (P o t)2^T (vd o Q2) + u_m^2 dR2^T Q2 + dR2^T (r o Q2)] + u_o^2 dK_h^2, + u_o^2 dK2
    vdV = sum_h (u^2 + u_m^2) A2^T dO2 + (A2 o vS)^T dO2 + A2^T (r o dO2) + u_o^2 dV_h^2, + u_o^2 dV2

dropout only scales: Z is exact, and 1 / (1 - p) is one rounding more of a value that is rounded anyway. The gradient of
a float mask is dS summed over the mask's broadcast dims. Rounding of single entries is independent, but an error of
Delta_i or lse_i moves a whole row together, so it is summed along the keys before it is squared. With Sum over the
entries that one mask element was broadcast to, row sums running over the keys among them:

    vdmask = Sum vdS + Sum_rows [vd (rowsum P)^2 + r (rowsum dS)^2] + u_mask^2 dmask^2
    vdsink = sum_i p_s^2 [vd + delta^2 (r + (2w)^2 (sink^2 + lse^2))] + w^2 dsink^2

sigma = sqrt(v) + 2w M + eta E. M is the sum of the absolute values of the terms that an element is summed from (it
covers cancellation in float32 sums), eta E the smallest numbers: below 2^-25 (half of float16's smallest subnormal)
float16 rounds P, dS and outputs to 0, and below 2^-126 float32 and bfloat16 may flush to 0; E says how such errors of
single weights add up. LSE: sigma = sqrt(r + u_m^2 scale^2 Q2 ((P o t) K)^2) + 4w (1 + |lse| + |row maximum|).

**float32 is judged no finer than float16 rounding** (gate ``float32_coarse``). At u = w the model lacks a term that
grows with the number of summed values: honest float32 kernels break it on long one-signed sums (z up to 12 was measured
at Sk = 16384). Until that term is derived, these z are recorded and carry no verdict. The verdict is by a second sigma,
the same model and the same gates with float16's u = u_o = 2^-11. That is sound whatever the order of summation: a
correct float16 kernel sums in float32 too, and then rounds P, dS and outputs 2^13 times as coarsely, so who is less
accurate is wrong. Not found in float32: any error as small as float16's rounding, such as weights kept in float16. The
LSE is rounded to 16 bits by nobody, so it has one sigma in all dtypes and is judged in full.

**float32 with TF32 is judged no finer than bfloat16 rounding**: u = u_m = u_o = 2^-8 in the second sigma. float16's
would not do, as TF32 products read 11 bits of q, k, v and dout themselves, and hardware may cut where it does not
round: errors of one sign, up to 2^-10. bfloat16's rounding is four times that.

**float64** has as many digits as the truth, so there is no noise model: |got - truth| <= 1e-10 M, and for a gradient
that is stored in float32 (sinks, a float32 mask) that one rounding. Sums of up to 1e3 terms with scores up to 1e3 lose
about 2^-53 * 1e3 * 1e3 = 1e-10 in either of the two; a wrong formula is off by far more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from flashdispatch_conformance.oracle import Head, Truth, heads, reduce_to, truth
from flashdispatch_registry.backend import Extras
from flashdispatch_registry.problem import Problem

Gate = Literal["shape", "finite", "exact", "rms", "row", "max", "bias", "float32_coarse", "float64"]

W = 2.0**-24
"""Unit roundoff of float32."""
TF32_ROUNDOFF = 2.0**-11
ROUNDOFF: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: W, torch.float64: 2.0**-53}
)
UNDERFLOW: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126, torch.float64: 2.0**-1022}
)
FLOAT64_RTOL = 1e-10

_JUDGED = (
    "{}: judged no finer than {} rounding until its own model is derived. Judged: the z-scores called float32_coarse, "
    "shapes, finiteness, exact zeros. Recorded without a verdict: the other z-scores"
)
FLOAT32_JUDGED: Mapping[str, str] = MappingProxyType(
    {"ieee": _JUDGED.format("float32", "float16"), "tf32": _JUDGED.format("float32 with TF32", "bfloat16")}
)
"""What is judged in float32 and what is not, by `Problem.fp32_precision`."""


@dataclass(frozen=True, slots=True)
class Gates:
    """What z must satisfy, per tensor. `bias` is |mean(z * sign(truth))|, gated from `bias_numel` elements on."""

    rms: float = 1.5
    row: float = 4.0
    max: float = 8.0
    bias: float = 0.25
    bias_numel: int = 4096


GATES = Gates()
"""Measured in float16 and bfloat16, torch_reference on an H200, the worst of all tensors of the named cases: RMS 0.82
and row 1.64 (both of the LSE; others 0.44 and 1.09), max 1.64, bias 0.06 (docs/evidence/torch_reference_h200.json)."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one output or gradient must be: the truth, one sigma per element, and where only the exact value will do."""

    truth: Tensor
    """float64."""
    sigma: Tensor
    """float64, same shape; 0 where nothing is summed, so that there only the truth itself passes."""
    exact: Tensor
    """bool, same shape: 0 or -inf by contract (rows that see no key, rows past q_lens, keys that nobody sees)."""
    coarse: Tensor | None = None
    """The sigma of the verdict in float32, never missing there: with float16's rounding (TF32: bfloat16's)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A gate that a tensor broke, and the numbers."""

    gate: Gate
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The four numbers of z over the elements that are not exact by contract, as far as both are finite."""

    rms: float = 0.0
    row: float = 0.0
    """Largest RMS over one row: the last dim of a tensor with a head dim or a mask's keys; else one element."""
    max: float = 0.0
    bias: float = 0.0
    numel: int = 0
    worst_index: tuple[int, ...] = ()
    """Where |z| is largest."""

    def __str__(self) -> str:
        worst = f"max {self.max:.3g} at {list(self.worst_index)}"
        return f"rms {self.rms:.3g}, row {self.row:.3g}, bias {self.bias:+.3f}, {worst}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Scores):
    """How one tensor compares with the truth: z under the noise model of its own dtype, and the gates it breaks."""

    judged: bool = True
    """False in float32: these z-scores are recorded without a verdict, and those of `coarse` are judged."""
    coarse: Scores | None = None
    """float32 only: z with float16's rounding (TF32: bfloat16's)."""
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class _Roundoff:
    """The constants of the model for one problem."""

    u: float
    u_m: float
    u_o: float

    @classmethod
    def of(cls, problem: Problem) -> _Roundoff:
        u = ROUNDOFF[problem.dtype]
        if problem.dtype == torch.float32 and problem.fp32_precision == "tf32":
            return cls(TF32_ROUNDOFF, TF32_ROUNDOFF, W)
        return cls(u, 0.0, u)

    def coarse(self) -> _Roundoff:
        """What float32 is held to: float16's rounding of P, dS and outputs; with TF32 bfloat16's, and of operands."""
        if self.u_m:
            return _Roundoff(*[ROUNDOFF[torch.bfloat16]] * 3)
        return _Roundoff(ROUNDOFF[torch.float16], 0.0, ROUNDOFF[torch.float16])


class _Noise:
    """Variance, absolute sum M and underflow factor E of one tensor, filled head by head."""

    def __init__(self, like: Tensor) -> None:
        self.v, self.M, self.E = (torch.zeros_like(like) for _ in range(3))
        self.exact = torch.ones_like(like, dtype=torch.bool)

    def sigma(self, problem: Problem, true: Tensor, stored: torch.dtype) -> Tensor:
        if problem.dtype == torch.float64:
            return FLOAT64_RTOL * self.M + ROUNDOFF[stored] * true.abs() + UNDERFLOW[torch.float64] * self.E
        return self.v.sqrt() + 2 * W * self.M + UNDERFLOW[problem.dtype] * self.E


def _norm(rows: Tensor) -> Tensor:
    """Root of the sum of squares over the first dim: how independent errors of one unit per row add up."""
    return rows.square().sum(0).sqrt()


def _add_head(noise: dict[str, _Noise], head: Head, problem: Problem, unit: _Roundoff, backward: bool) -> None:
    """Adds one head's terms, in the order and the letters of the module's docstring."""
    scale = problem.scale
    u2, um2, uo2, w2 = unit.u**2, unit.u_m**2, unit.u_o**2, W**2
    b, h, n, m = head.b, head.h, head.Q.shape[0], head.K.shape[0]
    kv = h // problem.group
    P, Z, O, T, t, dS, dR, dO = head.P, head.Z, head.O, head.T, head.tanh_slope, head.dS, head.dR, head.dO  # noqa: E741
    A = P * Z
    Q2, K2, V2, O2, P2, A2, dO2, dS2, dR2 = (x.square() for x in (head.Q, head.K, head.V, O, P, A, dO, dS, dR))
    seen_rows, seen_keys = head.visible.any(1), head.visible.any(0)

    vT = (2 * um2 + 4 * w2) * scale**2 * (Q2 @ K2.T)
    v_slope = torch.zeros_like(T)
    if problem.softcap is not None:
        R = scale * (head.Q @ head.K.T)
        vT = t.square() * (vT + 4 * w2 * R.square()) + 4 * w2 * T.square()
        v_slope = (2 * T / problem.softcap**2).square() * vT + 4 * w2
    vS = vT + 4 * w2 * torch.where(head.visible, head.S, 0.0).square()
    if problem.alibi or problem.attn_mask == "float":
        vS = vS + 4 * w2 * (T.square() + head.bias.square())
    r = (P2 * vS).sum(1)
    p_s, sink = head.sink_weight, torch.tensor(0.0) if head.sink is None else head.sink
    r = r + p_s.square() * 4 * w2 * sink.square()
    vO = ((u2 + um2) * A2 + A2 * vS) @ V2 + (r[:, None] + uo2) * O2

    top = torch.where(head.visible, head.S, -torch.inf).amax(1) if m else torch.full((n,), -torch.inf)
    if head.sink is not None:
        top = torch.maximum(top, head.sink)
    finite = head.lse.isfinite()
    top, lse = torch.where(finite, top, 0.0), torch.where(finite, head.lse, 0.0)
    total = torch.exp(lse - top)  # the softmax denominator relative to its largest term, >= 1
    kept = 1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1.0 else 0.0

    out = noise["out"]
    out.v[b, :n, h] = vO
    out.M[b, :n, h] = A @ head.V.abs()
    out.E[b, :n, h] = 1.0 + kept * _norm(head.V) / total[:, None]
    out.exact[b, :n, h] = ~seen_rows[:, None]
    row = noise["lse"]
    row.v[b, h, :n] = r + um2 * scale**2 * (Q2 * ((P * t) @ head.K).square()).sum(1)
    row.M[b, h, :n] = 2.0 * (1.0 + lse.abs() + top.abs())  # 4w in sigma
    row.exact[b, h, :n] = ~finite
    if not backward:
        return

    vd = (dO2 * vO).sum(1) + 4 * w2 * ((dO2 * O2).sum(1) + head.dlse.square())
    vdP = Z.square() * (2 * um2 + 4 * w2) * (dO2 @ V2.T)
    vdS = u2 * dS2 + dS2 * vS + P2 * vdP
    vdR = t.square() * vdS + dS2 * v_slope
    absolute = (dO.abs() * O.abs()).sum(1) + head.dlse.abs()  # (n,): what Delta is summed from
    M_dS = P * (Z * (dO.abs() @ head.V.abs().T) + absolute[:, None])

    dq = noise["dq"]
    dq.v[b, :n, h] = scale**2 * (vdR @ K2 + vd[:, None] * ((P * t) @ head.K).square() + um2 * (dR2 @ K2))
    dq.v[b, :n, h] += (r[:, None] + uo2) * head.dQ.square()
    dq.M[b, :n, h] = abs(scale) * (M_dS @ head.K.abs())
    dq.E[b, :n, h] = 1.0 + abs(scale) * _norm(head.K)
    dq.exact[b, :n, h] = ~seen_rows[:, None]
    dk = noise["dk"]
    dk.v[b, :m, kv] += scale**2 * (
        vdR.T @ Q2 + (P * t).square().T @ (vd[:, None] * Q2) + um2 * (dR2.T @ Q2) + dR2.T @ (r[:, None] * Q2)
    )
    dk.v[b, :m, kv] += uo2 * head.dK.square()
    dk.M[b, :m, kv] += abs(scale) * (M_dS.T @ head.Q.abs())
    dk.E[b, :m, kv] += 1.0 + abs(scale) * _norm(head.Q)
    dv = noise["dv"]
    dv.v[b, :m, kv] += ((u2 + um2) * A2 + A2 * vS).T @ dO2 + A2.T @ (r[:, None] * dO2) + uo2 * head.dV.square()
    dv.M[b, :m, kv] += A.T @ dO.abs()
    dv.E[b, :m, kv] += 1.0 + kept * _norm(dO)
    for gradient in (dk, dv):
        gradient.exact[b, :m, kv] &= ~seen_keys[:, None]

    if "dattn_mask" in noise:
        _add_mask(noise["dattn_mask"], head, vdS, vd, r, M_dS)
    if "dsinks" in noise:
        spread = r + 4 * w2 * (sink.square() + lse.square())
        noise["dsinks"].v[h] += (p_s.square() * (vd + head.delta.square() * spread)).sum()
        noise["dsinks"].M[h] += (p_s * absolute).sum()
        noise["dsinks"].E[h] += n**0.5
        noise["dsinks"].exact[h] = False


def _add_mask(dmask: _Noise, head: Head, vdS: Tensor, vd: Tensor, r: Tensor, M_dS: Tensor) -> None:
    """The terms of one head in the gradient of a float mask."""
    b, h = head.b, head.h
    reduce_to(dmask.v, vdS, b, h)
    if dmask.v.shape[3] == 1:
        common = vd * head.P.sum(1).square() + r * head.dS.sum(1).square()  # (n,): a row moves together
        reduce_to(dmask.v, common[:, None], b, h)
    else:
        reduce_to(dmask.v, vd[:, None] * head.P.square() + r[:, None] * head.dS.square(), b, h)
    reduce_to(dmask.M, M_dS, b, h)
    seen = torch.zeros_like(dmask.E)
    reduce_to(seen, head.visible.double(), b, h)
    dmask.E += seen  # a count while it is summed, its root at the end
    dmask.exact &= seen == 0


def expect(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> dict[str, Expected]:
    """Truth, sigma and exact places of every output and gradient, by name: out, lse, dq, dk, dv, dattn_mask, dsinks.

    Arguments as for `oracle.truth`. Gradients are there when dout or dlse is given, those of mask and sinks when there
    is a float mask and there are sinks.
    """
    backward = dout is not None or dlse is not None
    exact = truth(problem, q, k, v, extras, dout, dlse)
    tensors = {name: value for name in Truth.__slots__ if isinstance(value := getattr(exact, name), Tensor)}
    unit = _Roundoff.of(problem)
    units = (unit, unit.coarse()) if problem.dtype == torch.float32 else (unit,)
    noises = [{name: _Noise(value) for name, value in tensors.items()} for _ in units]
    for head in heads(problem, q, k, v, extras, dout, dlse):
        for noise, each in zip(noises, units, strict=True):
            _add_head(noise, head, problem, each, backward)
    sigma, *coarse = (
        _sigmas(noise, tensors, problem, each, extras, backward) for noise, each in zip(noises, units, strict=True)
    )
    return {
        name: Expected(true, sigma[name], noises[0][name].exact, coarse[0][name] if coarse else None)
        for name, true in tensors.items()
    }


def _sigmas(
    noise: dict[str, _Noise],
    tensors: dict[str, Tensor],
    problem: Problem,
    unit: _Roundoff,
    extras: Extras,
    backward: bool,
) -> dict[str, Tensor]:
    """Sigma by name, from what every head has added and the last rounding of the sums over heads."""
    for name in ("dk", "dv") if backward else ():
        noise[name].v += unit.u_o**2 * tensors[name].square()
    stored = dict.fromkeys(tensors, problem.dtype)
    if "dattn_mask" in noise and extras.attn_mask is not None:
        stored["dattn_mask"] = extras.attn_mask.dtype
        dmask = noise["dattn_mask"]
        dmask.v += (ROUNDOFF[extras.attn_mask.dtype] * tensors["dattn_mask"]).square()
        dmask.E = torch.where(dmask.E > 0, 1.0 + dmask.E.sqrt(), 0.0)
    if "dsinks" in noise:
        stored["dsinks"] = torch.float32
        noise["dsinks"].v += (W * tensors["dsinks"]).square()
    return {name: noise[name].sigma(problem, true, stored[name]) for name, true in tensors.items()}


def judge(name: str, got: Tensor, expected: Expected, problem: Problem) -> Stats:
    """Compares one tensor with what is expected of it and names every gate it breaks."""
    if got.shape != expected.truth.shape:
        text = f"{name} has shape {tuple(got.shape)}, expected {tuple(expected.truth.shape)}"
        return Stats(failures=(Failure("shape", text),))
    value, true, exact = got.detach().cpu().double(), expected.truth, expected.exact
    failures: list[Failure] = []

    infinite = value.isfinite() != true.isfinite()
    if infinite.any():
        first = tuple(infinite.nonzero()[0].tolist())
        text = f"{name}{list(first)} is {value[first]} where the truth is {true[first]}"
        failures.append(Failure("finite", f"{text}; {int(infinite.sum())} of {value.numel()} elements like it"))
    inexact = exact & (value != true) & ~infinite
    if inexact.any():
        first = tuple(inexact.nonzero()[0].tolist())
        text = f"{name}{list(first)} is {value[first]:.3g} but must be exactly {true[first]}"
        failures.append(Failure("exact", f"{text}; {int(inexact.sum())} of {value.numel()} elements like it"))

    free = ~exact & value.isfinite() & true.isfinite()
    error = torch.where(free, value - true, 0.0)
    scores, coarse = _scores(name, error, expected.sigma, true, free), None
    if problem.dtype == torch.float64:
        if scores.max > 1.0:
            text = f"{name}{list(scores.worst_index)} is off by {scores.max:.3g} times what float64 allows"
            failures.append(Failure("float64", text))
    elif problem.dtype == torch.float32:
        if expected.coarse is None:
            raise ValueError(f"no coarse sigma for {name}: a float32 tensor would go unjudged")
        coarse = _scores(name, error, expected.coarse, true, free)
        failures += [
            Failure("float32_coarse", f"{failure.message} [float32_coarse]") for failure in _broken(name, coarse)
        ]
    else:
        failures += _broken(name, scores)
    return Stats(
        **{item.name: getattr(scores, item.name) for item in fields(Scores)},
        judged=coarse is None,
        coarse=coarse,
        failures=tuple(failures),
    )


def _scores(name: str, error: Tensor, sigma: Tensor, true: Tensor, free: Tensor) -> Scores:
    """The four numbers of z over the elements that are free to have noise; `error` is 0 at the others."""
    count = int(free.sum())
    if not count:
        return Scores()
    z = torch.where(error == 0, 0.0, error / sigma)  # sigma 0: only the truth passes, else infinite
    per_row = z.square()
    if name not in ("lse", "dsinks"):  # they have one value a row
        per_row = per_row.sum(-1) / free.sum(-1).clamp(min=1)
    worst = int(z.abs().argmax())
    return Scores(
        rms=float((z.square().sum() / count).sqrt()),
        row=float(per_row.max().sqrt()),
        max=float(z.abs().max()),
        bias=float((z * true.sign()).sum() / count),
        numel=count,
        worst_index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), z.shape)),
    )


def _broken(name: str, scores: Scores) -> list[Failure]:
    """The z gates that `scores` breaks."""
    values: tuple[tuple[Gate, float, float], ...] = (
        ("rms", scores.rms, GATES.rms),
        ("row", scores.row, GATES.row),
        ("max", scores.max, GATES.max),
        ("bias", abs(scores.bias) if scores.numel >= GATES.bias_numel else 0.0, GATES.bias),
    )
    return [
        Failure(gate, f"{name}: {gate} of z is {value:.3g}, allowed {limit:g}; worst at {list(scores.worst_index)}")
        for gate, value, limit in values
        if not value <= limit
    ]
