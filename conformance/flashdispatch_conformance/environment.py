"""What there is to test here: the device, and the backends that can be loaded."""

from __future__ import annotations

import torch

import flashdispatch
from flashdispatch_conformance.result import INSTALLATION
from flashdispatch_registry.errors import FlashDispatchError, InvalidRequestError, UnknownBackendError
from flashdispatch_registry.select import unknown_backend

ALL = "all"
"""Stands for every backend that can be loaded."""


class NotHereError(FlashDispatchError, RuntimeError):
    """The device or the backend that is to be tested is not on this machine."""


def device(text: str | None) -> torch.device:
    """The device called `text`; None is the first GPU, and the CPU where there is no GPU.

    Raises InvalidRequestError when that is no device's name, NotHereError when there is none of that name.
    """
    if text is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(text)
    except RuntimeError as error:
        raise InvalidRequestError(f"{text!r} is no device: cpu, cuda or cuda:1, for example") from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = found.index or 0
        if index >= count:
            raise NotHereError(f"there is no {text} here: torch sees {count or 'no'} GPUs; --device cpu needs none")
        return torch.device("cuda", index)
    try:
        torch.zeros(1, device=found).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise NotHereError(f"torch can't use {text} here: {str(error).splitlines()[0]}") from error
    return found


def backends(names: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Backends that can be tested, of a list ``a,b`` or of `ALL`; and, of all, why some can't.

    Raises UnknownBackendError for a name that nobody has, NotHereError for one that can't be loaded, with the reasons.
    """
    known = {status.name: status for status in flashdispatch.backends()}
    missing = {
        name: "\n".join(str(reason) for reason in status.reasons if reason.code in INSTALLATION)
        for name, status in known.items()
        if any(reason.code in INSTALLATION for reason in status.reasons)
    }
    if names == ALL:
        able = tuple(name for name in known if name not in missing)
        if not able:
            raise NotHereError("\n".join(f"{name}: {reasons}" for name, reasons in missing.items()) or "no backends")
        return able, missing
    asked = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not asked:
        raise InvalidRequestError("name a backend: --backend NAME, NAME,NAME or all")
    for name in asked:
        if name not in known:
            own = "\n  a backend that a file of yours registers: add --plugin MODULE, the file's name without .py"
            raise UnknownBackendError(unknown_backend(name, "--backend", list(known)) + own)
        if name in missing:
            raise NotHereError(f"{name} can't be tested here:\n  {missing[name]}")
    return asked, {}
