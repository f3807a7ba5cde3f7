"""FlashAttention-2 in plain Triton, forward and backward: the portable fast path of any NVIDIA GPU from sm_80 on.

Requirement: every feature of the contract in 16 bit and IEEE float32, for any head dim up to 256, with O(S) memory,
bitwise repeatable gradients, and no compiling once a kernel is there. Where the answer to a question is:

    forward.py, backward.py, mask_gradient.py   the kernels, to be read in this order
    scores.py                                   what they share, to be read beside them: key blocks, masks, dropout
    tiles.py                                    which tile and how many warps, as data
    arguments.py                                what a problem's kernels are launched with
    compile.py, facts.py                        from there to a compiled kernel, and what became of it
    launch.py                                   the backend object: outputs, addresses, launches
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch

from flashdispatch_registry import BackendSpec, Code, HeadDims, Problem, Reason, Support, hookimpl
from flashdispatch_registry.support import beyond_32_bits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels in NumPy, on CPU tensors, in this whole process: for tests, never by itself."""


def why_not(problem: Problem) -> Iterator[Reason]:
    """What data can't say: the interpreter's bfloat16, and sizes that do not fit the kernels' 32-bit numbers."""
    if INTERPRETED and problem.dtype is torch.bfloat16:
        yield Reason(
            Code.BACKEND_LIMIT,
            "dtype",
            "bfloat16 in Triton's interpreter",
            "float16 or float32 there: the interpreter multiplies bfloat16's raw bits",
            "use float16, or run on a GPU",
        )
    yield from beyond_32_bits(problem)


SPEC = BackendSpec(
    name="triton_fa2",
    factory="flashdispatch_backends.triton_fa2.launch:backend",
    support=Support(
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        head_dims=HeadDims(1, 256),
        head_dims_v=HeadDims(1, 256),
        devices=frozenset({"cpu"}) if INTERPRETED else frozenset({"cuda"}),
        min_arch="sm_80",
        causal=frozenset({"bottom_right", "top_left"}),
        window=True,
        attn_mask=frozenset({"bool", "float"}),
        attn_mask_grad=True,
        alibi=True,
        sinks=True,
        sinks_grad=True,
        lengths=True,
        softcap=True,
        dropout=True,
        gqa=True,
        backward=True,
        lse=True,
        lse_grad=True,
        deterministic=True,
    ),
    priority={"*": 50},
    by_name_only="Triton's interpreter, for tests" if INTERPRETED else "",
    numerics="exact",
    memory="linear",
    requires=("triton>=3.6",),
    install="pip install 'flashdispatch[triton]'",
    why_not=why_not,
)
"""The declaration. Which architectures it was tested on is said by reports, not here."""


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    """One backend."""
    yield SPEC
