"""How far every ready backend is from the truth, on the Q, K and V of a real model.

The truth is dense attention in float64, written out below in five lines, of exactly the values the backend gets (after
rounding them to its dtype). The padding is filled with NaN before the backend sees it: with q_lens and kv_lens, what is
past a sequence's length must not matter.

The conformance suite judges kernels with a model of rounding noise, over all its named cases. This is one case and a
coarse bound, meant for looking at: an error of rounding size on values that nobody made up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

import flashdispatch
from flashdispatch.demo.sentence_model import Captured
from flashdispatch_registry.problem import DTYPE_NAMES
from flashdispatch_registry.reasons import Reason

DTYPES = (torch.float32, torch.bfloat16)
TENSORS = ("out", "dq", "dk", "dv")
YARDSTICK = "PyTorch SDPA"

TIMES_YARDSTICK = 4.0
"""A backend passes when no tensor's relative error is more than this many times the yardstick's worst one. Two kernels
that round differently stay well below it; a kernel that is wrong is off by orders of magnitude."""


@dataclass(frozen=True, slots=True)
class Error:
    """One tensor's distance from the truth, over real tokens."""

    max_abs: float
    rms: float
    relative: float
    """rms of the error / rms of the truth."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One backend in one dtype: an error for each of TENSORS, or the reasons why it can't run this."""

    backend: str
    dtype: torch.dtype
    errors: dict[str, Error]
    limit: float
    """The largest relative error that passes."""
    reasons: tuple[Reason, ...] = ()

    @property
    def passes(self) -> bool:
        """True when it ran and every error is of rounding size. NaN is not."""
        return bool(self.errors) and all(error.relative <= self.limit for error in self.errors.values())

    def to_json(self) -> dict[str, object]:
        """A plain dict."""
        return {
            "backend": self.backend,
            "dtype": DTYPE_NAMES[self.dtype],
            "passes": self.passes,
            "relative_limit": self.limit,
            "errors": {name: asdict(error) for name, error in self.errors.items()},
            "reasons": [reason.to_json() for reason in self.reasons],
        }


Results = dict[str, Tensor]
"""A tensor for each of TENSORS, (B, S, H, D)."""


@dataclass(frozen=True, slots=True)
class _Case:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    """A random cotangent: the gradient that would arrive from the layers above."""
    lens: Tensor
    real: Tensor
    """(B, S) bool, True = a real token."""

    def rounded(self, dtype: torch.dtype) -> _Case:
        return self._each(lambda x: x.to(dtype))

    def poisoned(self) -> _Case:
        """NaN wherever there is no token."""
        padding = ~self.real[..., None, None]  # (B, S, 1, 1)
        return self._each(lambda x: x.masked_fill(padding, math.nan))

    def _each(self, change: Callable[[Tensor], Tensor]) -> _Case:
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v), dout=change(self.dout))


def measure(captured: Captured) -> Iterator[Measured]:
    """One `Measured` for each dtype and ready backend, after the yardstick: PyTorch's own in the same dtype."""
    generator = torch.Generator().manual_seed(0)
    dout = torch.randn(captured.q.shape, generator=generator).to(captured.q)
    real = torch.arange(captured.q.shape[1], device=captured.q.device) < captured.lens[:, None]  # (B, S)
    case = _Case(captured.q, captured.k, captured.v, dout, captured.lens, real)
    for dtype in DTYPES:
        rounded = case.rounded(dtype)
        truth = dense_float64(rounded)
        yardstick = _errors(torch_sdpa(rounded), truth, real)
        limit = TIMES_YARDSTICK * max(error.relative for error in yardstick.values())
        yield Measured(YARDSTICK, dtype, yardstick, limit)
        for status in flashdispatch.backends():
            if status.ready:
                yield _measure(rounded, truth, status.name, limit)


def _measure(case: _Case, truth: Results, backend: str, limit: float) -> Measured:
    try:
        ours = dispatched(case.poisoned(), backend)
    except flashdispatch.BackendUnsupportedError as error:
        reasons = error.plan.candidate(backend).reasons if error.plan else ()
        return Measured(backend, case.q.dtype, {}, limit, reasons)
    return Measured(backend, case.q.dtype, _errors(ours, truth, case.real), limit)


def dispatched(case: _Case, backend: str) -> Results:
    """Through flashdispatch, on the backend named, forward and backward."""
    q, k, v = _leaves(case)
    out = flashdispatch.attention(q, k, v, q_lens=case.lens, kv_lens=case.lens, backend=backend)
    return _results(out, (q, k, v), case.dout)


def torch_sdpa(case: _Case) -> Results:
    """Through PyTorch, with a bool mask for the padding."""
    q, k, v = _leaves(case)
    qh, kh, vh = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, D)
    out = functional.scaled_dot_product_attention(qh, kh, vh, attn_mask=case.real[:, None, None, :]).transpose(1, 2)
    # Here padded queries do run; with no gradient from above they add nothing to dk and dv.
    return _results(out, (q, k, v), case.dout.masked_fill(~case.real[..., None, None], 0.0))


def dense_float64(case: _Case) -> Results:
    """The truth: softmax(q kᵀ / √D) v over real keys, in float64, nothing fused, gradients by autograd."""
    q, k, v = (x.double().requires_grad_() for x in (case.q, case.k, case.v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])  # (B, H, S, S)
    weights = scores.masked_fill(~case.real[:, None, None, :], -math.inf).softmax(dim=-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)  # (B, S, H, D)
    return _results(out, (q, k, v), case.dout.double().masked_fill(~case.real[..., None, None], 0.0))


def _leaves(case: _Case) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v))
    return q, k, v


def _results(out: Tensor, inputs: tuple[Tensor, ...], dout: Tensor) -> Results:
    gradients = torch.autograd.grad(out, inputs, dout)
    return dict(zip(TENSORS, (out.detach(), *gradients), strict=True))


def _errors(got: Results, truth: Results, real: Tensor) -> dict[str, Error]:
    errors = {}
    for name in TENSORS:
        right = truth[name][real]  # (tokens, H, D)
        wrong = got[name][real].double() - right
        rms, size = wrong.square().mean().sqrt(), right.square().mean().sqrt()
        errors[name] = Error(float(wrong.abs().max()), float(rms), float(rms / size))
    return errors
