"""Waivers: faults that are known, as data with a link, a scope and an end. Nothing else turns a failure into less.

    # waivers.toml
    [[waiver]]
    id = "cudnn-8-nan"                      # any name, unique in the file
    cases = ["named/length_704_*"]          # globs on a unit's or a check's id
    backend = "mine"
    versions = "<2.1"                       # specifier on the backend's distribution; "" is all
    archs = ["sm_90"]                       # [] is all
    url = "https://example.org/issues/7"
    reason = "dQ is NaN when every score is near -120"
    expires = 2027-03-31                    # the last day on which it holds
    owner = "kernel team"

A waiver that has expired, that matches no check of the suite or whose check passes is a fault: the list can't outlive
its reasons.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from flashdispatch_conformance.result import Result
from flashdispatch_registry.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """One known fault."""

    id: str
    cases: tuple[str, ...]
    """Globs; each matches a unit's id (``named/d128-float16``) or a check's (``named/d128``)."""
    backend: str
    versions: str
    """A specifier set on the backend's distribution; empty means all."""
    archs: tuple[str, ...]
    """Empty means all."""
    url: str
    reason: str
    expires: date
    """The last day on which it holds."""
    owner: str

    def applies(self, backend: str, version: str, arch: str) -> bool:
        """True when it is about this backend, in this version, on this architecture."""
        if self.backend != backend or (self.archs and arch not in self.archs):
            return False
        return SpecifierSet(self.versions).contains(version or "0", prereleases=True)

    def covers(self, unit: str) -> bool:
        """True when a glob matches the unit's id or its check's."""
        check = unit.rpartition("-")[0]
        return any(fnmatchcase(unit, glob) or fnmatchcase(check, glob) for glob in self.cases)

    def to_json(self) -> dict[str, Any]:
        """A plain dict, as reports carry it."""
        return asdict(self) | {"cases": list(self.cases), "archs": list(self.archs), "expires": str(self.expires)}

    @classmethod
    def of(cls, data: Mapping[str, Any], where: str) -> Waiver:
        """The inverse of `to_json`, and what a table of waivers.toml is read with.

        Raises InvalidRequestError that names `where` and what is wrong.
        """
        names = [item.name for item in fields(cls)]
        if missing := [name for name in names if name not in data]:
            raise InvalidRequestError(f"{where} lacks {', '.join(missing)}; a waiver has {', '.join(names)}")
        if unknown := sorted(set(data).difference(names)):
            raise InvalidRequestError(f"{where} has the unknown {', '.join(unknown)}; a waiver has {', '.join(names)}")
        texts = {name: _text(data[name], f"{where}, {name}") for name in ("id", "backend", "url", "reason", "owner")}
        if not texts["url"].startswith(("https://", "http://")):
            raise InvalidRequestError(f"{where}, url: a link to the report of the fault, got {texts['url']!r}")
        cases = _texts(data["cases"], f"{where}, cases")
        if not cases:
            raise InvalidRequestError(f'{where}, cases: name at least one, such as ["named/length_1"]')
        versions = data["versions"]
        try:
            SpecifierSet(versions)
        except (InvalidSpecifier, AttributeError, TypeError):
            raise InvalidRequestError(
                f'{where}, versions: a specifier such as "<2.1" or "", got {versions!r}'
            ) from None
        return cls(
            **texts,
            cases=cases,
            versions=versions,
            archs=_texts(data["archs"], f"{where}, archs"),
            expires=_day(data["expires"], f"{where}, expires"),
        )


Waivers = tuple[Waiver, ...]


def read(path: Path) -> Waivers:
    """The waivers of a file.

    Raises InvalidRequestError for what is no such file, OSError when it can't be read.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} is no TOML: {error}") from error
    tables = data.get("waiver", [])
    if set(data) - {"waiver"} or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidRequestError(f"{path} must hold [[waiver]] tables and nothing else, got {', '.join(data)}")
    found = tuple(
        Waiver.of(table, f"{path}, waiver {table.get('id', f'number {at}')!r}") for at, table in enumerate(tables, 1)
    )
    twice = sorted({one.id for one in found if sum(one.id == other.id for other in found) > 1})
    if twice:
        raise InvalidRequestError(f"{path}: the ids {', '.join(twice)} are there twice")
    return found


def apply(
    results: Sequence[Result],
    waivers: Sequence[Waiver],
    *,
    backend: str,
    version: str,
    arch: str,
    today: date,
    known: Collection[str] = (),
) -> tuple[tuple[Result, ...], tuple[str, ...]]:
    """The results under the waivers, and what is wrong with the waivers themselves, in words.

    Of those that apply here and have not expired: what failed is waived, what passed is an unexpected pass, and what
    was refused or not run stays. `known` are ids of units that the suite has beyond `results`: a waiver that matches
    one of them is not idle, only not asked.
    """
    mine = [waiver for waiver in waivers if waiver.applies(backend, version, arch)]
    holding = [waiver for waiver in mine if today <= waiver.expires]
    found = tuple(_under(result, holding) for result in results)
    return found, faults(
        mine, [result.id for result in results], backend=backend, version=version, arch=arch, today=today, known=known
    )


def faults(
    waivers: Sequence[Waiver],
    units: Collection[str],
    *,
    backend: str,
    version: str,
    arch: str,
    today: date,
    known: Collection[str] = (),
) -> tuple[str, ...]:
    """What is wrong with those waivers that apply here, in words: expired ones, and globs that match no unit."""
    found = []
    for waiver in (waiver for waiver in waivers if waiver.applies(backend, version, arch)):
        if waiver.expires < today:
            found.append(f"the waiver {waiver.id} expired on {waiver.expires}: fix {waiver.url}, or renew it")
        idle = [glob for glob in waiver.cases if not _matches(replace(waiver, cases=(glob,)), units, known)]
        if idle:
            found.append(f"the waiver {waiver.id} matches no check: {', '.join(idle)}")
    return tuple(found)


def _matches(waiver: Waiver, *ids: Collection[str]) -> bool:
    return any(waiver.covers(unit) for some in ids for unit in some)


def _under(result: Result, waivers: Sequence[Waiver]) -> Result:
    waiver = next((waiver for waiver in waivers if waiver.covers(result.id)), None)
    if waiver is None:
        return result
    if result.outcome in ("fail", "error"):
        return replace(result, outcome="waived", waiver=waiver.id)
    if result.outcome == "pass":
        text = f"the waiver {waiver.id} says that it fails ({waiver.url}), and it passes: take the waiver out"
        return replace(result, outcome="unexpected_pass", waiver=waiver.id, messages=(*result.messages, text))
    return result


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequestError(f"{where}: a text, got {value!r}")
    return value


def _texts(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise InvalidRequestError(f"{where}: a list of texts, got {value!r}")
    return tuple(value)


def _day(value: object, where: str) -> date:
    try:
        return date.fromisoformat(str(value))
    except ValueError:
        raise InvalidRequestError(f"{where}: a day such as 2027-03-31, got {value!r}") from None
