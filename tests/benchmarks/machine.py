"""What a row says about the machine, the versions and the run; read only, no setting of the GPU is ever changed."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

QUERY = ("uuid", "driver_version", "clocks.sm", "power.draw", "temperature.gpu")
LIMIT_S = 5.0
"""How long nvidia-smi may take before the reading is given up."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the GPU; None for what it does not say."""

    driver: str = ""
    sm_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


def reading(load: Callable[[], object] | None = None) -> Reading:
    """Asks nvidia-smi, with `load` run over and over until it answers: an idle GPU's clock says nothing about the case.

    Without a GPU, or an nvidia-smi that works, the reading is empty.
    """
    if not torch.cuda.is_available():
        return Reading()
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return Reading()
    with asked:
        end = time.monotonic() + LIMIT_S
        while load is not None and asked.poll() is None and time.monotonic() < end:
            load()
        try:
            text, _ = asked.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            asked.kill()
            return Reading()
    return parse(text, str(getattr(torch.cuda.get_device_properties(0), "uuid", "")))


def parse(text: str, uuid: str) -> Reading:
    """The line of the GPU with this UUID (nvidia-smi adds ``GPU-``); when there is only one line, that one."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    lines = [cells for cells in lines if len(cells) == len(QUERY)]
    mine = [cells for cells in lines if uuid and cells[0].endswith(uuid)] or (lines if len(lines) == 1 else [])
    if not mine:
        return Reading()
    _, driver, *numbers = mine[0]
    return Reading(driver, *map(_number, numbers))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]"


@dataclass(frozen=True, slots=True)
class Run:
    """What is the same for all rows of one run."""

    gpu: str
    """Its name; the processor's architecture on a machine without one."""
    versions: dict[str, str] = field(hash=False)
    commit: str
    command: str

    @classmethod
    def here(cls, command: str, commit: str = "") -> Run:
        """This machine and this checkout. `commit` for a copy of the tree that has no repository around it."""
        versions = {"torch": str(torch.__version__)}
        driver = reading().driver
        if driver:
            versions["driver"] = driver
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
            # torch ships it without types
            cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
            versions |= {"cudnn": str(cudnn)} if cudnn else {}
        for name in (
            "triton",
            "tilelang",
            "cupy-cuda12x",
            "cupy-cuda13x",
            "nvidia-cuda-nvrtc",
            "flash-attn-4",
            "flash-attn",
        ):
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue  # not installed
        versions["python"] = platform.python_version()
        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"cpu {platform.machine()}"
        return cls(gpu, versions, commit or _commit(), command)


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        # Untracked files don't count: rows and logs lie about in a tree that is measured.
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
