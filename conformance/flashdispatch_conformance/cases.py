"""All cases, by id. `named` says why each of its cases exists."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashdispatch_conformance.case import Case
from flashdispatch_conformance.named import NAMED as NAMED

ALL: tuple[Case, ...] = NAMED
"""In the order of reports."""

BY_ID: Mapping[str, Case] = MappingProxyType({case.id: case for case in ALL})
