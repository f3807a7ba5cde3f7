"""Where a report was made: the suite, the machine, its device and the backend, as blocks of the document.

What a machine does not tell is null, and the run goes on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import torch

import flashdispatch
from flashdispatch import BackendStatus
from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.errors import InvalidRequestError, UnknownBackendError
from flashdispatch_registry.problem import DTYPE_NAMES
from flashdispatch_registry.select import unknown_backend
from flashdispatch_registry.source import source_hash, source_of
from flashdispatch_registry.support import HeadDims, Support
from flashdispatch_registry.versions import required_versions, versions

PACKAGE = Path(__file__).parent
NOT_SUITE = frozenset({"reports"})
"""Folders of the package that are no part of the suite: a new report changes no check."""

_SMI = {
    "driver": "driver_version",
    "ecc": "ecc.mode.current",
    "mig": "mig.mode.current",
    "power_limit_w": "power.limit",
    "clock_sm_mhz": "clocks.max.sm",
    "clock_memory_mhz": "clocks.max.memory",
}
"""Field of the block -> what nvidia-smi calls it."""


def source_tree_sha256() -> str:
    """Of the suite's own source."""
    return source_hash(PACKAGE, without=NOT_SUITE)


def suite_modified() -> bool | None:
    """Whether the suite's source is another than what was committed or installed; None when nobody can tell."""
    changed = _git("status", "--porcelain", "--", ".", *(f":(exclude){name}" for name in sorted(NOT_SUITE)))
    if _git("ls-files", "--error-unmatch", "--", "__init__.py") is not None and changed is not None:
        return bool(changed)
    return _differs_from_record()


def _git(*arguments: str) -> str | None:
    """What git says in the suite's folder; None when it can't or there is no repository."""
    try:
        done = subprocess.run(  # noqa: S603  fixed arguments
            ["git", "--no-optional-locks", "-C", str(PACKAGE), *arguments],  # noqa: S607  whichever git the user has
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _differs_from_record() -> bool | None:
    """Whether a file of the suite is not as the wheel brought it, by the hashes that its installer kept."""
    try:
        files = distribution("flashdispatch").files or []
    except PackageNotFoundError:
        return None
    mine = [file for file in files if file.parts[0] == PACKAGE.name and file.hash is not None]
    if not mine:
        return None
    return not all(_as_recorded(PACKAGE.parent / file, file.hash.mode, file.hash.value) for file in mine if file.hash)


def _as_recorded(path: Path, algorithm: str, value: str) -> bool:
    import base64

    if not path.is_file():
        return False
    digest = hashlib.new(algorithm, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == value


def host() -> dict[str, Any]:
    """Operating system, Python and the versions that decide what a kernel does."""
    installed = sorted({f"{dist.name}=={dist.version}" for dist in distributions()})
    return {
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "cuda_runtime": torch.version.cuda,
        "versions": dict(versions()),
        "packages_sha256": _hashed("\n".join(installed)),
        "hostname_sha256": _hashed(platform.node()),
    }


def device(device: torch.device) -> dict[str, Any]:
    """The device that was tested on, as far as PyTorch and nvidia-smi tell."""
    block: dict[str, Any] = {
        "type": device.type,
        "arch": arch_of(device),
        "name": _cpu_name() if device.type == "cpu" else device.type,
        "sm_count": None,
        "memory_bytes": None,
        "uuid_sha256": None,
        **dict.fromkeys(_SMI),
    }
    if device.type != "cuda" or not torch.cuda.is_available():
        return block
    properties = torch.cuda.get_device_properties(device)
    block |= {
        "name": properties.name,
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        block |= {"uuid_sha256": _hashed(str(uuid)), **_smi(f"GPU-{str(uuid).removeprefix('GPU-')}")}
    return block


def _smi(uuid: str) -> dict[str, str | float | None]:
    """What nvidia-smi says of one GPU; nothing when it is not there or knows it not."""
    query = ",".join(_SMI.values())
    try:
        done = subprocess.run(  # noqa: S603  a fixed query, and a UUID from the driver
            ["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(values) != len(_SMI):
        return {}
    return {name: _told(name, value) for name, value in zip(_SMI, values, strict=True)}


def _told(name: str, value: str) -> str | float | None:
    """A value of nvidia-smi; None for what the GPU does not have (``[N/A]``)."""
    if value.startswith("[") or not value:
        return None
    if not name.endswith(("_w", "_mhz")):
        return value
    return float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def status_of(name: str) -> BackendStatus:
    """The backend called `name` on this machine.

    Raises UnknownBackendError when there is none, InvalidRequestError when its plugin gave no declaration.
    """
    known = flashdispatch.backends()
    for status in known:
        if status.name == name:
            if status.spec is None:
                reasons = "; ".join(map(str, status.reasons))
                raise InvalidRequestError(f"{name} declares nothing, so there is nothing to report on: {reasons}")
            return status
    raise UnknownBackendError(unknown_backend(name, "the conformance suite", [status.name for status in known]))


def backend(status: BackendStatus) -> dict[str, Any]:
    """What was tested: where it comes from, the hash of its source, and what it declares, verbatim."""
    spec = status.spec
    if spec is None:
        raise InvalidRequestError(f"{status.name} declares nothing, so there is nothing to report on")
    source = source_of(spec.factory)
    return {
        "name": status.name,
        "distribution": status.distribution,
        "version": status.version,
        "factory": spec.factory,
        "source_sha256": None if source is None else source_hash(source),
        "languages": required_versions(spec.requires),
        "numerics": spec.numerics,
        "memory": spec.memory,
        "fused": spec.fused,
        "portable": spec.portable,
        "by_name_only": spec.by_name_only,
        "capabilities": capabilities(spec.support),
    }


def capabilities(support: Support) -> dict[str, Any]:
    """Declared support as JSON, field by field."""
    return {item.name: _plain(getattr(support, item.name)) for item in fields(support)}


def _plain(value: object) -> Any:
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, HeadDims):
        return asdict(value)
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
