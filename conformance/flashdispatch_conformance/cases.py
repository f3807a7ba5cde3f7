"""All cases, by id: `named` has one reason each, `pinned` is one public report each, `pairwise` covers what is left."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashdispatch_conformance.case import Case
from flashdispatch_conformance.named import NAMED as NAMED
from flashdispatch_conformance.pairwise import PAIRWISE as PAIRWISE
from flashdispatch_conformance.pinned import PINNED as PINNED

ALL: tuple[Case, ...] = (*NAMED, *PINNED, *PAIRWISE)
"""In the order of reports."""

BY_ID: Mapping[str, Case] = MappingProxyType({case.id: case for case in ALL})
