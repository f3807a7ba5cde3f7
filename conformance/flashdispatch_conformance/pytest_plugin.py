"""The suite as tests of pytest: ``pytest --pyargs flashdispatch_conformance --fd-backend NAME``.

pytest loads this module wherever the package is installed, so it holds the options and nothing else: without
``--fd-backend`` nothing happens and nothing is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options. What they mean is what ``flashdispatch conformance run`` means by its own."""
    group = parser.getgroup("flashdispatch", "conformance of attention backends (flashdispatch)")
    group.addoption("--fd-backend", metavar="NAME", help="run the conformance suite on this backend")
    group.addoption(
        "--fd-tier", metavar="TIER", default="smoke", choices=("smoke", "full", "deep"), help="how much of it"
    )
    group.addoption("--fd-device", metavar="DEVICE", help="cpu, cuda or cuda:1; default: cuda where there is one")
    group.addoption("--fd-report", metavar="DIR", help="write the report there at the end")
    group.addoption("--fd-waivers", metavar="FILE", help="known faults, as TOML")
    group.addoption(
        "--fd-timeout", metavar="SECONDS", type=float, help="what one unit may take (120 on a GPU, 900 on a CPU)"
    )
    group.addoption(
        "--fd-plugin", metavar="MODULE", action="append", default=[], help="a module that registers a backend"
    )
    group.addoption(
        "--fd-in-process",
        action="store_true",
        help="no child process: a crash ends pytest; for debuggers, and for backends that a conftest.py registers",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Loads the suite when it is asked for."""
    if config.getoption("--fd-backend") is not None:
        from flashdispatch_conformance.pytest_items import Conformance

        config.pluginmanager.register(Conformance(config), "flashdispatch_conformance_items")
