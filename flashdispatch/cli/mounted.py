"""Commands that other distributions bring: entry points of the group ``flashdispatch.commands``, each a `typer.Typer`.

One that can't be loaded stands in the help as broken, and says why when it is used; the others don't notice.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Collection, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from flashdispatch import _settings
from flashdispatch_registry.errors import FlashDispatchWarning, PluginError
from flashdispatch_registry.plugins import normalised

GROUP = "flashdispatch.commands"

OURS = "flashdispatch"
"""The distribution whose commands load whatever the settings say of plugins."""


def mounted(taken: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Name and command of each entry point, ours first. A name that is `taken`, or comes twice, is warned about."""
    seen = set(taken)
    for point in sorted(entry_points(group=GROUP), key=lambda point: (_owner(point) != OURS, _owner(point))):
        if point.name in seen:
            warnings.warn(
                f"the command {point.name!r} of {_owner(point)} has a name that is taken: it can't be used",
                FlashDispatchWarning,
                stacklevel=2,
            )
            continue
        seen.add(point.name)
        yield point.name, _command(point)


def _command(point: EntryPoint) -> Any:
    owner = _owner(point)
    if owner != OURS and not _settings.plugin_policy().allows(point.name, owner):
        return _broken(point, f"{owner} may not load: FLASHDISPATCH_PLUGINS or _DISABLE_PLUGIN_AUTOLOAD keeps it out")
    try:
        app = point.load()
    except Exception as error:  # noqa: BLE001  whatever it is, the other commands must work
        what = f"{type(error).__name__}: {error}"
        return _broken(point, f"{point.value} of {owner} failed to load: {what}", traceback.format_exc())
    if not isinstance(app, typer.Typer):
        return _broken(point, f"{point.value} of {owner} is a {type(app).__name__}, and must be a typer.Typer")
    command = get_command(app)
    command.name = point.name
    return command


def _broken(point: EntryPoint, reason: str, details: str = "") -> TyperCommand:
    def fail() -> None:
        raise PluginError(f"the command {point.name!r} is broken: {reason}" + (f"\n\n{details}" if details else ""))

    return TyperCommand(
        point.name,
        callback=fail,
        help=f"Broken: {reason}",
        rich_markup_mode=None,  # a reason may have brackets of its own
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _owner(point: EntryPoint) -> str:
    return "unknown" if point.dist is None else normalised(point.dist.name)
