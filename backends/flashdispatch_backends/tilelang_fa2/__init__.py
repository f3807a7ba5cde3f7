"""FlashAttention-2 in TileLang, forward and backward: tile programs whose copies, layouts and warps TileLang arranges.

Requirement: the contract in 16 bit but for dropout, sinks and ALiBi, for head dims from 16 to 256 in steps of 8, with
O(S) memory, bitwise repeatable gradients, and one compiled kernel for all lengths, batches and masks of position. Where
the answer to a question is:

    forward.py, backward.py     the kernels, to be read in this order
    scores.py                   what they share, to be read beside them: blocks, loads, masks, softcap
    tiles.py                    which tile and how many warps, as data
    recipe.py, arguments.py     what is compiled into a problem's kernels, and what they are launched with
    compile.py, facts.py        from there to a compiled kernel, and what became of it
    launch.py                   the backend object: outputs, launches
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashdispatch_registry import BackendSpec, HeadDims, Support, hookimpl
from flashdispatch_registry.support import beyond_32_bits

SPEC = BackendSpec(
    name="tilelang_fa2",
    factory="flashdispatch_backends.tilelang_fa2.launch:backend",
    support=Support(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=HeadDims(16, 256, 8),
        head_dims_v=HeadDims(16, 256, 8),
        devices=frozenset({"cuda"}),
        min_arch="sm_80",
        causal=frozenset({"bottom_right", "top_left"}),
        window=True,
        attn_mask=frozenset({"bool", "float"}),
        lengths=True,
        softcap=True,
        gqa=True,
        backward=True,
        lse=True,
        lse_grad=True,
        deterministic=True,
    ),
    priority={"*": 40, "sm_90": 60},  # tuned on an H200, and faster there than triton_fa2; elsewhere only compiled
    numerics="exact",
    memory="linear",
    requires=("tilelang>=0.1.13",),
    install="pip install 'flashdispatch[tilelang]'",
    why_not=beyond_32_bits,
)
"""The declaration. Which architectures it was tested on is said by reports, not here."""


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    """One backend."""
    yield SPEC
