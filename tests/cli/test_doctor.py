"""The doctor: it answers whatever is wrong, says what to type, and its exit code is its verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdispatch import _settings
from flashdispatch.cli import findings, machine
from flashdispatch.cli.machine import Gpu, Machine
from flashdispatch_registry import plugins, tile_store

Command = Callable[..., Any]
AddPlugin = Callable[[str, str], None]
Source = Callable[..., str]

GPUS = (Gpu(0, "NVIDIA H200", "sm_90", 139 << 30), Gpu(1, "NVIDIA B200", "sm_100", 178 << 30))

BUILT_IN = {point.name for point in distribution("flashdispatch").entry_points if point.group == "flashdispatch"}


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor shows every variable that is set, also the one that keeps tests away from tuned tiles."""
    monkeypatch.delenv(tile_store.CACHE_DIR)


@pytest.mark.parametrize("width", [80, 120])
def test_a_healthy_machine_gets_a_0_and_sees_its_parts(command: Command, width: int) -> None:
    ran = command("doctor", width=width)
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= width
    for said in (torch.__version__, "Plugins", "torch_reference", "loaded", "Backends", "ready", "none set"):
        assert said in ran.out
    assert "Traceback" not in ran.out
    assert ran.err == ""


def test_json_is_all_there_is_on_stdout(command: Command) -> None:
    ran = command("doctor", "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["ok"], found["broken"]) == (0, True, [])
    assert found["machine"]["arch"] == ("cpu" if not torch.cuda.is_available() else found["machine"]["gpus"][0]["arch"])
    assert found["versions"]["torch"] == torch.__version__
    assert found["plugins"][0]["distribution"] == "flashdispatch"
    reference = next(backend for backend in found["backends"] if backend["name"] == "torch_reference")
    assert reference["ready"] is True
    assert reference["reasons"] == []


def test_a_broken_plugin_is_shown_with_its_traceback_and_harms_no_other(
    command: Command, add_plugin: AddPlugin
) -> None:
    add_plugin("tiles", "import a_library_that_is_not_there\n")
    ran = command("doctor")
    assert ran.code == 1
    assert "Traceback of plugin tiles:" in ran.out
    assert "import a_library_that_is_not_there" in ran.out
    assert "broken plugin tiles (acme-tiles): ModuleNotFoundError: No module named" in ran.words
    assert "pip uninstall acme-tiles" in ran.words
    assert "see its plugin above" in ran.words
    assert "ready torch_reference" in ran.words
    assert ran.err == ""


def test_no_traceback_leaves_only_the_line(command: Command, add_plugin: AddPlugin) -> None:
    add_plugin("tiles", "import a_library_that_is_not_there\n")
    ran = command("doctor", "--no-traceback")
    assert ran.code == 1
    assert "Traceback" not in ran.out
    assert "ModuleNotFoundError" in ran.out


def test_a_broken_plugin_in_json_has_its_traceback(command: Command, add_plugin: AddPlugin) -> None:
    add_plugin("tiles", "import a_library_that_is_not_there\n")
    ran = command("doctor", "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["ok"]) == (1, False)
    record = next(plugin for plugin in found["plugins"] if plugin["name"] == "tiles")
    assert (record["status"], record["distribution"], record["version"]) == ("failed", "acme-tiles", "2.0")
    assert record["traceback"].startswith("Traceback")
    assert next(backend for backend in found["backends"] if backend["name"] == "tiles")["ready"] is False


def test_a_backend_whose_code_does_not_import_is_broken_too(
    command: Command, add_plugin: AddPlugin, plugin_source: Source
) -> None:
    add_plugin("tiles", plugin_source("tiles", factory="no_such_kernels:backend"))
    ran = command("doctor")
    assert ran.code == 1
    assert "Traceback of backend tiles:" in ran.out
    assert "broken backend tiles: ModuleNotFoundError: No module named 'no_such_kernels'" in ran.words
    assert "LOAD_FAILED" in ran.out
    assert "to do backend tiles does not load: `pip install --upgrade acme-tiles`" in ran.words
    assert "ready torch_reference" in ran.words


def test_a_missing_package_is_no_fault_but_comes_with_what_to_type(
    command: Command, add_plugin: AddPlugin, plugin_source: Source
) -> None:
    add_plugin("tiles", plugin_source("tiles", requires=("tilelib>=3",), install="pip install 'acme-tiles[lib]'"))
    ran = command("doctor")
    assert ran.code == 0
    assert "DEP_MISSING tilelib is not installed; takes tilelib>=3" in ran.words
    assert "to do tiles is only missing packages: `pip install 'acme-tiles[lib]'`" in ran.words


def test_two_plugins_with_one_name_are_named(command: Command, add_plugin: AddPlugin, plugin_source: Source) -> None:
    add_plugin("one", plugin_source("tiles"))
    add_plugin("two", plugin_source("tiles"))
    ran = command("doctor")
    assert ran.code == 1
    assert "acme-one 2.0 and acme-two 2.0" in ran.words
    assert "DUPLICATE_NAME" in ran.out
    assert "uninstall one of the two" in ran.words


def test_a_slow_plugin_is_flagged(
    command: Command, add_plugin: AddPlugin, plugin_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "SLOW_IMPORT_SECONDS", -1.0)
    add_plugin("tiles", plugin_source("tiles", requires=("tilelib",)))
    ran = command("doctor")
    assert ran.code == 0
    assert "(slow" in ran.out
    assert "plugin tiles makes every start wait" in ran.words


def test_a_plugin_that_is_not_allowed_is_shown_with_the_setting_that_says_so(
    command: Command, add_plugin: AddPlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDISPATCH_PLUGINS", "")
    add_plugin("tiles", "raise RuntimeError('must not be imported')\n")
    ran = command("doctor")
    assert ran.code == 0
    assert "not allowed" in ran.out
    assert "FLASHDISPATCH_PLUGINS= load only these" in ran.words
    assert "tiles not allowed: the settings below keep its plugin out" in ran.words
    assert "broken" not in ran.out
    assert "to do" not in ran.out
    tiles = next(b for b in json.loads(command("doctor", "--json").out)["backends"] if b["name"] == "tiles")
    assert [reason["code"] for reason in tiles["reasons"]] == ["NOT_ALLOWED"]


def test_what_a_backend_says_would_help_is_in_the_advice_and_what_broke_in_the_result(
    command: Command, add_plugin: AddPlugin, plugin_source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_compiler.py").write_text("e = OSError('no nvcc')\ne.add_note('install the toolkit')\nraise e\n")
    monkeypatch.syspath_prepend(tmp_path)
    add_plugin("tiles", plugin_source("tiles", factory="no_compiler"))
    words = command("doctor").words
    assert "broken backend tiles: OSError: no nvcc" in words
    assert "to do backend tiles does not load: install the toolkit; its traceback is for its authors" in words


def test_known_issues_are_listed_with_their_links(
    command: Command, add_plugin: AddPlugin, plugin_source: Source
) -> None:
    add_plugin("tiles", plugin_source("tiles", requires=("tilelib",)))
    words = command("doctor").words
    assert "tiles wrong at odd lengths (https://example.org/7): passed over automatically" in words
    assert "priority 45 at most" in words  # ours, which are slow and right
    known = json.loads(command("doctor", "--json").out)["known_issues"]
    (tiles,) = (issue for issue in known if issue["backend"] == "tiles")
    assert (tiles["url"], tiles["priority"]) == ("https://example.org/7", None)


def test_variables_in_force_are_shown_with_their_meaning(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "error")
    ran = command("doctor")
    assert f"FLASHDISPATCH_FALLBACK=error {_settings.KNOWN['FLASHDISPATCH_FALLBACK']}" in ran.words


def test_an_unknown_variable_is_shown_with_the_nearest_known_one(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BAKEND", "x")
    ran = command("doctor")
    assert ran.code == 0
    assert "FLASHDISPATCH_BAKEND is not a flashdispatch setting. Did you mean 'FLASHDISPATCH_BACKEND'?" in ran.words
    settings = json.loads(command("doctor", "--json").out)["settings"]
    assert settings["unknown"] == {"FLASHDISPATCH_BAKEND": " Did you mean 'FLASHDISPATCH_BACKEND'?"}


def test_settings_lists_every_variable(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "FLASHDISPATCH_CHECK" not in command("doctor").out
    monkeypatch.setenv("FLASHDISPATCH_CHECK", "1")
    ran = command("doctor", "--settings", width=80)
    assert max(map(len, ran.out.splitlines())) <= 80
    assert all(f"{name} {meaning}" in ran.words for name, meaning in _settings.KNOWN.items() if "CHECK" not in name)
    assert "FLASHDISPATCH_CHECK=1" in ran.out


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"BACKEND": "torch_refrence"},
            "no backend is called 'torch_refrence', so calls raise. Did you mean 'torch_re",
        ),
        ({"BACKEND": "torch_reference,foo"}, "no backend is called 'foo', so calls raise."),
        ({"BACKEND": ","}, "FLASHDISPATCH_BACKEND=',': no backend name"),
        ({"BACKEND": "auto,torch_reference"}, "'auto' stands alone"),
        (
            {"BACKEND": "tiles", "DISABLE": "tiles"},
            "FLASHDISPATCH_BACKEND=tiles: disabled by FLASHDISPATCH_DISABLE=tiles",
        ),
        ({"BACKEND": "needy"}, "FLASHDISPATCH_BACKEND=needy: can't run on this machine"),
        ({"BACKEND": "needy,tiles", "DISABLE": "tiles"}, "needy,tiles: can't run on this machine"),
        ({"FALLBACK": "perhaps"}, "must be error, warn or allow"),
        ({"CHECK": "perhaps"}, "must be 1 or 0"),
    ],
    ids=str,
)
def test_a_value_that_makes_calls_raise_is_broken_and_hides_nothing(
    environment: dict[str, str],
    said: str,
    command: Command,
    add_plugin: AddPlugin,
    plugin_source: Source,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_plugin("tiles", plugin_source("tiles", factory="acme_tiles"))
    add_plugin("needy", plugin_source("needy", requires=("tilelib>=3",)))
    monkeypatch.setattr(findings, "_load", lambda _: {})
    for name, value in environment.items():
        monkeypatch.setenv(f"FLASHDISPATCH_{name}", value)
    ran = command("doctor")
    assert ran.code == 1
    assert said in ran.words
    assert "not examined" not in ran.out
    assert re.search(r"Result ─+ ready .*torch_reference.* broken FLASHDISPATCH_", ran.words)
    found = json.loads(command("doctor", "--json").out)
    assert len(found["broken"]) == 1
    assert said in found["broken"][0]
    assert {plugin["name"] for plugin in found["plugins"]} == BUILT_IN | {"tiles", "needy"}


@pytest.mark.parametrize(
    "environment",
    [
        {"BACKEND": ""},
        {"BACKEND": "auto"},
        {"BACKEND": "torch_reference"},
        {"BACKEND": "tiles, torch_reference"},
        {"BACKEND": "tiles,torch_reference", "DISABLE": "tiles"},
        {"DISABLE": "tiles"},
        {"PLUGINS": ""},
        {"PLUGINS": "tiles"},
        {"PLUGINS": "acme-tiles"},
        {"PLUGINS": "Acme_Tiles"},
        {"PLUGINS": "ACME.tiles, torch_reference"},
    ],
    ids=str,
)
def test_names_that_are_right_are_no_finding(
    environment: dict[str, str],
    command: Command,
    add_plugin: AddPlugin,
    plugin_source: Source,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_plugin("tiles", plugin_source("tiles"))
    monkeypatch.setattr(findings, "_load", lambda _: {})
    for name, value in environment.items():
        monkeypatch.setenv(f"FLASHDISPATCH_{name}", value)
    found = json.loads(command("doctor", "--json").out)
    assert (found["ok"], found["broken"], found["advice"]) == (True, [], [])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DISABLE", "tils", "FLASHDISPATCH_DISABLE names 'tils', which is no backend: it disables nothing."),
        ("DISABLE", "torch_reference2", "it disables nothing. Did you mean 'torch_reference'?"),
        ("PLUGINS", "acme-tilse", "which is no plugin and no distribution with one. Did you mean 'acme-tiles'?"),
        (
            "PLUGINS",
            "tiles,TILSE",
            "names 'TILSE', which is no plugin and no distribution with one. Did you mean 'tiles'?",
        ),
        ("PLUGINS", "zzz", "FLASHDISPATCH_PLUGINS names 'zzz', which is no plugin"),
    ],
)
def test_a_name_that_names_nobody_is_something_to_do(
    name: str, value: str, said: str, command: Command, add_plugin: AddPlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plugin(
        "tiles", "from flashdispatch_registry import hookimpl\n@hookimpl\ndef flashdispatch_backends(): return []\n"
    )
    monkeypatch.setenv(f"FLASHDISPATCH_{name}", value)
    ran = command("doctor")
    assert ran.code == 0
    assert "to do FLASHDISPATCH_" in ran.words
    assert said in ran.words
    assert len(json.loads(command("doctor", "--json").out)["advice"]) == 1


def test_every_bad_value_is_named_not_only_the_first(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FALLBACK", "CHECK", "STRICT_PLUGINS"):
        monkeypatch.setenv(f"FLASHDISPATCH_{name}", "perhaps")
    broken = json.loads(command("doctor", "--json").out)["broken"]
    assert [line.split("=")[0] for line in broken] == [
        "FLASHDISPATCH_FALLBACK",
        "FLASHDISPATCH_CHECK",
        "FLASHDISPATCH_STRICT_PLUGINS",
    ]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FLASHDISPATCH_STRICT_PLUGINS", "1", "plugin tiles (acme-tiles 2.0) failed to load"),
        ("FLASHDISPATCH_STRICT_PLUGINS", "perhaps", "FLASHDISPATCH_STRICT_PLUGINS='perhaps' must be 1 or 0"),
        ("FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD", "2", "FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD='2' must be 1 or 0"),
    ],
)
def test_what_stops_the_examination_is_a_finding(
    name: str, value: str, said: str, command: Command, add_plugin: AddPlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    add_plugin("tiles", "1 / 0\n")
    ran = command("doctor")
    assert ran.code == 1
    assert ran.words.count(f"not examined: {said}") == 2
    assert "none found" not in ran.out
    assert torch.__version__ in ran.out
    found = json.loads(command("doctor", "--json").out)
    assert said in found["unexamined"]
    assert found["broken"] == [found["unexamined"]]
    assert ("passes it over" in ran.words) == (value == "1")


LONG_NAME = "acme_hand_written_assembly_for_one_gpu"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_module_is_broken_at_its_dots_beside_a_long_name(
    command: Command, add_plugin: AddPlugin, plugin_source: Source, width: int
) -> None:
    add_plugin(LONG_NAME, plugin_source(LONG_NAME, requires=("tilelib",)))
    lines = command("doctor", width=width).out.splitlines()
    assert max(map(len, lines)) <= width
    assert any("flashdispatch_backends." in line for line in lines)
    assert any(line.endswith((" torch_reference", ".torch_reference")) for line in lines)


def test_no_backend_that_can_run_here_is_a_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {backend["name"] for backend in json.loads(command("doctor", "--json").out)["backends"]}
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", ",".join(found))
    ran = command("doctor")
    assert ran.code == 1
    assert "no backend can run on this machine" in ran.words


def test_a_clone_that_is_not_installed_is_told_what_to_type(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda **_: ())
    ran = command("doctor")
    assert ran.code == 1
    assert "none found" in ran.out
    assert "pip install -e ." in ran.words


@pytest.mark.parametrize("width", [80, 120])
def test_every_gpu_is_shown_with_its_architecture(
    command: Command, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    here = Machine("Linux", "3.12", "2.11", "CUDA 13.0", "580.65", GPUS)
    monkeypatch.setattr(findings, "this_machine", lambda: here)
    ran = command("doctor", width=width)
    assert "built for CUDA 13.0" in ran.out
    assert "580.65" in ran.out
    assert "0: NVIDIA H200, sm_90, 139.0 GiB" in ran.out
    assert "1: NVIDIA B200, sm_100, 178.0 GiB" in ran.out
    assert here.arch == "sm_90"


def test_a_machine_without_a_gpu_is_a_cpu_and_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(index: int) -> None:
        raise AssertionError(index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", forbidden)
    assert machine.this_machine().arch == "cpu"


def test_what_torch_complains_about_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def complaining() -> bool:
        import warnings

        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", complaining)
    assert machine.this_machine().complaint == "The NVIDIA driver on your system is too old"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Thu Feb 8\nGCC version:  gcc 12", "535.161.08"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("something else", ""),
        (None, ""),
    ],
)
def test_driver_version_is_read_from_the_kernels_file(
    text: str | None, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SimpleNamespace(exists=lambda: text is not None, read_text=lambda: text)
    monkeypatch.setattr(machine, "_DRIVER", file)
    assert machine.this_machine().driver == number
