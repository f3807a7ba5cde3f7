"""The contract between the core and a backend: what a backend publishes, what it gets, what it gives back.

A backend is only kernels and their launch. The core owns validation, layout, autograd, autocast, torch.compile and
the choice; what arrives here is already checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

from packaging.specifiers import SpecifierSet
from torch import Tensor

from flashdispatch_registry.problem import Problem
from flashdispatch_registry.reasons import Reason
from flashdispatch_registry.support import Support
from flashdispatch_registry.versions import alternatives

API_VERSION = 1
"""The version of this contract. It rises only when a backend written for the old one would compute something wrong."""

Numerics = Literal["exact", "low_precision_accum", "quantized", "approximate"]
Memory = Literal["linear", "chunked", "quadratic"]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_FACTORY = re.compile(r"\w+(\.\w+)*(:\w+(\.\w+)*)?")
RESERVED_NAMES = frozenset({"auto"})


class Extras(NamedTuple):
    """The optional tensors of a call, each None when not given. All on q's device, all but attn_mask contiguous."""

    attn_mask: Tensor | None = None
    """(B|1, Hq|1, Sq|1, Sk|1): bool (True = attend), or q's dtype or float32 (added). Any strides; never expanded."""
    alibi_slopes: Tensor | None = None
    """(Hq,) or (B, Hq) float32."""
    sinks: Tensor | None = None
    """(Hq,) float32 logits."""
    q_lens: Tensor | None = None
    """(B,) int32. On a GPU the values are unchecked: clamp them to 0..Sq in the kernel."""
    kv_lens: Tensor | None = None
    """(B,) int32, likewise 0..Sk."""
    dropout_seed: Tensor | None = None
    """(2,) int64: Philox key (64 bits) and offset (low 32 bits)."""

    def given(self, problem: Problem) -> tuple[Tensor, ...]:
        """Those that `problem` has, for a backend to save behind its other tensors."""
        there = zip(self, _given(problem), strict=True)
        return tuple(tensor for tensor, is_given in there if is_given and tensor is not None)

    @classmethod
    def restored(cls, problem: Problem, saved: Iterable[Tensor]) -> Extras:
        """The inverse of `given`: the problem says which are there."""
        left = iter(saved)
        return cls(*(next(left) if is_given else None for is_given in _given(problem)))


NO_EXTRAS = Extras()
"""Of a call with q, k and v alone."""


def _given(problem: Problem) -> tuple[bool, ...]:
    """Which extras a call has, in the order of `Extras`."""
    return (
        problem.attn_mask is not None,
        problem.alibi,
        problem.sinks,
        problem.q_lens,
        problem.kv_lens,
        problem.dropout_p > 0,
    )


class Needs(NamedTuple):
    """Which gradients one backward pass must give."""

    q: bool
    k: bool
    v: bool
    attn_mask: bool
    sinks: bool


class Gradients(NamedTuple):
    """The gradients of one backward pass, each in its input's shape and dtype; None where not needed."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    attn_mask: Tensor | None = None
    sinks: Tensor | None = None


class Forward(NamedTuple):
    """What `Backend.forward` returns."""

    out: Tensor
    """(B, Sq, Hq, Dv) in q's dtype, strides as `empty_output` gives."""
    lse: Tensor | None
    """(B, Hq, Sq) float32 (float64 for float64), contiguous, natural log. None only when the problem asks for neither
    LSE nor gradients."""
    saved: tuple[Tensor, ...]
    """What `backward` needs; () when the problem asks for no gradient. Under torch.compile only tensors of this call
    may be kept: q, k, v, the extras, out and lse."""


@runtime_checkable
class Backend(Protocol):
    """The object that `BackendSpec.factory` names: a module with these three functions, or an instance.

    All tensors have layout (B, S, H, D) whatever the caller's layout, with a contiguous last dim and otherwise any
    strides (also 0). Work is launched on torch's current stream of q's device, which is the current device; no
    synchronisation. Around forward and backward autocast is off, and nothing done there is recorded by autograd.
    """

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        """Attention forward: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
        ...

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        """Gradients from `dout` (B, Sq, Hq, Dv) and `dlse` (B, Hq, Sq, contiguous; None when the LSE was not used)."""
        ...

    def prepare(self, problem: Problem) -> None:
        """Compiles what `problem` needs on the current device, so that a later call there neither compiles nor tunes.

        May do nothing.
        """
        ...


@runtime_checkable
class Binds(Protocol):
    """A backend that prepares the launches of one call's metadata once, for all the calls that share it.

    Optional: a backend without it is called through ``forward(problem, ...)``. `forward` stays even so: traced calls
    come through it.
    """

    def bind(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras
    ) -> Callable[[Tensor, Tensor, Tensor, Extras], Forward]:
        """What runs every forward whose tensors have the shapes, strides and dtypes of these.

        But for strides that mean nothing: of dims of size 1, of empty tensors. Values and addresses differ from call to
        call, so none of these tensors is kept. Called with the first such call, in the surroundings of
        `Backend.forward`; the result is called in them too, from any thread. What it returns has the same metadata in
        every call: the core holds the first to the contract.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """A backend's entry in the registry: light data, read without importing any kernel language.

    Raises ValueError or TypeError when a field is not well-formed.
    """

    name: str
    """``[a-z][a-z0-9_]*``, unique over all installed plugins."""
    factory: str
    """``"package.module:object"`` or ``"package.module"``, imported on first use; the result is the `Backend`.

    An exception there is the reason LOAD_FAILED; notes added to it say what would help, in place of `install`."""
    support: Support
    api_version: int = API_VERSION
    priority: Mapping[str, int] = field(default_factory=lambda: {"*": 0}, hash=False)
    """Static rank per architecture, higher first; ``"*"`` for all others."""
    numerics: Numerics = "exact"
    """Auto-selection takes only ``"exact"``."""
    by_name_only: str = ""
    """Why automatic choice passes it over, even where it is alone: ``"Triton's interpreter, for tests"``."""
    memory: Memory = "linear"
    """Extra memory in the sequence length: O(S), O(block * S), O(S^2)."""
    fused: bool = True
    """One kernel per pass. Auto taking an unfused backend for a GPU problem is reported (FLASHDISPATCH_FALLBACK)."""
    portable: bool = False
    """No architecture-specific code: runs wherever PyTorch does, so "tested on this architecture" is no question."""
    requires: tuple[str, ...] = ()
    """Distributions it needs, as requirement strings: ``("triton>=3.4",)``; ``"a>=1 | b>=1"`` where one of several
    will do. Checked without importing them."""
    install: str = ""
    """What to type when they are missing: ``pip install 'flashdispatch[triton]'``."""
    why_not: Callable[[Problem], Iterable[Reason]] | None = field(default=None, hash=False)
    """Adds reasons that the data can't express. Pure, total, no GPU work, all reasons at once, under 50 µs."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"backend name {self.name!r} must match [a-z][a-z0-9_]*")
        if self.name in RESERVED_NAMES:
            raise ValueError(f"backend name {self.name!r} is reserved")
        if not _FACTORY.fullmatch(self.factory):
            raise ValueError(f"factory {self.factory!r} must look like 'package.module:object'")
        for what, kind in (
            ("api_version", int),
            ("by_name_only", str),
            ("fused", bool),
            ("portable", bool),
            ("requires", tuple),
        ):
            if not isinstance(getattr(self, what), kind):
                raise TypeError(f"{self.name}: {what} must be {kind.__name__}, got {getattr(self, what)!r}")
        if self.why_not is not None and not callable(self.why_not):
            raise TypeError(f"{self.name}: why_not must be a function or None, got {self.why_not!r}")
        for what, value, allowed in (
            ("numerics", self.numerics, get_args(Numerics)),
            ("memory", self.memory, get_args(Memory)),
        ):
            if value not in allowed:
                raise ValueError(f"{self.name}: {what} must be one of {', '.join(allowed)}, got {value!r}")
        for text in self.requires:
            alternatives(text)  # raises InvalidRequirement, a ValueError
        if not isinstance(self.support, Support):
            raise TypeError(f"{self.name}: support must be a Support, got {type(self.support).__name__}")
        for arch, rank in self.priority.items():
            if not isinstance(arch, str) or not isinstance(rank, int):
                raise TypeError(f"{self.name}: priority maps architectures to ints, got {arch!r}: {rank!r}")
        object.__setattr__(self, "priority", dict(self.priority))  # a copy: nobody else can change it

    def priority_on(self, arch: str) -> int:
        """The static rank on `arch`."""
        return self.priority.get(arch, self.priority.get("*", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """A combination known to be wrong, as data: auto-selection passes it over, and a plan that forces it says so.

    With a `priority` it is right and slow: the backend ranks no higher there, and the plan says why. That stands apart
    from the backend's own declaration, so that a new measurement leaves conformance reports valid.

    `versions` is a specifier set (``"<2.1"``) on the backend's distribution; empty means all.
    """

    backend: str
    reason: str
    url: str
    when: Callable[[Problem], bool] = field(hash=False)
    versions: str = ""
    priority: int | None = None

    def __post_init__(self) -> None:
        if self.priority is not None and not isinstance(self.priority, int):
            raise TypeError(f"KnownIssue's priority is an int or None, got {self.priority!r}")
        if not all(isinstance(text, str) for text in (self.backend, self.reason, self.url)) or not callable(self.when):
            raise TypeError(f"KnownIssue takes texts and a function, got {self!r}")
        SpecifierSet(self.versions)  # raises InvalidSpecifier, a ValueError
