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


def alternatives(text: str) -> list[Requirement]:
    """The requirements of which any one will do: ``"cupy-cuda13x>=13 | cupy-cuda12x>=13"``; those for this machine.

    Raises InvalidRequirement, a ValueError, for what is none.
    """
    found = [Requirement(part.strip()) for part in text.split("|")]
    return [one for one in found if one.marker is None or one.marker.evaluate()]


def required_versions(requires: Sequence[str]) -> dict[str, str]:
    """Distribution -> installed version (or "not installed") of the requirement strings that count on this machine.

    Of alternatives, those that are installed, or else the first.
    """
    found: dict[str, str] = {}
    for text in requires:
        names = [requirement.name for requirement in alternatives(text)]
        there = {name: number for name in names if (number := installed(name))}
        found |= there or dict.fromkeys(names[:1], "not installed")
    return found


def installed(distribution: str) -> str:
    """The installed version of a distribution; empty when there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
