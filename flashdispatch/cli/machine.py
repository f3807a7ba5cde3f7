"""What machine this is: operating system, Python, torch, CUDA and the GPUs. Starts no CUDA where there is no GPU."""

from __future__ import annotations

import platform
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from flashdispatch_registry.arch import arch_of

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that torch can use."""

    index: int
    name: str
    arch: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The parts of a machine that decide which backends can run."""

    system: str
    python: str
    torch: str
    runtime: str
    """CUDA or ROCm version that torch was built for; empty for a CPU build."""
    driver: str
    """NVIDIA driver version; empty when none is loaded."""
    gpus: tuple[Gpu, ...]
    complaint: str = ""
    """What torch said when it looked for GPUs and could not use them."""

    @property
    def arch(self) -> str:
        """The architecture a call without a device in mind runs on: the first GPU's, else the CPU."""
        return self.gpus[0].arch if self.gpus else "cpu"


def this_machine() -> Machine:
    """Looks around."""
    gpus, complaint = _gpus()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        torch=str(torch.__version__),
        runtime=f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {hip}"
        if (hip := torch.version.hip)
        else "",
        driver=_driver(),
        gpus=gpus,
        complaint=complaint,
    )


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = torch.cuda.is_available()
    complaint = "; ".join(str(warning.message).splitlines()[0] for warning in caught)
    if not seen:
        return (), complaint
    return tuple(_gpu(index) for index in range(torch.cuda.device_count())), complaint


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(index, properties.name, arch_of(torch.device("cuda", index)), properties.total_memory)


def _driver() -> str:
    if not _DRIVER.exists():
        return ""
    found = re.search(r"(?:Kernel Module|for \w+)\s+(\d+(?:\.\d+)+)", _DRIVER.read_text())
    return found.group(1) if found else ""
