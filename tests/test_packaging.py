"""The wheel holds the four packages and nothing else, also when it is built from the sdist as an installer would."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

CLONE = Path(__file__).parent.parent
ROOTS = {  # import package -> the folder that it lies in
    "flashdispatch": CLONE,
    "flashdispatch_registry": CLONE / "registry",
    "flashdispatch_backends": CLONE / "backends",
    "flashdispatch_conformance": CLONE / "conformance",
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(CLONE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]


def in_clone() -> set[str]:
    """Every file of the four packages, as an import path: source, stubs, kernel sources, data."""
    return {
        path.relative_to(root).as_posix()
        for package, root in ROOTS.items()
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_of_the_four_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == in_clone()


@pytest.mark.parametrize("package", ROOTS)
def test_each_package_says_that_it_is_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_the_wheel_is_for_any_platform(dist: Path, project: dict[str, Any]) -> None:
    assert [path.name for path in dist.glob("*.whl")] == [f"flashdispatch-{project['version']}-py3-none-any.whl"]


def test_the_wheel_has_the_command_and_the_built_in_backends(wheel: zipfile.ZipFile, project: dict[str, Any]) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    points = configparser.ConfigParser(delimiters=("=",))
    points.read_string(wheel.read(name).decode())
    assert dict(points["console_scripts"]) == {"flashdispatch": "flashdispatch.__main__:main"}
    assert dict(points["flashdispatch"]) == project["entry-points"]["flashdispatch"]
    for module in points["flashdispatch"].values():
        path = module.partition(":")[0].replace(".", "/")
        assert {f"{path}.py", f"{path}/__init__.py"} & set(wheel.namelist())


def test_the_wheel_carries_the_license_and_the_dependencies(wheel: zipfile.ZipFile, project: dict[str, Any]) -> None:
    names = wheel.namelist()
    (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    metadata = HeaderParser().parsestr(wheel.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    plain = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert sorted(plain) == sorted(project["dependencies"])


def test_the_sdist_has_what_it_takes_to_build_and_to_test(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "Makefile", "tests/test_packaging.py"} <= held
    assert "registry/flashdispatch_registry/__init__.py" in held
    assert not [name for name in held if "__pycache__" in name or name.endswith(".pyc")]
