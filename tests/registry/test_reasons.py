"""Reasons are data with stable codes."""

from __future__ import annotations

import json
import pickle

import pytest

from flashdispatch_registry import Code, Reason

# Users match on these: a new one is added here, none may be renamed or dropped.
STABLE = [
    "DEVICE", "ARCH_IMPOSSIBLE", "DTYPE", "HEAD_DIM", "HEAD_DIM_V", "HEAD_DIM_BACKWARD",
    "GQA", "CAUSAL", "WINDOW", "ATTN_MASK", "ATTN_MASK_GRAD", "ALIBI",
    "SINKS", "SINKS_GRAD", "LENGTHS", "SOFTCAP", "DROPOUT", "BACKWARD",
    "LSE", "LSE_GRAD", "DETERMINISM", "BACKEND_LIMIT", "DEP_MISSING", "LOAD_FAILED",
    "API_VERSION", "DUPLICATE_NAME", "DISABLED", "NOT_AUTO", "NOT_ALLOWED", "FALLBACK",
    "KNOWN_ISSUE", "WHY_NOT_RAISED", "NONCONFORMANT",
]  # fmt: skip


def test_the_codes_are_pinned() -> None:
    assert set(STABLE) == set(Code)


@pytest.mark.parametrize("name", STABLE)
def test_a_code_is_its_own_text(name: str) -> None:
    assert Code(name) == name
    assert str(Code[name]) == name


def test_the_text_of_a_reason() -> None:
    reason = Reason(Code.GQA, "heads", "Hq 8, Hkv 2", "Hq equal to Hkv")
    assert str(reason) == "GQA: heads is Hq 8, Hkv 2; takes Hq equal to Hkv"


def test_the_fix_comes_last() -> None:
    reason = Reason(Code.DTYPE, "dtype", "float16", "float32", "cast q, k and v to float32")
    assert str(reason).endswith("(fix: cast q, k and v to float32)")


def test_a_reason_is_plain_json_and_survives_pickling() -> None:
    reason = Reason(Code.SOFTCAP, "softcap", "30", "None")
    assert json.loads(json.dumps(reason.to_json())) == {
        "code": "SOFTCAP",
        "field": "softcap",
        "got": "30",
        "allowed": "None",
        "fix": "",
    }
    assert pickle.loads(pickle.dumps(reason)) == reason
