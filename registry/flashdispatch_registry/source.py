"""Which source a backend is made of, and its hash: what tuned tiles and conformance reports are valid for.

Nothing here imports a backend's code, so that its kernel language is not loaded to find out whether it has changed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path


def source_of(factory: str) -> Path | None:
    """The folder of the package that a factory's module is or lies in; a module in no package is its own file.

    `factory` is `BackendSpec.factory`. None when there is no such module, or it comes from no file: nobody could tell
    when a kernel has changed.
    """
    name = factory.partition(":")[0]
    file, is_package = _file_of(name)
    if file is None:
        return None
    return file.parent if is_package or "." in name else file


def source_hash(source: Path, *, without: Collection[str] = ()) -> str:
    """SHA-256 of the source files of a package's folder, by name and content; or of the one file `source`.

    `without` names folders directly inside that do not count.
    """
    digest = hashlib.sha256()
    folder = source if source.is_dir() else source.parent
    for name in sorted(path.relative_to(folder).as_posix() for path in _source_files(source)):
        if name.partition("/")[0] in without:
            continue
        content = (folder / name).read_bytes()
        # With the lengths between them, no two sets of files read the same.
        digest.update(f"{len(name.encode())} {name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _source_files(source: Path) -> Sequence[Path]:
    """Every file but what Python and editors leave: a suffix that is forgotten here would hide a changed kernel."""
    if source.is_file():
        return [source]
    inside = (path for path in source.rglob("*") if path.is_file())
    return [
        path
        for path in inside
        if not any(part == "__pycache__" or part.startswith(".") for part in path.relative_to(source).parts)
    ]


def _file_of(name: str) -> tuple[Path | None, bool]:
    """The file of a module and whether it is a package's, without importing it or the packages around it."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return (None if file is None else Path(file)), hasattr(loaded, "__path__")
    found: ModuleSpec | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):  # importlib.util.find_spec would import the packages around it
        inside = None if found is None else found.submodule_search_locations
        if found is not None and inside is None:
            return None, False
        found = _find(".".join(parts[:end]), inside)
        if found is None:
            return None, False
    if found is None or not found.has_location or found.origin is None:
        return None, False
    return Path(found.origin), found.submodule_search_locations is not None


def _find(name: str, inside: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, inside)
        if spec is not None:
            return spec
    return None
