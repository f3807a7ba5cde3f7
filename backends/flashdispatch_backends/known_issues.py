"""Where a backend of ours is known to be wrong, or slow: data, apart from the backends' own folders.

A backend's conformance report holds for its folder, and how it ranks is no part of what makes it right.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashdispatch_registry import KnownIssue, Problem, hookimpl

MEASURED = "docs/measurements.md#other-shapes-features-and-masks"


def _masked(problem: Problem) -> bool:
    return problem.attn_mask is not None


def _biased_dq_with_q_lens(problem: Problem) -> bool:
    return problem.attn_mask == "float" and problem.q_lens and "q" in problem.needs_grad


def _backward_with_q_lens(problem: Problem) -> bool:
    return problem.q_lens and problem.needs_backward


@hookimpl
def flashdispatch_known_issues() -> Iterable[KnownIssue]:
    """Slow ones, measured on an H200: 45 is below `triton_fa2`, and above whatever is not fused. And a wrong one."""
    yield KnownIssue(
        backend="cuda_fa2",
        reason="NaN or Inf of a float attn_mask in rows past q_lens reaches the gradient of q there, which must be 0",
        url="docs/cuda_fa2.md#known-faults",
        when=_biased_dq_with_q_lens,
    )
    yield KnownIssue(
        backend="tilelang_fa2",
        reason="with an attn_mask its kernels are up to twice as slow as those of triton_fa2",
        url=MEASURED,
        when=_masked,
        priority=45,
    )
    yield KnownIssue(
        backend="tilelang_fa2",
        reason="with q_lens its backward is slower than that of triton_fa2",
        url=MEASURED,
        when=_backward_with_q_lens,
        priority=45,
    )
