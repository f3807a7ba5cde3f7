"""Faults of precision: too few digits somewhere, or rounding to one side."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdispatch_conformance.emulation import Call, Emulation, State, Tile
from flashdispatch_conformance.mutants.mutant import Family

PRECISION = Family()


def _toward_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 tensor cut to `dtype`, as a shift by 16 bits does it for bfloat16."""
    rounded = x.to(dtype)
    too_far = rounded.float().abs() > x.abs()
    return torch.where(too_far, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def _mantissa_of_10_bits(x: Tensor) -> Tensor:
    """A float32 tensor rounded to TF32: 10 bits behind the point."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@PRECISION.add("lse: max", "named/length_63-bfloat16")
class ScoresInStorageDtype(Emulation):
    """Q K^T leaves its product in the storage dtype, as eager attention in 16 bits does."""

    def scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        S, slope = super().scores(call, Q_i, K_j, rows, keys)
        return Tile(self.round_weights(call, S), slope)


@PRECISION.add("lse: max", "named/length_63-float16")
class LseInStorageDtype(Emulation):
    """The LSE is kept in the storage dtype between the passes."""

    def finish(self, call: Call, state: State) -> tuple[Tensor, Tensor]:
        out, lse = super().finish(call, state)
        return out, lse.to(call.problem.dtype).float()


@PRECISION.add("out: bias", "named/length_64-bfloat16")
class OutputTruncated(Emulation):
    """Outputs are stored by cutting bits off: a shift by 16 in place of a rounding."""

    def round_out(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _toward_zero(x, dtype) if dtype != torch.float32 else x


@PRECISION.add("out: bias", "named/cross_tall-bfloat16")
class WeightsTruncated(Emulation):
    """P enters its product cut and not rounded: with values of one sign the output shrinks."""

    def round_weights(self, call: Call, P: Tensor) -> Tensor:
        return _toward_zero(P, call.problem.dtype).float()


@PRECISION.add("dv: rms", "named/scale_one-float16")
class WeightsInBfloat16(Emulation):
    """P is rounded to bfloat16 whatever the storage dtype."""

    def round_weights(self, call: Call, P: Tensor) -> Tensor:
        return P.bfloat16().float()


@PRECISION.add("out: rms", "named/keys_8192-bfloat16")
class AccumulatorInStorageDtype(Emulation):
    """The sum over tiles of keys is kept in the storage dtype: it takes length to see it."""

    def add(self, total: Tensor, part: Tensor) -> Tensor:
        return (total + part).bfloat16().float()


@PRECISION.add("dv: rms", "named/queries_8192-bfloat16")
class GradientAddedInStorageDtype(Emulation):
    """Gradients of keys and values are added up by 16-bit atomics."""

    def add(self, total: Tensor, part: Tensor) -> Tensor:
        return (total + part).bfloat16().float()


@PRECISION.add("out: max", "named/length_65-float32")
class Float32WeightsInFloat16(Emulation):
    """In float32 too, P goes to the tensor cores as float16."""

    def round_weights(self, call: Call, P: Tensor) -> Tensor:
        return P.half().float()


@PRECISION.add("out: max", "named/length_65-float32")
class Float32WeightsInBfloat16(Emulation):
    """In float32 too, P goes to the tensor cores as bfloat16."""

    def round_weights(self, call: Call, P: Tensor) -> Tensor:
        return P.bfloat16().float()


@PRECISION.add("dq: max", "named/length_65-float32")
class Float32ScoreGradientsInFloat16(Emulation):
    """In float32 too, dS goes to the tensor cores as float16."""

    def round_scores(self, call: Call, dS: Tensor) -> Tensor:
        return dS.half().float()


@PRECISION.add("lse: max", "named/length_65-float32")
class Float32OperandsInTf32(Emulation):
    """Products of float32 tensors in TF32, which nobody allowed."""

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return _mantissa_of_10_bits(a) @ _mantissa_of_10_bits(b)


@PRECISION.add("out: max", "named/keys_8192-float32")
class Float32AccumulatorInBfloat16(Emulation):
    """In float32 too, the sum over tiles is kept in bfloat16."""

    def add(self, total: Tensor, part: Tensor) -> Tensor:
        return (total + part).bfloat16().float()


@PRECISION.add("dq: max", "named/length_65-float32")
class Float32GradientThroughBfloat16(Emulation):
    """A float32 gradient passes through a buffer of bfloat16."""

    def add_to_dq(self, call: Call, dQ_i: Tensor, dR: Tensor, K_j: Tensor, keys: slice) -> Tensor:
        return super().add_to_dq(call, dQ_i, dR, K_j, keys).bfloat16().float()


@PRECISION.add("out: rms", "named/length_1-float32")
class Float32EpsilonInTheDenominator(Emulation):
    """The normaliser gets 1e-6 against division by 0."""

    def finish(self, call: Call, state: State) -> tuple[Tensor, Tensor]:
        _, lse = super().finish(call, state)
        return state.acc / (state.l + 1e-6) * call.rescue, lse
