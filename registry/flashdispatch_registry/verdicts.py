"""What conformance reports say of the backends: tested, or known to be wrong, on an architecture.

    <folder of flashdispatch_conformance>/reports/<backend>-<arch>-<tier>.json    GPUs that we, and others, ran on
    <cache folder>/reports/<backend>-<arch>-<tier>.json                           this user's own runs

"Tested" is never written by hand. A report speaks of the code it was made with: it counts while the backend's source
hash, the architecture and the minor versions of what the backend requires are the same. Only the few files of a backend
and an architecture that somebody asks about are read, once a process, and no kernel language is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from packaging.version import InvalidVersion, Version

from flashdispatch_registry.backend import BackendSpec
from flashdispatch_registry.source import source_hash, source_of
from flashdispatch_registry.tile_store import cache_dir
from flashdispatch_registry.versions import required_versions

log = logging.getLogger("flashdispatch")

Word = Literal["conformant", "partial", "nonconformant"]

CONFORMANT_TIERS = frozenset({"full", "deep"})
"""Tiers whose conformant reports make a backend tested; the smoke tier is only a first contact."""

FOLDER = "reports"
SUITE = "flashdispatch_conformance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one report says."""

    backend: str
    arch: str
    source: str
    """SHA-256 of the backend's source."""
    languages: Mapping[str, str]
    """Minor versions of what the backend requires: ``{"triton": "3.6"}``."""
    tier: str
    word: Word
    file: Path


def verdicts_of(specs: Iterable[BackendSpec], arch: str) -> tuple[Verdict, ...]:
    """All verdicts on the code of these backends, as it is installed here, on `arch`.

    Raises SettingsError when FLASHDISPATCH_CACHE_DIR names no folder.
    """
    return tuple(verdict for spec in specs for verdict in _on(spec.name, spec.factory, spec.requires, arch))


def forget() -> None:
    """The reports are read again when they are next asked about."""
    _on.cache_clear()


def matches(verdict: Verdict, source: str, languages: Mapping[str, str]) -> bool:
    """True when a report speaks of this source and these minor versions."""
    return verdict.source == source and verdict.languages == languages


def minor(version: str) -> str:
    """``"3.6"`` for ``"3.6.1+cu130"``, ``"0.1.15"`` for itself; what is no version stays as it is.

    Before 1.0 the third number is what changes with every release: 0.1.13 says nothing of 0.1.15.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return version
    return f"{found.major}.{found.minor}" if found.major else f"0.{found.minor}.{found.micro}"


@lru_cache(maxsize=1024)
def _on(backend: str, factory: str, requires: tuple[str, ...], arch: str) -> tuple[Verdict, ...]:
    found = tuple(_reports(backend, arch))
    source = source_of(factory) if found else None  # without a report nobody need know the source
    if source is None:
        return ()
    code, languages = source_hash(source), _minors(required_versions(requires))
    return tuple(verdict for verdict in found if matches(verdict, code, languages))


def _reports(backend: str, arch: str) -> Iterator[Verdict]:
    for folder in _folders():
        for path in sorted(folder.glob(f"{backend}-{arch}-*.json")):
            try:
                yield parse(path.read_text(encoding="utf-8"), path, backend, arch)
            except (OSError, ValueError, RecursionError) as error:
                log.warning("the conformance report %s is not used: %s", path, error)


def _folders() -> Iterator[Path]:
    suite = importlib.util.find_spec(SUITE)  # a package at the top: nothing is imported to find it
    for location in (suite.submodule_search_locations or ()) if suite is not None else ():
        yield Path(location) / FOLDER
    yield cache_dir() / FOLDER


def parse(text: str, file: Path, backend: str, arch: str) -> Verdict:
    """The verdict in a report's text.

    Raises ValueError with what is wrong when it is no such report, its seal is broken, or it is about something else
    than its file's name says.
    """
    document = json.loads(text)
    try:
        sealed = {name: value for name, value in document.items() if name != "seal"}
        canonical = json.dumps(sealed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        if document["seal"]["value"] != hashlib.sha256(canonical.encode()).hexdigest():
            raise ValueError("its seal is broken: something was changed after it was written")
        verdict = Verdict(
            backend=document["backend"]["name"],
            arch=document["device"]["arch"],
            source=document["backend"]["source_sha256"] or "",
            languages=_minors(document["backend"]["languages"]),
            tier=document["suite"]["tier"],
            word=document["summary"]["verdict"],
            file=file,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it does not have the form of one ({type(error).__name__}: {error})") from error
    if verdict.word not in get_args(Word):
        raise ValueError(f"its verdict is {verdict.word!r}, none of {', '.join(get_args(Word))}")
    if (verdict.backend, verdict.arch) != (backend, arch):
        raise ValueError(f"it is about {verdict.backend} on {verdict.arch}, not what its name says")
    return verdict


def _minors(versions: Mapping[str, str]) -> dict[str, str]:
    return {name: minor(number) for name, number in versions.items()}
