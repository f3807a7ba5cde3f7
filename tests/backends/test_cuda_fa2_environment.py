"""cuda_fa2 on machines that lack something, and its cubins on disk. Needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashdispatch_backends.cuda_fa2 import SPEC
from flashdispatch_backends.cuda_fa2 import compile as compiling
from flashdispatch_backends.cuda_fa2.compile import build, path_of, require_toolchain
from flashdispatch_backends.cuda_fa2.recipe import Recipe
from flashdispatch_registry.plugins import Registry
from flashdispatch_registry.tile_store import CACHE_DIR
from flashdispatch_registry.tile_table import Shape

SMALL = Recipe(kernel="forward", dtype="float16", block_d=16, block_dv=16, shape=Shape(64, 16, 4, 1))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))


# Packages


def without(*missing: str) -> Callable[[str], str]:
    return lambda name: "" if name in missing else "14.0"


@pytest.mark.parametrize("missing", [("cupy-cuda12x",), ("cupy-cuda13x",)])
def test_one_build_of_cupy_is_enough(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdispatch_registry.plugins.installed", without(*missing))
    (entry,) = (entry for entry in Registry().entries() if entry.name == SPEC.name)
    assert entry.faults == ()


def test_without_cupy_the_reason_names_both_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdispatch_registry.plugins.installed", without("cupy-cuda12x", "cupy-cuda13x"))
    (entry,) = (entry for entry in Registry().entries() if entry.name == SPEC.name)
    (fault,) = entry.faults
    assert (fault.field, fault.got) == ("cupy-cuda13x or cupy-cuda12x", "not installed")
    assert "flashdispatch[cuda13]" in fault.fix
    assert "flashdispatch[cuda12]" in fault.fix


# NVRTC and driver


class Machine:
    """What a machine has, in place of what this one has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.has(driver=13000)
        monkeypatch.setattr(compiling, "capability", lambda _: 90)

    def has(self, *, driver: int) -> None:
        self.patch.setattr(compiling.cupy.cuda.runtime, "driverGetVersion", lambda: driver)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_machine_with_everything(machine: Machine) -> None:
    require_toolchain(0)


def test_without_nvrtc_it_says_what_to_install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    monkeypatch.setattr(compiling.nvrtc, "getSupportedArchs", fails)
    with pytest.raises(RuntimeError, match=r"no NVRTC.*libnvrtc\.so\.13") as caught:
        require_toolchain(0)
    assert caught.value.__notes__ == ["pip install nvidia-cuda-nvrtc, or install the CUDA 13 toolkit"]


def test_an_nvrtc_that_is_older_than_the_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "capability", lambda _: 999)
    with pytest.raises(RuntimeError, match="does not know sm_999") as caught:
        require_toolchain(0)
    assert caught.value.__notes__ == ["install a newer CuPy and NVRTC"]


def test_a_driver_that_is_older_than_cupys_cuda(machine: Machine) -> None:
    machine.has(driver=12040)
    with pytest.raises(RuntimeError, match="driver supports CUDA 12, and CuPy is built for CUDA 13") as caught:
        require_toolchain(0)
    assert "pip install cupy-cuda12x" in caught.value.__notes__[0]


# Cubins on disk


def test_a_kernel_is_compiled_once_and_found_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(SMALL, 80)
    assert path.read_bytes().startswith(b"\x7fELF")
    monkeypatch.setattr(compiling, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert build(SMALL, 80) == path


def test_whatever_a_cubin_depends_on_is_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Recipe(kernel="forward", dtype="float16", block_d=16, block_dv=16, shape=Shape(64, 32, 4, 1))
    names = {path_of(SMALL, 80), path_of(SMALL, 90), path_of(other, 80)}
    monkeypatch.setattr(compiling.nvrtc, "getVersion", lambda: (99, 9))
    names.add(path_of(SMALL, 80))
    monkeypatch.undo()
    changed = compiling.sources() | {"mma.cuh": b"// changed"}
    monkeypatch.setattr(compiling, "sources", lambda: changed)
    names.add(path_of(SMALL, 80))
    assert len(names) == 5


def test_processes_beside_each_other_compile_it_once(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from flashdispatch_backends.cuda_fa2 import compile as compiling
from flashdispatch_backends.cuda_fa2.recipe import Recipe
from flashdispatch_registry.tile_table import Shape
slow = compiling.compile_source
def counted(*arguments):
    with Path({str(tmp_path / "count")!r}).open("a") as file:
        file.write("compiled ")
    return slow(*arguments)
compiling.compile_source = counted
print(compiling.build({SMALL!r}, 80))
"""
    beside = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in beside}
    assert [process.returncode for process in beside] == [0, 0, 0]
    assert said == {f"{path_of(SMALL, 80)}\n"}
    assert (tmp_path / "count").read_text() == "compiled "


def test_a_cubin_that_the_driver_refuses_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(SMALL, 80)

    class RefusedError(RuntimeError):
        """CuPy's own asks the driver for its text, and there is none here."""

    def refuses(**_: object) -> None:
        raise RefusedError

    monkeypatch.setattr(compiling.driver, "CUDADriverError", RefusedError)
    monkeypatch.setattr(compiling.cupy, "RawModule", refuses)
    with pytest.raises(RefusedError) as caught:
        compiling._loaded(path, SMALL)
    assert not path.exists()
    assert str(path) in caught.value.__notes__[0]


def test_what_does_not_compile_says_for_what_and_why_and_leaves_no_file() -> None:
    wrong = Recipe(kernel="forward", dtype="float16", block_d=8, block_dv=8, shape=Shape(64, 16, 4, 1))
    with pytest.raises(RuntimeError, match=r"NVRTC 13\.\d+ does not compile Recipe\(.*for sm_80: .*\n.*error"):
        build(wrong, 80)
    assert not path_of(wrong, 80).exists()
