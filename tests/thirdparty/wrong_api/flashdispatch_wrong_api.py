"""Written for version 99 of the contract, and eager to be chosen."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashdispatch_registry import BackendSpec, HeadDims, Support, hookimpl


@hookimpl
def flashdispatch_backends() -> Iterable[BackendSpec]:
    yield BackendSpec(
        name="wrong_api",
        factory="flashdispatch_wrong_api:nothing",
        support=Support(dtypes=frozenset({torch.float32}), head_dims=HeadDims(), devices=frozenset({"cpu"})),
        api_version=99,
        priority={"*": 1000},
    )
