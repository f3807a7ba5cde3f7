"""How far every ready backend is from the truth, on the Q, K and V of a real model.

The truth is dense attention in float64, written out below in five lines, of exactly the values the backend gets (after
rounding them to its dtype). The padding is filled with NaN before the backend sees it: with q_lens and kv_lens, what is
past a sequence's length must not matter.

The conformance suite judges kernels with a model of rounding noise, over hundreds of cases. This is one case and a coarse
bound, meant for looking at: an error of rounding size on values that nobody made up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import flashdispatch
from flashdispatch.demo.sentence_model import Captured
from flashdispatch_registry.problem import DTYPE_NAMES
from flashdispatch_registry.reasons import Reason

DTYPES = (torch.float32, torch.bfloat16)
TENSORS = ("out", "dq", "dk", "dv")
YARDSTICK = "PyTorch SDPA"

MAX_RELATIVE = 8.0
"""The largest relative error that passes, in units of the dtype's eps."""


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
    reasons: tuple[Reason, ...] = ()

    @property
    def relative(self) -> float:
        """The worst relative error in units of the dtype's eps; NaN when something came out NaN."""
        worst = 0.0
        for error in self.errors.values():
            if math.isnan(error.relative):
                return math.nan
            worst = max(worst, error.relative)
        return worst / torch.finfo(self.dtype).eps

    @property
    def passes(self) -> bool:
        """True when it ran and every error is of rounding size."""
        return bool(self.errors) and self.relative <= MAX_RELATIVE

    def to_json(self) -> dict[str, object]:
        """A plain dict."""
        return {
            "backend": self.backend,
            "dtype": DTYPE_NAMES[self.dtype],
            "passes": self.passes,
            "relative_in_eps": self.relative if self.errors else None,
            "errors": {
                name: {"max_abs": error.max_abs, "rms": error.rms, "relative": error.relative}
                for name, error in self.errors.items()
            },
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
        return _Case(*(x.to(dtype) for x in (self.q, self.k, self.v, self.dout)), self.lens, self.real)

    def poisoned(self) -> _Case:
        """NaN wherever there is no token."""
        padding = ~self.real[..., None, None]  # (B, S, 1, 1)
        tensors = (x.masked_fill(padding, math.nan) for x in (self.q, self.k, self.v, self.dout))
        return _Case(*tensors, self.lens, self.real)


def measure(captured: Captured) -> Iterator[Measured]:
    """One `Measured` for each dtype and ready backend, PyTorch's own attention last in each dtype, for comparison."""
    generator = torch.Generator().manual_seed(0)
    dout = torch.randn(captured.q.shape, generator=generator).to(captured.q)
    real = torch.arange(captured.q.shape[1], device=captured.q.device) < captured.lens[:, None]  # (B, S)
    case = _Case(captured.q, captured.k, captured.v, dout, captured.lens, real)
    for dtype in DTYPES:
        rounded = case.rounded(dtype)
        truth = dense_float64(rounded)
        for status in flashdispatch.backends():
            if status.ready:
                yield _measure(rounded, truth, status.name)
        yield Measured(YARDSTICK, dtype, _errors(torch_sdpa(rounded), truth, real))


def _measure(case: _Case, truth: Results, backend: str) -> Measured:
    try:
        ours = dispatched(case.poisoned(), backend)
    except flashdispatch.BackendUnsupportedError as error:
        reasons = error.plan.candidate(backend).reasons if error.plan else ()
        return Measured(backend, case.q.dtype, {}, reasons)
    return Measured(backend, case.q.dtype, _errors(ours, truth, case.real))


def dispatched(case: _Case, backend: str) -> Results:
    """Through flashdispatch, on the backend named, forward and backward."""
    q, k, v = _leaves(case)
    out = flashdispatch.attention(q, k, v, q_lens=case.lens, kv_lens=case.lens, backend=backend)
    return _results(out, (q, k, v), case.dout)


def torch_sdpa(case: _Case) -> Results:
    """Through PyTorch, with a bool mask for the padding."""
    q, k, v = _leaves(case)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, S, D)
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=case.real[:, None, None, :]).transpose(1, 2)
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
