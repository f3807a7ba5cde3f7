"""Metamorphic properties: two calls whose results must agree in a way that needs no truth.

What the contract makes bitwise equal is compared bit by bit. Everything else is two roundings of one truth: the
difference is held to the gates with both calls' noise added up.

M12 asks the reference formulas and not the backend for a derivative: gradients against central differences of the
float64 forward, along a random direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import flashdispatch
from flashdispatch_conformance.case import Case, Mask
from flashdispatch_conformance.check import Check
from flashdispatch_conformance.inputs import Inputs, as_truth
from flashdispatch_conformance.oracle import truth
from flashdispatch_conformance.tolerance import ROUNDOFF, Expected, W, expect
from flashdispatch_conformance.trial import Trial, same_bits

Values = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Ran:
    """One declared call: what went in, what came out in float64 and the oracle's layout, and its noise."""

    inputs: Inputs
    got: Mapping[str, Tensor]
    expected: Mapping[str, Expected]

    def sigma(self, name: str) -> Tensor:
        return self.expected[name].sigma

    def drift(self, name: str) -> Tensor:
        return self.expected[name].drift


def drawn(inputs: Inputs) -> Values:
    """The values of q, k, v and dout as the backend sees them, float64, (B, S, H, D)."""
    q, k, v, extras, dout, _ = inputs.canonical()
    values = {"q": q, "k": k, "v": v} | ({} if dout is None else {"dout": dout})
    if extras.attn_mask is not None and inputs.case.mask is not None:
        mask = extras.attn_mask.reshape(inputs.case.mask.shape).cpu()
        return {name: x.cpu().double() for name, x in values.items()} | {
            "attn_mask": mask if mask.dtype == torch.bool else mask.double()
        }
    return {name: x.cpu().double() for name, x in values.items()}


def ran(trial: Trial, case: Case, values: Values | None = None) -> _Ran | None:
    """Runs the largest declared part of `case`: with gradients, else with the LSE, else the output. None: nothing."""
    inputs = trial.inputs(case, values)
    if case.needs_grad and trial.declared(inputs, "gradients"):
        got = trial.differentiable_call(inputs)
        if not case.dlse and trial.declared(inputs, "lse"):
            got = got | {"lse": trial.call(inputs, "lse")["lse"]}
    elif trial.declared(inputs, "lse"):
        got = trial.call(inputs, "lse")
    elif trial.declared(inputs, "out"):
        got = trial.call(inputs, "out")
    else:
        return None
    expected = expect(inputs.problem, *inputs.canonical())
    turned = {name: as_truth(name, x, case.layout).detach().cpu() for name, x in got.items()}
    return _Ran(inputs, turned, expected)


def agree(trial: Trial, name: str, got: Tensor, wanted: Tensor, noise: tuple[Tensor, Tensor], said: str) -> None:
    """Holds two roundings of one truth to the gates: `noise` is the sigma and the drift of their difference."""
    sigma, drift = noise
    expected = Expected(wanted.double(), sigma, wanted == -torch.inf, drift, rows=wanted.numel())
    trial.judge(name, got.double(), expected, said)


def both(a: Tensor, b: Tensor) -> Tensor:
    """The sigma of a difference."""
    return (a.square() + b.square()).sqrt()


def same(trial: Trial, name: str, a: Tensor, b: Tensor, said: str) -> None:
    """Notes when two tensors are not bitwise equal."""
    if not same_bits(a, b):
        off = int((a.double() != b.double()).sum())
        trial.fail(f"{name} {said}: {off} of {a.numel()} elements are not bitwise equal")


def _as_it_is(x: Tensor) -> Tensor:
    return x


def compare(
    trial: Trial, a: _Ran, b: _Ran, said: str, turned: Mapping[str, Callable[[Tensor], Tensor]] | None = None
) -> None:
    """Every tensor that both have, by the gates; `turned` brings one of b's tensors to a's order or sum."""
    for name in a.got:
        if name not in b.got:
            continue
        turn = (turned or {}).get(name, _as_it_is)
        sigma = both(a.sigma(name), turn(b.sigma(name)))
        agree(trial, name, a.got[name], turn(b.got[name]), (sigma, a.drift(name) + turn(b.drift(name))), said)


def _permuted_keys(trial: Trial) -> None:
    case = Case(
        id="property/m01",
        why="",
        batch=2,
        heads=(4, 2),
        seqlens=(65, 203),
        mask=Mask(shape=(1, 4, 65, 203), kind="float"),
    )
    a = ran(trial, case)
    if a is None:
        return
    order = torch.randperm(203, generator=torch.Generator().manual_seed(1))
    back = order.argsort()
    values = drawn(a.inputs)
    values |= {"k": values["k"][:, order], "v": values["v"][:, order], "attn_mask": values["attn_mask"][..., order]}
    b = ran(trial, case, values)
    if b is not None:
        to_a = {name: (lambda x: x[:, back]) for name in ("dk", "dv")}
        compare(trial, a, b, "keys in another order", to_a)


def _shifted_keys(trial: Trial) -> None:
    case = Case(id="property/m02", why="", heads=(2, 2), seqlens=(65, 130), causal=True)
    generator = torch.Generator().manual_seed(2)

    def grid(*shape: int) -> Tensor:
        return torch.randint(-16, 17, shape, generator=generator).double() / 8

    q, k, c = grid(1, 65, 2, 64), grid(1, 130, 2, 64), grid(1, 1, 1, 64)
    a, b = ran(trial, case, {"q": q, "k": k}), ran(trial, case, {"q": q, "k": k + c})
    if a is None or b is None:
        return
    shift = a.inputs.problem.scale * (q * c).sum(-1).transpose(1, 2)  # (B, H, Sq)
    for name in ("out", "dv", "lse"):
        if name in a.got and name in b.got:
            moved = a.got[name].double() + (shift if name == "lse" else 0.0)
            sigma, drift = both(a.sigma(name), b.sigma(name)), a.drift(name) + b.drift(name)
            agree(trial, name, b.got[name], moved, (sigma, drift), "one vector added to every key")


def _split_keys(trial: Trial) -> None:
    case = Case(id="property/m03", why="", batch=2, heads=(4, 2), seqlens=(33, 203), grads=())
    whole = ran(trial, case)
    if whole is None or "lse" not in whole.got:
        return
    values = drawn(whole.inputs)
    u = ROUNDOFF[trial.target.dtype]
    for cut in (0, 1, 64, 130, 203):
        parts = []
        for keys in (slice(0, cut), slice(cut, 203)):
            size = keys.stop - keys.start
            part = {"q": values["q"], "k": values["k"][:, keys], "v": values["v"][:, keys]}
            parts.append(ran(trial, replace(case, id=f"property/m03_{cut}_{size}", seqlens=(33, size)), part))
        first, second = parts
        if first is None or second is None:
            return
        out, lse = flashdispatch.merge_attention(
            first.got["out"], first.got["lse"], second.got["out"], second.got["lse"]
        )
        said = f"keys split at {cut} and merged"
        if cut in (0, 203):
            other = second if cut == 0 else first
            same(trial, "out", out, other.got["out"], said)
            same(trial, "lse", lse, other.got["lse"], said)
        total = whole.expected["lse"].truth
        noise = whole.sigma("out").square() + (u * whole.expected["out"].truth).square()
        noise_lse = whole.sigma("lse").square() + (4 * W * (1 + total.abs())).square()
        for part_ in (first, second):
            weight = (part_.expected["lse"].truth - total).exp()  # (B, H, Sq)
            by_row = weight.transpose(1, 2)[..., None]
            noise = noise + (by_row * part_.sigma("out")).square()
            noise = (
                noise
                + (by_row * part_.expected["out"].truth).square()
                * part_.sigma("lse").square().transpose(1, 2)[..., None]
            )
            noise_lse = noise_lse + (weight * part_.sigma("lse")).square()
        agree(trial, "out", out, whole.got["out"], (noise.sqrt(), 2 * whole.drift("out")), said)
        agree(trial, "lse", lse, whole.got["lse"], (noise_lse.sqrt(), 2 * whole.drift("lse")), said)


def _lengths(trial: Trial) -> None:
    q_lens, kv_lens = (70, 0, 33, 1), (130, 65, 0, 64)
    case = Case(
        id="property/m04",
        why="",
        batch=4,
        heads=(4, 2),
        seqlens=(70, 130),
        q_lens=q_lens,
        kv_lens=kv_lens,
        causal=True,
    )
    together = ran(trial, case)
    if together is None:
        return
    values = drawn(together.inputs)
    for b, (n, m) in enumerate(zip(q_lens, kv_lens, strict=True)):
        one = {name: values[name][b : b + 1, : (m if name in "kv" else n)] for name in ("q", "k", "v", "dout")}
        single = replace(case, id=f"property/m04_{b}", batch=1, seqlens=(n, m), q_lens=None, kv_lens=None)
        alone = ran(trial, single, one)
        if alone is None:
            return

        def cut(x: Tensor, name: str, b: int = b, n: int = n, m: int = m) -> Tensor:
            return x[b : b + 1, :, :n] if name == "lse" else x[b : b + 1, : (m if name in ("dk", "dv") else n)]

        for name in set(alone.got) & set(together.got):
            sigma = both(cut(together.sigma(name), name), alone.sigma(name))
            drift = cut(together.drift(name), name) + alone.drift(name)
            agree(trial, name, cut(together.got[name], name), alone.got[name], (sigma, drift), f"sequence {b} alone")


def _wide_windows(trial: Trial) -> None:
    plain = Case(id="property/m05", why="", heads=(4, 2), seqlens=(130, 130))
    for causal in (False, True):
        a = ran(trial, replace(plain, causal=causal))
        b = ran(trial, replace(plain, causal=causal, window=(130, 0 if causal else 130)))
        if a is not None and b is not None:
            compare(trial, b, a, "a window that hides nothing" + (" of a causal call" if causal else ""))


def _repeated_heads(trial: Trial) -> None:
    case = Case(id="property/m06", why="", heads=(6, 2), seqlens=(65, 97), causal=True)
    a = ran(trial, case)
    if a is None:
        return
    values = drawn(a.inputs)
    repeated = values | {name: values[name].repeat_interleave(3, dim=2) for name in ("k", "v")}
    b = ran(trial, replace(case, heads=(6, 6)), repeated)
    if b is None:
        return
    compare(trial, a, replace(b, got={k: x for k, x in b.got.items() if k not in ("dk", "dv")}), "heads repeated")
    for name in ("dk", "dv"):
        if name in a.got and name in b.got:
            summed = _by_group(b.got[name].double(), 3).sum(3)
            noise = _by_group(b.sigma(name).square(), 3).sum(3).sqrt()
            drift = a.drift(name) + _by_group(b.drift(name), 3).sum(3)
            agree(trial, name, a.got[name], summed, (both(a.sigma(name), noise), drift), "heads repeated and summed")


def _by_group(x: Tensor, group: int) -> Tensor:
    """(B, S, H, D) -> (B, S, H / group, group, D)."""
    b, s, h, d = x.shape
    return x.reshape(b, s, h // group, group, d)


def _scaled_values(trial: Trial) -> None:
    case = Case(id="property/m07", why="", heads=(2, 2), seqlens=(65, 130), causal=True, grads=())
    a = ran(trial, case)
    if a is None:
        return
    values = drawn(a.inputs)
    b = ran(trial, case, values | {"v": 8 * values["v"]})
    if b is None:
        return
    normal = a.got["out"].double().abs() >= 2.0**-13  # float16 rounds smaller ones to a coarser grid
    off = normal & (8 * a.got["out"].double() != b.got["out"].double())
    if off.any():
        trial.fail(f"out of 8 V is not bitwise 8 times that of V at {off.nonzero()[0].tolist()}")
    grid = (4 * values["v"]).round() / 4
    other = torch.randint(-8, 9, grid.shape, generator=torch.Generator().manual_seed(3)).double() / 4
    parts = [ran(trial, case, values | {"v": x}) for x in (grid, other, grid + other)]
    one, two, total = parts
    if one is None or two is None or total is None:
        return
    wanted = one.got["out"].double() + two.got["out"].double()
    sigma = both(both(one.sigma("out"), two.sigma("out")), total.sigma("out"))
    drift = one.drift("out") + two.drift("out") + total.drift("out")
    agree(trial, "out", total.got["out"], wanted, (sigma, drift), "V1 + V2 against the sum of the outputs")


def _causal_prefix(trial: Trial) -> None:
    case = Case(id="property/m08", why="", heads=(4, 2), seqlens=(200, 200), causal=True, grads=())
    a = ran(trial, case)
    if a is None:
        return
    values = drawn(a.inputs)
    for t in (1, 64, 127):
        other = {name: values[name].clone() for name in values}
        for name in ("k", "v"):
            other[name][:, t:] = other[name][:, t:].flip(1) + 1.0
        b = ran(trial, case, other)
        if b is not None:
            same(trial, "out", b.got["out"][:, :t], a.got["out"][:, :t], f"rows below {t} with other later keys")


def _hidden_keys(trial: Trial) -> None:
    case = Case(id="property/m09", why="", batch=2, heads=(4, 2), seqlens=(33, 130), q_lens=(33, 20), kv_lens=(97, 64))
    a = trial.inputs(case)
    if trial.declared(a, "out"):
        first = trial.call(a, "out")["out"]
        largest = torch.finfo(trial.target.dtype).max
        for tensor in (a.k, a.v):
            for b, length in enumerate(case.kv_lens or ()):
                tensor.detach()[b, length:] = largest
        same(trial, "out", trial.call(a, "out")["out"], first, "with the largest number past the lengths, not NaN")
    short = Case(id="property/m09_mask", why="", heads=(2, 2), seqlens=(33, 64))
    x = ran(trial, short)
    if x is None:
        return
    values = drawn(x.inputs)
    more = {name: torch.cat([values[name], values[name].flip(1)[:, :37] + 3.0], 1) for name in ("k", "v")}
    mask = (torch.arange(101) < 64).expand(33, 101)
    longer = replace(short, seqlens=(33, 101), mask=Mask(shape=(33, 101)))
    y = ran(trial, longer, values | more | {"attn_mask": mask})
    if y is not None:
        to_x = {name: (lambda t: t[:, :64]) for name in ("dk", "dv")}
        compare(trial, x, y, "keys appended that a mask hides", to_x)


def _folded_scale(trial: Trial) -> None:
    case = Case(id="property/m10", why="", heads=(2, 2), seqlens=(65, 130), causal=True, scale=0.125, grads=())
    a = ran(trial, case)
    if a is None:
        return
    values = drawn(a.inputs)
    b = ran(trial, replace(case, scale=0.03125), values | {"q": 4 * values["q"]})
    if b is not None:
        same(trial, "out", b.got["out"], a.got["out"], "with a quarter of the scale and 4 q")
    zero = ran(trial, replace(case, scale=0.0, causal=False), values)
    if zero is not None:
        mean = values["v"].mean(1, keepdim=True).expand_as(zero.got["out"])
        agree(trial, "out", zero.got["out"], mean, (zero.sigma("out"), zero.drift("out")), "scale 0 is the mean of V")


def _batch_mates(trial: Trial) -> None:
    case = Case(id="property/m11", why="", batch=5, heads=(4, 2), seqlens=(65, 130), causal=True)
    together = ran(trial, case)
    if together is None:
        return
    values = drawn(together.inputs)
    for b in (0, 4):
        one = {name: values[name][b : b + 1] for name in ("q", "k", "v", "dout")}
        alone = ran(trial, replace(case, batch=1), one)
        if alone is None:
            return
        for name in set(alone.got) & set(together.got):
            at = slice(b, b + 1)
            sigma = both(together.sigma(name)[at], alone.sigma(name))
            drift = together.drift(name)[at] + alone.drift(name)
            agree(
                trial, name, together.got[name][at], alone.got[name], (sigma, drift), f"sequence {b} without the others"
            )


def _direction(trial: Trial) -> None:
    case = Case(id="property/m12", why="", heads=(2, 1), seqlens=(17, 33), dims=(16, 16), causal=True, softcap=20.0)
    inputs = trial.inputs(case)
    if not trial.declared(inputs, "gradients"):
        return
    got = trial.differentiable_call(inputs)
    expected = expect(inputs.problem, *inputs.canonical())
    q, k, v, extras, dout, _ = inputs.canonical()
    if dout is None:
        raise ValueError("the case has no dout")
    generator = torch.Generator().manual_seed(12)
    step = 1e-4
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        t = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

        def loss(moved: Tensor, name: str = name) -> float:
            exact = {"q": q, "k": k, "v": v} | {name: moved}
            out = truth(inputs.problem, exact["q"], exact["k"], exact["v"], extras).out
            return float((out * dout.cpu().double()).sum())

        x = tensor.cpu().double()
        slope = (loss(x + step * t) - loss(x - step * t)) / (2 * step)
        sigma = expected[f"d{name}"].sigma
        noise = float((sigma * t).square().sum().sqrt()) + 1e-6 * abs(slope) + 1e-8
        z = (float((got[f"d{name}"].cpu().double() * t).sum()) - slope) / noise
        if abs(z) > 8:
            trial.fail(f"d{name} along a random direction is off the central difference by {z:.3g} sigma")


def _equal_keys(trial: Trial) -> None:
    case = Case(id="property/m13", why="", batch=2, heads=(4, 2), seqlens=(65, 130), causal=True)
    key = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(13), dtype=torch.float64)
    got = ran(trial, case, {"k": key.expand(2, 130, 2, 64)})
    if got is not None and "dq" in got.got:
        trial.judge("dq", got.got["dq"], got.expected["dq"], "all keys equal: dQ is 0")


def _doubled_keys(trial: Trial) -> None:
    case = Case(id="property/m14", why="", heads=(4, 2), seqlens=(33, 97), grads=())
    a = ran(trial, case)
    if a is None:
        return
    values = drawn(a.inputs)
    twice = values | {name: torch.cat([values[name]] * 2, 1) for name in ("k", "v")}
    b = ran(trial, replace(case, seqlens=(33, 194)), twice)
    if b is None:
        return
    for name in set(a.got) & set(b.got):
        wanted = a.got[name].double() + (math.log(2) if name == "lse" else 0.0)
        sigma, drift = both(a.sigma(name), b.sigma(name)), a.drift(name) + b.drift(name)
        agree(trial, name, b.got[name], wanted, (sigma, drift), "every key twice")


def _folded_heads(trial: Trial) -> None:
    case = Case(id="property/m15", why="", batch=3, heads=(4, 4), seqlens=(65, 97), causal=True)
    a = ran(trial, case)
    if a is None:
        return

    def fold(x: Tensor) -> Tensor:
        """(B, S, H, D) -> (B H, S, 1, D)."""
        return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)

    def unfold(x: Tensor) -> Tensor:
        """The inverse."""
        return x.reshape(3, 4, x.shape[1], x.shape[3]).transpose(1, 2)

    def unfold_rows(x: Tensor) -> Tensor:
        """(B H, 1, S) -> (B, H, S)."""
        return x.reshape(3, 4, x.shape[2])

    values = {name: fold(x) for name, x in drawn(a.inputs).items()}
    b = ran(trial, replace(case, batch=12, heads=(1, 1)), values)
    if b is not None:
        turned = dict.fromkeys(("out", "dq", "dk", "dv"), unfold) | {"lse": unfold_rows}
        compare(trial, a, b, "batch and heads folded", turned)
    single = Case(id="property/m15_single", why="", heads=(1, 1), seqlens=(65, 97), grads=())
    inputs = trial.inputs(single)
    if not trial.declared(inputs, "out"):
        return

    def odd(x: Tensor) -> Tensor:
        """The same tensor: its dims of size 1 have other strides."""
        return x.detach().as_strided(x.shape, (7, x.stride(1), 3, 1), x.storage_offset())

    plain = trial.call(inputs, "out")["out"]
    other = replace(inputs, q=odd(inputs.q), k=odd(inputs.k), v=odd(inputs.v))
    same(trial, "out", trial.call(other, "out")["out"], plain, "with odd strides of dims of size 1")


_BODIES: tuple[tuple[str, str, Callable[[Trial], None]], ...] = (
    ("m01_permuted_keys", "the order of keys does not matter: tiles, rescaling", _permuted_keys),
    ("m02_shifted_keys", "one vector added to every key shifts the LSE alone", _shifted_keys),
    ("m03_split_keys", "sgl-project/sglang#35045: parts merged by their LSE are the whole", _split_keys),
    ("m04_lengths", "a padded sequence is what it is alone", _lengths),
    ("m05_wide_windows", "a window that hides nothing is none", _wide_windows),
    ("m06_repeated_heads", "grouped heads are repeated heads, gradients summed", _repeated_heads),
    ("m07_scaled_values", "linear in V, bitwise for powers of two", _scaled_values),
    ("m08_causal_prefix", "later keys change no earlier row, bit for bit", _causal_prefix),
    ("m09_hidden_keys", "what is hidden does not matter, whatever its value", _hidden_keys),
    ("m10_folded_scale", "scale and q are one factor; scale 0 is the mean of V", _folded_scale),
    ("m11_batch_mates", "flashinfer-ai/flashinfer#2424: a sequence does not depend on its batch", _batch_mates),
    ("m12_direction", "gradients against central differences of the float64 forward", _direction),
    ("m13_equal_keys", "all keys equal: dQ is 0 whatever dout and V are", _equal_keys),
    ("m14_doubled_keys", "every key twice: the same O, and LSE + ln 2", _doubled_keys),
    ("m15_folded_heads", "batch and heads are one grid; strides of size-1 dims mean nothing", _folded_heads),
)

PROPERTIES: tuple[Check, ...] = tuple(Check.of(f"property/{name}", why, body) for name, why, body in _BODIES)
"""All metamorphic properties, M1 to M15."""
