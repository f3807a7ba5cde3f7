"""The journal of a run: every result as a line of JSON as soon as it is there, so that a run can be taken up again.

Its first line says what was run; a journal of anything else is not continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashdispatch_conformance.result import NotRun, Result
from flashdispatch_conformance.tolerance import Failure, Stats
from flashdispatch_registry.errors import InvalidRequestError

SUFFIX = ".journal.jsonl"
"""Of its file's name."""

Identity = Mapping[str, Any]
"""What the results of a journal are about, as JSON: backend, source hashes, versions, device, seed, units."""


class Journal:
    """The file of one run, open for more results."""

    def __init__(self, path: Path, identity: Identity, results: Sequence[Result] = ()) -> None:
        """Starts a journal with the results that are there already, in place of an old one of the same path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text("".join(map(_line, (identity, *map(result_to_json, results)))))
        new.replace(path)
        self._file = path.open("a")

    def add(self, result: Result) -> None:
        """Appends one result; it is in the file when this returns."""
        self._file.write(_line(result_to_json(result)))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._file.close()


@contextmanager
def claim(path: Path) -> Iterator[None]:
    """Keeps other runs from the journal at `path`, and from the reports beside it.

    Raises InvalidRequestError when another run is at it, in this process or any other.
    """
    from filelock import FileLock, Timeout  # it loads asyncio, and only a run needs it

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        name = path.name.removesuffix(SUFFIX)
        raise InvalidRequestError(
            f"another run of {name} is writing into {path.parent} right now{_progress(path)}.\n"
            "  wait until it ends, or give this run a folder of its own: -o OTHER"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _progress(path: Path) -> str:
    """How far the run is that writes it, where that can be read."""
    try:
        return f" ({len(read(path)[1])} units so far)"
    except (OSError, ValueError):  # it has just begun, or is just ending
        return ""


def read(path: Path) -> tuple[dict[str, Any], tuple[Result, ...]]:
    """The identity and the results of a journal. A last line that was cut off does not count.

    Raises FileNotFoundError when there is none, ValueError when it is no journal.
    """
    lines = path.read_text().split("\n")[:-1]  # what follows the last line break was being written
    if not lines:
        raise ValueError(f"{path} is empty")
    identity = json.loads(lines[0])
    if not isinstance(identity, dict):
        raise ValueError(f"the first line of {path} is no JSON object")  # noqa: TRY004  the file's value is wrong
    return identity, tuple(result_from_json(json.loads(line)) for line in lines[1:])


def differences(old: Identity, new: Identity) -> tuple[str, ...]:
    """What two runs differ in, in words; empty when the one continues the other."""
    known = json.loads(json.dumps(new))  # tuples are lists there
    return tuple(
        f"{name} was {_short(old.get(name))} and is {_short(known.get(name))}"
        for name in dict.fromkeys([*old, *known])
        if old.get(name) != known.get(name)
    )


def result_to_json(result: Result) -> dict[str, Any]:
    """A plain dict, with every number in full; `result_from_json` reads it back to an equal result."""
    return asdict(result)


def result_from_json(data: Mapping[str, Any]) -> Result:
    """Reads what `result_to_json` wrote."""
    not_run = data["not_run"]
    changed = {
        "messages": tuple(data["messages"]),
        "not_run": None if not_run is None else NotRun(not_run),
        "refused": {part: tuple(codes) for part, codes in data["refused"].items()},
        "stats": {name: _stats(stats) for name, stats in data["stats"].items()},
    }
    return Result(**(dict(data) | changed))


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data) + "\n"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 70 else f"{text[:67]}..."


def _stats(data: dict[str, Any]) -> Stats:
    numbers: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Stats(**(numbers | {"failures": tuple(Failure(**failure) for failure in data["failures"])}))
