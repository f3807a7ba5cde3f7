"""Brings `torch_reference`, which is built in."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashdispatch_registry import BackendSpec, HeadDims, Support, hookimpl


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="torch_reference",
        factory="flashdispatch_shadows_built_in:nothing",
        support=Support(dtypes=frozenset({torch.float32}), head_dims=HeadDims(), devices=frozenset({"cpu"})),
        priority={"*": 1000},
    )
