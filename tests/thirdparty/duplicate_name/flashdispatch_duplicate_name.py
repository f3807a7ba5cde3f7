"""Brings `tiny`, which flashdispatch-tiny has, too."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashdispatch_registry import BackendSpec, HeadDims, Support, hookimpl


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="tiny",
        factory="flashdispatch_duplicate_name:nothing",
        support=Support(dtypes=frozenset({torch.float32}), head_dims=HeadDims(), devices=frozenset({"cpu"})),
        priority={"*": 1000},
    )
