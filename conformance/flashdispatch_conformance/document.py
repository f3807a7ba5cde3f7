"""A report as a document: plain JSON, its seal, and its file.

Floats have 4 significant digits, and what JSON has no number for is one of the texts NaN, Infinity, -Infinity. A file
has one unit a line, so that two of them are compared by any tool that compares lines.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashdispatch_registry.errors import InvalidRequestError

Document = dict[str, Any]

SCHEMA_VERSION = "1.0.0"
"""Of the document's form; the first number rises when a reader of the old form would misread it."""

SCHEMA = Path(__file__).with_name("report.schema.json")


def rounded(value: float) -> float | str:
    """`value` as reports have it."""
    short = float(f"{value:.4g}")  # which may be infinite where `value` is not
    if math.isnan(short):
        return "NaN"
    if math.isinf(short):
        return "Infinity" if short > 0 else "-Infinity"
    return short


def number(value: float | str) -> float:
    """The inverse: a report's number as a float."""
    return float(value)


def canonical(content: Any) -> bytes:
    """The one form of a JSON value that is hashed: keys sorted, no blanks, UTF-8.

    Raises ValueError for NaN and infinities, which JSON has not.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256(content: Any) -> str:
    """Of the canonical form."""
    return hashlib.sha256(canonical(content)).hexdigest()


def seal_of(document: Mapping[str, Any]) -> dict[str, str]:
    """The seal that `document` must carry: a hash of everything but the seal.

    It finds a slip and an edit by hand. It is no signature: who edits can seal again, so `verify` works the verdict out
    anew too.
    """
    return {"algorithm": "sha256", "value": sha256({key: value for key, value in document.items() if key != "seal"})}


def sealed(document: Mapping[str, Any]) -> Document:
    """A copy with the right seal."""
    return {**document, "seal": seal_of(document)}


def file_name(document: Mapping[str, Any]) -> str:
    """The `stem` of its run, and ``.json``."""
    run = document["run"]
    return "{}.json".format(
        stem(
            document["backend"]["name"],
            document["device"]["arch"],
            document["suite"]["tier"],
            selected=bool(run["match"] or run["dtypes"]),
            shard=run["shard"],
        )
    )


def stem(backend: str, arch: str, tier: str, *, selected: bool, shard: str) -> str:
    """``<backend>-<arch>-<tier>``, as the registry looks for it, of the files of a run.

    A run of selected checks or dtypes, and a shard ``"2/4"``, add to it: they never replace the report on all.
    """
    parts = [backend, arch, tier, *(["selected"] if selected else []), *([shard.replace("/", "of")] if shard else [])]
    return "-".join(parts)


def write(document: Mapping[str, Any], folder: Path) -> Path:
    """Writes `document` into `folder`, which is made when it is not there, over a file of the same name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(document)
    new = path.with_name(f".{path.name}.new")
    new.write_text(to_text(document), encoding="utf-8")
    new.replace(path)
    return path


def read(path: Path) -> Document:
    """The document in a file, whatever it says (see `verify`).

    Raises InvalidRequestError when it is no report at all, OSError when it can't be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict) or "schema_version" not in document:
        raise InvalidRequestError(f"{path} is no conformance report: it has no schema_version")
    return document


def to_text(document: Mapping[str, Any]) -> str:
    """JSON with one block, and in lists one item, a line."""
    blocks = [f"{json.dumps(key)}: {_block(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _block(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(_line(item) for item in value) + "\n]"
    if isinstance(value, dict) and value:
        lines = (f"{json.dumps(key)}: {_inner(item)}" for key, item in value.items())
        return "{\n  " + ",\n  ".join(lines) + "\n}"
    return _line(value)


def _inner(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n    " + ",\n    ".join(_line(item) for item in value) + "\n  ]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
