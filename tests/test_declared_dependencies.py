"""Every third-party package that our code imports is one that pyproject.toml installs for it.

The tests' own environment has all extras, so a forgotten one would show only on a user's machine.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"flashdispatch", "flashdispatch_registry", "flashdispatch_backends", "flashdispatch_conformance"}

PLACES: dict[str, tuple[str, ...]] = {
    "flashdispatch": (),
    "flashdispatch/demo": ("demo",),
    "registry/flashdispatch_registry": (),
    "backends/flashdispatch_backends": (),
    "backends/flashdispatch_backends/triton_fa2": ("triton",),
    "backends/flashdispatch_backends/tilelang_fa2": ("tilelang",),
    "backends/flashdispatch_backends/cuda_fa2": ("cuda12", "cuda13"),
    "conformance/flashdispatch_conformance": ("conformance",),
}
"""Folder -> the extras it may need beyond the core dependencies."""


def distributions(requirements: list[str]) -> set[str]:
    return {Requirement(text).name.lower() for text in requirements}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found - OURS - set(sys.stdlib_module_names)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_imported_is_declared(place: str) -> None:
    allowed = distributions(PROJECT["dependencies"])
    for extra in PLACES[place]:
        allowed |= distributions(PROJECT["optional-dependencies"][extra])
    deeper = [ROOT / other for other in PLACES if other != place and other.startswith(place)]
    owners = packages_distributions()
    files = [path for path in (ROOT / place).rglob("*.py") if not any(path.is_relative_to(other) for other in deeper)]
    assert files
    for path in files:
        for name in imports(path):
            named = {owner.lower() for owner in owners.get(name, [name])}
            assert named & allowed, f"{path.relative_to(ROOT)} imports {name}, which no dependency of {place} brings"
