"""One tolerance for every backend, shape and tensor: the error divided by the rounding noise that exact attention has.

An absolute or relative tolerance must be wide enough for the noisiest row and so hides a wrong element in a quiet one;
"k times PyTorch's error" depends on how bad PyTorch is. Here every element has its own sigma, a first-order model of
the rounding that the contract allows, and the z-score ``(got - truth) / sigma`` is held by the same `GATES` everywhere.
They are frozen with the suite's version and never widened for a backend.

What a backend may round: products and sums are float32; the weights P and the dS of the backward are rounded once to
the storage dtype; O once; the backward recomputes P from the LSE and takes Delta from the stored O; dK and dV may be
rounded per query head before they are summed over a GQA group (FlashAttention-2, arXiv 2307.08691, does just that).
Unit roundoff u: bfloat16 2^-8, float16 2^-11, float32 w = 2^-24; u_m is the rounding of matmul operands (0 but with
TF32); u_o the rounding of outputs. Elementwise variances, o being the elementwise product
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

**Long sums.** Each of the N additions of a float32 sum of terms x_k rounds its partial sum s_k: variance w^2 s_k^2.
The order is the kernel's own (tiles, threads, split keys), so it is taken at random, where E s_k^2 follows from drawing
k of N terms. With X1 = sum x_k and X2 = sum x_k^2,

    v_acc(N, X1, X2) = w^2 sum_k E s_k^2 = w^2 (N/3 X1^2 + N/6 X2)

which is one addition after another; tiles and trees do better and are not asked to. It is added to vT / scale^2
(N = D, X1 = QK^T), to r (the sum of the weights: X1 = 1, X2 = rowsum P2), to vdP (N = Dv), to vd (N = Dv) and, N being
the number of visible pairs, to O, dQ, dK, dV, dmask and dsink, whose X1 is the truth itself. In 16 bit u is so much
larger than w that it is only seen on sums of many thousands. In float32 without it, honest kernels break the gates at
Sk = 16384 (docs/calibration.md has the measurements).

**Truncation.** Matrix units may cut what they add to an accumulator instead of rounding it (Fasi, Higham, Mikaitis and
Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 7:e330, 2021, section 4): each addition then loses about
w |s_k|, always towards 0. The shallowest instruction for float32 sums 8 products, and IEEE accuracy takes three of them
(of the high parts, and of a high with a low part, twice), so N terms are c = 3 ceil(N / 8) cuts:

    drift = w c (|X1| / 2 + 2/3 sqrt(X2))         from E|s_k| <= k/N |X1| + sqrt(k/N X2)

is the error of one sign that no kernel can be blamed for. That of the scores goes on to the LSE as rowsum P t drift_S;
it moves weights both ways, and is left out elsewhere. drift widens the bias gate alone, by its mean in sigmas, and no
other. In 16 bit it is nothing below thousands of terms.

**float32 with TF32**: u = u_m = u_o = 2^-8. Its products read 10 bits of q, k, v and dout, and hardware may cut where
it does not round: errors of one sign, up to 2^-10 in each of two factors. Rounding to 2^-8 is what covers them: the
mean of the cuts, 0.7 * 2^-10, is inside the bias gate of 0.25 * 2^-8.

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

Gate = Literal["shape", "finite", "exact", "rms", "row", "max", "bias", "float64"]

W = 2.0**-24
"""Unit roundoff of float32."""
TF32_ROUNDOFF = 2.0**-8
"""What covers operands cut to 10 bits, as the docstring derives."""
DEPTH = 8
"""Products that the shallowest matrix instruction for float32 sums before it adds them to its accumulator."""
PARTS = 3
"""Instructions that one product of float32 accuracy takes on units that multiply TF32."""
ROUNDOFF: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: W, torch.float64: 2.0**-53}
)
UNDERFLOW: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126, torch.float64: 2.0**-1022}
)
FLOAT64_RTOL = 1e-10


@dataclass(frozen=True, slots=True)
class Gates:
    """What z must satisfy, per tensor.

    `bias` is |mean(z * sign(truth))| less the mean of drift / sigma. It is a mean of independent errors, and gated,
    from `bias_numel` elements and `bias_rows` independent rows on: the error of one row's LSE is in all elements that
    the row contributes to, so that a single query, or many equal ones, shift them all one way.
    """

    rms: float = 1.5
    row: float = 4.0
    max: float = 8.0
    bias: float = 0.25
    bias_numel: int = 4096
    bias_rows: int = 64


GATES = Gates()
"""Frozen with the suite's version. Five kernels on an H200 stay below 1.4, 3.4, 4.9 and 0.22 (docs/calibration.md)."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one output or gradient must be: the truth, one sigma per element, and where only the exact value will do."""

    truth: Tensor
    """float64."""
    sigma: Tensor
    """float64, same shape; 0 where nothing is summed, so that there only the truth itself passes."""
    exact: Tensor
    """bool, same shape: 0 or -inf by contract (rows that see no key, rows past q_lens, keys that nobody sees)."""
    drift: Tensor
    """float64, same shape: the error of one sign that truncating accumulation may leave; it widens the bias gate."""
    rows: int
    """Rows of P that are rounded independently of each other, over all batches and heads (`_independent`)."""


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
    drift: float = 0.0
    """Mean of drift / sigma: what the bias gate is widened by."""
    numel: int = 0
    rows: int = 0
    worst_index: tuple[int, ...] = ()
    """Where |z| is largest."""
    histogram: tuple[int, ...] = ()
    """Elements with z below -4, in each quarter from -4 to 4, and above 4; empty when there are none."""

    def __str__(self) -> str:
        worst = f"max {self.max:.3g} at {list(self.worst_index)}"
        return f"rms {self.rms:.3g}, row {self.row:.3g}, bias {self.bias:+.3f}, {worst}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Scores):
    """How one tensor compares with the truth: z under the noise model of its own dtype, and the gates it breaks."""

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
            return cls(TF32_ROUNDOFF, TF32_ROUNDOFF, TF32_ROUNDOFF)
        return cls(u, 0.0, u)


def accumulation(count: Tensor | float, X1: Tensor, X2: Tensor) -> Tensor:
    """v_acc: variance of a float32 sum of `count` terms, X1 their sum and X2 the sum of their squares."""
    return W**2 * (count * X1.square() / 3 + count * X2 / 6)


def truncation(count: Tensor | float, X1: Tensor, X2: Tensor) -> Tensor:
    """drift: what the same sum may lose towards 0 in matrix units that cut."""
    cuts = PARTS * torch.ceil(torch.as_tensor(count, dtype=torch.float64) / DEPTH)
    return W * cuts * (X1.abs() / 2 + X2.sqrt() * (2 / 3))


class _Noise:
    """Variance, absolute sum M, underflow factor E and summed terms of one tensor, filled head by head."""

    def __init__(self, like: Tensor) -> None:
        self.v, self.M, self.E = (torch.zeros_like(like) for _ in range(3))
        self.count, self.X2 = torch.zeros_like(like), torch.zeros_like(like)
        """How many terms an element is the sum of, and the sum of their squares."""
        self.drift = torch.zeros_like(like)
        """What comes to that of the sum itself."""
        self.exact = torch.ones_like(like, dtype=torch.bool)

    def sigma(self, problem: Problem, true: Tensor, stored: torch.dtype) -> Tensor:
        if problem.dtype == torch.float64:
            return FLOAT64_RTOL * self.M + ROUNDOFF[stored] * true.abs() + UNDERFLOW[torch.float64] * self.E
        v = self.v + accumulation(self.count, true, self.X2)
        return v.sqrt() + 2 * W * self.M + UNDERFLOW[problem.dtype] * self.E


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

    R = scale * (head.Q @ head.K.T)
    R2 = scale**2 * (Q2 @ K2.T)  # the sum of the squares of its terms
    vT = (2 * um2 + 4 * w2) * R2 + accumulation(problem.head_dim, R, R2)
    v_slope = torch.zeros_like(T)
    if problem.softcap is not None:
        vT = t.square() * (vT + 4 * w2 * R.square()) + 4 * w2 * T.square()
        v_slope = (2 * T / problem.softcap**2).square() * vT + 4 * w2
    vS = vT + 4 * w2 * torch.where(head.visible, head.S, 0.0).square()
    if problem.alibi or problem.attn_mask == "float":
        vS = vS + 4 * w2 * (T.square() + head.bias.square())
    row_count, key_count = head.visible.sum(1).double(), head.visible.sum(0).double()
    r = (P2 * vS).sum(1) + accumulation(row_count, torch.ones_like(row_count), P2.sum(1))
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
    out.count[b, :n, h], out.X2[b, :n, h] = row_count[:, None], A2 @ V2
    out.exact[b, :n, h] = ~seen_rows[:, None]
    row = noise["lse"]
    row.v[b, h, :n] = r + um2 * scale**2 * (Q2 * ((P * t) @ head.K).square()).sum(1)
    row.M[b, h, :n] = 2.0 * (1.0 + lse.abs() + top.abs())  # 4w in sigma
    row.drift[b, h, :n] = (P * t * truncation(problem.head_dim, R, R2)).sum(1)
    row.drift[b, h, :n] += truncation(row_count, torch.ones_like(row_count), P2.sum(1))
    row.exact[b, h, :n] = ~finite
    if not backward:
        return

    vO = vO + accumulation(row_count[:, None], O, A2 @ V2)
    dO2_O2, dO2_V2 = (dO2 * O2).sum(1), dO2 @ V2.T
    vd = (dO2 * vO).sum(1) + 4 * w2 * (dO2_O2 + head.dlse.square())
    vd = vd + accumulation(problem.head_dim_v, (dO * O).sum(1), dO2_O2)
    vdP = (2 * um2 + 4 * w2) * dO2_V2 + accumulation(problem.head_dim_v, dO @ head.V.T, dO2_V2)
    vdP = Z.square() * vdP
    vdS = u2 * dS2 + dS2 * vS + P2 * vdP
    vdR = t.square() * vdS + dS2 * v_slope
    absolute = (dO.abs() * O.abs()).sum(1) + head.dlse.abs()  # (n,): what Delta is summed from
    M_dS = P * (Z * (dO.abs() @ head.V.abs().T) + absolute[:, None])

    dq = noise["dq"]
    dq.v[b, :n, h] = scale**2 * (vdR @ K2 + vd[:, None] * ((P * t) @ head.K).square() + um2 * (dR2 @ K2))
    dq.v[b, :n, h] += (r[:, None] + uo2) * head.dQ.square()
    dq.M[b, :n, h] = abs(scale) * (M_dS @ head.K.abs())
    dq.E[b, :n, h] = 1.0 + abs(scale) * _norm(head.K)
    dq.count[b, :n, h], dq.X2[b, :n, h] = row_count[:, None], scale**2 * (dR2 @ K2)
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
    dk.X2[b, :m, kv] += scale**2 * (dR2.T @ Q2)
    dv.X2[b, :m, kv] += A2.T @ dO2
    for gradient in (dk, dv):
        gradient.count[b, :m, kv] += key_count[:, None]
        gradient.exact[b, :m, kv] &= ~seen_keys[:, None]

    if "dattn_mask" in noise:
        _add_mask(noise["dattn_mask"], head, vdS, vd, r, M_dS)
    if "dsinks" in noise:
        spread = r + 4 * w2 * (sink.square() + lse.square())
        noise["dsinks"].v[h] += (p_s.square() * (vd + head.delta.square() * spread)).sum()
        noise["dsinks"].M[h] += (p_s * absolute).sum()
        noise["dsinks"].E[h] += n**0.5
        noise["dsinks"].count[h] += n
        noise["dsinks"].X2[h] += (p_s * head.delta).square().sum()
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
    reduce_to(dmask.X2, head.dS.square(), b, h)
    reduce_to(dmask.count, head.visible.double(), b, h)
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
    noise = {name: _Noise(value) for name, value in tensors.items()}
    rows = 0
    for head in heads(problem, q, k, v, extras, dout, dlse):
        rows += _independent(head)
        _add_head(noise, head, problem, unit, backward)
    sigma = _sigmas(noise, tensors, problem, unit, extras, backward)
    return {
        name: Expected(true, sigma[name], each.exact, each.drift + truncation(each.count, true, each.X2), rows)
        for (name, each), true in zip(noise.items(), tensors.values(), strict=True)
    }


def _independent(head: Head) -> int:
    """How many errors of its own a head has: different queries, each with its LSE, or different weights if fewer.

    Equal weights (scale 0, equal keys) are rounded alike, and so their errors add up instead of averaging out.
    """
    weights = head.P[head.visible]
    sample = weights[:: max(1, len(weights) // 4096)]
    return min(len(torch.unique(head.Q[head.visible.any(1)], dim=0)), len(torch.unique(sample)))


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


def judge(name: str, got: Tensor, expected: Expected, dtype: torch.dtype) -> Stats:
    """Compares one tensor of a call in `dtype` with what is expected of it and names every gate it breaks."""
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
    scores = _scores(name, torch.where(free, value - true, 0.0), expected, free)
    if dtype == torch.float64:
        if scores.max > 1.0:
            text = f"{name}{list(scores.worst_index)} is off by {scores.max:.3g} times what float64 allows"
            failures.append(Failure("float64", text))
    else:
        failures += broken(name, scores)
    return Stats(**{item.name: getattr(scores, item.name) for item in fields(Scores)}, failures=tuple(failures))


def _scores(name: str, error: Tensor, expected: Expected, free: Tensor) -> Scores:
    """The numbers of z over the elements that are free to have noise; `error` is 0 at the others."""
    count = int(free.sum())
    if not count:
        return Scores()
    sigma = expected.sigma
    z = torch.where(error == 0, 0.0, error / sigma)  # sigma 0: only the truth passes, else infinite
    per_row = z.square()
    if name not in ("lse", "dsinks"):  # they have one value a row
        per_row = per_row.sum(-1) / free.sum(-1).clamp(min=1)
    worst = int(z.abs().argmax())
    drift = torch.where(free & (sigma > 0), expected.drift / sigma, 0.0)
    return Scores(
        rms=float((z.square().sum() / count).sqrt()),
        row=float(per_row.max().sqrt()),
        max=float(z.abs().max()),
        bias=float((z * expected.truth.sign()).sum() / count),
        drift=float(drift.sum() / count),
        numel=count,
        rows=expected.rows,
        worst_index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), z.shape)),
        histogram=_histogram(z[free]),
    )


def _histogram(z: Tensor) -> tuple[int, ...]:
    edges = torch.arange(-4.0, 4.25, 0.25, dtype=torch.float64)
    bins = torch.bucketize(z.nan_to_num(), edges, right=True)  # 0 is below -4, the last one from 4 on
    return tuple(int(count) for count in torch.bincount(bins, minlength=len(edges) + 1))


def broken(name: str, scores: Scores) -> list[Failure]:
    """The z gates that `scores` breaks."""
    independent = scores.numel >= GATES.bias_numel and scores.rows >= GATES.bias_rows
    bias = max(abs(scores.bias) - scores.drift, 0.0) if independent else 0.0
    values: tuple[tuple[Gate, float, float], ...] = (
        ("rms", scores.rms, GATES.rms),
        ("row", scores.row, GATES.row),
        ("max", scores.max, GATES.max),
        ("bias", bias, GATES.bias),
    )
    return [
        Failure(gate, f"{name}: {gate} of z is {value:.3g}, allowed {limit:g}; worst at {list(scores.worst_index)}")
        for gate, value, limit in values
        if not value <= limit
    ]
