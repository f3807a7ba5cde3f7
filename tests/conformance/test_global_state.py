"""PyTorch's global state: each change is found, named and undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashdispatch_conformance import global_state


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "default dtype is torch.float64 after the calls, and was "),
        (lambda: torch.set_default_device("meta"), "default device is meta after the calls, and was cpu"),
        (lambda: torch.rand(1), "CPU random generator is in another state"),
        (lambda: torch.manual_seed(12), "CPU random generator is in another state"),
        (lambda: torch.set_grad_enabled(False), "grad mode is False after the calls, and was True"),
        (lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu is True after the calls, and was False"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms (enabled, only warned about) is"),
        (lambda: torch.set_float32_matmul_precision("high"), "float32 matmul precision (all, GPU, CPU) is ('high'"),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), "float32 matmul precision"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "number of threads is "),
        (
            lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
            "backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False",
        ),
        (lambda: setattr(torch.backends.cudnn, "benchmark", True), "backends.cudnn.benchmark is True"),
        (
            lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
            "utils.deterministic.fill_uninitialized_memory is False",
        ),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "backends.cuda.flash_sdp_enabled() is False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_change_is_found_named_and_undone(change: Callable[[], object], said: str) -> None:
    before = global_state.snapshot()
    change()
    differences = global_state.restore(before)
    assert len(differences) == 1
    assert differences[0].startswith(f"torch's {said}")
    assert global_state.restore(before) == ()


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this PyTorch has one name for it")
def test_a_precision_that_was_set_by_its_new_name_is_undone_too() -> None:
    before = global_state.snapshot()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    (difference,) = global_state.restore(before)
    assert "float32 matmul precision (all, GPU, CPU) is (None, 'tf32', " in difference
    assert global_state.restore(before) == ()
    assert torch.get_float32_matmul_precision() == "highest"


def test_without_a_change_there_is_nothing_to_say() -> None:
    before = global_state.snapshot()
    torch.rand(3, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.ones(3).sum()
    assert global_state.restore(before) == ()
