"""Which features of the contract a check is about: the rows of a report's capability matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from flashdispatch_conformance.case import Case


def _plain(case: Case) -> bool:
    return not any(has(case) for has in FEATURES.values() if has is not _plain)


FEATURES: Mapping[str, Callable[[Case], bool]] = MappingProxyType(
    {
        "no feature but the sizes": _plain,
        "causal": lambda case: case.causal is True,
        "causal, top-left": lambda case: case.causal == "top_left",
        "window": lambda case: case.window is not None,
        "bool mask": lambda case: case.mask is not None and case.mask.kind == "bool",
        "float mask": lambda case: case.mask is not None and case.mask.kind != "bool",
        "mask gradient": lambda case: case.mask is not None and case.mask.grad,
        "ALiBi": lambda case: case.alibi is not None,
        "sinks": lambda case: case.sinks,
        "q_lens, kv_lens": lambda case: case.q_lens is not None or case.kv_lens is not None,
        "softcap": lambda case: case.softcap is not None,
        "dropout": lambda case: case.dropout_p > 0,
        "grouped query heads": lambda case: case.heads[0] != case.heads[1],
        "one query (decode)": lambda case: case.seqlens[0] == 1 < case.seqlens[1],
        "Sq differs from Sk": lambda case: case.seqlens[0] != case.seqlens[1] and case.seqlens[0] != 1,
        "D below 64": lambda case: case.dims[0] < 64,
        "D 65 to 128": lambda case: 64 < case.dims[0] <= 128,
        "D above 128": lambda case: case.dims[0] > 128,
        "Dv differs from D": lambda case: case.dims[0] != case.dims[1],
        "LSE gradient": lambda case: case.dlse,
        "deterministic gradients": lambda case: case.deterministic is True,
        "no gradients": lambda case: not case.needs_grad,
        "layout bhsd": lambda case: case.layout == "bhsd",
        "strided tensors": lambda case: any(
            view != "contiguous" for view in (case.q_view, case.k_view, case.v_view, case.dout_view)
        ),
    }
)
"""Row -> whether a case counts in it, in the order of the matrix. A case counts in several."""

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "pinned": "public bug reports",
        "probe": "exact probes",
        "property": "metamorphic properties",
        "condition": "streams, graphs, load, devices",
        "support": "refusals and reasons",
    }
)
"""First part of a check's id -> a row of its own; another kind has its name."""

CASES = frozenset({"named", "pairwise"})
"""Kinds of cases that have no row but those of their features."""


def features(check: str, case: Case | None) -> tuple[str, ...]:
    """The rows that a check counts in; at least one."""
    kind = check.partition("/")[0]
    own = () if case is not None and kind in CASES else (KINDS.get(kind, kind.replace("_", " ")),)
    return own if case is None else (*own, *(name for name, has in FEATURES.items() if has(case)))
