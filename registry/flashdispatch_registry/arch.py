"""The name of a device's architecture: ``sm_90`` for an NVIDIA GPU, else the device type (``cpu``, ``mps``).

Read from the tensor's own device, never from the current one, so that machines with mixed GPUs are served right.
Nothing here starts a CUDA context unless a CUDA device is asked about.
"""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from flashdispatch_registry.errors import InvalidRequestError, InvalidTypeError

_SM = re.compile(r"sm_(\d+)[af]?")
_NAME = re.compile(r"sm_[1-9]\d{1,2}[af]?|gfx[0-9a-f]+|cpu|cuda|mps|xpu|meta")


@lru_cache(maxsize=64)
def _cuda_arch(index: int) -> str:
    if torch.version.hip:
        # A ROCm device answers "cuda" too; its architecture is a gfx name and no sm_ rule applies to it.
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def arch_of(device: torch.device) -> str:
    """The architecture name of `device`, e.g. ``"sm_90"`` or ``"cpu"``."""
    if device.type != "cuda":
        return device.type
    if not torch.cuda.is_available():
        # FakeTensors can name a CUDA device on a machine that has none.
        return "cuda"
    return _cuda_arch(device.index if device.index is not None else torch.cuda.current_device())


def device_type_of(arch: str) -> str:
    """The torch device type an architecture name belongs to: ``"sm_120"`` is ``"cuda"``, ``"cpu"`` is ``"cpu"``."""
    return "cuda" if arch.startswith(("sm_", "gfx", "cuda")) else arch


def sm_number(arch: str) -> int | None:
    """120 for ``"sm_120"``, 90 for ``"sm_90a"``; None for anything that is no NVIDIA architecture."""
    match = _SM.fullmatch(arch)
    return int(match.group(1)) if match else None


def check_arch(arch: str) -> None:
    """Raises InvalidRequestError for what is no architecture's name, with the nearest that is."""
    if not isinstance(arch, str):
        raise InvalidTypeError(f"arch must be a string such as 'sm_90', got {arch!r}")
    if _NAME.fullmatch(arch):
        return
    number = re.fullmatch(r"sm\W?(\d{2,3}[af]?)", arch.lower())
    hint = f" Did you mean 'sm_{number.group(1)}'?" if number else ""
    raise InvalidRequestError(f"arch must be an architecture such as 'sm_90', 'sm_120' or 'cpu', got {arch!r}.{hint}")
