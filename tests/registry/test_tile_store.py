"""Tuned tiles on disk: what was kept is found, and only by who asks for exactly that."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdispatch import _settings
from flashdispatch_registry import tile_store
from flashdispatch_registry.source import source_hash
from flashdispatch_registry.tile_store import Tuned, fingerprint, fingerprint_of, load, path_of, save

HERE = {"gpu": "NVIDIA H200", "arch": "sm_90", "source": "abc", "torch": "2.13.0"}
TILE = {"block_m": 128, "block_n": 64, "num_warps": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tile_store.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_saved_is_loaded(cache: Path) -> None:
    path = save("tiles", HERE, {"forward d64": Tuned(TILE, 12.5)})
    assert load("tiles", HERE) == {"forward d64": TILE}
    assert path == path_of("tiles", HERE)
    assert path.parent == cache / "tiles"
    assert path.name.startswith("tiles-nvidia-h200-")


def test_nothing_saved_is_nothing_and_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    assert load("tiles", HERE) == {}
    assert caplog.records == []


def test_saving_merges_and_the_newer_one_wins() -> None:
    save("tiles", HERE, {"a": Tuned(TILE, 1.0), "b": Tuned(TILE, 2.0)})
    save("tiles", HERE, {"b": Tuned({"block_m": 16}, 1.5), "c": Tuned({"block_m": 32}, 3)})
    assert load("tiles", HERE) == {"a": TILE, "b": {"block_m": 16}, "c": {"block_m": 32}}


@pytest.mark.parametrize(
    "change", [{"gpu": "NVIDIA H100"}, {"source": "abd"}, {"torch": "2.14.0"}, {"triton": "3.7.1"}], ids=str
)
def test_another_gpu_source_or_version_finds_nothing(change: dict[str, str]) -> None:
    save("tiles", HERE, {"a": Tuned(TILE, 1.0)})
    assert load("tiles", HERE | change) == {}
    assert load("other", HERE) == {}


def damaged(change: Any) -> str:
    data = {"format": 1, "backend": "tiles", "fingerprint": HERE, "tiles": {"a": {"tile": TILE, "microseconds": 1.0}}}
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ('{"format": 1', "Expecting"),
        ("[" * 100_000, "recursion"),
        ("[]", "does not have the fields"),
        (damaged(lambda data: data.pop("format")), "does not have the fields"),
        (damaged(lambda data: data.update(note="mine")), "does not have the fields"),
        (damaged(lambda data: data.update(format=2)), "its format is 2, not 1"),
        (damaged(lambda data: data.update(backend="others")), "its backend is 'others'"),
        (damaged(lambda data: data.update(fingerprint=HERE | {"gpu": "NVIDIA L4"})), "its fingerprint is"),
        (damaged(lambda data: data.update(tiles=[1])), "its tiles are no object"),
        (damaged(lambda data: data["tiles"].update(b=7)), "'b' does not have the fields"),
        (damaged(lambda data: data["tiles"]["a"].update(tile={"block_m": "128"})), "the tile of 'a'"),
        (damaged(lambda data: data["tiles"]["a"].update(tile={"block_m": True})), "the tile of 'a'"),
        (damaged(lambda data: data["tiles"]["a"].update(tile={})), "the tile of 'a'"),
        (damaged(lambda data: data["tiles"]["a"].update(microseconds=math.nan)), "the microseconds of 'a'"),
        (damaged(lambda data: data["tiles"]["a"].update(microseconds=0)), "the microseconds of 'a'"),
    ],
    ids=lambda value: value if len(value) < 40 else "",
)
def test_a_damaged_or_foreign_file_is_a_warning_that_names_it(
    text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of("tiles", HERE)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load("tiles", HERE) == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    assert said in record.getMessage()


def test_the_file_that_the_damaged_ones_vary_is_believed() -> None:
    path = path_of("tiles", HERE)
    path.parent.mkdir(parents=True)
    path.write_text(damaged(dict))
    assert load("tiles", HERE) == {"a": TILE}


def test_bytes_that_are_no_text_and_a_folder_in_the_files_place_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    path = path_of("tiles", HERE)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe")
    assert load("tiles", HERE) == {}
    path.unlink()
    path.mkdir()
    assert load("tiles", HERE) == {}
    assert len(caplog.records) == 2


def test_saving_over_a_damaged_file_says_so_and_replaces_it(caplog: pytest.LogCaptureFixture) -> None:
    path = save("tiles", HERE, {"a": Tuned(TILE, 1.0)})
    path.write_text("{")
    save("tiles", HERE, {"b": Tuned(TILE, 1.0)})
    assert str(path) in caplog.text
    assert load("tiles", HERE) == {"b": TILE}


@pytest.mark.parametrize(
    "wrong", [Tuned({}, 1.0), Tuned({"block_m": 0.5}, 1.0), Tuned(TILE, math.inf), Tuned(TILE, -1)], ids=str
)
def test_what_would_not_be_believed_is_not_written(wrong: Tuned) -> None:
    save("tiles", HERE, {"a": Tuned(TILE, 1.0)})
    with pytest.raises(ValueError, match="of 'b' must"):
        save("tiles", HERE, {"b": wrong})
    assert load("tiles", HERE) == {"a": TILE}


def test_a_write_that_is_cut_short_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    save("tiles", HERE, {"a": Tuned(TILE, 1.0)})

    def full(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text[: len(text) // 2].encode())
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space"):
            save("tiles", HERE, {"b": Tuned(TILE, 1.0)})
    assert load("tiles", HERE) == {"a": TILE}
    save("tiles", HERE, {"b": Tuned(TILE, 1.0)})
    assert set(load("tiles", HERE)) == {"a", "b"}


def test_writers_at_the_same_time_lose_nothing() -> None:
    code = (
        "import sys\nfrom flashdispatch_registry.tile_store import Tuned, save\n"
        f"for at in range(40): save('tiles', {HERE!r}, {{f'{{sys.argv[1]}} {{at}}': Tuned({{'n': at}}, 1.0)}})\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("left", "right")]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert load("tiles", HERE) == {f"{name} {at}": {"n": at} for name in ("left", "right") for at in range(40)}


def test_the_users_cache_folder_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", " "):
        monkeypatch.setenv(tile_store.CACHE_DIR, value)
        assert tile_store.cache_dir().name == "flashdispatch"
    monkeypatch.setenv(tile_store.CACHE_DIR, "~/tuned")
    assert tile_store.cache_dir() == Path.home() / "tuned"


def test_the_variable_is_a_known_setting() -> None:
    assert tile_store.CACHE_DIR in _settings.KNOWN


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "lone_backend"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "kernels.py").write_text("BLOCK = 64\n")
    (folder / "mma.cu").write_text("// kernel\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_any_source_file_counts_by_name_and_content(package: Path) -> None:
    seen = {source_hash(package)}
    (package / "kernels.py").write_text("BLOCK = 128\n")
    seen.add(source_hash(package))
    (package / "mma.cu").write_text("// kernels\n")
    seen.add(source_hash(package))
    (package / "mma.cu").rename(package / "wgmma.cu")
    seen.add(source_hash(package))
    (package / "sub").mkdir()
    (package / "sub" / "more.cuh").write_text("")
    seen.add(source_hash(package))
    assert len(seen) == 5


def test_what_python_and_editors_leave_does_not_count(package: Path) -> None:
    before = source_hash(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "kernels.cpython-311.pyc").write_bytes(b"\0")
    (package / ".kernels.py.swp").write_bytes(b"\0")
    assert source_hash(package) == before


def test_the_same_source_elsewhere_has_the_same_hash(package: Path, tmp_path: Path) -> None:
    package.rename(tmp_path / "moved")
    assert source_hash(tmp_path / "moved") == source_hash((tmp_path / "moved").rename(package))


@pytest.mark.parametrize("factory", ["lone_backend", "lone_backend.kernels", "lone_backend.kernels:BLOCK"])
def test_a_backends_fingerprint_is_its_folder_and_what_it_requires(factory: str, package: Path, spec: Any) -> None:
    requires = ("packaging>=24", "no-such-thing>=1", "numpy; python_version < '3'")
    found = fingerprint_of(spec(factory=factory, requires=requires))
    assert found["source"] == source_hash(package)
    assert found["packaging"] == version("packaging")
    assert found["no-such-thing"] == "not installed"
    assert "numpy" not in found
    assert found["torch"] == torch.__version__
    assert load("plain", found) == {}


def test_a_backend_of_one_file_does_not_count_its_neighbours(
    tmp_path: Path, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lone_file.py").write_text("backend = 1\n")
    before = fingerprint_of(spec(factory="lone_file:backend"))
    (tmp_path / "neighbour.py").write_text("")
    assert fingerprint_of(spec(factory="lone_file:backend")) == before
    (tmp_path / "lone_file.py").write_text("backend = 2\n")
    assert fingerprint_of(spec(factory="lone_file:backend")) != before


def test_a_backend_from_no_file_keeps_nothing(spec: Any) -> None:
    with pytest.raises(ValueError, match="sys comes from no file, so its tiles can't be kept"):
        fingerprint_of(spec(factory="sys:path"))


def test_a_machine_without_a_gpu_has_the_gpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {name: fingerprint("abc")[name] for name in ("gpu", "arch")} == {"gpu": "none", "arch": "cpu"}


@pytest.mark.gpu
def test_a_gpu_is_named() -> None:
    assert fingerprint("abc")["gpu"] == torch.cuda.get_device_name()
    assert fingerprint("abc", device_index=0)["arch"].startswith(("sm_", "gfx"))


def test_reading_imports_nothing_heavy() -> None:
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nfrom flashdispatch_registry import tile_store\n"
        f"tile_store.load('tiles', {HERE!r})\n"
        "heavy = {'filelock', 'rich', 'typer', 'triton', 'tilelang', 'cupy', 'asyncio'}\n"
        "sys.exit(' '.join(heavy & (set(sys.modules) - before)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
