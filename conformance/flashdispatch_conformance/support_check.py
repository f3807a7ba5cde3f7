"""Declared support: the reasons a backend gives are a pure function, and asking for them runs nothing.

That what is declared passes, and that what is not is refused with these reasons, is checked by every case.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

import flashdispatch
from flashdispatch_conformance.check import BF16, Check
from flashdispatch_conformance.trial import Trial
from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.masks import Band
from flashdispatch_registry.problem import DTYPES, Problem
from flashdispatch_registry.reasons import Code

PROBLEMS = 2000
"""How many random problems are asked about."""


def _reasons(trial: Trial) -> None:
    backend = trial.target.backend
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    random = Random(0)  # noqa: S311  a seeded walk through problems, nothing secret
    arch = arch_of(trial.target.device)
    for _ in range(PROBLEMS):
        problem = random_problem(random, arch)
        asked = [flashdispatch.explain(problem, backend=backend).candidate(backend).reasons for _ in range(2)]
        if asked[0] != asked[1]:
            trial.fail(f"two answers for {problem.describe()}: {asked[0]} and {asked[1]}")
        for reason in asked[0]:
            if reason.code is Code.WHY_NOT_RAISED:
                trial.fail(f"why_not raised for {problem.describe()}: {reason.got}")
        if trial.messages:
            return
    if torch.cuda.is_initialized() and not started:  # type: ignore[no-untyped-call]
        trial.fail("asking for reasons started a CUDA context")
    trial.ran = True


def random_problem(random: Random, arch: str) -> Problem:
    """A valid problem of any size, which nobody is going to run."""
    heads_kv, batch = random.choice((1, 2, 3, 8)), random.choice((0, 1, 2, 70000))
    heads_q = heads_kv * random.choice((1, 4))
    sq, sk = random.choices((0, 1, 63, 64, 1025, 2**20), k=2)
    head_dim = random.choice((1, 8, 16, 40, 63, 64, 80, 96, 128, 192, 256, 512))
    grads: Any = random.choice(((), ("q",), ("k", "v"), ("q", "k", "v")))
    mask: Any = random.choice((None, None, "bool", "float"))
    shape = random.choice(((1, 1, sq, sk), (batch, heads_q, sq, sk), (1, 1, 1, sk)))
    return Problem(
        arch=arch,
        dtype=random.choice(list(DTYPES.values())),
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=sq,
        seqlen_k=sk,
        head_dim=head_dim,
        head_dim_v=random.choice((head_dim, 64, 128)),
        scale=random.choice((0.125, 0.0, -1.0, 1e4)),
        band=Band.of(
            causal=random.random() < 0.5,
            align=random.choice(("bottom_right", "top_left")),
            window=random.choice((None, (0, 0), (128, None), (1, 7))),
        ),
        attn_mask=mask,
        attn_mask_shape=None if mask is None else shape,
        alibi=random.random() < 0.2,
        sinks=random.random() < 0.2,
        q_lens=random.random() < 0.2,
        kv_lens=random.random() < 0.2,
        softcap=random.choice((None, None, 20.0)),
        dropout_p=random.choice((0.0, 0.0, 0.1, 1.0)),
        layout=random.choice(("bshd", "bhsd")),
        needs_grad=grads,
        return_lse=random.random() < 0.5,
        deterministic=random.random() < 0.5,
    )


SUPPORT: tuple[Check, ...] = (
    Check.of(
        "support/reasons",
        "facebookresearch/xformers#1030: reasons are pure and total, and asking for them starts no CUDA context",
        _reasons,
        dtypes=(BF16,),
        smoke_dtypes=(BF16,),
    ),
)
"""Checks of the declaration itself."""
