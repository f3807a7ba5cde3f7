"""Architecture names: of devices, and what a name says."""

from __future__ import annotations

import pytest
import torch

from flashdispatch_registry.arch import arch_of, device_type_of, sm_number


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_a_device_that_is_not_cuda_is_its_own_architecture(device: str) -> None:
    assert arch_of(torch.device(device)) == device


def test_a_cuda_device_on_a_machine_without_one_is_just_cuda(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert arch_of(torch.device("cuda", 3)) == "cuda"


@pytest.mark.gpu
def test_a_cuda_device_is_named_by_its_compute_capability() -> None:
    major, minor = torch.cuda.get_device_capability(0)
    assert arch_of(torch.device("cuda", 0)) == f"sm_{major}{minor}"


@pytest.mark.parametrize(
    ("arch", "device_type"),
    [("sm_90", "cuda"), ("sm_120", "cuda"), ("gfx942", "cuda"), ("cuda", "cuda"), ("cpu", "cpu"), ("mps", "mps")],
)
def test_the_device_type_of_an_architecture(arch: str, device_type: str) -> None:
    assert device_type_of(arch) == device_type


@pytest.mark.parametrize(
    ("arch", "number"),
    [("sm_75", 75), ("sm_90a", 90), ("sm_100f", 100), ("sm_120", 120), ("gfx942", None), ("cpu", None), ("sm_", None)],
)
def test_only_nvidia_architectures_have_a_number(arch: str, number: int | None) -> None:
    assert sm_number(arch) == number


def test_architectures_compare_as_numbers_and_not_as_text() -> None:
    older, newer = sm_number("sm_90"), sm_number("sm_120")
    assert older is not None
    assert newer is not None
    assert older < newer
