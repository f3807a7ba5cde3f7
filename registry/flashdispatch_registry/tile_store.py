"""Tuned tiles on disk: one file for each backend, GPU and set of versions that decides what its kernels compile to.

    <cache folder>/tiles/triton_fa2-nvidia-h200-3f9c2b7e51d0.json

The fingerprint is in the file's name, so another GPU, another compiler or a changed kernel finds no tiles rather than
wrong ones, and it stands in the file too: one that says something else, or is damaged, is left out with a warning.
Writers lock and merge; readers need no lock, since a file is replaced as a whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.backend import BackendSpec
from flashdispatch_registry.errors import InvalidRequestError, SettingsError
from flashdispatch_registry.kernels import Tile
from flashdispatch_registry.source import source_hash, source_of
from flashdispatch_registry.versions import required_versions

log = logging.getLogger("flashdispatch")

CACHE_DIR = "FLASHDISPATCH_CACHE_DIR"
"""The environment variable that names another cache folder than the user's own."""

FORMAT = 1
"""Rises when a file written before would be understood wrongly."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A tile that won on a GPU, and its time there."""

    tile: Tile
    microseconds: float


def load(backend: str, fingerprint: Mapping[str, str]) -> Mapping[str, Tile]:
    """The tiles kept for `backend` under `fingerprint`, by `Tunable.tile_key`; empty when there are none.

    Reads one small file and imports nothing; call it once for a GPU and keep the answer.
    """
    return {key: tuned.tile for key, tuned in _read(path_of(backend, fingerprint), backend, fingerprint).items()}


def save(backend: str, fingerprint: Mapping[str, str], tuned: Mapping[str, Tuned]) -> Path:
    """Keeps `tuned` beside what is there, in place of what has the same key; returns the file.

    Raises ValueError for what `load` would not believe, OSError when the file can't be written.
    """
    from filelock import FileLock  # it loads asyncio, and only writers need it

    path = path_of(backend, fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        merged = _read(path, backend, fingerprint) | dict(tuned)
        content = {
            "format": FORMAT,
            "backend": backend,
            "fingerprint": dict(fingerprint),
            "tiles": {key: {**asdict(merged[key]), "tile": dict(merged[key].tile)} for key in sorted(merged)},
        }
        text = json.dumps(content, indent=2)
        _parse(text, backend, fingerprint)
        new = path.with_name(f".{path.name}.new")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(path)
    return path


def path_of(backend: str, fingerprint: Mapping[str, str]) -> Path:
    """The file of `backend` under `fingerprint`, whether it is there or not."""
    digest = hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()[:12]
    gpu = re.sub(r"[^a-z0-9]+", "-", fingerprint.get("gpu", "").lower()).strip("-")
    return cache_dir() / "tiles" / f"{backend}-{gpu}-{digest}.json"


def cache_dir() -> Path:
    """FLASHDISPATCH_CACHE_DIR, else the user's cache folder for flashdispatch. It may not exist yet.

    Raises SettingsError for the home folder of a user that there is not.
    """
    named = os.environ.get(CACHE_DIR, "").strip()
    if not named:
        return user_cache_path("flashdispatch", appauthor=False)
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{CACHE_DIR}={named!r}: {error}") from error


def fingerprint_of(spec: BackendSpec, device_index: int | None = None) -> dict[str, str]:
    """The fingerprint of a declared backend: its own source, and the versions of what it requires.

    The backend and `flashdispatch tune` both ask here, so that one finds what the other kept.

    Raises InvalidRequestError when its code comes from no file: nobody could tell when a kernel has changed.
    """
    source = source_of(spec.factory)
    if source is None:
        module = spec.factory.partition(":")[0]
        raise InvalidRequestError(f"{spec.name}: {module} comes from no file, so its tiles can't be kept")
    return fingerprint(source_hash(source), spec.requires, device_index)


def fingerprint(source: str, requires: Sequence[str] = (), device_index: int | None = None) -> dict[str, str]:
    """Everything that a measured tile depends on.

    Args:
        source: What `source_hash` says of the backend's folder.
        requires: Requirement strings; their distributions' installed versions count.
        device_index: Which GPU; None is the current one. A machine without any has the GPU "none".
    """
    gpu, arch = "none", "cpu"
    if torch.cuda.is_available():
        index = torch.cuda.current_device() if device_index is None else device_index
        gpu, arch = torch.cuda.get_device_name(index), arch_of(torch.device("cuda", index))
    found = {"gpu": gpu, "arch": arch, "source": source, "torch": str(torch.__version__)}
    return found | required_versions(requires)


def _read(path: Path, backend: str, fingerprint: Mapping[str, str]) -> dict[str, Tuned]:
    try:
        return _parse(path.read_text(encoding="utf-8"), backend, fingerprint)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        log.warning("tuned tiles in %s are not used: %s", path, error)
        return {}


def _parse(text: str, backend: str, fingerprint: Mapping[str, str]) -> dict[str, Tuned]:
    """The tiles in a file's text.

    Raises ValueError with what is wrong when it is no such file, or another backend's, GPU's or version's.
    """
    data = json.loads(text)
    expected = {"format": FORMAT, "backend": backend, "fingerprint": dict(fingerprint)}
    if not isinstance(data, dict) or set(data) != {*expected, "tiles"}:
        raise ValueError(f"it does not have the fields {', '.join(expected)}, tiles")
    for name, value in expected.items():
        if data[name] != value:
            raise ValueError(f"its {name} is {data[name]!r}, not {value!r}")
    if not isinstance(data["tiles"], dict):
        raise ValueError("its tiles are no object")  # noqa: TRY004  a wrong text, whatever is wrong in it
    return {key: _tuned(key, entry) for key, entry in data["tiles"].items()}


def _tuned(key: str, entry: Any) -> Tuned:
    if not isinstance(entry, dict) or set(entry) != {"tile", "microseconds"}:
        raise ValueError(f"{key!r} does not have the fields tile, microseconds")
    tile, time = entry["tile"], entry["microseconds"]
    if not isinstance(tile, dict) or not tile or not all(type(value) is int for value in tile.values()):
        raise ValueError(f"the tile of {key!r} must name whole numbers, got {tile!r}")
    if type(time) not in (int, float) or not (math.isfinite(time) and time > 0):
        raise ValueError(f"the microseconds of {key!r} must be a number above 0, got {time!r}")
    return Tuned(tile, time)
