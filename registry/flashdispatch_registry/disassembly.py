"""Machine code as text, by the disassembler of a CUDA toolkit or the one that comes with Triton."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path


def cuobjdump() -> str | None:
    """The path of cuobjdump: on PATH, in CUDA_HOME, or Triton's, which torch brings on Linux; None where it is not."""
    triton = find_spec("triton")  # not imported
    folders = [Path(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    found = [shutil.which("cuobjdump"), *(shutil.which(folder / "cuobjdump") for folder in folders)]
    return next((path for path in found if path is not None), None)


def sass_of(cubin: bytes) -> str:
    """The machine code of a cubin; empty where there is no disassembler. Raises CalledProcessError when it fails."""
    program = cuobjdump()
    if program is None:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "--dump-sass", file.name]  # all of it is ours
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
