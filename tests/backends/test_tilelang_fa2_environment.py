"""tilelang_fa2 in the process around it: a TileLang or compiler that is missing is a reason, and a sound one is silent.

In interpreters of their own, since the one that runs the tests has loaded TileLang.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIELDS = (
    'arch="sm_90", dtype=torch.bfloat16, batch=1, heads_q=1, heads_kv=1, seqlen_q=64, seqlen_k=64, head_dim=64, '
    "head_dim_v=64, scale=0.125"
)

CHOOSE = f"""
import json, sys
import flashdispatch, torch
from flashdispatch_registry import Problem

problem = Problem({FIELDS})

def said(plan):
    candidate = plan.candidate("tilelang_fa2")
    return dict(chosen=plan.chosen, reasons=[reason.to_json() for reason in candidate.reasons], table=plan.table())

before = said(flashdispatch.explain(problem))
imported = "tilelang" in sys.modules
prepared = said(flashdispatch.prepare(problem))
try:
    flashdispatch.prepare(problem, backend="tilelang_fa2")
    forced = None
except flashdispatch.BackendUnsupportedError as error:
    forced = str(error)
print(json.dumps(dict(before=before, imported=imported, prepared=prepared, forced=forced)))
"""
"""Automatic choice of a problem that only tilelang_fa2 and torch_reference may take."""

HIDE = """
import importlib.metadata
real = importlib.metadata.version

def version(name):
    if name == "tilelang":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version
"""


def python(script: str, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in another interpreter, with `path` before what is installed."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHDISPATCH_", "TILELANG_"))}
    paths = [*([str(path)] if path else []), *filter(None, [given.get("PYTHONPATH")])]
    given |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | environ
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, env=given)


def choice(script: str, path: Path | None = None, **environ: str) -> Any:
    done = python(script, path, FLASHDISPATCH_DISABLE="triton_fa2,cuda_fa2", FLASHDISPATCH_FALLBACK="allow", **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BROKEN = {
    "a library is missing": 'raise OSError("libcuda.so.1: cannot open shared object file")',
    "it is another package": "",
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_a_tilelang_that_fails_to_import_is_a_reason_and_choice_goes_on(code: str, tmp_path: Path) -> None:
    (tmp_path / "tilelang.py").write_text(code)
    says = choice(CHOOSE, tmp_path)
    assert (says["before"]["chosen"], says["before"]["reasons"]) == ("tilelang_fa2", [])  # nobody has looked
    assert says["imported"] is False
    assert says["prepared"]["chosen"] == "torch_reference"
    (reason,) = says["prepared"]["reasons"]
    assert reason["code"] == "LOAD_FAILED"
    assert code.rpartition('("')[2].removesuffix('")') in reason["got"]
    assert reason["fix"] == "pip install 'flashdispatch[tilelang]'"
    assert "LOAD_FAILED" in says["forced"]


@pytest.mark.parametrize(("have", "got"), [("0.1.12", "0.1.12 installed"), (None, "not installed")])
def test_a_tilelang_that_is_too_old_or_absent_is_a_reason_and_is_not_imported(
    have: str | None, got: str, tmp_path: Path
) -> None:
    (tmp_path / "tilelang.py").write_text('raise AssertionError("imported")')
    if have is not None:
        folder = tmp_path / f"tilelang-{have}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tilelang\nVersion: {have}\n")
    says = choice(CHOOSE if have else HIDE + CHOOSE, tmp_path)
    for when in ("before", "prepared"):
        assert says[when]["chosen"] == "torch_reference"
        (reason,) = says[when]["reasons"]
        assert (reason["code"], reason["field"], reason["got"]) == ("DEP_MISSING", "tilelang", got)
        assert reason["allowed"] == "tilelang>=0.1.13"
        assert reason["fix"] == "pip install 'flashdispatch[tilelang]'"
    assert "DEP_MISSING" in says["forced"]


MISSING = {
    "nvcc": ({"CUDA_HOME": "/nowhere"}, "nvcc, and there is none", "install the CUDA toolkit"),
    "a C++ compiler": ({"PATH": "{tools}", "CXX": "", "CC": ""}, "C++ compiler, and there is none", "install g++"),
}


@pytest.mark.parametrize(("environ", "got", "fix"), MISSING.values(), ids=MISSING)
def test_a_missing_compiler_is_a_reason_where_there_is_a_gpu_and_choice_goes_on(
    environ: dict[str, str], got: str, fix: str, tmp_path: Path
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(0o755)
    given = {"CUDA_HOME": str(tmp_path)} | {name: text.format(tools=nvcc.parent) for name, text in environ.items()}
    says = choice("import torch; torch.cuda.is_available = lambda: True" + CHOOSE, **given)
    assert says["prepared"]["chosen"] == "torch_reference"
    (reason,) = says["prepared"]["reasons"]
    assert reason["code"] == "LOAD_FAILED"
    assert got in reason["got"]
    assert reason["fix"].startswith(fix)
    assert fix in says["forced"]


# What is heard of TileLang while it works for us

MAKE = """
from flashdispatch_backends.tilelang_fa2 import compile
from flashdispatch_backends.tilelang_fa2.recipe import Recipe
from flashdispatch_registry.tile_table import Shape

def recipe(kernel, *shape):
    return Recipe(kernel=kernel, dtype="float16", head_dim=64, head_dim_v=64, shape=Shape(*shape), tma=True)

"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on this machine")
def test_compiling_prints_nothing_and_leaves_the_kernel_on_disk_for_the_next_process(tmp_path: Path) -> None:
    build = MAKE + 'compile.build(recipe("delta", 16, 16, 4, 1), 90)'
    for script in (build, "from tilelang.contrib import nvcc; nvcc.compile_cuda = None" + build):
        done = python(script, TILELANG_CACHE_DIR=str(tmp_path))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


WORK = """
import json
compile.lowered(recipe("total", 64, 64, 4, 2), 90)
notes = []
for fault in (
    lambda: compile.program(recipe("forward", 64, 0, 4, 2)),
    lambda: compile.lowered(recipe("forward", 40, 64, 4, 2), 90),
):
    try:
        fault()
    except Exception as error:
        notes.append(error.__notes__)
print(json.dumps(notes))
"""


def test_lowering_prints_nothing_and_what_fails_says_so_in_its_exception() -> None:
    done = python(MAKE + WORK)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    for doing, (first, *_) in zip(("tracing", "lowering"), json.loads(done.stdout), strict=True):
        assert first.startswith(f"While {doing} Recipe(kernel='forward'")
        assert "with TileLang" in first
