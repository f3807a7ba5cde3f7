"""What the package exports: its names, version, signature and docstrings."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import flashdispatch


def test_the_public_names_are_pinned() -> None:
    assert sorted(flashdispatch.__all__) == flashdispatch.__all__
    assert set(flashdispatch.__all__) == {
        "BackendContractError", "BackendLoadError", "BackendStatus", "BackendUnsupportedError",
        "ColdKernelError", "DisabledBackendError", "FallbackError", "FallbackWarning", "FlashDispatchError",
        "FlashDispatchWarning",
        "ForwardModeError", "InvalidRequestError", "InvalidTypeError", "NoBackendError", "Plan", "PluginError",
        "Problem", "RecomputeError", "SecondDerivativeError", "SettingsError", "SettingsWarning",
        "UnknownBackendError", "__version__", "attention", "backends", "explain", "merge_attention", "prepare",
        "register", "reload_settings", "sdpa", "set_default_backend", "unregister", "use_backend",
    }  # fmt: skip


def test_the_version_is_the_distributions() -> None:
    assert flashdispatch.__version__ == version("flashdispatch")


def test_attention_has_the_contracts_signature() -> None:
    parameters = inspect.signature(flashdispatch.attention).parameters
    assert list(parameters) == [
        "q", "k", "v", "causal", "window", "attn_mask", "alibi_slopes", "sinks", "q_lens", "kv_lens", "scale",
        "softcap", "dropout_p", "dropout_seed", "layout", "return_lse", "deterministic", "backend",
    ]  # fmt: skip
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {
        "causal": False, "window": None, "attn_mask": None, "alibi_slopes": None, "sinks": None, "q_lens": None,
        "kv_lens": None, "scale": None, "softcap": None, "dropout_p": 0.0, "dropout_seed": None, "layout": "bshd",
        "return_lse": False, "deterministic": None, "backend": None,
    }  # fmt: skip
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name not in ("q", "k", "v"))


def test_everything_public_is_documented() -> None:
    undocumented = [
        name for name in flashdispatch.__all__ if name != "__version__" and not getattr(flashdispatch, name).__doc__
    ]
    assert undocumented == []
