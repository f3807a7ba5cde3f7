"""README.md says what is true."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from flashdispatch.cli import app

README = Path(__file__).parents[1] / "README.md"


def test_support_table_is_what_the_backends_declare() -> None:
    result = CliRunner().invoke(app, ["matrix", "--check", str(README)])
    assert result.exit_code == 0, result.output
