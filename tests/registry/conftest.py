"""What the registry's tests share: a problem and a backend to vary, one field at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashdispatch_registry import BackendSpec, HeadDims, Problem, Support

MakeProblem = Callable[..., Problem]
MakeSpec = Callable[..., BackendSpec]


@pytest.fixture
def problem() -> MakeProblem:
    """A small float32 forward on the CPU, with any field changed."""

    def make(**changes: Any) -> Problem:
        fields: dict[str, Any] = {
            "arch": "cpu",
            "dtype": torch.float32,
            "batch": 2,
            "heads_q": 4,
            "heads_kv": 4,
            "seqlen_q": 16,
            "seqlen_k": 32,
            "head_dim": 64,
            "head_dim_v": 64,
            "scale": 0.125,
        }
        return Problem(**(fields | changes))

    return make


@pytest.fixture
def spec() -> MakeSpec:
    """A backend that declares the least, with any field of its spec or its support changed."""
    support_fields = set(Support.__dataclass_fields__)

    def make(name: str = "plain", **changes: Any) -> BackendSpec:
        declared: dict[str, Any] = {
            "dtypes": frozenset({torch.float32}),
            "head_dims": HeadDims(),
            "devices": frozenset({"cpu", "cuda"}),
        }
        declared |= {key: value for key, value in changes.items() if key in support_fields}
        others = {key: value for key, value in changes.items() if key not in support_fields}
        return BackendSpec(name=name, **({"factory": "nowhere", "support": Support(**declared)} | others))

    return make
