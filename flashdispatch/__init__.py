"""Exact attention, forward and backward, on the fastest kernel that is proven right for this problem on this GPU.

One call: `attention(q, k, v, ...)`. Ask why with `explain(...)`, force a backend with `use_backend(...)` or
FLASHDISPATCH_BACKEND.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from flashdispatch._attention import attention
from flashdispatch._forcing import set_default_backend, use_backend
from flashdispatch._merge import merge_attention
from flashdispatch._plans import explain, prepare, reload_settings
from flashdispatch._registry import BackendStatus, backends, register, unregister
from flashdispatch._sdpa import sdpa
from flashdispatch_registry.errors import (
    BackendContractError,
    BackendLoadError,
    BackendUnsupportedError,
    ColdKernelError,
    DisabledBackendError,
    FallbackError,
    FallbackWarning,
    FlashDispatchError,
    FlashDispatchWarning,
    ForwardModeError,
    InvalidRequestError,
    InvalidTypeError,
    NoBackendError,
    PluginError,
    RecomputeError,
    SecondDerivativeError,
    SettingsError,
    SettingsWarning,
    UnknownBackendError,
)
from flashdispatch_registry.plan import Plan
from flashdispatch_registry.problem import Problem

try:
    __version__ = _version("flashdispatch")
except _PackageNotFoundError:
    # A bare source tree on PYTHONPATH has no metadata, hence no entry points and no backends; `doctor` says what to do.
    __version__ = "0+not.installed"

__all__ = [
    "BackendContractError",
    "BackendLoadError",
    "BackendStatus",
    "BackendUnsupportedError",
    "ColdKernelError",
    "DisabledBackendError",
    "FallbackError",
    "FallbackWarning",
    "FlashDispatchError",
    "FlashDispatchWarning",
    "ForwardModeError",
    "InvalidRequestError",
    "InvalidTypeError",
    "NoBackendError",
    "Plan",
    "PluginError",
    "Problem",
    "RecomputeError",
    "SecondDerivativeError",
    "SettingsError",
    "SettingsWarning",
    "UnknownBackendError",
    "__version__",
    "attention",
    "backends",
    "explain",
    "merge_attention",
    "prepare",
    "register",
    "reload_settings",
    "sdpa",
    "set_default_backend",
    "unregister",
    "use_backend",
]
