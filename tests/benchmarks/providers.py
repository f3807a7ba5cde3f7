"""Who is measured: our backends by name, `auto`, and the peers, each in its own layout and over the same memory.

| provider | what runs |
|---|---|
| name of a backend | `flashdispatch.attention(..., backend=name)` |
| `auto` | `flashdispatch.attention(...)`, refused where it would take a slow path |
| `sdpa_flash`, `sdpa_cudnn`, `sdpa_efficient` | torch's SDPA with that backend forced, which raises when it can't run |
| `sdpa_default` | torch's SDPA, left to choose |
| `fa4` | `flash_attn.cute`, where it is installed |

`--providers a,b` picks; without it all of them, and of our backends those that are fused and ready here. SDPA gets
(B, H, S, D) views of the (B, S, H, D) tensors, its native way to take such memory: nobody is charged for a copy.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashdispatch

from .grids import Case
from .truth import Inputs, inside_band

Triple = tuple[Tensor, Tensor, Tensor]


class Refused(Exception):  # noqa: N818 (not an error: the reason why there is no row)
    """This provider does not do this case."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A provider with the tensors of one case."""

    inputs: Triple
    """q, k and v as it takes them; leaves, so that gradients come back in the same layout."""
    forward: Callable[[], Tensor]
    bhsd: bool = False
    """Its layout; else (B, S, H, D)."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Must be entered around `forward`; outside of what is timed."""
    note: str = ""

    def turned(self, tensor: Tensor) -> Tensor:
        """Between its layout and (B, S, H, D), either way, as a view."""
        return tensor.transpose(1, 2) if self.bhsd else tensor


@dataclass(frozen=True, slots=True)
class Provider:
    """`ready(case, inputs, grad)` makes it ready for a case; raises Refused, or whatever the implementation raises."""

    name: str
    ours: bool
    """An error of ours other than a refusal fails the benchmark; a peer's is only reported."""
    ready: Callable[[Case, Inputs, bool], Ready]


PEERS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_default", "fa4")


def provider(name: str) -> Provider:
    """By name. Raises ValueError for one that is neither a peer nor a registered backend."""
    if name in PEERS:
        return Provider(name, False, _fa4 if name == "fa4" else partial(_sdpa, SDPA[name]))
    known = [status.name for status in flashdispatch.backends()]
    if name not in ("auto", *known):
        raise ValueError(f"no provider is called {name!r}; there are auto, {', '.join((*known, *PEERS))}")
    return Provider(name, True, partial(_ours, None if name == "auto" else name))


def chosen(names: Sequence[str] = ()) -> list[Provider]:
    """Those asked for, or else everybody who may be of interest here."""
    if torch.cuda.is_available():
        # Until something starts CUDA, a GPU's architecture counts as unknown.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    if not names:
        fused = [
            status.name
            for status in flashdispatch.backends()
            if status.ready and status.spec is not None and status.spec.fused
        ]
        names = (*fused, "auto", *(name for name in PEERS if name != "fa4" or importlib.util.find_spec("flash_attn")))
    return [provider(name) for name in dict.fromkeys(names)]


def leaves(given: Inputs, grad: bool, *, bhsd: bool = False) -> Triple:
    """q, k and v as fresh leaves over the same memory."""
    q, k, v = (
        (tensor.transpose(1, 2) if bhsd else tensor).detach().requires_grad_(grad)
        for tensor in (given.q, given.k, given.v)
    )
    return q, k, v


def _ours(backend: str | None, case: Case, given: Inputs, grad: bool) -> Ready:
    q, k, v = leaves(given, grad)
    optional = {"window": case.window, "softcap": case.softcap, "kv_lens": given.kv_lens, "backend": backend}
    given_ones = {name: value for name, value in optional.items() if value is not None}
    arguments: dict[str, Any] = {"causal": case.causal} | given_ones
    note = ""
    if backend is None:
        plan = flashdispatch.explain(q, k, v, **arguments)
        if plan.chosen is not None and plan.fallback is not None:
            raise Refused(f"auto would take {plan.chosen}: {plan.fallback}")
        note = f"chose {plan.chosen}"
    return Ready((q, k, v), partial(flashdispatch.attention, q, k, v, **arguments), note=note)


SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_default": None,
}


def _sdpa(forced: SDPBackend | None, case: Case, given: Inputs, grad: bool) -> Ready:
    if case.softcap is not None:
        raise Refused("torch's SDPA has no softcap")
    q, k, v = leaves(given, grad, bhsd=True)
    arguments: dict[str, Any] = {}
    if case.band.has_window or (case.causal and case.seqlen_q != case.seqlen_k):
        # A dense mask is the only way that SDPA offers to say this; made here, outside of what is timed.
        arguments["attn_mask"] = inside_band(case, range(case.seqlen_q), case.seqlen_k, case.seqlen_k, q.device)
    elif case.causal:
        arguments["is_causal"] = True
    if given.kv_lens is not None:
        seen = torch.arange(case.seqlen_k, device=q.device) < given.kv_lens[:, None]
        arguments["attn_mask"] = seen[:, None, None, :]
    if case.group > 1:
        arguments["enable_gqa"] = True
    around = nullcontext if forced is None else partial(sdpa_kernel, forced)
    return Ready((q, k, v), partial(scaled_dot_product_attention, q, k, v, **arguments), bhsd=True, around=around)


def _fa4(case: Case, given: Inputs, grad: bool) -> Ready:
    if given.kv_lens is not None:
        raise Refused("flash_attn_func has no key lengths")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of its import are its own affair
            from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]
    except ImportError as error:
        raise Refused(f"flash_attn.cute does not import: {error}") from error
    q, k, v = leaves(given, grad)
    optional = {"window_size": case.window, "softcap": case.softcap}
    arguments = {"causal": case.causal} | {name: value for name, value in optional.items() if value is not None}

    def forward() -> Tensor:
        result = flash_attn_func(q, k, v, **arguments)
        return cast("Tensor", result[0] if isinstance(result, tuple) else result)  # newer ones return the LSE too

    return Ready((q, k, v), forward)
