"""What the backend can do, as data. flashdispatch imports this at discovery, so it must stay light: no kernels here."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashdispatch_registry import BackendSpec, Code, HeadDims, Problem, Reason, Support, hookimpl

LARGEST_SCORES = 2**24
"""Elements of the (B, Hq, Sq, Sk) scores, which are held in memory."""


def why_not(problem: Problem) -> Iterable[Reason]:
    """The one limit that `Support` can't express. It can only add reasons to what the declaration already refuses."""
    scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    if scores > LARGEST_SCORES:
        yield Reason(
            Code.BACKEND_LIMIT,
            "B * Hq * Sq * Sk",
            str(scores),
            f"up to {LARGEST_SCORES}",
            "split the batch, or leave the choice to flashdispatch",
        )


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    """Called once, at discovery."""
    yield BackendSpec(
        name="tiny",
        factory="flashdispatch_tiny.kernels",  # imported on first use
        support=Support(
            dtypes=frozenset({torch.bfloat16, torch.float32, torch.float64}),
            head_dims=HeadDims(maximum=256),
            head_dims_v=HeadDims(maximum=256),
            devices=frozenset({"cpu"}),
            causal=frozenset({"bottom_right"}),
            backward=True,
            lse=True,
            lse_grad=True,
            deterministic=True,
        ),
        priority={"*": -10},
        memory="quadratic",
        fused=False,
        portable=True,
        why_not=why_not,
    )
