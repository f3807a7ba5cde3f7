"""Seeded faults: backends that are wrong in one way each, to see that the suite finds them.

Each stands for faults that real kernels had. A gate is worth what it kills here.
"""

from __future__ import annotations

from flashdispatch_conformance.mutants.backward import BACKWARD
from flashdispatch_conformance.mutants.masks import MASKS
from flashdispatch_conformance.mutants.memory import MEMORY
from flashdispatch_conformance.mutants.mutant import Mutant, OnlyOnGpu
from flashdispatch_conformance.mutants.precision import PRECISION
from flashdispatch_conformance.mutants.softmax import SOFTMAX

__all__ = ["MUTANTS", "ONLY_ON_GPU", "Mutant", "OnlyOnGpu"]

MUTANTS: tuple[Mutant, ...] = (*MASKS, *SOFTMAX, *PRECISION, *MEMORY, *BACKWARD)
"""All that run on a CPU."""

ONLY_ON_GPU: tuple[OnlyOnGpu, ...] = (
    OnlyOnGpu(
        name="default_stream_launch",
        fault="a kernel is launched on the default stream and not on the current one",
        reason="a CPU has no streams: every call is over when it returns",
    ),
    OnlyOnGpu(
        name="lse_baked_into_a_graph",
        fault="a number read on the host while a CUDA graph was captured is replayed with new inputs",
        reason="a CPU has no graphs to capture",
    ),
)
"""Of the kill table, but not run here."""
