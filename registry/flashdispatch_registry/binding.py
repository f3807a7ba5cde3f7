"""A backend whose launches are worked out once per kind of call: what such backends do alike, as a base class.

A kind of call is a problem and its tensors' metadata. What is left to a backend is how one kind is bound, which kernels
it has, and how they are compiled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from flashdispatch_registry.backend import NO_EXTRAS, Extras, Forward, Gradients, Needs
from flashdispatch_registry.kernels import Tile
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.tile_table import Shape, TileTable

BOUND_LIMIT = 1024
"""Kinds of call that are remembered; beyond it all are forgotten."""

BoundForward = Callable[[Tensor, Tensor, Tensor, Extras], Forward]


class BoundBackward(Protocol):
    """Runs every backward of one kind of call. out and LSE are what the forward saved, dlse may be None."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        extras: Extras,
    ) -> Gradients:  # fmt: skip
        """Makes the gradients, and launches."""
        ...


class BindingBackend(ABC):
    """`Backend`, `Binds` and `Tunable` of this package, but for four methods that are a backend's own.

    They are `bind`, `bind_backward`, `prepare` and `kernels`. What `bind` returns saves q, k, v, out, lse and extras.
    """

    def __init__(self, table: TileTable) -> None:
        self.table = table
        self._bound: dict[Any, Any] = {}

    @abstractmethod
    def bind(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> BoundForward:
        """See `Binds.bind`."""

    @abstractmethod
    def bind_backward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, extras: Extras,
        with_dlse: bool, needs: Needs,
    ) -> BoundBackward:  # fmt: skip
        """What runs every backward whose tensors have the metadata of these."""

    @abstractmethod
    def prepare(self, problem: Problem) -> None:
        """See `Backend.prepare`."""

    @abstractmethod
    def kernels(self, problem: Problem) -> Sequence[str]:
        """See `Tunable.kernels`."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """See `Backend.forward`."""
        key = (problem, _metadata(q, k, v, extras))
        bound = self._bound.get(key)
        if bound is None:
            bound = self._remember(key, self.bind(problem, q, k, v, extras))
        result: Forward = bound(q, k, v, extras)
        return result

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """See `Backend.backward`."""
        q, k, v, out, lse, *given = saved
        extras = Extras.restored(problem, given) if given else NO_EXTRAS
        lse = lse.contiguous()  # a hook on saved tensors may give them back with other strides
        key = (problem, _metadata(q, k, v, extras), out.stride(), dout.stride(), dlse is not None, needs)
        bound = self._bound.get(key)
        if bound is None:
            made = self.bind_backward(problem, q, k, v, out, dout, extras, dlse is not None, needs)
            bound = self._remember(key, made)
        result: Gradients = bound(q, k, v, out, lse, dout, dlse, extras)
        return result

    def _remember(self, key: Any, bound: Any) -> Any:
        if len(self._bound) >= BOUND_LIMIT:
            self._bound.clear()
        self._bound[key] = bound
        return bound

    def shape(self, problem: Problem, kernel: str) -> Shape:
        """The tile in force."""
        return self.table.shape(problem, kernel)

    def tile(self, problem: Problem, kernel: str) -> Tile:
        """See `Tunable.tile`."""
        return self.shape(problem, kernel)._asdict()

    def tile_key(self, problem: Problem, kernel: str) -> str:
        """See `Tunable.tile_key`."""
        return self.table.key(problem, kernel)

    def tile_space(self, problem: Problem, kernel: str) -> Sequence[Tile]:
        """See `Tunable.tile_space`."""
        return [shape._asdict() for shape in self.table.worth_measuring(problem, kernel)]

    def set_tile(self, problem: Problem, kernel: str, tile: Tile | None) -> None:
        """See `Tunable.set_tile`. Raises ValueError for an unknown kernel and for what is no tile."""
        self.table.set(problem, kernel, tile)
        self._bound.clear()


def _metadata(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[object, ...]:
    """What a launch depends on beside the problem. Dtypes but the mask's, and Dv, are the problem's."""
    given = None
    if extras is not NO_EXTRAS:
        given = tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in extras)
    return q.device, q.shape, q.stride(), k.shape, k.stride(), v.stride(), given
