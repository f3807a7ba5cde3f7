"""``--plugin``: modules that register a backend when they are imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flashdispatch_conformance.worker import import_plugins
from flashdispatch_registry.errors import PluginError


def load(modules: Sequence[str] | None) -> None:
    """Imports `modules`, from the working folder too, as ``python -m`` would; child processes inherit the path.

    Raises PluginError that says what kept one from loading.
    """
    if not modules:
        return
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    for module in modules:
        try:
            import_plugins([module])
        except Exception as error:
            raise PluginError(f"--plugin {module} can't be imported: {type(error).__name__}: {error}") from error
