"""Memory: long sequences must need little beside their inputs and results.

    pytest tests/benchmarks/test_memory.py --benchmark-enable --benchmark-only --benchmark-quiet --rows rows.jsonl

On a GPU: the peak of what a pass allocates beside inputs, output and gradients, S 4k to 64k, B1 H4 D64 bf16 causal, as
rows in bytes; for our fused backends it must grow no faster than S. On a CPU: torch_reference over 32768 x 32768
scores, which would be 4 GiB if stored. Real assertions, since memory does not depend on who else uses the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from .comparison import Outcome, catching, circumstances, place
from .grids import Case
from .machine import reading
from .providers import Provider, chosen
from .rows import Direction, Row
from .truth import Inputs, make_inputs

LENGTHS = (4096, 8192, 16384, 32768, 65536)
SLACK = 2**20
"""Bytes: what an allocator rounds, and buffers of a fixed size."""

SEQLEN = 32768
LIMIT_MB = 400
RUN = """
import json, resource, sys, time
import torch
import flashdispatch_backends.torch_reference as backend
from flashdispatch_registry import Band, Extras, Needs, Problem

torch.set_num_threads(1)


def attention(seqlen):
    problem = Problem(
        arch="cpu", dtype=torch.float32, batch=1, heads_q=1, heads_kv=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=64,
        head_dim_v=64, scale=0.125, band=Band(right=0) if sys.argv[2] == "causal" else Band(),
        needs_grad=("q", "k", "v"),
    )
    q, k, v, dout = (torch.randn(1, seqlen, 1, 64) for _ in range(4))
    before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    start = time.perf_counter()
    result = backend.forward(problem, q, k, v, Extras())
    middle = time.perf_counter()
    grads = backend.backward(problem, result.saved, dout, None, Needs(True, True, True, False, False))
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"extra_mb": (peak - before) / 1e6, "forward_s": middle - start, "backward_s": end - middle}


with torch.no_grad():
    attention(64)  # loads what torch loads late
    print(json.dumps(attention(int(sys.argv[1]))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_32768_tokens_of_one_head_take_less_than_400_mb(benchmark: Any, mask: str) -> None:
    """The extra memory holds the outputs, too: out, lse, dq, dk, dv are 34 MB."""

    def run() -> dict[str, float]:
        command = [sys.executable, "-c", RUN, str(SEQLEN), mask]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)
        numbers: dict[str, float] = json.loads(done.stdout)
        return numbers

    numbers = benchmark.pedantic(run, rounds=1, iterations=1)
    benchmark.extra_info.update(numbers)
    assert numbers["extra_mb"] < LIMIT_MB


@pytest.mark.gpu
def test_extra_memory_on_a_gpu_grows_no_faster_than_the_sequence(benchmark: Any, record: Any) -> None:
    providers = chosen(record.options.providers)

    def whole() -> Outcome:
        outcome = Outcome()
        for length in LENGTHS:
            case = Case.of("bf16", 1, 4, length, 64)
            given = make_inputs(case, torch.device("cuda"))
            for each in providers:
                with catching(outcome, case, "memory", each):
                    extra = extra_memory(each, case, given)
                    seen = circumstances(record.run, reading()) | {"grid": "memory"}
                    outcome.rows += [
                        Row(**place(case), provider=each.name, direction=name, value=size, unit="bytes", **seen)
                        for name, size in extra.items()
                    ]
        return outcome

    outcome = benchmark.pedantic(whole, rounds=1, iterations=1)
    record.close(benchmark, outcome)
    ours = {each.name for each in providers if each.ours}
    too_much = faster_than_linear([row for row in outcome.rows if row.provider in ours])
    assert not too_much, "\n".join(too_much)


def extra_memory(provider: Provider, case: Case, given: Inputs) -> dict[Direction, float]:
    """The peaks of forward (with gradients to come, so what it saves counts) and backward, second call of each."""
    for _ in range(2):  # the first compiles, and makes workspaces that stay
        ready = provider.ready(case, given, True)
        with ready.around():
            (out,), forward = peak(lambda: (ready.forward(),))  # noqa: B023 (called at once)
        dout = ready.turned(given.dout)
        _, backward = peak(partial(torch.autograd.grad, out, ready.inputs, dout))
        del out
    return {"fwd_memory": float(forward), "bwd_memory": float(backward)}


def peak(action: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], int]:
    """What it returns, and the most bytes that were allocated at a time beside that and what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = action()
    torch.cuda.synchronize()
    own = sum(result.numel() * result.element_size() for result in results)
    return results, max(0, torch.cuda.max_memory_allocated() - before - own)


def faster_than_linear(rows: Sequence[Row]) -> list[str]:
    """Whose extra memory at the longest sequence is more than 1.1 x what the shortest one's, scaled by S, allows."""
    found = []
    for provider, direction in dict.fromkeys((row.provider, row.direction) for row in rows):
        mine = {row.case: row.value for row in rows if (row.provider, row.direction) == (provider, direction)}
        sizes = list(mine.values())
        if len(sizes) < len(LENGTHS):
            continue  # it refused a length, and the summary says so
        allowed = 1.1 * LENGTHS[-1] / LENGTHS[0] * sizes[0] + SLACK
        if sizes[-1] > allowed:
            found.append(f"{provider} {direction}: {sizes[-1]:.0f} bytes at S {LENGTHS[-1]}, {allowed:.0f} allowed")
    return found
