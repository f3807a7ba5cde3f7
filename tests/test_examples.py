"""Every script in examples/ runs as a reader would run it, with warnings as errors, and says something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def test_there_are_examples_and_the_readme_names_each_file() -> None:
    assert SCRIPTS
    text = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.iterdir() if path.is_file() and f"`{path.name}`" not in text] == [
        "README.md"
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_runs(script: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert len(script.read_text().splitlines()) <= 60
