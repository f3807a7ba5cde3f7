"""``python -m flashdispatch``, and the console script of the same name."""

from __future__ import annotations

import warnings

from flashdispatch.cli import app


def main() -> None:
    """Runs the command line; exits with 0, 1 or 2 as `flashdispatch.cli` says."""
    warnings.formatwarning = _one_line
    app(prog_name="flashdispatch")


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """What a warning says; at a prompt, where in our code it was raised says nothing."""
    del category, filename, lineno, line
    return f"warning: {message}\n"


if __name__ == "__main__":
    main()
