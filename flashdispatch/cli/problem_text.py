"""A Problem from text that a person wrote: every mistake is said in words, before the Problem exists."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from flashdispatch_registry.arch import check_arch
from flashdispatch_registry.masks import Band
from flashdispatch_registry.problem import DTYPES, Problem
from flashdispatch_registry.select import nearest

LIMIT = 2**63
"""Sizes are below it, as torch's are; so is every number that a size is divided by or compared with."""

_WORDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number from 0 on",
    float: "a finite number",
    NoneType: "null",
    torch.dtype: " or ".join(DTYPES),
}


def read_problem(text: str) -> Problem:
    """The Problem that `text` holds as JSON; also the one inside a plan.

    Raises ValueError (or InvalidRequestError, which is one) that says what is wrong.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if isinstance(data, dict):
        data = data.get("problem", data)
    _check_fields(Problem, data, "")
    _check_sense(data)
    return Problem.from_json(data)


def _check_fields(kind: type[Any], data: Any, where: str) -> None:
    if not isinstance(data, dict):
        # A wrong type in a text is a wrong text: one kind of error for the caller.
        raise ValueError(  # noqa: TRY004
            f"{where.rstrip('.') or 'it'} must be an object with fields, {{...}}, got {_short(data)}"
        )
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    for name in data:
        if name not in names:
            raise ValueError(f"it has no field {where}{name}.{nearest(name, names)}")
    for name, value in data.items():
        if hints[name] is Band:
            _check_fields(Band, value, f"{name}.")
        elif not _fits(value, hints[name]):
            raise ValueError(f"{where}{name} must be {_words(hints[name])}, got {_short(value)}")
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.name not in data]
    if needed:
        raise ValueError(f"it lacks {', '.join(where + name for name in needed)}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is one that this annotation allows."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        several = args[-1] is Ellipsis
        wanted = (args[0],) * len(value) if several and isinstance(value, list) else args
        return isinstance(value, list) and len(value) == len(wanted) and all(map(_fits, value, wanted))
    if hint is torch.dtype:
        return isinstance(value, str) and value in DTYPES
    if hint is float and isinstance(value, float):
        return math.isfinite(value)
    if hint in (int, float):
        least = 0 if hint is int else -LIMIT
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < LIMIT
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, args))
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin is tuple:
        return f"a list of {_words(args[0])}" if args[-1] is Ellipsis else f"{len(args)} times {_words(args[0])}, [...]"
    return _WORDS[hint]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_sense(data: dict[str, Any]) -> None:
    """What the arguments of a call could not say, a Problem must not say either."""
    check_arch(data["arch"])
    for name in ("heads_q", "heads_kv", "head_dim", "head_dim_v"):
        if data[name] < 1:
            raise ValueError(f"{name} must be at least 1")
    if data["heads_q"] % data["heads_kv"]:
        raise ValueError(f"heads_q must be a multiple of heads_kv, got {data['heads_q']} and {data['heads_kv']}")
    softcap, dropout_p = data.get("softcap"), data.get("dropout_p", 0.0)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be more than 0 or null, got {softcap}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be within 0..1, got {dropout_p}")
    mask, wanted = data.get("attn_mask"), data.get("needs_grad", ())
    if (mask is None) != (data.get("attn_mask_shape") is None):
        raise ValueError("attn_mask and attn_mask_shape come together")
    if "attn_mask" in wanted and mask != "float":
        raise ValueError("only a float attn_mask has a gradient")
    if "sinks" in wanted and not data.get("sinks"):
        raise ValueError("there is no gradient of sinks without sinks")
