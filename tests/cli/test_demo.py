"""The demo's command: what it hands on, and what it says when something is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from flashdispatch.cli import demo
from flashdispatch_registry.errors import BackendLoadError

Command = Callable[..., Any]


class Calls:
    """A demo that notes how it was called."""

    def __init__(self) -> None:
        self.text = Path()
        self.seconds = 0.0
        self.device = torch.device("meta")
        self.error: Exception | None = None

    def run_demo(self, console: Console, *, text: Path, seconds: float, device: torch.device) -> dict[str, Any]:
        console.print("progress")
        if self.error:
            raise self.error
        self.text, self.seconds, self.device = text, seconds, device
        return {"loss": 1.5}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls, module = Calls(), ModuleType("flashdispatch.demo")
    module.run_demo = calls.run_demo  # type: ignore[attr-defined]  # a module made on the spot
    monkeypatch.setitem(sys.modules, "flashdispatch.demo", module)
    return calls


def test_options_reach_the_demo(command: Command, calls: Calls, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("one two three")
    ran = command("demo", "--text", str(text), "--seconds", "5", "--device", "cpu")
    assert ran.code == 0
    assert (calls.text, calls.seconds, calls.device) == (text, 5.0, torch.device("cpu"))
    assert "progress" in ran.out


def test_default_is_the_clones_text_on_the_best_device(command: Command, calls: Calls) -> None:
    assert command("demo").code == 0
    assert calls.text.name == "tidepool.txt"
    assert calls.text.parent.name == "examples"
    assert calls.seconds == 8.0
    assert calls.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_json_keeps_progress_off_stdout(command: Command, calls: Calls) -> None:
    ran = command("demo", "--json")
    assert json.loads(ran.out) == {"loss": 1.5}
    assert "progress" in ran.err


def test_a_missing_text_says_to_pass_one(
    command: Command, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TEXT", tmp_path / "nothing.txt")
    ran = command("demo")
    assert ran.code == 2
    assert "pass one with --text" in " ".join(ran.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("device", "said"),
    [("toaster", "toaster"), ("cuda", "torch sees no GPU here"), ("meta", "torch can't use meta here")],
)
def test_a_device_that_is_not_there_is_a_usage_error(
    device: str, said: str, command: Command, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = command("demo", "--device", device)
    assert ran.code == 2
    assert said in ran.err


def test_missing_packages_are_a_1_with_what_to_type(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    ran = command("demo", "--json", "--device", "cpu")
    assert (ran.code, ran.out) == (1, "")
    assert "error: the demo needs the package transformers" in ran.err
    assert "Type: pip install 'flashdispatch[demo]'" in ran.err


def test_an_error_of_ours_inside_the_demo_is_a_message(command: Command, calls: Calls) -> None:
    calls.error = BackendLoadError("no such kernel")
    ran = command("demo", "--json")
    assert (ran.code, ran.out) == (1, "")
    assert "error: no such kernel" in ran.err
