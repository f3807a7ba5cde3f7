"""The versions that decide what a kernel does, read from metadata without importing anything."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.requirements import Requirement

DISTRIBUTIONS = ("flashdispatch", "triton", "tilelang", "cupy-cuda12x", "cupy-cuda13x", "pluggy", "numpy")


@cache
def versions() -> dict[str, str]:
    """Name -> version of Python, torch, CUDA and the kernel languages that are installed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # what is not installed has no version to report
    return found


def versions_line() -> str:
    """The same in one line: ``python 3.11.7, torch 2.13.0, ...``."""
    return ", ".join(f"{name} {number}" for name, number in versions().items())


def required_versions(requires: Sequence[str]) -> dict[str, str]:
    """Distribution -> installed version (or "not installed") of the requirement strings that count on this machine."""
    found: dict[str, str] = {}
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            try:
                found[requirement.name] = version(requirement.name)
            except PackageNotFoundError:
                found[requirement.name] = "not installed"
    return found
