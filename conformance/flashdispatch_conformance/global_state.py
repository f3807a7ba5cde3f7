"""PyTorch's global state, which is the caller's: as it is now, what has changed since, and back again.

The CPU's random generator is part of it. Those of GPUs are not: capturing a graph moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Snapshot = tuple[Any, ...]
"""The value of each of `SETTINGS`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that any code of a process can change for all of it, or for its thread."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]

    def difference(self, before: Any, now: Any) -> str:
        """What has changed, in words; empty when nothing has."""
        if isinstance(before, Tensor):
            if torch.equal(before, now):
                return ""
            return f"torch's {self.name} is in another state after the calls: they drew from it, or seeded it"
        return "" if before == now else f"torch's {self.name} is {now} after the calls, and was {before}"


def snapshot() -> Snapshot:
    """The state as it is now."""
    return tuple(setting.read() for setting in SETTINGS)


def restore(before: Snapshot) -> tuple[str, ...]:
    """Makes the state what it was when `before` was taken, and says what was different."""
    differences = []
    for setting, value in zip(SETTINGS, before, strict=True):
        if difference := setting.difference(value, setting.read()):
            setting.write(value)
            differences.append(difference)
    return tuple(differences)


def _write_default_device(device: torch.device) -> None:
    # A default device of cpu that somebody has set costs time in each call; none at all means the same.
    torch.set_default_device(None if device.type == "cpu" else device)


def _read_determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _write_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_MATMULS = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
"""Have a precision of their own from PyTorch 2.9 on."""


def _read_precision() -> tuple[str | None, ...]:
    """The precision of float32 products: of all, on GPUs, on CPUs. None is what PyTorch does not have, or can't say."""
    try:
        common = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by its old name and by its new one, and they disagree
        common = None
    return common, *(getattr(module, "fp32_precision", None) for module in _MATMULS)


def _write_precision(value: tuple[str | None, ...]) -> None:
    common, *parts = value
    if common is not None:
        torch.set_float32_matmul_precision(common)
    for module, part in zip(_MATMULS, parts, strict=True):
        if part is not None:
            setattr(module, "fp32_precision", part)  # noqa: B010  older releases don't have it


def _attributes() -> Iterator[Setting]:
    for name, module, attributes in (
        (
            "backends.cuda.matmul",
            torch.backends.cuda.matmul,
            (
                "allow_fp16_accumulation",
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
            ),
        ),
        ("backends.cudnn", torch.backends.cudnn, ("enabled", "benchmark", "deterministic")),
        ("utils.deterministic", torch.utils.deterministic, ("fill_uninitialized_memory",)),
    ):
        for attribute in attributes:
            if hasattr(module, attribute):
                yield Setting(
                    f"{name}.{attribute}", partial(getattr, module, attribute), partial(setattr, module, attribute)
                )


def _attention_kernels() -> Iterator[Setting]:
    """Which kernels scaled_dot_product_attention may take."""
    cuda = torch.backends.cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        if hasattr(cuda, f"enable_{name}_sdp"):
            yield Setting(
                f"backends.cuda.{name}_sdp_enabled()",
                getattr(cuda, f"{name}_sdp_enabled"),
                getattr(cuda, f"enable_{name}_sdp"),
            )


SETTINGS: tuple[Setting, ...] = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", torch.get_default_device, _write_default_device),
    Setting("CPU random generator", torch.random.get_rng_state, torch.random.set_rng_state),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    *(
        Setting(
            f"autocast on {device}",
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        for device in ("cpu", "cuda")
    ),
    Setting("deterministic algorithms (enabled, only warned about)", _read_determinism, _write_determinism),
    Setting("float32 matmul precision (all, GPU, CPU)", _read_precision, _write_precision),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    *_attributes(),
    *_attention_kernels(),
)
