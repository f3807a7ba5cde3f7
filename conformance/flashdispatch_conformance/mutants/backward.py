"""Faults in the backward alone: the forward is right."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdispatch_conformance.emulation import Call, Emulation, Tile
from flashdispatch_conformance.mutants.mutant import Family
from flashdispatch_registry.backend import Gradients, Needs
from flashdispatch_registry.problem import Problem

BACKWARD = Family()


@BACKWARD.add("dq: max", "named/length_65-bfloat16")
class BackwardWithoutCausal(Emulation):
    """The backward forgets the causal mask."""

    def backward_scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        S = self.scale(call) * (Q_i @ K_j.mT) + self.bias(call, rows, keys)
        seen = self.inside_lengths(call, rows, keys)
        return Tile(torch.where(seen, S, -torch.inf), super().backward_scores(call, Q_i, K_j, rows, keys).slope)


@BACKWARD.add("dq: max", "named/length_65-bfloat16")
class NoDelta(Emulation):
    """Delta is left out of dS."""

    def delta(self, call: Call, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
        return torch.zeros_like(lse)


@BACKWARD.add("dq: max", "named/length_65-bfloat16")
class DeltaOfTheNextRow(Emulation):
    """Delta is read one row further."""

    def delta(self, call: Call, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
        return super().delta(call, out, dout, dlse, lse).roll(-1, 2)


@BACKWARD.add("dq: max", "named/lse_gradient-bfloat16")
class LseGradientIgnored(Emulation):
    """A gradient for the LSE is accepted and not used."""

    def delta(self, call: Call, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
        return super().delta(call, out, dout, None, lse)


@BACKWARD.add("dq: max", "named/cross_wide-bfloat16")
class DqMissesATile(Emulation):
    """The last tile of keys does not reach dQ."""

    def add_to_dq(self, call: Call, dQ_i: Tensor, dR: Tensor, K_j: Tensor, keys: slice) -> Tensor:
        last = keys.stop == call.problem.seqlen_k
        return dQ_i if last else super().add_to_dq(call, dQ_i, dR, K_j, keys)


@BACKWARD.add("dk: max", "named/length_65-bfloat16")
class DkUnscaled(Emulation):
    """The scale, which the forward folds into q, is missing in dK."""

    def scale_dk(self, call: Call, dK_j: Tensor) -> Tensor:
        return dK_j


@BACKWARD.add("dk: max", "named/gqa_8_2-bfloat16")
class GradientOfTheFirstHeadOfAGroup(Emulation):
    """The gradients of keys and values are those of one query head, not the sum over its group."""

    def sum_of_group(self, x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        return self.round_out(x[:, ::group], dtype)


@BACKWARD.add("dq: finite", "named/keys_200_minus_120-bfloat16")
class PaddedColumnsInTheBackward(Emulation):
    """The empty columns of the last tile have score 0: exp(0 - LSE) overflows where scores are near -120."""

    def add_to_dq(self, call: Call, dQ_i: Tensor, dR: Tensor, K_j: Tensor, keys: slice) -> Tensor:
        return super().add_to_dq(call, dQ_i, dR, K_j, keys) + 0.0 * self.overflow

    def recomputed(self, S: Tensor, lse: Tensor) -> Tensor:
        self.overflow = torch.exp(-lse) if S.shape[-1] % self.block_n else torch.zeros_like(lse)
        return super().recomputed(S, lse)


@BACKWARD.add("dq: max", "named/softcap_peaked-bfloat16")
class SoftcapWithoutDerivative(Emulation):
    """The derivative of tanh is left out."""

    def backward_scores(self, call: Call, Q_i: Tensor, K_j: Tensor, rows: slice, keys: slice) -> Tile:
        return Tile(super().backward_scores(call, Q_i, K_j, rows, keys).S, None)


@BACKWARD.add("dattn_mask: max", "named/mask_float32_shared_grad-bfloat16")
class MaskGradientNotSummed(Emulation):
    """The gradient of a mask shared by the batch is that of the first sequence."""

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        gradients = super().backward(problem, saved, dout, dlse, needs)
        if gradients.attn_mask is None or problem.attn_mask_shape is None or problem.attn_mask_shape[0] > 1:
            return gradients
        first = dout.clone()
        first[1:] = 0.0
        alone = super().backward(problem, saved, first, dlse, needs)
        return gradients._replace(attn_mask=alone.attn_mask)


@BACKWARD.add("dsinks: max", "named/sinks_window_gqa-bfloat16")
class SinksGradientOfOneSequence(Emulation):
    """The gradient of the sinks is not summed over the batch."""

    def sinks_gradient(self, call: Call, lse: Tensor, total: Tensor | None, delta: Tensor) -> Tensor | None:
        first = torch.zeros_like(delta)
        first[:1] = delta[:1]
        return super().sinks_gradient(call, lse, total, first)


@BACKWARD.add("dk: exact", "named/causal_wide_top_left-bfloat16")
class GradientForKeysNobodySees(Emulation):
    """Tiles behind the diagonal are skipped, and their dK is what was left in the buffer, though small."""

    def scale_dk(self, call: Call, dK_j: Tensor) -> Tensor:
        return torch.where(dK_j == 0.0, 1e-7, super().scale_dk(call, dK_j))
