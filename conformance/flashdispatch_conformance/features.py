"""Which features of the contract a check is about: the rows of a report's capability matrix."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashdispatch_conformance.case import Case

KINDS: Mapping[str, str] = MappingProxyType({"named": "", "pairwise": "", "pinned": "pinned bug reports"})
"""First part of a check's id -> its row; "" is none but those of the case. Others name themselves."""

PLAIN = "no feature but the sizes"


def features(check: str, case: Case | None) -> tuple[str, ...]:
    """The rows that a check counts in; at least one."""
    kind = check.partition("/")[0]
    row = KINDS.get(kind, kind.replace("_", " "))
    found = [row] if row else []
    if case is not None:
        found += [name for name, has in _has(case).items() if has]
    return tuple(found) or (PLAIN,)


def _has(case: Case) -> dict[str, bool]:
    """Feature -> whether the case has it, in the order of the matrix."""
    mask, window = case.mask, case.window
    views = (case.q_view, case.k_view, case.v_view, case.dout_view)
    return {
        "causal": case.causal is True,
        "causal, top-left": case.causal == "top_left",
        "window": window is not None,
        "bool mask": mask is not None and mask.kind == "bool",
        "float mask": mask is not None and mask.kind != "bool",
        "mask gradient": mask is not None and mask.grad,
        "ALiBi": case.alibi is not None,
        "sinks": case.sinks,
        "q_lens, kv_lens": case.q_lens is not None or case.kv_lens is not None,
        "softcap": case.softcap is not None,
        "dropout": case.dropout_p > 0,
        "GQA": case.heads[0] != case.heads[1],
        "one query (decode)": case.seqlens[0] == 1 and case.seqlens[1] > 1,
        "Sq differs from Sk": case.seqlens[0] != case.seqlens[1] and case.seqlens[0] != 1,
        "D below 64": case.dims[0] < 64,
        "D 65 to 128": 64 < case.dims[0] <= 128,
        "D above 128": case.dims[0] > 128,
        "Dv differs from D": case.dims[0] != case.dims[1],
        "LSE gradient": case.dlse,
        "deterministic": bool(case.deterministic),
        "layout bhsd": case.layout == "bhsd",
        "strided tensors": any(view != "contiguous" for view in views),
        "no gradients": not case.needs_grad,
    }
