"""Importing flashdispatch and finding its plugins loads no kernel language, nothing else heavy, and starts no CUDA.

In interpreters of their own, outside the clone, since the one that runs the tests has loaded much of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

HEAVY = ("triton", "tilelang", "tvm", "cupy", "rich", "typer", "pytest", "hypothesis", "transformers")

LOOK = f"""
import json, os, sys
import torch

heavy = {HEAVY!r}
before = set(sys.modules)

def loaded():
    return sorted(name for name in set(sys.modules) - before if name.startswith(heavy))

says = {{}}
import flashdispatch
says["after_import"] = loaded()
says["plugins_after_import"] = sorted(
    name for name in sys.modules if name.startswith(("flashdispatch_backends", "flashdispatch_conformance"))
)
says["found"] = [status.name for status in flashdispatch.backends()]
says["after_discovery"] = loaded()
says["cuda_after_discovery"] = torch.cuda.is_initialized()

q = torch.arange(32.0).view(1, 4, 1, 8) / 32

def gradient():
    x = q.clone().requires_grad_()
    flashdispatch.attention(x, q, q, causal=True).sum().backward()
    return x.grad.flatten().tolist()

reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, json.dumps(gradient()).encode())
    os._exit(0)
os.close(writer)
says["child"] = json.load(os.fdopen(reader))
os.wait()
says["parent"] = gradient()
says["after_call"] = loaded()
says["cuda_after_call"] = torch.cuda.is_initialized()
print(json.dumps(says))
"""


def run(script: str, cwd: Any) -> Any:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLASHDISPATCH_")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=cwd, env=environ
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Any:
    return run(LOOK, tmp_path_factory.mktemp("outside_the_clone"))


@pytest.mark.parametrize("when", ["after_import", "after_discovery", "after_call"])
def test_nothing_heavy_is_loaded(seen, when: str) -> None:
    assert seen[when] == []


def test_importing_flashdispatch_loads_no_backend(seen) -> None:
    assert seen["plugins_after_import"] == []


def test_the_built_in_backends_are_found(seen) -> None:
    assert {"torch_reference", "triton_fa2", "tilelang_fa2", "cuda_fa2"} <= set(seen["found"])


@pytest.mark.parametrize("when", ["cuda_after_discovery", "cuda_after_call"])
def test_no_cuda_context_is_started_for_a_call_on_the_cpu(seen, when: str) -> None:
    assert seen[when] is False


def test_a_process_forked_after_discovery_computes_the_same(seen) -> None:
    assert len(seen["child"]) == 32
    assert seen["child"] == seen["parent"]


def test_the_contract_can_be_imported_without_the_face(tmp_path) -> None:
    script = """
import json, sys
import flashdispatch_registry
print(json.dumps(sorted(name for name in sys.modules if name.startswith("flashdispatch") and "_registry" not in name)))
"""
    assert run(script, tmp_path) == []
