"""The support table on the command line, and in a file between its markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashdispatch.cli.matrix import END, EXAMPLES, START

Command = Callable[..., Any]
AddPlugin = Callable[[str, str], None]
Source = Callable[..., str]


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n{START}\nold\n{END}\n\nThe end – fin.\n", encoding="utf-8")
    return path


def test_only_built_in_backends_stand_in_the_table_unless_all_are_asked_for(
    command: Command, add_plugin: AddPlugin, plugin_source: Source
) -> None:
    add_plugin("tiles", plugin_source("tiles"))
    assert "tiles" not in json.loads(command("matrix", "--json").out)
    assert json.loads(command("matrix", "--json", "--all").out)["tiles"]["dtypes"] == "bfloat16"


@pytest.mark.parametrize("width", [80, 120])
def test_table_for_people_fits(command: Command, width: int) -> None:
    ran = command("matrix", width=width)
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= width
    assert "torch_reference" in ran.out


def test_markdown_is_printed_whole(command: Command) -> None:
    ran = command("matrix", "--markdown", width=40)
    lines = ran.out.splitlines()
    assert ran.code == 0
    assert {line[0] + line[-1] for line in lines} == {"||"}
    assert "`torch_reference`" in lines[0]


def test_check_finds_an_old_table_and_shows_the_difference(command: Command, readme: Path) -> None:
    ran = command("matrix", "--check", str(readme))
    assert ran.code == 1
    assert "\n-old\n" in ran.out
    assert "\n+| dtypes" in ran.out
    assert f"flashdispatch matrix --write {readme}" in ran.err


def test_write_brings_it_up_to_date_and_leaves_the_rest_alone(command: Command, readme: Path) -> None:
    assert command("matrix", "--write", str(readme)).code == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\n{START}\n| ")
    assert text.endswith(f"|\n{END}\n\nThe end – fin.\n")
    assert command("matrix", "--check", str(readme)).code == 0
    assert command("matrix", "--write", str(readme)).code == 0
    assert readme.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("option", ["--check", "--write"])
@pytest.mark.parametrize("text", ["", START, f"{END} {START}"])
def test_a_file_without_the_markers_is_a_usage_error_and_stays_as_it_is(
    command: Command, readme: Path, option: str, text: str
) -> None:
    readme.write_text(text)
    ran = command("matrix", option, str(readme))
    assert ran.code == 2
    assert "support-table:start" in ran.err
    assert readme.read_text() == text


def test_a_file_that_is_not_there_is_a_usage_error(command: Command, tmp_path: Path) -> None:
    ran = command("matrix", "--check", str(tmp_path / "nowhere.md"))
    assert ran.code == 2
    assert "there is no file" in ran.err


@pytest.mark.parametrize("option", ["--check", "--write"])
def test_a_file_that_is_no_text_is_a_usage_error_and_stays_as_it_is(
    command: Command, tmp_path: Path, option: str
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    ran = command("matrix", option, str(path), width=400)
    assert (ran.code, ran.out) == (2, "")
    assert f"{path} is no UTF-8 text" in ran.err
    assert path.read_bytes() == b"\x89PNG\xff\xfe"


@pytest.mark.parametrize(("option", "method"), [("--check", "read_text"), ("--write", "write_text")])
def test_a_file_that_may_not_be_used_is_a_usage_error(
    command: Command, readme: Path, option: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, method, refused)
    ran = command("matrix", option, str(readme), width=400)
    assert (ran.code, ran.out) == (2, "")
    assert f"{readme} can't be" in ran.err
    assert "Permission denied" in ran.err


def test_the_example_for_jq_names_what_is_there(command: Command) -> None:
    found = re.search(r"jq '\.(\w+)\.(\w+)'", EXAMPLES)
    assert found is not None
    assert json.loads(command("matrix", "--json").out)[found[1]][found[2]]


def test_two_outputs_exclude_each_other(command: Command) -> None:
    assert command("matrix", "--json", "--markdown").code == 2
