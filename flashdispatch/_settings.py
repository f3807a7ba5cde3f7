"""Environment variables: what each means, what it may say, and which ones look like ours and are not.

`FLASHDISPATCH_BACKEND` and `FLASHDISPATCH_DISABLE` are read on every call (`in_force`), so that a change in a running
process counts at once. FALLBACK and CHECK are read when a plan is made, the plugin variables at first use, and
CACHE_DIR by `flashdispatch_registry.tile_store` whenever it looks for a file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flashdispatch_registry.errors import SettingsError, SettingsWarning
from flashdispatch_registry.plugins import PluginPolicy
from flashdispatch_registry.select import nearest

PREFIX = "FLASHDISPATCH_"
BACKEND = "FLASHDISPATCH_BACKEND"
DISABLE = "FLASHDISPATCH_DISABLE"

KNOWN: Mapping[str, str] = {
    BACKEND: "run this backend, or the first of a chain a,b that can; anything else raises",
    DISABLE: "never run these backends (a,b); beats everything",
    "FLASHDISPATCH_FALLBACK": "error, warn (default) or allow: only an unfused or quadratic backend can run on a GPU",
    "FLASHDISPATCH_CHECK": "1: check lengths on a GPU too, which synchronises",
    "FLASHDISPATCH_PLUGINS": "load only these third-party plugins (a,b: entry points or distributions; empty: none)",
    "FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD": "1: load no third-party plugin that FLASHDISPATCH_PLUGINS does not name",
    "FLASHDISPATCH_STRICT_PLUGINS": "1: a broken plugin raises instead of being passed over",
    "FLASHDISPATCH_CACHE_DIR": "the folder for tuned tiles and cuda_fa2's kernels, instead of the user's cache folder",
}
"""Every variable, with its meaning in a line."""

FallbackPolicy = Literal["error", "warn", "allow"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment at one moment, parsed."""

    fallback: FallbackPolicy = "warn"
    check: bool = False
    plugins: PluginPolicy = PluginPolicy()  # noqa: RUF009  frozen, so one shared default is safe


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Parses `environ`.

    Raises SettingsError for a value that means nothing.
    """
    fallback = environ.get("FLASHDISPATCH_FALLBACK", "").strip().lower() or "warn"
    if fallback not in get_args(FallbackPolicy):
        raise SettingsError(f"FLASHDISPATCH_FALLBACK={fallback!r} must be error, warn or allow")
    return Settings(
        fallback=fallback,  # type: ignore[arg-type]  # checked above
        check=_flag(environ, "FLASHDISPATCH_CHECK"),
        plugins=plugin_policy(environ),
    )


def plugin_policy(environ: Mapping[str, str] = os.environ) -> PluginPolicy:
    """Which plugins may load.

    Raises SettingsError for a value that means nothing.
    """
    allow = environ.get("FLASHDISPATCH_PLUGINS")
    return PluginPolicy(
        allow=frozenset(names(allow)) if allow is not None else None,
        autoload=not _flag(environ, "FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD"),
        strict=_flag(environ, "FLASHDISPATCH_STRICT_PLUGINS"),
    )


_BACKEND_KEY, _DISABLE_KEY = (os.environ.encodekey(name) for name in (BACKEND, DISABLE))


def in_force() -> tuple[Any, Any]:
    """FLASHDISPATCH_BACKEND and FLASHDISPATCH_DISABLE as they stand now, raw: `text` reads such a value.

    os.environ keeps what it holds as encoded names and values in a dict, `_data`, and `os.environ.get` encodes and
    decodes at every look-up: 2 µs for these two on every call's way, against 0.1 µs here. A change made through
    os.environ is a change of that dict, so it is seen all the same.
    """
    try:
        data = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001  the reason is above
    except AttributeError:  # something else stands in os.environ's place
        return os.environ.get(BACKEND), os.environ.get(DISABLE)
    return data.get(_BACKEND_KEY), data.get(_DISABLE_KEY)


def text(raw: Any) -> str | None:
    """A value of `in_force` as os.environ would give it."""
    return None if raw is None else os.fsdecode(raw)


def names(text: str) -> tuple[str, ...]:
    """``"a, b"`` -> ``("a", "b")``; empty parts are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def unknown(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with our prefix that mean nothing -> a "did you mean" (or an empty text)."""
    return {name: nearest(name, KNOWN) for name in environ if name.startswith(PREFIX) and name not in KNOWN}


_warned: set[str] = set()


def warn_unknown(environ: Mapping[str, str] = os.environ) -> None:
    """Warns once about each unknown variable: a misspelt setting must not be ignored in silence."""
    for name, hint in unknown(environ).items():
        if name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name} is not a flashdispatch setting.{hint}", SettingsWarning, stacklevel=2)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise SettingsError(f"{name}={value!r} must be 1 or 0")
