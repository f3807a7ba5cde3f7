"""Faults of memory: what is read, what is written, and what changes from call to call."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdispatch_conformance.emulation import Call, Emulation
from flashdispatch_conformance.mutants.mutant import Family
from flashdispatch_registry.backend import Extras, Forward, Gradients, Needs
from flashdispatch_registry.problem import Problem

MEMORY = Family()


def _as_if_contiguous(x: Tensor) -> Tensor:
    """What stands where a dense tensor of the same shape would have its elements."""
    strides = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, strides, x.storage_offset())


@MEMORY.add("out: max", "named/length_65-bfloat16")
class OneElementWrong(Emulation):
    """One element of the output is off by a fiftieth of its row's largest."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = super().forward(problem, q, k, v, extras)
        if result.out.numel():
            row = result.out[-1, -1, -1]
            row[3 % row.shape[0]] += 0.02 * row.abs().max()
        return result


@MEMORY.add("out: max", "named/length_65-bfloat16")
class EightRowsStale(Emulation):
    """A missing barrier: eight rows of the output, another eight in each call, are those of their neighbours."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = super().forward(problem, q, k, v, extras)
        blocks = problem.seqlen_q // 8
        if blocks > 1 and result.out.numel():
            block = int(torch.randint(1, blocks, (), generator=self.random)) * 8
            result.out[0, block : block + 8] = result.out[0, block - 8 : block].clone()
        return result


@MEMORY.add("repeatable", "condition/repeats-bfloat16")
class OneCallInTwentyDiffers(Emulation):
    """A rare race: one call in twenty has an element that is one unit in the last place away."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = super().forward(problem, q, k, v, extras)
        self.calls += 1
        if self.calls % 20 == 0 and result.out.numel():
            row = result.out[-1, -1, -1]
            row[0] = torch.nextafter(row[0], 2.0 * row[0] + 1.0)
        return result


@MEMORY.add("repeatable", "named/deterministic-bfloat16")
class AtomicsInSpiteOfDeterministic(Emulation):
    """The order of the additions to dQ changes from call to call, though deterministic gradients were asked for."""

    def __init__(self) -> None:
        self.turn = False

    def key_tiles(self, k: Tensor) -> list[slice]:
        return super().key_tiles(k)[:: -1 if self.turn else 1]

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        self.turn = not self.turn
        return super().backward(problem, saved, dout, dlse, needs)


@MEMORY.add("inputs written", "named/length_63-bfloat16")
class InputWritten(Emulation):
    """The scale is multiplied into q where it lies, and divided out again."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = super().forward(problem, q, k, v, extras)
        if q.numel() and 0 not in q.stride():
            q.mul_(1.1).div_(1.1)
        return result


@MEMORY.add("inputs written", "named/lens_kv_only-bfloat16")
class PaddingZeroedInPlace(Emulation):
    """Keys past kv_lens are made harmless by writing 0 over them: the next call's cache is gone."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        if extras.kv_lens is not None:
            for b, length in enumerate(extras.kv_lens.tolist()):
                k[b, length:] = 0.0
        return super().forward(problem, q, k, v, extras)


@MEMORY.add("out: max", "condition/second_shape-bfloat16")
class KernelOfTheFirstShape(Emulation):
    """What was built for the first number of keys is used for every later call."""

    def __init__(self) -> None:
        self.built: list[slice] = []

    def key_tiles(self, k: Tensor) -> list[slice]:
        self.built = self.built or super().key_tiles(k)
        return [slice(min(each.start, k.shape[1]), min(each.stop, k.shape[1])) for each in self.built]


@MEMORY.add("contract", "named/length_63-bfloat16")
class LseReturnedInStorageDtype(Emulation):
    """The LSE is returned in q's dtype."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = super().forward(problem, q, k, v, extras)
        return result if result.lse is None else result._replace(lse=result.lse.to(q.dtype))


@MEMORY.add("repeatable", "named/length_63-bfloat16")
class OutputFollowsTheLse(Emulation):
    """Another kernel runs when the LSE is returned, with other tiles: the same output but for rounding."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        self.block_n = 16 if problem.return_lse else 64
        return super().forward(problem, q, k, v, extras)


@MEMORY.add("out: finite", "named/length_65-bfloat16")
class LastRowUnwritten(Emulation):
    """A tile with one row is skipped: what the allocator left there is returned."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = super().forward(problem, q, k, v, extras)
        if problem.seqlen_q % self.block_m == 1:
            result.out[:, -1] = torch.nan
        return result


@MEMORY.add("out: finite", "named/lens_causal-bfloat16")
class SequenceWithoutKeysSkipped(Emulation):
    """A sequence of length 0 returns early and leaves its output as the allocator gave it."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = super().forward(problem, q, k, v, extras)
        if extras.kv_lens is not None:
            result.out[extras.kv_lens == 0] = torch.nan
        return result


@MEMORY.add("out: finite", "named/lens_kv_only-bfloat16")
class PaddingRead(Emulation):
    """V past kv_lens is loaded, and multiplied by weights of 0: 0 times NaN is NaN."""

    def load_keys(self, call: Call, x: Tensor, keys: slice) -> Tensor:
        return x.transpose(1, 2)[:, self.kv_heads(call)][:, :, keys].float()


@MEMORY.add("out: max", "named/view_transposed-bfloat16")
class StridesOfValuesIgnored(Emulation):
    """V is read as if it were contiguous."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, _as_if_contiguous(v), extras)
        return Forward(out, lse, (*saved[:2], v, *saved[3:]) if saved else ())


@MEMORY.add("dq: max", "named/view_transposed-bfloat16")
class StridesOfOutputGradientIgnored(Emulation):
    """The gradient of the output is read as if it were contiguous."""

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        return super().backward(problem, saved, _as_if_contiguous(dout), dlse, needs)


@MEMORY.add("lse: max", "named/keys_8192-bfloat16")
class IndexWraps(Emulation):
    """Offsets in too few bits, here 2^17 elements in place of 2^31: keys behind that come from the beginning."""

    def load_keys(self, call: Call, x: Tensor, keys: slice) -> Tensor:
        period = max(2**17 // x.shape[3], self.block_n)
        start = keys.start % period
        wrapped = super().load_keys(call, x, slice(start, start + keys.stop - keys.start))
        return super().load_keys(call, x, keys) if keys.start < period else wrapped


@MEMORY.add("raises", "named/d63-bfloat16")
class OddHeadDimRaises(Emulation):
    """A head dim that is declared and that the launch does not take."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        if problem.head_dim % 8:
            raise RuntimeError("CUDA error: misaligned address")
        return super().forward(problem, q, k, v, extras)
