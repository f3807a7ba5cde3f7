"""The command line in this process, and third-party plugins that exist for one test."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from flashdispatch import _plans, _registry
from flashdispatch.cli import app

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Ran(NamedTuple):
    """What one command gave."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """stdout without its line breaks, so that wrapping does not matter."""
        return " ".join(self.out.split())


Command = Callable[..., Ran]
AddPlugin = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test discovers anew, and leaves nothing behind."""
    monkeypatch.setattr(_registry, "_process", None)
    _plans.cache.clear()
    yield
    _plans.cache.clear()


@pytest.fixture
def command() -> Command:
    """Runs ``flashdispatch ARGS``, 100 columns wide."""

    def run(*args: str, stdin: str | bytes | None = None, width: int = 100) -> Ran:
        result = CliRunner().invoke(app, list(args), input=stdin, env={"COLUMNS": str(width)})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, _ANSI.sub("", result.stdout), _ANSI.sub("", result.stderr))

    return run


@pytest.fixture
def add_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddPlugin]:
    """Installs a distribution ``acme-NAME`` 2.0 with one plugin NAME, whose module is the given source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def add(name: str, source: str) -> None:
        module = f"acme_{name}"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[flashdispatch]\n{name} = {module}\n")
        modules.append(module)

    yield add
    for module in modules:
        sys.modules.pop(module, None)


PLUGIN = """
import torch
from flashdispatch_registry import BackendSpec, HeadDims, KnownIssue, Support, hookimpl

@hookimpl
def flashdispatch_backends():
    yield BackendSpec(
        name={name!r},
        factory={factory!r},
        requires={requires!r},
        install={install!r},
        support=Support(
            dtypes=frozenset({{torch.bfloat16}}), head_dims=HeadDims(), devices=frozenset({{"cpu", "cuda"}})
        ),
    )

@hookimpl
def flashdispatch_known_issues():
    yield KnownIssue(backend={name!r}, reason="wrong at odd lengths", url="https://example.org/7", when=lambda p: False)
"""


@pytest.fixture
def plugin_source() -> Callable[..., str]:
    """A plugin's module with one backend and one known issue."""

    def source(name: str, *, factory: str = "nowhere", requires: tuple[str, ...] = (), install: str = "") -> str:
        return PLUGIN.format(name=name, factory=factory, requires=requires, install=install)

    return source
