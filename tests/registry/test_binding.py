"""A backend bound once per kind of call: what makes a kind, and what is passed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashdispatch_registry import BackendSpec, Extras, Forward, Gradients, HeadDims, Needs, Problem, Support, binding
from flashdispatch_registry.backend import NO_EXTRAS
from flashdispatch_registry.binding import BindingBackend, BoundBackward, BoundForward
from flashdispatch_registry.tile_table import Shape, TileTable

SPEC = BackendSpec(
    name="counting", factory="counting", support=Support(dtypes=frozenset({torch.float32}), head_dims=HeadDims(8, 64))
)
NEEDS = Needs(q=True, k=False, v=False, attn_mask=False, sinks=False)
TILE = Shape(64, 64, 4, 1)


class Counting(BindingBackend):
    """Attention to nobody, which notes how often it is bound."""

    def __init__(self) -> None:
        rows = {"forward/any": TILE}
        super().__init__(
            TileTable(SPEC, rows, lambda _, kernel: [f"{kernel}/any"], lambda *_: (), lambda *_: TILE, lambda *_: None)
        )
        self.bound: list[str] = []
        self.given: list[Any] = []

    def bind(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> BoundForward:
        self.bound.append("forward")
        return lambda q, k, v, extras: Forward(v, None, (q, k, v, v, q, *extras.given(problem)))

    def prepare(self, problem: Problem) -> None:
        """Nothing to compile."""

    def kernels(self, problem: Problem) -> tuple[str, ...]:
        return ("forward",)

    def bind_backward(self, problem: Problem, *_: Any) -> BoundBackward:
        self.bound.append("backward")

        def run(*given: Any) -> Gradients:
            self.given.append(given)
            return Gradients(q=given[0])

        return run


def problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "arch": "cpu", "dtype": torch.float32, "batch": 1, "heads_q": 2, "heads_kv": 2, "seqlen_q": 4, "seqlen_k": 4,
        "head_dim": 8, "head_dim_v": 8, "scale": 1.0, "needs_grad": ("q",),
    }  # fmt: skip
    return Problem(**(fields | changes))


def tensor(**strided: Any) -> Tensor:
    return torch.empty_strided((1, 4, 2, 8), strided.get("strides", (64, 16, 8, 1)))


def test_one_kind_of_call_is_bound_once() -> None:
    backend, asked = Counting(), problem()
    for _ in range(3):
        backend.forward(asked, tensor(), tensor(), tensor(), NO_EXTRAS)
    assert backend.bound == ["forward"]


def test_a_mask_of_another_shape_stride_or_dtype_is_another_kind() -> None:
    backend = Counting()
    asked = problem(attn_mask="float", attn_mask_shape=(1, 1, 4, 4))
    masks = [torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4, dtype=torch.float16)]
    masks += [torch.zeros(1, 1, 4, 4).mT, torch.zeros(1, 1, 1, 4)]
    for mask in (*masks, *masks):
        backend.forward(asked, tensor(), tensor(), tensor(), Extras(attn_mask=mask))
    assert backend.bound == ["forward"] * 4


def test_a_backward_gets_what_the_forward_saved_and_is_bound_by_its_metadata() -> None:
    backend, asked = Counting(), problem(kv_lens=True)
    lens = torch.tensor([3], dtype=torch.int32)
    q, k, v = tensor(), tensor(), tensor()
    saved = backend.forward(asked, q, k, v, Extras(kv_lens=lens)).saved
    dout, dlse = tensor(), torch.zeros(1, 2, 4)
    for dlse_given in (None, None, dlse, dlse):
        backend.backward(asked, saved, dout, dlse_given, NEEDS)
    backend.backward(asked, saved, tensor(strides=(64, 8, 32, 1)), None, NEEDS)
    assert backend.bound == ["forward", *["backward"] * 3]
    *_, extras = backend.given[0]
    assert extras.kv_lens is lens
    assert [given[6] for given in backend.given] == [None, None, dlse, dlse, None]


def test_an_lse_that_a_hook_gave_other_strides_is_made_contiguous() -> None:
    backend, asked = Counting(), problem()
    q, k, v = tensor(), tensor(), tensor()
    lse = torch.zeros(1, 4, 2).mT
    backend.backward(asked, (q, k, v, v, lse), tensor(), None, NEEDS)
    assert backend.given[0][4].is_contiguous()


def test_a_tile_that_is_set_binds_anew() -> None:
    backend, asked = Counting(), problem()
    backend.forward(asked, tensor(), tensor(), tensor(), NO_EXTRAS)
    other = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 1}
    backend.set_tile(asked, "forward", other)
    backend.forward(asked, tensor(), tensor(), tensor(), NO_EXTRAS)
    assert backend.bound == ["forward", "forward"]
    assert (backend.tile(asked, "forward"), backend.tile_key(asked, "forward")) == (other, "forward/any")
    assert backend.tile_space(asked, "forward") == [other]
    assert backend.shape(asked, "forward") == Shape(**other)


def test_kinds_that_are_remembered_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "BOUND_LIMIT", 2)
    backend = Counting()
    for scale in (1.0, 2.0, 3.0, 3.0, 1.0):
        backend.forward(problem(scale=scale), tensor(), tensor(), tensor(), NO_EXTRAS)
    assert len(backend.bound) == 4  # 1 and 2, then 3 alone, then 1 anew
