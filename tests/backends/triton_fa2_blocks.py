"""Run by test_triton_fa2_interpreter under TRITON_INTERPRET=1: which blocks kernels visit, beside a brute-force search.

Prints one JSON document. A program of `probe` works out the edges of one random problem, as a kernel would.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from flashdispatch_backends.triton_fa2.arguments import backward_launches, forward_launch, pointers_of
from flashdispatch_backends.triton_fa2.compile import KERNELS
from flashdispatch_backends.triton_fa2.scores import (
    block_start,
    count_blocks,
    key_blocks,
    query_blocks,
    work_of_program,
)
from flashdispatch_registry import Band, Extras, Needs, Problem
from flashdispatch_registry.tile_table import Shape

MOST = 24
"""More blocks than any sample has."""
SAMPLES = 80
"""Of each band and block size. A program costs the interpreter 10 ms."""


@triton.jit
def probe(
    samples, answers, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """For sample pid: how many blocks are whole, where they start; how many are cut, where they start."""
    at = samples + tl.program_id(0) * 7
    first, last, shift = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    q_len, kv_len = tl.load(at + 3), tl.load(at + 4)
    left = tl.load(at + 5) if LEFT else None
    right = tl.load(at + 6) if RIGHT else None
    if KEYS:
        edges = key_blocks(first, last, shift, kv_len, left, right, BLOCK)
    else:
        edges = query_blocks(first, last, shift, q_len, kv_len, left, right, BLOCK)
    for cut in tl.static_range(2):
        out = answers + (tl.program_id(0) * 2 + cut) * (MOST + 1)
        count = count_blocks(edges, cut, BLOCK)
        tl.store(out, count)
        for index in tl.range(count):
            tl.store(out + 1 + index, block_start(edges, index, cut, BLOCK))


@triton.jit
def probe_order(answers, blocks, heads_at_once):
    """Program pid writes its block and its head."""
    block, bh = work_of_program(blocks, heads_at_once)
    tl.store(answers + 2 * tl.program_id(0), block)
    tl.store(answers + 2 * tl.program_id(0) + 1, bh)


def order(blocks: int, heads: int, heads_at_once: int | None) -> list[list[int]]:
    """[block, head] of each program, in the order in which a GPU starts them."""
    answers = torch.empty(blocks * heads, 2, dtype=torch.int32)
    probe_order[(blocks * heads,)](answers, blocks, heads_at_once)
    found: list[list[int]] = answers.tolist()
    return found


def drawn(keys: bool, rng: np.random.Generator, block: int) -> np.ndarray:
    """Random (first, last, shift, q_len, kv_len, left, right) of a block of queries or keys, as the kernels form it."""
    q_len, kv_len = rng.integers(1, 40, SAMPLES), rng.integers(0 if keys else 1, 40, SAMPLES)
    shift = np.where(rng.random(SAMPLES) < 0.7, kv_len - q_len, 0)
    other = rng.choice([4, 8, 16], SAMPLES)
    along = q_len if keys else kv_len
    first = (rng.random(SAMPLES) * along).astype(int) // other * other
    last = np.minimum(first + other, q_len) - 1 if keys else first + other - 1
    limits = [np.where(rng.random(SAMPLES) < 0.2, 0, rng.integers(0, 60, SAMPLES)) for _ in range(2)]
    return np.stack([first, last, shift, q_len, kv_len, *limits], 1).astype(np.int32)


def visible(sample: np.ndarray, left: bool, right: bool) -> np.ndarray:
    """(q_len, kv_len): what the mask of position lets a query see, from the definition."""
    _, _, shift, q_len, kv_len, most_left, most_right = (int(x) for x in sample)
    p, j = np.arange(q_len)[:, None] + shift, np.arange(kv_len)[None, :]
    seen = np.ones((q_len, kv_len), bool)
    if left:
        seen &= j >= p - most_left
    if right:
        seen &= j <= p + most_right
    return seen


def fault(keys: bool, sample: np.ndarray, seen: np.ndarray, whole: list[int], cut: list[int], block: int) -> str:
    """What is wrong with the blocks of one sample; nothing if nothing is."""
    first, last = int(sample[0]), int(sample[1])
    # Entry [resident, streamed] of one block of queries (or keys) against all that it may visit.
    tile = seen[first : last + 1] if keys else seen[:, first : last + 1].T
    resident = last + 1 - first
    visited = whole + cut
    if len(set(visited)) != len(visited):
        return "a block twice"
    if any(start % block or start < 0 for start in visited):
        return "a block that does not begin at a multiple of its size"
    needed = sorted({int(at) // block * block for at in np.flatnonzero(tile.any(0))})
    if sorted(visited) != needed and (needed or len(cut) > 1 or whole):  # one that shows that there is none is fine
        return f"visits {sorted(visited)}, needs {needed}"
    for start in whole:
        part = tile[:, start : start + block]
        if part.shape != (resident, block) or not part.all():
            return f"block {start} is not whole"
    return ""


def compared(keys: bool, left: bool, right: bool) -> dict[str, Any]:
    """The outcome for one kind of band."""
    rng = np.random.default_rng(2 * left + right)
    faults, whole_, cut_, none = [], 0, 0, 0
    for block in (4, 16):
        samples = drawn(keys, rng, block)
        answers = torch.zeros((SAMPLES, 2, MOST + 1), dtype=torch.int32)
        probe[(SAMPLES,)](torch.from_numpy(samples), answers, left, right, block, keys, MOST)
        for sample, (whole, cut) in zip(samples, answers.tolist(), strict=True):
            whole, cut = whole[1 : 1 + whole[0]], cut[1 : 1 + cut[0]]
            what = fault(keys, sample, visible(sample, left, right), whole, cut, block)
            if what:
                names = "first, last, shift, q_len, kv_len, left, right"
                faults.append(f"{what}: {names} = {sample.tolist()}, block {block}")
            whole_, cut_, none = whole_ + bool(whole), cut_ + bool(cut), none + (not whole and not cut)
    return {
        "faults": faults[:5], "checked": 2 * SAMPLES, "with_whole_blocks": whole_, "with_cut_blocks": cut_,
        "with_none": none,
    }  # fmt: skip


WATCHED = {"forward": "out", "dq": "dq", "dkdv": "dv"}
"""A result of each kernel."""


def written_in_order(kernel: str, causal: bool) -> list[list[int]]:
    """[block, head] of what a kernel writes, one after the other, of two blocks of 64 rows of two heads."""
    problem = Problem(
        arch="cpu", dtype=torch.float32, batch=1, heads_q=2, heads_kv=2, seqlen_q=128, seqlen_k=128, head_dim=16,
        head_dim_v=16, scale=0.25, band=Band(right=0) if causal else Band(), needs_grad=("q", "k", "v"),
    )  # fmt: skip
    q, k, v, dout = torch.randn(4, 1, 128, 2, 16).unbind(0)
    extras = Extras()

    def shape_of(problem: Problem, kernel: str) -> Shape:
        return Shape(64, 64, 4, 1)

    needs = Needs(q=True, k=True, v=True, attn_mask=False, sinks=False)
    launches = backward_launches(problem, q, k, v, dout, dout, extras, False, needs, shape_of)
    launches.append(forward_launch(problem, q, k, v, extras, shape_of))
    (launch,) = (launch for launch in launches if launch.recipe.kernel == kernel)
    row, written, other = torch.zeros(1, 2, 128), torch.full_like(q, torch.nan), torch.zeros_like(q)
    tensors = {
        "q": q, "k": k, "v": v, "out": other, "lse": row, "dout": dout, "delta": row, "dq": other, "dk": other,
        "dv": other, WATCHED[kernel]: written,
    } | pointers_of(extras)  # fmt: skip
    seen: list[list[int]] = []

    def look() -> None:
        done = written.isfinite().view(2, 64, 2, 16).all(3).all(1)
        seen.extend(at for at in done.nonzero().tolist() if at not in seen)

    start = InterpreterBuilder.set_grid_idx

    def look_and_start(builder: Any, x: int, y: int, z: int) -> None:
        look()
        start(builder, x, y, z)

    with patch.object(InterpreterBuilder, "set_grid_idx", look_and_start):
        grid = (launch.grid,)
        KERNELS[kernel][grid](*(None if name is None else tensors[name] for name in launch.pointers), *launch.rest)
    look()
    return seen


if __name__ == "__main__":
    bands = {"full": (False, False), "left": (True, False), "right": (False, True), "left and right": (True, True)}
    print(  # noqa: T201  this is what it is for
        json.dumps(
            {of: {name: compared(of == "keys", *band) for name, band in bands.items()} for of in ("keys", "queries")}
            | {"order": {str(at_once): order(3, 5, at_once) for at_once in (None, 1, 2, 5, 7)}}
            | {
                "written": {
                    f"{kernel} {'causal' if causal else 'full'}": written_in_order(kernel, causal)
                    for kernel, causal in product(("forward", "dq", "dkdv"), (False, True))
                }
            }
        )
    )
