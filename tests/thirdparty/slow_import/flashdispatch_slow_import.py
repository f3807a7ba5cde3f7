"""Works, after a second of what belongs into its kernel module."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from flashdispatch_registry import BackendSpec, HeadDims, Support, hookimpl

time.sleep(1.2)


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="slow_import",
        factory="flashdispatch_slow_import:nothing",
        support=Support(dtypes=frozenset({torch.float32}), head_dims=HeadDims(), devices=frozenset({"cpu"})),
        priority={"*": -20},
    )
