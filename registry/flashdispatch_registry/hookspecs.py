"""The two hooks of a flashdispatch plugin. Both only yield records, at discovery; neither runs during a call.

A plugin is a module (or object) named by an entry point in the group ``flashdispatch`` that implements one or both with
`hookimpl`. Keep the module light: it is imported at discovery, so it must not import a kernel language or touch a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from flashdispatch_registry.backend import BackendSpec, KnownIssue

PROJECT = "flashdispatch"
"""pluggy's project name and the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def flashdispatch_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body]  # a hookspec has no body
    """The backends this plugin brings.

    Called once per discovery. An empty answer means the plugin has none. Every `BackendSpec.name` must be unique over
    all installed plugins: two plugins with one name are both refused, and a built-in name can't be taken.
    """


@hookspec
def flashdispatch_known_issues() -> Iterable[KnownIssue]:  # type: ignore[empty-body]  # a hookspec has no body
    """Combinations known to be wrong, or slow, of any backend (also of another plugin's), each with a link.

    Called once per discovery. An empty answer means none are known.
    """
