"""FlashAttention-2 in CUDA C++, forward and backward: what the algorithm does to the hardware, written out by hand.

Requirement: the contract in 16 bit but for dropout, sinks and ALiBi, for head dims from 16 to 256 in steps of 8, with
O(S) memory and bitwise repeatable gradients, compiled at run time by NVRTC and loaded through CuPy, with no headers but
these and no other library. Where the answer to a question is:

    forward.cu, backward.cu     the kernels, to be read in this order
    mma.cuh, tile.cuh           what they are made of: matrix instructions, tiles in shared memory
    scores.cuh, arguments.cuh   what they share, to be read beside them: blocks, masks, softcap; what a launch passes
    tiles.py                    which tile and how many warps, as data
    recipe.py, arguments.py     what is compiled into a problem's kernels, and what they are launched with
    compile.py, facts.py        from there to a compiled kernel, and what became of it
    launch.py                   the backend object: outputs, addresses, launches
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashdispatch_registry import BackendSpec, HeadDims, Support, hookimpl
from flashdispatch_registry.support import beyond_32_bits

SPEC = BackendSpec(
    name="cuda_fa2",
    factory="flashdispatch_backends.cuda_fa2.launch:backend",
    support=Support(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=HeadDims(16, 256, 8),
        head_dims_v=HeadDims(16, 256, 8),
        devices=frozenset({"cuda"}),
        min_arch="sm_80",
        impossible={"sm_75": "no cp.async"},
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
    priority={"*": 30},  # mma.sync: what wgmma reaches on sm_90 is out of its reach
    numerics="exact",
    memory="linear",
    requires=("cupy-cuda13x>=13 | cupy-cuda12x>=13",),
    install="pip install 'flashdispatch[cuda13]', or 'flashdispatch[cuda12]' where torch.version.cuda is 12.x",
    why_not=beyond_32_bits,
)
"""The declaration. Which architectures it was tested on is said by reports, not here."""


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    """One backend."""
    yield SPEC
