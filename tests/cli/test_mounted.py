"""Commands that other distributions bring: one that is broken costs nobody anything until it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashdispatch_registry.errors import FlashDispatchWarning

Command = Callable[..., Any]
AddCommand = Callable[[str, str], None]

GOOD = """
import typer
app = typer.Typer(help="Says hello.")

@app.command()
def hello(name: str) -> None:
    print("hello", name)

@app.command()
def other() -> None:
    pass
"""


@pytest.fixture
def add_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddCommand]:
    """Installs a distribution with one command, whose module is the given source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def add(name: str, source: str) -> None:
        module = f"acme_{name}_{len(modules)}"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[flashdispatch.commands]\n{name} = {module}:app\n")
        modules.append(module)

    yield add
    for module in modules:
        sys.modules.pop(module, None)


def test_a_command_stands_in_the_help_and_runs(command: Command, add_command: AddCommand) -> None:
    add_command("acme", GOOD)
    assert "Says hello." in command("--help").words
    ran = command("acme", "hello", "world")
    assert (ran.code, ran.out) == (0, "hello world\n")


def test_the_conformance_suite_is_one_of_them(command: Command) -> None:
    assert "conformance" in command("--help").out
    assert command("conformance", "list", "--tier", "smoke").code == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import there_is_no_such_module", "ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("app = 3", "is a int, and must be a typer.Typer"),
        ("pass", "AttributeError"),
    ],
)
def test_a_broken_one_says_so_in_the_help_and_when_it_is_used(
    command: Command, add_command: AddCommand, source: str, said: str
) -> None:
    add_command("acme", source)
    help_ = command("--help", width=200)
    assert help_.code == 0
    assert "acme Broken:" in " ".join(help_.out.replace("│", " ").split())
    assert "doctor" in help_.out
    ran = command("acme", "do", "--some", "thing")
    assert (ran.code, ran.out) == (1, "")
    assert "the command 'acme' is broken" in ran.err
    assert said in ran.err
    assert command("matrix", "--json").code == 0


def test_our_own_commands_load_nobody_elses(command: Command, add_command: AddCommand) -> None:
    add_command("acme", GOOD)
    assert command("matrix", "--json").code == 0
    assert "acme_acme_0" not in sys.modules


def test_a_distribution_that_may_not_load_is_not_loaded(
    command: Command, add_command: AddCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_command("acme", GOOD)
    monkeypatch.setenv("FLASHDISPATCH_PLUGINS", "somebody-else")
    ran = command("acme", "hello", "world")
    assert ran.code == 1
    assert "may not load: FLASHDISPATCH_PLUGINS" in ran.err
    assert "acme_acme_0" not in sys.modules
    assert command("conformance", "list", "--tier", "smoke").code == 0


def test_a_name_that_is_taken_is_warned_about(command: Command, add_command: AddCommand) -> None:
    add_command("doctor", GOOD)
    with pytest.warns(FlashDispatchWarning, match="the command 'doctor' of acme-doctor-0 has a name that is taken"):
        assert "Says hello." not in command("--help").out


def test_a_misspelt_command_says_the_nearest(command: Command) -> None:
    ran = command("conformanse")
    assert ran.code == 2
    assert "Did you mean 'conformance'?" in " ".join(ran.err.replace("│", " ").split())
