"""What a check is doing right now, said to whoever watches its process: the last word before a crash or a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Stage = Literal["compiling or running", "running", "judging"]
"""compiling or running: in the first call of a form, or its backward. running: in a later one. judging: comparing."""


def _ignore(stage: Stage) -> None:
    del stage


_watcher: Callable[[Stage], None] = _ignore


def watch(watcher: Callable[[Stage], None]) -> None:
    """Has `watcher` told of each stage that a check of this process enters, from now on."""
    global _watcher
    _watcher = watcher


def enter(stage: Stage) -> None:
    """Says what comes next."""
    _watcher(stage)
