"""What the command line asks of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Options:
    """`--grid`, `--providers`, `--rounds`, `--rows`, `--commit`."""

    grids: tuple[str, ...] = ("main",)
    providers: tuple[str, ...] = ()
    rounds: int = 5
    rows: Path | None = None
    commit: str = ""

    @classmethod
    def add(cls, parser: pytest.Parser) -> None:
        """Declares them."""
        group = parser.getgroup("flashdispatch benchmarks")
        group.addoption("--grid", default="main", help="main, fp16, fp32, extra, smoke; or several: a,b")
        group.addoption("--providers", default="", help="who is measured: names with commas; default: everybody")
        group.addoption("--rounds", type=int, default=5, help="how often every provider is visited, interleaved")
        group.addoption("--rows", type=Path, default=None, help="JSON-lines file to which the rows are added")
        group.addoption("--commit", default="", help="what the rows call the commit; default: ask git")

    @classmethod
    def of(cls, config: pytest.Config) -> Options:
        """As given; the defaults when pytest was started above this folder, and so parsed before it saw them."""

        def names(text: str) -> tuple[str, ...]:
            return tuple(name.strip() for name in text.split(",") if name.strip())

        return cls(
            names(config.getoption("--grid", "main")),
            names(config.getoption("--providers", "")),
            config.getoption("--rounds", 5),
            config.getoption("--rows", None),
            config.getoption("--commit", ""),
        )
