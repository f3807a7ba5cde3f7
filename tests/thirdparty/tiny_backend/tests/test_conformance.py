"""The shared suite on this backend: what it declares must be right, what it does not must be refused."""

from __future__ import annotations

from flashdispatch_conformance import AttentionConformance


class TestTiny(AttentionConformance):
    backend = "tiny"
    device = "cpu"
