"""The whole suite on a third party's backend, from its installed package to the sealed report; and with a bug in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TINY = Path(__file__).parent / "tiny_backend"


@dataclass(frozen=True)
class Run:
    """What ``flashdispatch conformance run`` left."""

    code: int
    said: str
    report: Any
    file: Path


def conformance(folder: Path, *arguments: str, having: Path) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter that has `having` on its path."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLASHDISPATCH_")}
    command = [sys.executable, "-m", "flashdispatch", "conformance", *arguments]
    return subprocess.run(
        command, env=environ | {"PYTHONPATH": str(having)}, cwd=folder, capture_output=True, text=True, timeout=290
    )


def installed(project: Path, folder: Path) -> Path:
    """Builds and installs a project into `folder`. Offline: the build backend is in the environment of the tests."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environ = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*pip, "--target", str(folder), str(project)], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return folder


def run(folder: Path, having: Path, *arguments: str) -> Run:
    """Runs the suite on "tiny" on the CPU, and reads the report."""
    done = conformance(
        folder, "run", "--backend", "tiny", "--device", "cpu", "-o", "reports", *arguments, having=having
    )
    (file,) = (folder / "reports").glob("tiny-cpu-*.json")
    return Run(done.returncode, done.stdout + done.stderr, json.loads(file.read_text(encoding="utf-8")), file)


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("honest")
    return run(folder, installed(TINY, folder / "site"))


def test_it_is_conformant(honest: Run) -> None:
    assert honest.report["summary"]["counts"]["fail"] == 0, honest.said
    assert honest.report["summary"]["counts"]["error"] == 0, honest.said
    # Partial only while the suite itself is being worked on: its files are not those of a commit.
    assert honest.report["summary"]["verdict"] == ("partial" if honest.report["suite"]["modified"] else "conformant")
    assert honest.code == (4 if honest.report["suite"]["modified"] else 0)


def test_what_it_does_not_declare_is_counted_and_not_hidden(honest: Run) -> None:
    counts = honest.report["summary"]["counts"]
    assert counts["pass"] > 100
    assert counts["unsupported"] > 100
    refused = {code for case in honest.report["cases"] for codes in case.get("refused", {}).values() for code in codes}
    assert {"GQA", "WINDOW", "ATTN_MASK", "DROPOUT"} <= refused


def test_without_a_gpu_the_report_says_what_was_not_run(honest: Run) -> None:
    assert "they need a CUDA GPU, and this machine has none" in honest.said
    not_run = {case["check"] for case in honest.report["cases"] if case["outcome"] == "not_run"}
    assert {"condition/stream", "condition/graph_new_values"} <= not_run


def test_anybody_can_verify_the_report(honest: Run, tmp_path: Path) -> None:
    assert conformance(tmp_path, "verify", str(honest.file), having=tmp_path).returncode == 0
    forged = tmp_path / "forged.json"
    text = honest.file.read_text(encoding="utf-8")
    forged.write_text(text.replace('"outcome": "unsupported"', '"outcome": "pass"', 1), encoding="utf-8")
    done = conformance(tmp_path, "verify", str(forged), having=tmp_path)
    assert done.returncode == 1
    assert "seal" in done.stdout + done.stderr


def test_a_planted_bug_makes_it_nonconformant(tmp_path: Path) -> None:
    """Delta is forgotten in the backward: a bug that no forward shows."""
    project = tmp_path / "tiny_backend"
    shutil.copytree(TINY, project)
    kernels = project / "flashdispatch_tiny" / "kernels.py"
    text = kernels.read_text(encoding="utf-8")
    right = " - Delta[..., None]"
    assert right in text
    kernels.write_text(text.replace(right, ""), encoding="utf-8")
    found = run(tmp_path, installed(project, tmp_path / "site"), "-k", "named/length_6", "--dtype", "bfloat16")
    assert found.report["summary"]["verdict"] == "nonconformant"
    assert found.code == 1
    failed = [case for case in found.report["cases"] if case["outcome"] == "fail"]
    assert "named/length_65" in {case["check"] for case in failed}
    assert all(message.startswith(("dq", "dk")) for case in failed for message in case["messages"])
    assert "flashdispatch conformance replay 'named/length_65-bfloat16' --backend tiny" in found.said
