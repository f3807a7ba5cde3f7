"""Faults of our environment variables: values that mean nothing, backends forced in vain, names that name nobody."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from flashdispatch import BackendStatus, _settings
from flashdispatch._forcing import Asked, resolve
from flashdispatch_registry.errors import SettingsError
from flashdispatch_registry.plugins import PluginPolicy, PluginRecord, normalised
from flashdispatch_registry.reasons import Code
from flashdispatch_registry.select import nearest

PLUGINS = "FLASHDISPATCH_PLUGINS"


def bad_values(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A line for each variable whose value means nothing, not only for the first: each is read on its own."""
    for name in _settings.KNOWN:
        if name in environ:
            alone = {name: environ[name]}
            try:
                _settings.read(alone)
                resolve(Asked(None, alone.get(_settings.BACKEND), None, None))
            except SettingsError as error:
                yield str(error)


def forced_in_vain(backends: Sequence[BackendStatus], environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A line for each way in which FLASHDISPATCH_BACKEND makes calls raise on this machine."""
    value = environ.get(_settings.BACKEND)
    try:
        forced, _ = resolve(Asked(None, value, None, None))
    except SettingsError:
        return  # `bad_values` has it
    if forced is None:
        return
    known = {backend.name: backend for backend in backends}
    unknown = [name for name in forced.names if name not in known]
    for name in unknown:
        yield f"{_settings.BACKEND}={value}: no backend is called {name!r}, so calls raise.{nearest(name, known)}"
    named = [known[name] for name in forced.names if name in known]
    if unknown or any(backend.ready for backend in named):
        return
    if all(reason.code is Code.DISABLED for backend in named for reason in backend.reasons):
        by = f"{_settings.DISABLE}={environ.get(_settings.DISABLE)}"
        yield f"{_settings.BACKEND}={value}: disabled by {by}, so calls raise; drop it from one of the two"
    else:
        yield f"{_settings.BACKEND}={value}: can't run on this machine (reasons above), so calls raise"


def names_nobody(
    backends: Sequence[BackendStatus], plugins: Sequence[PluginRecord], environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """A line for each name in FLASHDISPATCH_DISABLE and FLASHDISPATCH_PLUGINS that changes nothing."""
    known = [backend.name for backend in backends]
    for name in _settings.names(environ.get(_settings.DISABLE, "")):
        if name not in known:
            yield f"{_settings.DISABLE} names {name!r}, which is no backend: it disables nothing.{nearest(name, known)}"
    for name in _settings.names(environ.get(PLUGINS, "")):
        policy = PluginPolicy(allow=frozenset({name}))
        if not any(policy.allows(plugin.name, plugin.distribution) for plugin in plugins):
            known = list(dict.fromkeys(text for plugin in plugins for text in (plugin.name, plugin.distribution)))
            hint = nearest(name, known) or nearest(normalised(name), known)
            yield f"{PLUGINS} names {name!r}, which is no plugin and no distribution with one.{hint}"
