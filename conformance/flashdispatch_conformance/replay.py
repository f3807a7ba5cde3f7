"""One unit again, by its id or from a line of JSON: in this process, where a debugger can follow it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flashdispatch_conformance import catalogue
from flashdispatch_conformance.case import Replay
from flashdispatch_conformance.case_check import check_case
from flashdispatch_conformance.check import Check, Unit
from flashdispatch_conformance.result import Result
from flashdispatch_conformance.trial import Target
from flashdispatch_conformance.worker import run_unit
from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.problem import DTYPE_NAMES, DTYPES
from flashdispatch_registry.select import nearest


def check_of(text: str) -> Check:
    """The check called `text`, or the one of the unit called so.

    Raises InvalidRequestError, with the nearest id, when the suite has neither.
    """
    found = catalogue.BY_ID.get(text) or catalogue.BY_ID.get(text.rpartition("-")[0])
    if found is None or text not in {found.id, *(Unit(found, dtype).id for dtype in found.dtypes)}:
        raise InvalidRequestError(_unknown(text, [*catalogue.BY_ID, *(unit.id for unit in catalogue.units("deep"))]))
    return found


def unit_of(text: str) -> tuple[Unit, int]:
    """The unit, and the seed, of a unit's id or of the JSON ``{"case": {...}, "dtype": "bfloat16", "seed": 0}``.

    Raises InvalidRequestError that says what is wrong with `text`.
    """
    if text.lstrip().startswith("{"):
        try:
            replay = Replay.parse(text)
        except ValueError as error:
            raise InvalidRequestError(f"this can't be replayed: {error}") from error
        case = replay.case
        return Unit(Check(id=case.id, why=case.why, run=partial(check_case, case)), DTYPES[replay.dtype]), replay.seed
    check = check_of(text)
    if text == check.id:
        dtypes = ", ".join(DTYPE_NAMES[dtype] for dtype in check.dtypes)
        raise InvalidRequestError(f"{text} is a check: add one of its dtypes, {text}-DTYPE ({dtypes})")
    return next(unit for unit in catalogue.units("deep") if unit.id == text), 0


def run(unit: Unit, *, backend: str, device: torch.device, seed: int, dump: Path | None = None) -> Result:
    """The unit's result. `dump` is a file for every input, judged output and truth, by name, for `torch.load`.

    Raises UnknownBackendError when there is no such backend.
    """
    tensors: dict[str, Tensor] = {}

    def record(name: str, tensor: Tensor) -> None:
        number = sum(key == name or key.startswith(f"{name} #") for key in tensors)
        tensors[f"{name} #{number + 1}" if number else name] = tensor.detach().cpu().clone()

    result = run_unit(
        unit,
        Target(backend=backend, dtype=unit.dtype, device=device, seed=seed, record=None if dump is None else record),
    )
    if dump is not None:
        torch.save(tensors, dump)
    return result


def _unknown(text: str, known: list[str]) -> str:
    return (
        f"the suite has no {text!r}.{nearest(text, known)}\n"
        "  all ids: flashdispatch conformance list; a part of one finds it: list -k gqa"
    )
