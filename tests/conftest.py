"""Every test starts with no settings but an empty cache folder, no cached plans and nothing warned about yet."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashdispatch
from flashdispatch import _forcing, _plans, _registry, _settings
from flashdispatch_registry import BackendSpec, Extras, Forward, Gradients, HeadDims, Needs, Problem, Support
from flashdispatch_registry.tile_store import CACHE_DIR

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(_settings.PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "empty_cache"))  # not what was tuned on this machine
    for seen in (_settings._warned, _forcing._logged, _plans._events, _plans._unknown_disabled):
        seen.clear()
    flashdispatch.reload_settings()
    torch.manual_seed(0)
    yield
    flashdispatch.set_default_backend(None)
    _plans.cache.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `gpu` runs where there is a CUDA device, and says so where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


class Spy:
    """A backend that runs the reference and counts what it is asked."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.backwards: list[Needs] = []
        self.dlse: list[torch.Tensor | None] = []
        self.dout_strides: list[tuple[int, ...]] = []
        self.prepared: list[Problem] = []
        self.states: list[dict[str, bool]] = []

    def _state(self) -> None:
        self.states.append({"grad": torch.is_grad_enabled(), "autocast": torch.is_autocast_enabled("cpu")})

    def forward(self, problem: Problem, q: Any, k: Any, v: Any, extras: Extras) -> Forward:
        self._state()
        self.problems.append(problem)
        return _registry.registry().load("torch_reference").forward(problem, q, k, v, extras)

    def backward(self, problem: Problem, saved: Any, dout: Any, dlse: Any, needs: Needs) -> Gradients:
        self._state()
        self.backwards.append(needs)
        self.dlse.append(dlse)
        self.dout_strides.append(dout.stride())
        return _registry.registry().load("torch_reference").backward(problem, saved, dout, dlse, needs)

    def prepare(self, problem: Problem) -> None:
        self.prepared.append(problem)


FULL: dict[str, Any] = {
    "dtypes": frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    "head_dims": HeadDims(),
    "head_dims_v": HeadDims(),
    "devices": frozenset({"cpu", "cuda"}),
    "causal": frozenset({"bottom_right", "top_left"}),
    "window": True,
    "attn_mask": frozenset({"bool", "float"}),
    "attn_mask_grad": True,
    "alibi": True,
    "sinks": True,
    "sinks_grad": True,
    "lengths": True,
    "softcap": True,
    "dropout": True,
    "gqa": True,
    "backward": True,
    "lse": True,
    "lse_grad": True,
    "deterministic": True,
}

AddBackend = Callable[..., Spy]


@pytest.fixture
def add_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[AddBackend]:
    """Registers a `Spy` under a name for one test; keywords change its support (everything) or its spec."""
    added: list[str] = []

    def add(name: str, backend: Any = None, **changes: Any) -> Any:
        backend = Spy() if backend is None else backend
        module = types.ModuleType(f"fake_{name}")
        module.backend = backend  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        support = FULL | {
            key: value for key, value in changes.items() if key in FULL or key in ("min_arch", "impossible")
        }
        others = {key: value for key, value in changes.items() if key not in support}
        spec = {"factory": f"fake_{name}:backend", "support": Support(**support)} | others
        flashdispatch.register(BackendSpec(name=name, **spec))
        added.append(name)
        return backend

    yield add
    left = {entry.name for entry in _registry.registry().entries()}
    for name in left.intersection(added):
        flashdispatch.unregister(name)


@pytest.fixture
def qkv() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """q, k, v of a small call in layout bshd."""

    def make(
        batch: int = 2,
        seqlen_q: int = 9,
        seqlen_k: int | None = None,
        heads_q: int = 4,
        heads_kv: int | None = None,
        head_dim: int = 16,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seqlen_k, heads_kv = seqlen_q if seqlen_k is None else seqlen_k, heads_kv or heads_q
        shapes = (
            (batch, seqlen_q, heads_q, head_dim),
            (batch, seqlen_k, heads_kv, head_dim),
            (batch, seqlen_k, heads_kv, head_dim_v or head_dim),
        )
        q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes)
        return q, k, v

    return make
