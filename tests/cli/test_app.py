"""The command line as a whole: help, version, exit codes, and what it costs to import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from typing import Any

import pytest
from rich.text import Text
from typer.main import get_command

from flashdispatch import __main__
from flashdispatch.cli import app, demo, doctor, explain, matrix, output, source, tune

COMMANDS = {
    "doctor": doctor,
    "explain": explain,
    "source": source,
    "tune tiles": tune,
    "matrix": matrix,
    "demo": demo,
}

Command = Callable[..., Any]


def python(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, timeout=60, **kwargs)


def test_help_lists_every_command(command: Command) -> None:
    ran = command("--help")
    assert ran.code == 0
    assert all(name.split()[0] in ran.out for name in COMMANDS)
    assert "tiles" in command("tune", "--help").out


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [80, 120])
def test_help_of_each_command_has_its_examples_and_fits(name: str, width: int, command: Command) -> None:
    ran = command(*name.split(), "--help", width=width)
    assert ran.code == 0
    assert "--json" in ran.out
    assert f"flashdispatch {name}" in ran.out.split("Examples")[1]
    assert max(map(len, ran.out.splitlines())) <= width


@pytest.mark.parametrize("module", COMMANDS.values(), ids=COMMANDS)
def test_examples_fit_into_80_columns_so_that_they_can_be_copied(module: Any) -> None:
    examples = [line.replace("[cyan]", "").replace("[/]", "") for line in module.EXAMPLES.splitlines()]
    assert max(map(len, examples)) <= 78


def test_version_is_the_distributions(command: Command) -> None:
    ran = command("--version")
    assert (ran.code, ran.out) == (0, f"flashdispatch {version('flashdispatch')}\n")


def test_an_option_is_called_what_its_parameter_is_called() -> None:
    # Typer 0.27 takes a metavar for the name, unless the name is given too.
    def options(command: Any) -> list[Any]:
        subcommands = getattr(command, "commands", {}).values()
        own = [param for param in command.params if param.param_type_name == "option"]
        return own + [option for subcommand in subcommands for option in options(subcommand)]

    names = [name for option in options(get_command(app)) for name in (*option.opts, *option.secondary_opts)]
    assert len(names) > 50
    assert [name for name in names if name != name.lower()] == []


@pytest.mark.parametrize("args", [("nonsense",), ("explain", "--nonsense"), ("explain", "--dtype", "int8")])
def test_what_is_not_understood_exits_with_2_and_prints_nothing_on_stdout(
    args: tuple[str, ...], command: Command
) -> None:
    ran = command(*args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err


def test_our_own_error_is_a_message_and_not_a_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_STRICT_PLUGINS", "perhaps")
    ran = command("matrix", "--json")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "error: FLASHDISPATCH_STRICT_PLUGINS='perhaps' must be 1 or 0\n"


def test_what_is_printed_for_people_has_no_trailing_blanks_in_a_pipe(command: Command) -> None:
    for name in ("doctor", "explain", "matrix"):
        lines = command(name).out.splitlines()
        assert len(lines) > 5
        assert lines == [line.rstrip() for line in lines]


def test_a_terminal_gets_its_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.show(Text("ready", "green"))
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.delenv("FORCE_COLOR")
    output.show(Text("ready", "green"))
    assert capsys.readouterr().out == "ready\n"


def test_a_bug_keeps_its_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "examine", broken)
    with pytest.raises(ZeroDivisionError):
        command("doctor")


def test_console_script_is_main() -> None:
    script = next(point for point in entry_points(group="console_scripts") if point.name == "flashdispatch")
    assert script.load() is __main__.main


def test_python_m_runs_the_same_and_says_warnings_in_one_line() -> None:
    ran = python("-m", "flashdispatch", "matrix", "--markdown", env=os.environ | {"FLASHDISPATCH_CHEKC": "1"})
    assert ran.returncode == 0
    assert ran.stdout.startswith("| ")
    assert ran.stderr == (
        "warning: FLASHDISPATCH_CHEKC is not a flashdispatch setting. Did you mean 'FLASHDISPATCH_CHECK'?\n"
    )


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_help_and_version_load_no_compiler_and_no_model_library(option: str) -> None:
    code = (
        "import sys\nfrom flashdispatch.__main__ import main\n"
        f"sys.argv = ['flashdispatch', {option!r}]\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'transformers', 'triton', 'flashdispatch.demo'}\n"
        "sys.exit(' '.join(heavy.intersection(sys.modules)) or 0)"
    )
    ran = python("-c", code)
    assert (ran.returncode, ran.stderr.strip()) == (0, "")


def test_importing_flashdispatch_loads_neither_rich_nor_typer() -> None:
    code = "import sys, flashdispatch; sys.exit(any(name in sys.modules for name in ('rich', 'typer')))"
    assert python("-c", code).returncode == 0
