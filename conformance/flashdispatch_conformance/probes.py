"""Exact probes: inputs whose attention is known to the last bit, so that nothing hides under a tolerance.

counting  q = 0, v = 1: every weight is 1, so O is 1 (in float32 within its noise) and exp(LSE) counts the visible keys
address   one key matches each query by a code of +-1 and all others underflow: O is a copy of that key's value
integer   the same with small integers as v and dout: dV counts and adds them exactly, dQ and dK are exactly 0
zeros     v = 0 gives O = 0; dout = 0 gives gradients that are exactly 0

They prove masks, tails, strides, head maps and padding bit for bit, and cost next to nothing. The case says the shape,
the mask and the memory; the probe says the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashdispatch_conformance.case import Case, Mask
from flashdispatch_conformance.check import BF16, Check
from flashdispatch_conformance.inputs import Inputs, bshd
from flashdispatch_conformance.oracle import heads
from flashdispatch_conformance.tolerance import W, expect
from flashdispatch_conformance.trial import Trial

GAP = 110.0
"""By how much the matching key's score must exceed all others: exp(-104) is below half of float32's smallest number."""
TOP = 1000.0
"""The largest score an address may need: above it, exp2's argument is rounded by more than float16 forgives."""

COUNTING: tuple[Case, ...] = (
    Case(id="probe/counting_full", why="every key counts once, tails included", seqlens=(130, 203)),
    Case(id="probe/counting_causal", why="bottom-right: row i counts i + 1 + Sk - Sq", seqlens=(129, 200), causal=True),
    Case(id="probe/counting_causal_tall", why="rows that see nothing are 0, not 1", seqlens=(200, 129), causal=True),
    Case(id="probe/counting_top_left", why="row i counts min(i + 1, Sk)", seqlens=(200, 129), causal="top_left"),
    Case(
        id="probe/counting_window",
        why="vllm-project/vllm#3385: window (w, 0) counts min(i + 1, w + 1)",
        seqlens=(257, 257),
        causal=True,
        window=(64, 0),
    ),
    Case(id="probe/counting_window_both", why="both edges of a window", seqlens=(130, 260), window=(31, 65)),
    Case(
        id="probe/counting_decode_window",
        why="sgl-project/sglang#32087: 4096 keys of 5000, the oldest one too",
        heads=(2, 1),
        seqlens=(1, 5000),
        causal=True,
        window=(4095, 0),
    ),
    Case(
        id="probe/counting_mask",
        why="a boolean mask hides what it says, and whole rows",
        batch=2,
        seqlens=(70, 130),
        mask=Mask(shape=(2, 1, 70, 130), pattern="empty_rows"),
    ),
    Case(
        id="probe/counting_lens",
        why="lengths of 0, 1, a tile and one more; NaN behind them",
        batch=4,
        heads=(4, 2),
        seqlens=(130, 130),
        q_lens=(130, 0, 64, 1),
        kv_lens=(1, 130, 65, 0),
        causal=True,
    ),
    Case(
        id="probe/counting_65536",
        why="facebookresearch/xformers#719: more keys than 16 bits count",
        heads=(1, 1),
        seqlens=(1, 65536),
        dims=(16, 16),
    ),
)
"""Shapes and masks in which visible keys are counted."""

ADDRESS: tuple[Case, ...] = (
    Case(id="probe/address_full", why="every row finds its key, in any tile", seqlens=(130, 203)),
    Case(id="probe/address_causal", why="only among the keys it may see", seqlens=(130, 130), causal=True),
    Case(id="probe/address_gqa", why="query head h reads KV head h // group", heads=(8, 2), seqlens=(65, 97)),
    Case(id="probe/address_d40", why="head dims padded inside a kernel", dims=(40, 40), seqlens=(65, 97)),
    Case(id="probe/address_d72_dv96", why="Dv other than D", dims=(72, 96), seqlens=(65, 97)),
    Case(id="probe/address_d128", why="D = 128", dims=(128, 128), seqlens=(129, 130), causal=True),
    Case(id="probe/address_d256", why="D = 256", dims=(256, 256), seqlens=(65, 97)),
    Case(
        id="probe/address_bhsd_transposed",
        why="pytorch/pytorch#181133: strides as models make them",
        batch=3,
        heads=(4, 4),
        seqlens=(65, 97),
        layout="bhsd",
        q_view="transposed",
        k_view="transposed",
        v_view="transposed",
        dout_view="transposed",
    ),
    Case(
        id="probe/address_sliced",
        why="packed qkv, padded rows and odd addresses",
        batch=3,
        heads=(4, 2),
        seqlens=(65, 97),
        q_view="sliced",
        k_view="padded_rows",
        v_view="unaligned",
        dout_view="every_other",
    ),
    Case(
        id="probe/address_lens",
        why="batch offsets with padding between sequences",
        batch=3,
        seqlens=(70, 130),
        q_lens=(70, 33, 1),
        kv_lens=(130, 64, 65),
    ),
    Case(id="probe/address_window", why="the key at both edges of a window", seqlens=(130, 130), window=(33, 5)),
)
"""Shapes and memory in which values are fetched."""

Values = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """q, k (float64 codes in (B, S, H, D)) and, for each query, which key it matches; -1 where it sees none."""

    q: Tensor
    k: Tensor
    scale: float
    key: Tensor
    """(B, Sq, Hq) int64."""

    def fetched(self, rows: Tensor, group: int) -> Tensor:
        """The row of `rows` (B, Sk, Hkv, X) that each query matches, (B, Sq, Hq, X); zeros where there is none."""
        expanded = rows.repeat_interleave(group, dim=2)
        index = self.key.clamp(min=0)[..., None].expand(*self.key.shape, rows.shape[-1])
        return torch.where(self.key[..., None] >= 0, expanded.gather(1, index), 0.0)


def visible_keys(inputs: Inputs) -> Tensor:
    """(B, Sq, Hq, Sk) bool: what each query sees."""
    (sq, sk), case = inputs.case.seqlens, inputs.case
    seen = torch.zeros(case.batch, sq, case.heads[0], sk, dtype=torch.bool)
    for head in heads(inputs.problem, *inputs.canonical()[:4]):
        n, m = head.visible.shape
        seen[head.b, :n, head.h, :m] = head.visible
    return seen


def _counting(case: Case) -> Callable[[Trial], None]:
    (sq, sk), (hq, hkv), (d, dv) = case.seqlens, case.heads, case.dims
    values = {
        "q": torch.zeros(case.batch, sq, hq, d, dtype=torch.float64),
        "v": torch.ones(case.batch, sk, hkv, dv, dtype=torch.float64),
    }

    def body(trial: Trial) -> None:
        inputs = trial.inputs(replace(case, grads=()), values)
        if not trial.declared(inputs, "lse"):
            return
        got = trial.call(inputs, "lse")
        count = visible_keys(inputs).sum(-1)  # (B, Sq, Hq)
        out = bshd(got["out"], case.layout).cpu().double()
        if trial.target.dtype == torch.float32:  # sums of weights that were rounded themselves
            trial.judge("out", out, expect(inputs.problem, *inputs.canonical())["out"])
        else:  # rounded to 16 bits, all of them are 1
            _exact(trial, "out", out, (count > 0).double()[..., None].expand_as(out), 0.0)
        counted = got["lse"].cpu().double().exp().transpose(1, 2).round()
        _exact(trial, "exp(lse)", counted, count.double(), 0.0)

    return body


def _address(case: Case) -> Callable[[Trial], None]:
    def body(trial: Trial) -> None:
        address = _codes(trial, replace(case, grads=()))
        coded = replace(case, grads=(), scale=address.scale)
        inputs = trial.inputs(coded, {"q": address.q, "k": address.k})
        if not trial.declared(inputs, "out"):
            return
        out = bshd(trial.call(inputs, "out")["out"], case.layout).cpu().double()
        V = inputs.canonical()[2].cpu().double().nan_to_num()
        wanted = address.fetched(V, case.heads[0] // case.heads[1])
        _exact(trial, "out", out, wanted, _allowed(trial) * wanted.abs())

    return body


def _integers(case: Case) -> Callable[[Trial], None]:
    (sq, sk), (hq, hkv), (_, dv) = case.seqlens, case.heads, case.dims
    generator = torch.Generator().manual_seed(7)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).double()

    V, dO = integers(case.batch, sk, hkv, dv), integers(case.batch, sq, hq, dv)

    def body(trial: Trial) -> None:
        address = _codes(trial, replace(case, grads=()))
        inputs = trial.inputs(replace(case, scale=address.scale), {"q": address.q, "k": address.k, "v": V, "dout": dO})
        if not trial.declared(inputs, "gradients"):
            return
        got = trial.differentiable_call(inputs)
        group = hq // hkv
        wanted = torch.zeros(case.batch, sk, hkv, dv, dtype=torch.float64)
        for h in range(hq):
            key = address.key[:, :, h]
            index = key.clamp(min=0)[..., None].expand(-1, -1, dv)
            arriving = torch.where(key[..., None] >= 0, dO[:, :, h], 0.0)
            wanted[:, :, h // group] += torch.zeros_like(wanted[:, :, 0]).scatter_add(1, index, arriving)
        if float(wanted.abs().max()) > 256:
            raise ValueError(f"{case.id}: a sum of integers exceeds what bfloat16 holds exactly")
        allowed = _allowed(trial)
        _exact(trial, "dv", bshd(got["dv"], case.layout).cpu().double(), wanted, allowed * 3.0 * sq)
        # dS = P (dP - Delta) with dP = Delta exactly: integers below 2^24
        zero = 4 * allowed * address.scale * 9.0 * dv
        for name in ("dq", "dk"):
            gradient = bshd(got[name], case.layout).cpu().double()
            _exact(trial, name, gradient, torch.zeros_like(gradient), zero * sq)

    return body


def _zeros(trial: Trial) -> None:
    case = Case(id="probe/zeros", why="", batch=2, heads=(4, 2), seqlens=(65, 97), causal=True)
    (sq, sk), (hq, hkv) = case.seqlens, case.heads
    v = torch.zeros(case.batch, sk, hkv, 64, dtype=torch.float64)
    inputs = trial.inputs(replace(case, grads=()), {"v": v})
    if trial.declared(inputs, "out"):
        out = trial.call(inputs, "out")["out"].cpu().double()
        _exact(trial, "out with v = 0", out, torch.zeros_like(out), 0.0)
    dout = torch.zeros(case.batch, sq, hq, 64, dtype=torch.float64)
    inputs = trial.inputs(case, {"dout": dout})
    if trial.declared(inputs, "gradients"):
        for name, gradient in trial.differentiable_call(inputs).items():
            if name.startswith("d"):
                value = gradient.cpu().double()
                _exact(trial, f"{name} with dout = 0", value, torch.zeros_like(value), 0.0)
        if changed := inputs.changed():
            trial.fail(f"inputs were written to: {', '.join(changed)}")


def _allowed(trial: Trial) -> float:
    """Relative: nothing in 16 bit; in float32 the rounding of exp2's argument, at scores up to TOP."""
    return 4 * W * TOP if trial.target.dtype == torch.float32 else 0.0


def _codes(trial: Trial, case: Case) -> _Address:
    """Random codes of +-1 for the keys, and for each query the code of one key that it sees."""
    generator = torch.Generator().manual_seed(len(case.id))
    sk, (hq, hkv), (d, _) = case.seqlens[1], case.heads, case.dims
    k = torch.randint(0, 2, (case.batch, sk, hkv, d), generator=generator).double() * 2 - 1
    seen = visible_keys(trial.inputs(case))
    draw = torch.where(seen, torch.rand(seen.shape, generator=generator), -1.0)
    key = torch.where(seen.any(-1), draw.argmax(-1), -1)
    address = _Address(q=torch.zeros(0), k=k, scale=0.0, key=key)
    q = address.fetched(k, hq // hkv)
    scores = torch.einsum("bihd,bjhd->bihj", q, k.repeat_interleave(hq // hkv, dim=2))
    others = seen.clone()
    others.scatter_(-1, key.clamp(min=0)[..., None], value=False)
    gap = d - float(torch.where(others, scores, -torch.inf).max())
    scale = GAP / gap if gap > 0 else torch.inf
    if scale * d > TOP:
        raise ValueError(f"{case.id}: two of its codes are too near each other")
    return replace(address, q=q, scale=scale)


def _exact(trial: Trial, name: str, got: Tensor, wanted: Tensor, allowed: Tensor | float) -> None:
    """Notes the first element that is off by more than `allowed`; NaN always is."""
    off = ~((got - wanted).abs() <= allowed)
    if off.any():
        first = tuple(off.nonzero()[0].tolist())
        said = f"{name}{list(first)} is {got[first]:.6g} and must be {wanted[first]:.6g}"
        trial.fail(f"{said}; {int(off.sum())} of {off.numel()} elements are off")


def _again(case: Case, name: str, why: str) -> Case:
    return replace(case, id=case.id.replace("address", name), why=why)


INTEGER: tuple[Case, ...] = tuple(
    _again(case, "integer", f"dV adds integers exactly, dQ and dK are 0: {case.why}")
    for case in ADDRESS
    if case.id.removeprefix("probe/address_") in ("full", "causal", "gqa", "d128", "bhsd_transposed", "sliced", "lens")
)
"""Those of `ADDRESS` whose gradients are probed too."""

_SMOKE = {"probe/counting_causal", "probe/counting_lens", "probe/address_gqa", "probe/integer_causal", "probe/zeros"}


def _check(id: str, why: str, body: Callable[[Trial], None]) -> Check:  # noqa: A002  the field's name
    return Check.of(id, why, body, smoke_dtypes=(BF16,) if id in _SMOKE else ())


PROBES: tuple[Check, ...] = (
    *(_check(case.id, case.why, _counting(case)) for case in COUNTING),
    *(_check(case.id, case.why, _address(case)) for case in ADDRESS),
    *(_check(case.id, case.why, _integers(case)) for case in INTEGER),
    _check("probe/zeros", "zeros in, zeros out, and no input written", _zeros),
)
"""All exact probes."""
