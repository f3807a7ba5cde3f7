"""Environment variables are validated, and a misspelt one is not ignored in silence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import flashdispatch
from flashdispatch import SettingsError, SettingsWarning, _plans, _settings, attention


def test_every_variable_has_its_default() -> None:
    assert _settings.read({}) == _settings.Settings()
    assert _settings.read({name: "" for name in _settings.KNOWN if "PLUGINS" not in name}) == _settings.Settings()


def test_values_are_parsed() -> None:
    settings = _settings.read(
        {
            "FLASHDISPATCH_FALLBACK": "error",
            "FLASHDISPATCH_CHECK": "yes",
            "FLASHDISPATCH_PLUGINS": "a, b-c",
            "FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD": "1",
            "FLASHDISPATCH_STRICT_PLUGINS": "true",
        }
    )
    assert (settings.fallback, settings.check) == ("error", True)
    assert settings.plugins.allow == {"a", "b-c"}
    assert (settings.plugins.autoload, settings.plugins.strict) == (False, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("FALLBACK", "never"), ("CHECK", "maybe"), ("STRICT_PLUGINS", "2"), ("DISABLE_PLUGIN_AUTOLOAD", "x")],
)
def test_a_bad_value_raises_with_what_it_may_be(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"FLASHDISPATCH_{name}='{value}' must be"):
        _settings.read({f"FLASHDISPATCH_{name}": value})


def test_a_bad_value_raises_when_a_plan_is_made(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "sometimes")
    with pytest.raises(SettingsError):
        attention(*qkv())


def test_an_unknown_variable_warns_once_with_the_nearest_name(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_BAKEND", "torch_reference")
    with pytest.warns(SettingsWarning, match="FLASHDISPATCH_BAKEND is not .* Did you mean 'FLASHDISPATCH_BACKEND'"):
        attention(*qkv())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*qkv(seqlen_q=3))


def test_reload_settings_makes_new_plans(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, made, select = qkv(), [], _plans.select
    monkeypatch.setattr(_plans, "select", lambda *a, **k: made.append(1) or select(*a, **k))
    attention(*inputs)
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "sometimes")
    attention(*inputs)
    assert len(made) == 1  # the plan stands
    with pytest.raises(SettingsError):
        flashdispatch.reload_settings()
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "allow")
    flashdispatch.reload_settings()
    attention(*inputs)
    attention(*inputs)
    assert len(made) == 2


@pytest.mark.parametrize("check", ["", "0", "1"])
def test_lengths_on_the_cpu_are_always_checked(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_CHECK", check)
    lengths = torch.tensor([9], dtype=torch.int32)
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"within 0\.\.4"):
        attention(q, q, q, kv_lens=lengths)
