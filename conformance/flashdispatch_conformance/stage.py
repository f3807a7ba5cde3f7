"""What a check is doing right now, said to whoever watches its process: the last word before a crash or a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Stage = Literal["compiling or running", "running", "judging"]
"""compiling or running: in the first call of a form, or its backward. running: in a later one. judging: comparing."""


Watcher = Callable[[str, str], None]
"""Told of a kind, "stage" or "case", and which one."""


def _ignore(kind: str, text: str) -> None:
    del kind, text


_watcher: Watcher = _ignore


def watch(watcher: Watcher) -> None:
    """Has `watcher` told of all that the checks of this process do, from now on."""
    global _watcher
    _watcher = watcher


def enter(stage: Stage) -> None:
    """Says what comes next."""
    _watcher("stage", stage)


def draw(command: str) -> None:
    """Says which case comes next, where a check has many: by the command that runs it again."""
    _watcher("case", command)
