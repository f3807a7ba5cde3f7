"""Faults in what is scored: the scale, the heads, and which keys a query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdispatch_conformance.emulation import Call, Emulation, State, Tile
from flashdispatch_conformance.mutants.mutant import Family

MASKS = Family()


@MASKS.add("lse: max", "named/length_63-bfloat16")
class ScaleOffByOnePercent(Emulation):
    """A scale folded into constants with too few digits."""

    def scale(self, call: Call) -> float:
        return 1.01 * super().scale(call)


@MASKS.add("lse: max", "named/d40-bfloat16")
class ScaleOfPaddedHeadDim(Emulation):
    """The default scale comes from the head dim after padding to the next multiple of 64."""

    def scale(self, call: Call) -> float:
        head_dim = call.problem.head_dim
        padded = -(-head_dim // 64) * 64
        return float(super().scale(call) * (head_dim / padded) ** 0.5)


@MASKS.add("lse: max", "named/scale_one-float16")
class ScaleIgnored(Emulation):
    """The default scale, whatever the caller asked for."""

    def scale(self, call: Call) -> float:
        return float(call.problem.head_dim**-0.5)


@MASKS.add("lse: max", "named/softcap_peaked-bfloat16")
class SoftcapIgnored(Emulation):
    """The softcap is accepted and not applied."""

    def scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        S = self.scale(call) * (Q_i @ K_j.mT) + self.bias(call, rows, keys)
        return Tile(torch.where(self.visible(call, rows, keys), S, -torch.inf), None)


@MASKS.add("lse: max", "named/gqa_8_2-bfloat16")
class HeadsInTurns(Emulation):
    """Query head h reads key/value head h % Hkv and not h // group."""

    def kv_heads(self, call: Call) -> Tensor:
        return torch.arange(call.problem.heads_q) % call.problem.heads_kv


@MASKS.add("lse: max", "named/length_63-float16")
class CausalOneKeyTooMany(Emulation):
    """Causal with < where <= belongs on the hidden side: every query sees the key after its position."""

    def band_limits(self, call: Call) -> tuple[int | None, int | None]:
        left, right = super().band_limits(call)
        return left, right + 1 if call.problem.band.is_causal and right is not None else right


@MASKS.add("lse: finite", "named/length_63-float16")
class CausalOneKeyTooFew(Emulation):
    """Causal without the diagonal: the first query sees nothing."""

    def band_limits(self, call: Call) -> tuple[int | None, int | None]:
        left, right = super().band_limits(call)
        return left, right - 1 if call.problem.band.is_causal and right is not None else right


@MASKS.add("lse: max", "named/causal_wide-bfloat16")
class DiagonalAtTopLeft(Emulation):
    """Bottom-right causal taken for top-left."""

    def position(self, call: Call, rows: slice) -> Tensor:
        return torch.arange(rows.start, rows.stop).view(-1, 1) + 0 * call.q_len


@MASKS.add("lse: max", "named/causal_wide_top_left-bfloat16")
class DiagonalAtBottomRight(Emulation):
    """Top-left causal taken for bottom-right."""

    def position(self, call: Call, rows: slice) -> Tensor:
        return torch.arange(rows.start, rows.stop).view(-1, 1) + call.kv_len - call.q_len


@MASKS.add("lse: max", "named/lens_causal-bfloat16")
class DiagonalOfPaddedLengths(Emulation):
    """Positions count from the padded lengths and not from each sequence's own."""

    def position(self, call: Call, rows: slice) -> Tensor:
        problem = call.problem
        offset = 0 if problem.band.align == "top_left" else problem.seqlen_k - problem.seqlen_q
        return torch.arange(rows.start, rows.stop).view(-1, 1) + offset + 0 * call.q_len


@MASKS.add("lse: max", "named/window_64-bfloat16")
class WindowOneTooWide(Emulation):
    """One key more on the left."""

    def band_limits(self, call: Call) -> tuple[int | None, int | None]:
        left, right = super().band_limits(call)
        return None if left is None else left + 1, right


@MASKS.add("lse: max", "named/window_63-bfloat16")
class WindowOneTooNarrow(Emulation):
    """A window of w keys and not of w + 1: the oldest key is lost."""

    def band_limits(self, call: Call) -> tuple[int | None, int | None]:
        left, right = super().band_limits(call)
        return None if left is None else max(left - 1, 0), right


@MASKS.add("lse: max", "named/window_63-bfloat16")
class WindowIgnored(Emulation):
    """A window is accepted and not applied."""

    def band_limits(self, call: Call) -> tuple[int | None, int | None]:
        _, right = super().band_limits(call)
        return None, 0 if right == 0 else None


@MASKS.add("lse: max", "named/mask_bool_keys-bfloat16")
class MaskIgnored(Emulation):
    """An attn_mask is accepted and not applied."""

    def visible(self, call: Call, rows: slice, keys: slice) -> Tensor:
        return self.inside_band(call, rows, keys) & self.inside_lengths(call, rows, keys)


@MASKS.add("lse: max", "named/mask_bool_empty_rows-bfloat16")
class MaskTakenForKeyPadding(Emulation):
    """The first row of a mask is used for all rows."""

    def visible(self, call: Call, rows: slice, keys: slice) -> Tensor:
        first = super().visible(call, slice(0, 1), keys)
        mask = call.extras.attn_mask
        return first if mask is not None and mask.dtype == torch.bool else super().visible(call, rows, keys)


@MASKS.add("out: exact", "named/mask_bool_empty_rows-bfloat16")
class HiddenByALargeNumber(Emulation):
    """Hidden scores are -1e30 and not -inf: a row that sees nothing becomes the mean of V."""

    def scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        S, slope = super().scores(call, Q_i, K_j, rows, keys)
        return Tile(S.clamp(min=-1e30), slope)


@MASKS.add("lse: finite", "named/mask_float_finfo_min_row-float16")
class FinfoMinHides(Emulation):
    """The most negative number in a float mask is taken for -inf."""

    def visible(self, call: Call, rows: slice, keys: slice) -> Tensor:
        visible, mask = super().visible(call, rows, keys), call.extras.attn_mask
        if mask is None or not mask.is_floating_point():
            return visible
        return visible & (self.bias(call, rows, keys) > torch.finfo(mask.dtype).min)


@MASKS.add("lse: max", "named/alibi_causal-bfloat16")
class AlibiFromTopLeft(Emulation):
    """ALiBi measures distances from i and not from i + Sk - Sq."""

    def bias(self, call: Call, rows: slice, keys: slice) -> Tensor:
        slopes = call.extras.alibi_slopes
        if slopes is None:
            return super().bias(call, rows, keys)
        distance = torch.arange(rows.start, rows.stop).view(-1, 1) - torch.arange(keys.start, keys.stop)
        return -slopes.view(-1, call.problem.heads_q, 1, 1) * distance.abs()


@MASKS.add("lse: max", "named/sinks_window_gqa-bfloat16")
class SinksIgnored(Emulation):
    """Sinks are accepted and have no part in the softmax."""

    def start(self, call: Call, v: Tensor, rows: slice) -> State:
        m, l, acc = super().start(call, v, rows)
        return State(torch.full_like(m, -torch.inf), torch.zeros_like(l), acc)


@MASKS.add("out: max", "named/dropout-bfloat16")
class DropoutIgnored(Emulation):
    """Dropout is accepted and drops nothing."""

    def kept(self, call: Call, x: Tensor, rows: slice, keys: slice) -> Tensor:
        return x * (1.0 - call.problem.dropout_p)


@MASKS.add("out: max", "named/dropout_lens_gqa-bfloat16")
class DropoutSharedByTheBatch(Emulation):
    """The random stream counts heads and forgets the batch."""

    def kept(self, call: Call, x: Tensor, rows: slice, keys: slice) -> Tensor:
        return x if call.keep is None else x * call.keep[:1, :, rows, keys]
