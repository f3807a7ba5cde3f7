"""The contract between flashdispatch and its backends, and the choice among them.

This is what a backend author imports: the records a plugin yields (`BackendSpec`, `Support`, `KnownIssue`), the hook
marker, and the types that pass between the core and a backend.
"""

from flashdispatch_registry.backend import (
    API_VERSION,
    Backend,
    BackendSpec,
    Binds,
    Extras,
    Forward,
    Gradients,
    KnownIssue,
    Needs,
)
from flashdispatch_registry.hookspecs import hookimpl
from flashdispatch_registry.layout import empty_gradient, empty_output
from flashdispatch_registry.masks import Band
from flashdispatch_registry.problem import Problem
from flashdispatch_registry.reasons import Code, Reason
from flashdispatch_registry.support import HeadDims, Support

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendSpec",
    "Band",
    "Binds",
    "Code",
    "Extras",
    "Forward",
    "Gradients",
    "HeadDims",
    "KnownIssue",
    "Needs",
    "Problem",
    "Reason",
    "Support",
    "empty_gradient",
    "empty_output",
    "hookimpl",
]
