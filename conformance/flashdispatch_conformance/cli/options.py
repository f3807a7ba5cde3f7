"""Options that several commands of the suite have."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import torch
import typer

from flashdispatch_registry.errors import InvalidRequestError
from flashdispatch_registry.problem import DTYPES
from flashdispatch_registry.select import nearest


class TierName(StrEnum):
    """How much of the suite."""

    smoke = "smoke"
    full = "full"
    deep = "deep"


DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:1.", show_default="cuda where there is one")
]
Pattern = Annotated[
    list[str] | None,
    typer.Option(
        "-k", metavar="PATTERN", help="Part of an id, or a glob such as 'named/gqa*'; more than once for all."
    ),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="DTYPE", help="Only this dtype; more than once for several.", show_default="all"),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="A module that registers a backend when it is imported; the working folder is looked in, too.",
    ),
]


def dtypes_of(names: list[str] | None) -> frozenset[torch.dtype]:
    """The dtypes called `names`, or all. Raises InvalidRequestError for what is none."""
    for name in names or ():
        if name not in DTYPES:
            raise InvalidRequestError(
                f"no dtype is called {name!r}; there are {', '.join(DTYPES)}.{nearest(name, DTYPES)}"
            )
    return frozenset(DTYPES[name] for name in names or DTYPES)
