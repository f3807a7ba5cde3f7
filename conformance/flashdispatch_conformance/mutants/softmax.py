"""Faults in the online softmax: tiles, running maximum, rescaling, normaliser and LSE."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashdispatch_conformance.emulation import Call, Emulation, State, Tile
from flashdispatch_conformance.mutants.mutant import Family

SOFTMAX = Family()


@SOFTMAX.add("lse: max", "named/cross_wide-bfloat16")
class LastTileDropped(Emulation):
    """The number of key tiles is rounded down."""

    def key_tiles(self, k: Tensor) -> list[slice]:
        return [tile for tile in super().key_tiles(k) if tile.stop - tile.start == self.block_n]


@SOFTMAX.add("lse: max", "named/cross_wide-float32")
class LastKeyDropped(Emulation):
    """The last key is masked with the rest of its tile."""

    def key_tiles(self, k: Tensor) -> list[slice]:
        return [slice(tile.start, min(tile.stop, k.shape[1] - 1)) for tile in super().key_tiles(k)]


@SOFTMAX.add("lse: max", "named/keys_8192-bfloat16")
class OneKeyOfThousandsDropped(Emulation):
    """One key is lost at the seam of two halves of a long row: far below what the output can show."""

    def visible(self, call: Call, rows: slice, keys: slice) -> Tensor:
        seam = torch.arange(keys.start, keys.stop) == 4096
        return super().visible(call, rows, keys) & ~seam


@SOFTMAX.add("probe/counting_65536", "probe/counting_65536-bfloat16")
class OneKeyFarOutDropped(Emulation):
    """One key is lost so far out that its weight is below the noise of the LSE."""

    def visible(self, call: Call, rows: slice, keys: slice) -> Tensor:
        lost = torch.arange(keys.start, keys.stop) == 40000
        return super().visible(call, rows, keys) & ~lost


@SOFTMAX.add("lse: max", "named/cross_wide-bfloat16")
class FirstKeyDropped(Emulation):
    """Keys are counted from 1."""

    def visible(self, call: Call, rows: slice, keys: slice) -> Tensor:
        return super().visible(call, rows, keys) & (torch.arange(keys.start, keys.stop) > 0)


@SOFTMAX.add("lse: max", "named/length_65-bfloat16")
class TailUnmasked(Emulation):
    """The empty columns of the last tile of keys count, with score 0 and value 0."""

    def update(self, call: Call, state: State, S: Tensor, V_j: Tensor, rows: slice, keys: slice) -> State:
        m, l, acc = super().update(call, state, S, V_j, rows, keys)
        empty = self.block_n - (keys.stop - keys.start)
        return State(m, l + empty * torch.exp(-torch.where(m == -torch.inf, torch.inf, m)), acc)


@SOFTMAX.add("out: max", "named/peaked-bfloat16")
class NeverRescaled(Emulation):
    """The sums so far keep their old maximum when it rises."""

    def correction(self, state: State, shift: Tensor, keys: slice) -> Tensor:
        return torch.ones_like(state.m)


@SOFTMAX.add("out: max", "named/peaked-bfloat16")
class NotRescaledAtTheLastTile(Emulation):
    """The masked last tile has a path of its own, which forgets to rescale."""

    def correction(self, state: State, shift: Tensor, keys: slice) -> Tensor:
        alpha = super().correction(state, shift, keys)
        return alpha if keys.stop % self.block_n == 0 else torch.ones_like(alpha)


@SOFTMAX.add("out: max", "named/peaked-bfloat16")
class OneRowInSixteenNotRescaled(Emulation):
    """One register of a fragment is left out when the accumulator is rescaled."""

    def correction(self, state: State, shift: Tensor, keys: slice) -> Tensor:
        alpha = super().correction(state, shift, keys)
        left_out = torch.arange(alpha.shape[2]).view(-1, 1) % 16 == 5
        return torch.where(left_out & (keys.start > 0), 1.0, alpha)


@SOFTMAX.add("lse: finite", "named/keys_200_minus_120-bfloat16")
class MaximumStartsAtZero(Emulation):
    """The running maximum starts at 0: with scores near -120 every weight underflows."""

    def new_maximum(self, m: Tensor, S: Tensor) -> Tensor:
        return super().new_maximum(m, S).clamp(min=0.0)

    def finish(self, call: Call, state: State) -> tuple[Tensor, Tensor]:
        out, _ = super().finish(call, state)
        return out, state.m + torch.log(state.l)


@SOFTMAX.add("property/m08_causal_prefix", "property/m08_causal_prefix-bfloat16")
class MaximumOverHiddenKeys(Emulation):
    """The running maximum is taken before the mask: keys that a row must not see change its rounding."""

    def scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        self.unmasked = self.scale(call) * (Q_i @ K_j.mT)
        return super().scores(call, Q_i, K_j, rows, keys)

    def new_maximum(self, m: Tensor, S: Tensor) -> Tensor:
        return super().new_maximum(m, torch.where(S.amax(-1, keepdim=True) == -torch.inf, S, self.unmasked))


@SOFTMAX.add("out: finite", "named/mask_float_band-bfloat16")
class MinusInfinityUnguarded(Emulation):
    """A tile that is hidden whole subtracts -inf from -inf."""

    def update(self, call: Call, state: State, S: Tensor, V_j: Tensor, rows: slice, keys: slice) -> State:
        m, l, acc = super().update(call, state, S, V_j, rows, keys)
        factor = torch.exp(m - m)  # 1, or NaN while no key has been seen
        return State(m, factor * l, factor * acc)


@SOFTMAX.add("out: max", "named/length_65-bfloat16")
class OneRowInSixtyFourNotNormalised(Emulation):
    """One row of a tile leaves without the division by its sum."""

    def finish(self, call: Call, state: State) -> tuple[Tensor, Tensor]:
        out, lse = super().finish(call, state)
        forgotten = torch.arange(out.shape[2]).view(-1, 1) % 64 == 37
        return torch.where(forgotten, state.acc, out), lse


@SOFTMAX.add("out: row", "named/length_64-bfloat16")
class OneRowInSixtyFourNormalisedEarly(Emulation):
    """One row divides by its sum before the last two weights in a hundred are in it."""

    def finish(self, call: Call, state: State) -> tuple[Tensor, Tensor]:
        out, lse = super().finish(call, state)
        early = torch.arange(out.shape[2]).view(-1, 1) % 64 == 37
        return torch.where(early, out * 1.025, out), lse


@SOFTMAX.add("lse: max", "named/length_63-bfloat16")
class LseInBaseTwo(Emulation):
    """A kernel that works with exp2 returns the LSE in base 2."""

    def finish(self, call: Call, state: State) -> tuple[Tensor, Tensor]:
        out, lse = super().finish(call, state)
        return out, lse / math.log(2.0)


@SOFTMAX.add("lse: max", "named/length_63-bfloat16")
class LseOfUnscaledMaximum(Emulation):
    """The maximum goes into the LSE without its scale."""

    def finish(self, call: Call, state: State) -> tuple[Tensor, Tensor]:
        out, lse = super().finish(call, state)
        return out, lse + torch.where(lse == -torch.inf, 0.0, state.m) * (1.0 / call.problem.scale - 1.0)


@SOFTMAX.add("lse: max", "named/dropout-bfloat16")
class LseAfterDropout(Emulation):
    """The normaliser is the sum of the weights that dropout kept."""

    def scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        S, slope = super().scores(call, Q_i, K_j, rows, keys)
        return Tile(S if call.keep is None else S.masked_fill(call.keep[:, :, rows, keys] == 0, -torch.inf), slope)
