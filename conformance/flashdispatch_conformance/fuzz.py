"""Fuzzing: valid cases drawn at random near the edges of tiles, and a failing one made as small as it gets.

hypothesis draws and shrinks sizes and flags; the values of the tensors come from the case's id and the seed, as always,
so a finding is one line of JSON that `flashdispatch conformance replay` runs again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

from flashdispatch_conformance.case import Case, Mask, MaskPattern, Replay, Values, View, contradictions
from flashdispatch_conformance.case_check import check_case
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target
from flashdispatch_registry.problem import DTYPE_NAMES

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0, 255, 256, 257)
"""Lengths at which tiles begin and end, the simple ones first: that is where shrinking goes."""
DIMS = (64, 16, 32, 128, 8, 40, 72, 80, 96, 63, 192, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 3), (6, 3), (8, 1))
VALUES = tuple(word for word in get_args(Values) if word not in ("huge", "ones", "v_ones"))
VIEWS = tuple(word for word in get_args(View) if word != "expanded_all")
"""Neither has one number for all of V: then all errors are one error, and its z alone would be the RMS of the tensor.
And next to scores near 1e5 the LSE, one float32, has no digits for a backward."""
BUDGET = 300_000
"""Most pairs of query and key, over batch and heads: a fraction of a second for the truth."""
ROUND = 50
"""Examples after which the clock is looked at."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that a backend fails, shrunk."""

    replay: Replay
    result: Result

    def line(self) -> str:
        """The command that runs it again."""
        return command(self.result.backend, self.replay)


def command(backend: str, replay: Replay) -> str:
    """What runs one case again on the command line."""
    return f"flashdispatch conformance replay --backend {backend} '{replay.line()}'"


def cases() -> SearchStrategy[Case]:
    """A strategy for valid cases with the id ``fuzz/case``, small enough to be checked in a fraction of a second."""
    from hypothesis import strategies as st

    return st.composite(_draw)()


def _draw(draw: DrawFn) -> Case:
    from hypothesis import assume
    from hypothesis import strategies as st

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def rarely(*values: Any, default: Any = None) -> Any:
        """One of `values` in a quarter of the cases."""
        return one_of(*values) if draw(st.integers(0, 3)) == 3 else default

    length = st.one_of(st.sampled_from(EDGES), st.integers(0, 140))
    seqlen_q = draw(length)
    seqlen_k = seqlen_q if draw(st.booleans()) else draw(length)
    batch, heads, head_dim = one_of(1, 2, 3), one_of(*HEADS), one_of(*DIMS)
    sinks = rarely(True, default=False)
    mask = _draw_mask(one_of, rarely, batch, heads[0], seqlen_q, seqlen_k) if draw(st.booleans()) else None

    def lens(limit: int) -> tuple[int, ...] | None:
        return tuple(draw(st.integers(0, limit)) for _ in range(batch)) if rarely(True) else None

    window = rarely(True) and (
        draw(st.none() | st.integers(0, 140)),
        draw(st.none() | st.integers(0, 140)),
    )
    grads: Any = draw(st.sampled_from((("q", "k", "v"), (), ("q",), ("k", "v"), ("v",))))
    if grads and sinks and draw(st.booleans()):
        grads = (*grads, "sinks")
    differentiable = bool(grads) or (mask is not None and mask.grad)
    views: dict[str, Any] = {
        f"{name}_view": rarely(*(VIEWS if name != "dout" else get_args(View)), default="contiguous")
        for name in ("q", "k", "v", "dout")
    }
    case = Case(
        id="fuzz/case",
        why="found by fuzzing",
        batch=batch,
        heads=heads,
        seqlens=(seqlen_q, seqlen_k),
        dims=(head_dim, rarely(*DIMS, default=head_dim)),
        causal=one_of(False, True, "top_left"),
        window=window or None,
        mask=mask,
        alibi=rarely("heads", "batch"),
        sinks=sinks,
        scale=rarely(0.3, -0.125, 0.0, 0.01),
        softcap=rarely(15.0, 50.0),
        dropout_p=rarely(0.17, 0.5, 1.0, default=0.0),
        dropout_seed=one_of(0, (-(2**40) - 3, 7)),
        layout=one_of("bshd", "bhsd"),
        deterministic=rarely(True),
        grads=grads,
        dlse=differentiable and rarely(True, default=False),
        values=rarely(*VALUES, default="normal"),
        q_lens=lens(seqlen_q),
        kv_lens=lens(seqlen_k),
        **views,
    )
    assume(batch * heads[0] * seqlen_q * seqlen_k <= BUDGET)
    assume(not contradictions(case))
    return case


def _draw_mask(one_of: Any, rarely: Any, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Mask:
    full = (batch, heads, seqlen_q, seqlen_k)
    shape = tuple(size if keep else 1 for size, keep in zip(full, one_of(*_MASK_FORMS), strict=True))
    kind = one_of("bool", "float", "float32")
    patterns = [word for word in get_args(MaskPattern) if kind != "bool" or not word.startswith("finfo")]
    return Mask(
        shape=rarely(shape[2:], default=shape) if shape[:2] == (1, 1) else shape,
        kind=kind,
        pattern=rarely(*patterns, default="random"),
        view=rarely("padded_rows", "expanded", default="contiguous"),
        grad=kind != "bool" and rarely(True, default=False),
    )


_MASK_FORMS = tuple(
    tuple(map(bool, form)) for form in ((0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 1, 1), (0, 1, 1, 1), (1, 1, 1, 0))
)
"""Which dims of a mask are full; the others are 1."""


class _TimeIsUpError(KeyboardInterrupt):
    """Ends a round of hypothesis at once: of what a test can raise, it lets only an interrupt through."""


class _FailedError(Exception):
    """The case at hand fails."""


def fuzz(
    backend: str,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    seconds: float | None = None,
    max_examples: int | None = None,
    seed: int = 0,
    derandomize: bool = False,
    watch: Callable[[Replay], None] | None = None,
) -> Iterator[Finding]:
    """Draws cases until `seconds` have passed or `max_examples` were drawn, and yields each that fails, shrunk.

    A case fails when its result is fail or error. `watch` is told of each before it is run. With `derandomize` the same
    cases are drawn every time, whatever the seed. Raises ValueError when neither limit is given, UnknownBackendError
    when there is no such backend.
    """
    if seconds is None and max_examples is None:
        raise ValueError("give fuzz seconds or max_examples: without a limit it would never end")
    end = None if seconds is None else time.monotonic() + seconds
    target = Target(backend=backend, dtype=dtype, device=torch.device(device), seed=seed)
    left, number = max_examples, 0
    seen: set[Case] = set()
    while (left is None or left > 0) and (end is None or time.monotonic() < end):
        count = ROUND if left is None else min(ROUND, left)
        left = None if left is None else left - count
        result = _round(target, count, number if derandomize else _mixed(seed, number), end, watch)
        number += 1
        if result is not None and result[0] not in seen:
            seen.add(result[0])
            yield Finding(Replay(case=result[0], dtype=DTYPE_NAMES[dtype], seed=seed), result[1])


def _mixed(seed: int, number: int) -> int:
    """A seed of its own for each round."""
    return seed * 1_000_003 + number


def _round(
    target: Target, count: int, seed: int, end: float | None, watch: Callable[[Replay], None] | None
) -> tuple[Case, Result] | None:
    """The smallest failing case of `count` examples, with its result; None when all are right."""
    import hypothesis
    from hypothesis import HealthCheck, Phase

    smallest: list[tuple[Case, Result]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases())
    def check(case: Case) -> None:
        if end is not None and time.monotonic() > end:
            raise _TimeIsUpError
        if watch is not None:
            watch(Replay(case=case, dtype=DTYPE_NAMES[target.dtype], seed=target.seed))
        result = check_case(case, target)
        if result.outcome in ("fail", "error"):
            smallest[:] = [(case, result)]
            raise _FailedError

    with suppress(_FailedError, _TimeIsUpError):
        check()
    return smallest[0] if smallest else None
