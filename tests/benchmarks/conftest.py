"""Options, the record of all rows, and the summary at the end.

The options exist when tests/benchmarks, or a file in it, is named on pytest's command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from .comparison import Outcome
from .machine import Run
from .options import Options
from .rows import Refusal, Row, append, summary


class Record:
    """All rows of this session. They go to the `--rows` file at once."""

    def __init__(self, options: Options, run: Run) -> None:
        self.options = options
        self.run = run
        self.rows: list[Row] = []
        self.refusals: list[Refusal] = []

    def add(self, rows: Sequence[Row], refusals: Sequence[Refusal] = ()) -> None:
        """Keeps them for the summary, and writes the rows."""
        self.rows += rows
        self.refusals += refusals
        if self.options.rows is not None:
            append(self.options.rows, rows)

    def close(self, benchmark: object, outcome: Outcome) -> None:
        """Takes one test's outcome, also into pytest-benchmark's JSON, and fails the test when something is broken."""
        self.add(outcome.rows, outcome.refusals)
        benchmark.extra_info["rows"] = [row.to_json() for row in outcome.rows]  # type: ignore[attr-defined]
        broken = outcome.broken()
        assert not broken, "\n".join(broken)
        if not outcome.rows:
            pytest.skip("; ".join(f"{each.provider}: {each.reason}" for each in outcome.refusals) or "no providers")


_RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    Options.add(parser)


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Record:
    """Where a benchmark leaves its rows."""
    options = Options.of(pytestconfig)
    command = shlex.join(("pytest", *map(str, pytestconfig.invocation_params.args)))
    made = Record(options, Run.here(command, options.commit))
    pytestconfig.stash[_RECORD] = made
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    record = config.stash.get(_RECORD, None)
    if record is None or not (record.rows or record.refusals):
        return
    terminalreporter.section("rows")
    terminalreporter.write(summary(record.rows, record.refusals))
    if record.options.rows is not None:
        terminalreporter.write_line(f"{len(record.rows)} rows added to {record.options.rows}")
