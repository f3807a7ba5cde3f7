"""The suite on fake backends: each breach of the contract is found, and what is not declared must be refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol

import pytest
import torch
from torch import Tensor

import flashdispatch
import flashdispatch_conformance
from flashdispatch_backends import torch_reference
from flashdispatch_conformance import AttentionConformance, Result, global_state, run_case
from flashdispatch_conformance.case import Case
from flashdispatch_conformance.cases import BY_ID, NAMED
from flashdispatch_registry import BackendSpec, Extras, Forward, Gradients, Needs, Problem, Support

SUPPORT: Support = next(b.spec.support for b in flashdispatch.backends() if b.name == "torch_reference" and b.spec)


class Fake:
    """torch_reference, for subclasses to spoil."""

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        return torch_reference.forward(problem, q, k, v, extras)

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        return torch_reference.backward(problem, saved, dout, dlse, needs)

    def prepare(self, problem: Problem) -> None:
        pass


class Register(Protocol):
    def __call__(self, backend: object, support: Support = ..., **spec: Any) -> str: ...


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Registers an object as backend "fake" and returns the name."""
    registered = []

    def register(backend: object, support: Support = SUPPORT, **spec: Any) -> str:
        module = ModuleType("conformance_fake")
        module.backend = backend  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "conformance_fake", module)
        flashdispatch.register(BackendSpec(name="fake", factory="conformance_fake:backend", support=support, **spec))
        registered.append("fake")
        return "fake"

    yield register
    for name in registered:
        flashdispatch.unregister(name)


def run(name: str, case: str = "named/length_63", dtype: torch.dtype = torch.bfloat16) -> Result:
    return run_case(BY_ID[case], name, dtype)


def test_a_right_backend_passes_with_numbers_for_every_tensor(register: Register) -> None:
    result = run(register(Fake()))
    assert result.outcome == "pass", result.report()
    assert set(result.stats) >= {"out", "lse", "dq", "dk", "dv"}
    assert (result.check, result.backend, result.dtype) == ("named/length_63", "fake", "bfloat16")
    assert 0.05 < result.stats["out"].rms < 0.6
    assert not result.refused
    assert "rms" in result.report()


class OffByOnePercent(Fake):
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        return super().forward(replace(problem, scale=problem.scale * 1.01), q, k, v, extras)


class WritesToInputs(Fake):
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        result = super().forward(problem, q, k, v, extras)
        k[0, 0, 0, 0] += 1.0
        return result


class ReadsBeforeItsTensors(Fake):
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, v, extras)
        out[0, 0] += 0 * v.as_strided((1,), (1,), v.storage_offset() - 1)
        return Forward(out, lse, saved)


class IgnoresLengths(Fake):
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        ignorant = replace(problem, kv_lens=False)
        return (
            super()
            .forward(problem, q, k, v, extras)
            ._replace(out=super().forward(ignorant, q, k, v, extras._replace(kv_lens=None)).out)
        )


class FlickeringOutput(Fake):
    calls = 0

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, v, extras)
        self.calls += 1
        return Forward(out * (1 + 2.0**-7 * (self.calls % 2)), lse, saved)


class FlickeringGradient(Fake):
    calls = 0

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        gradients = super().backward(problem, saved, dout, dlse, needs)
        self.calls += 1
        assert gradients.q is not None
        gradients.q[0, -1, 0, 0] *= 1 + 2.0**-7 * (self.calls % 2)
        return gradients


class OutputFollowsTheLse(Fake):
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, v, extras)
        return Forward(out * (1 + 2.0**-7 * problem.return_lse), lse, saved)


class LowPrecisionLse(Fake):
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, v, extras)
        return Forward(out, None if lse is None else lse.to(problem.dtype), saved)


class NoGradientForTheKeys(Fake):
    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        gradients = super().backward(problem, saved, dout, dlse, needs)
        assert gradients.k is not None
        return gradients._replace(k=torch.zeros_like(gradients.k))


@pytest.mark.parametrize(
    ("backend", "case", "message"),
    [
        (OffByOnePercent, "named/length_63", "lse: rms of z"),
        (WritesToInputs, "named/length_63", "inputs were written to: k"),
        (ReadsBeforeItsTensors, "named/length_63", "out[0, 0, 0, 0] is nan"),
        (IgnoresLengths, "named/lens_kv_only", "is nan where the truth is"),
        (FlickeringOutput, "named/length_63", "out is not bitwise repeatable in the differentiable call"),
        (FlickeringOutput, "named/forward_only", "out is not bitwise repeatable"),
        (FlickeringGradient, "named/deterministic", "dq is not bitwise repeatable"),
        (OutputFollowsTheLse, "named/length_63", "out is another one when the LSE is returned too"),
        (LowPrecisionLse, "named/length_63", "returned lse (1, 2, 63) torch.bfloat16"),
        (NoGradientForTheKeys, "named/length_63", "dk: rms of z"),
    ],
)
def test_a_breach_is_found(register: Register, backend: type[Fake], case: str, message: str) -> None:
    result = run(register(backend()), case)
    assert result.outcome == "fail"
    assert message in result.report()


def test_wrong_strides_are_found(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = flashdispatch.attention

    def transposed(*tensors: Tensor, **arguments: Any) -> Any:
        got = attention(*tensors, **arguments)
        return tuple(t.mT.contiguous().mT for t in got) if isinstance(got, tuple) else got.mT.contiguous().mT

    monkeypatch.setattr(flashdispatch, "attention", transposed)
    result = run(register(Fake()))
    assert result.outcome == "fail"
    assert "out of the gradients call has strides" in result.report()
    assert "lse of the lse call has strides" in result.report()


def test_gradients_may_flicker_within_their_noise_unless_determinism_is_asked_for(register: Register) -> None:
    result = run(register(FlickeringGradient()))
    assert result.outcome == "pass", result.report()
    assert "dq (gradients call)" in result.stats  # the second run was judged too


class Raises(Fake):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def forward(self, *_: object) -> Forward:
        raise self.error


class Panic(BaseException):
    """No Exception, as a panic of Rust is none."""


class UnprintableError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("illegal memory access\nat 0x0"), "RuntimeError: illegal memory access"),
        (RuntimeError(), "RuntimeError"),
        (Panic("index out of bounds"), "Panic: index out of bounds"),
        (SystemExit(3), "SystemExit: 3"),
        (flashdispatch.UnknownBackendError("another's"), "UnknownBackendError: another's"),
        (UnprintableError(), "UnprintableError: <exception str() failed>"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_is_raised_is_an_error_that_says_so_before_its_traceback(
    register: Register, error: BaseException, said: str
) -> None:
    result = run(register(Raises(error)))
    assert (result.outcome, result.messages[0]) == ("error", said)
    assert result.messages[-1].startswith("Traceback")
    assert said in result.messages[-1]


def test_the_operator_can_end_a_run(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    name = register(Raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run(name)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # as it is in a child process
    assert run(name).outcome == "error"


class Changes(Fake):
    """Changes something that is the caller's, and goes on."""

    def __init__(self, change: Callable[[], object], error: Exception | None = None) -> None:
        self.change, self.error = change, error

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        self.change()
        if self.error:
            raise self.error
        return super().forward(problem, q, k, v, extras)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            "torch's default dtype is torch.float64 after the calls, and was torch.float32",
        ),
        (
            lambda: torch.rand(1),
            "torch's CPU random generator is in another state after the calls: they drew from it, or seeded it",
        ),
        (
            lambda: setattr(torch.backends.cudnn, "benchmark", True),
            "torch's backends.cudnn.benchmark is True after the calls, and was False",
        ),
    ],
    ids=["dtype", "random", "flag"],
)
def test_global_state_that_a_backend_changes_is_a_failure_and_is_put_back(
    register: Register, change: Callable[[], object], said: str
) -> None:
    before = global_state.snapshot()
    result = run(register(Changes(change)))
    assert result.outcome == "fail"
    assert said in result.messages
    assert global_state.restore(before) == ()


def test_global_state_is_put_back_after_an_error_too(register: Register) -> None:
    before = global_state.snapshot()
    result = run(register(Changes(lambda: torch.set_default_dtype(torch.float64), ValueError("by design"))))
    assert (result.outcome, result.messages[0]) == ("error", "ValueError: by design")
    assert "default dtype is torch.float64" in result.messages[1]
    assert global_state.restore(before) == ()


def test_no_memory_is_no_statement_about_the_backend(register: Register) -> None:
    assert run(register(Raises(torch.OutOfMemoryError()))).outcome == "not_run"


def test_a_missing_requirement_is_not_run(register: Register) -> None:
    name = register(Fake(), requires=("a-distribution-that-nobody-has>=1",))
    result = run(name)
    assert result.outcome == "not_run"
    assert "DEP_MISSING" in result.report()


def test_a_backend_that_fails_to_load_is_not_run(register: Register) -> None:
    result = run(register("no backend"))
    assert result.outcome == "not_run"
    assert "LOAD_FAILED" in result.report()


def test_a_disabled_backend_is_not_run(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    name = register(Fake())
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", name)
    assert run(name).outcome == "not_run"


def test_a_plugin_that_may_not_load_is_not_run(tmp_path: Path) -> None:
    info = tmp_path / "kept_out-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kept-out\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[flashdispatch]\nkept_out = nowhere\n", encoding="utf-8")
    code = """
        import torch
        from flashdispatch_conformance import run_case
        from flashdispatch_conformance.cases import BY_ID
        print(run_case(BY_ID["named/d8"], "kept_out", torch.bfloat16).report())
    """
    path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": path, "FLASHDISPATCH_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "named/d8 on kept_out in bfloat16: not_run\nNOT_ALLOWED: " in done.stdout, done.stdout + done.stderr


def test_a_why_not_that_raises_is_a_failure(register: Register) -> None:
    def why_not(problem: Problem) -> NoReturn:
        raise KeyError("sm_121")

    result = run(register(Fake(), why_not=why_not))
    assert result.outcome == "fail"
    assert result.refused == dict.fromkeys(("gradients", "out", "lse"), ("WHY_NOT_RAISED",))
    assert result.messages == tuple(
        f"why_not raised for the {part} call: KeyError: 'sm_121'" for part in ("gradients", "out", "lse")
    )


def test_an_unknown_backend_raises() -> None:
    with pytest.raises(flashdispatch.UnknownBackendError):
        run("nobody")


def test_what_is_not_declared_is_refused_with_its_codes(register: Register) -> None:
    result = run(register(Fake(), replace(SUPPORT, causal=frozenset())))
    assert result.outcome == "unsupported"
    assert result.refused == {"gradients": ("CAUSAL",), "out": ("CAUSAL",), "lse": ("CAUSAL",)}
    assert not result.stats


def test_a_forward_without_a_backward_is_still_held_to_the_truth(register: Register) -> None:
    bare = replace(SUPPORT, backward=False, attn_mask_grad=False, sinks_grad=False, lse_grad=False, deterministic=False)
    result = run(register(Fake(), bare))
    assert result.outcome == "pass", result.report()
    assert result.refused == {"gradients": ("BACKWARD",)}
    assert set(result.stats) == {"out", "lse"}


def test_a_call_that_should_be_refused_and_runs_is_a_failure(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = register(Fake(), replace(SUPPORT, causal=frozenset()))
    attention = flashdispatch.attention

    def obliging(*tensors: Tensor, backend: str, **arguments: Any) -> Any:
        return attention(*tensors, backend="torch_reference", **arguments)

    monkeypatch.setattr(flashdispatch, "attention", obliging)
    result = run(name)
    assert result.outcome == "fail"
    assert "out is not declared (CAUSAL) but the call ran" in result.report()


def test_a_refusal_by_another_error_is_a_failure(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    name = register(Fake(), replace(SUPPORT, causal=frozenset()))

    def broken(*tensors: Tensor, **arguments: Any) -> Any:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(flashdispatch, "attention", broken)
    result = run(name)
    assert result.outcome == "fail"
    assert "TypeError: unexpected keyword in place of BackendUnsupportedError" in result.report()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, scale=2 * p.scale), "scale for"),
        (lambda p: replace(p, band=replace(p.band, right=None)), "band for"),
        (lambda p: replace(p, needs_grad=("q",)), "needs_grad for"),
    ],
)
def test_a_call_that_the_core_misunderstood_is_a_failure(
    register: Register, monkeypatch: pytest.MonkeyPatch, change: Callable[[Problem], Problem], message: str
) -> None:
    name = register(Fake())
    explain = flashdispatch.explain

    def misunderstood(*tensors: Tensor, **arguments: Any) -> Any:
        plan = explain(*tensors, **arguments)
        return replace(plan, problem=change(plan.problem))

    monkeypatch.setattr(flashdispatch, "explain", misunderstood)
    result = run(name)
    assert result.outcome == "fail"
    assert message in result.report()


class HalfAsMuchAgain(Fake):
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, v, extras)
        return Forward(out * 1.5 + 0.01, lse, saved)


class RoundedToFloat16(Fake):
    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Forward:
        out, lse, saved = super().forward(problem, q, k, v, extras)
        return Forward(out.half().to(out.dtype), lse, saved)


@pytest.mark.parametrize("case", ["length_63", "gqa_8_2", "lens_causal", "forward_only", "everything", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_gross_fault_is_found_in_every_dtype(register: Register, case: str, dtype: torch.dtype) -> None:
    result = run(register(HalfAsMuchAgain()), f"named/{case}", dtype)
    assert result.outcome == "fail"
    assert any(failure.gate != "exact" for failure in result.stats["out"].failures)


def test_float16_inside_a_float32_call_is_found(register: Register) -> None:
    result = run(register(RoundedToFloat16()), "named/forward_only", torch.float32)
    assert result.outcome == "fail"
    assert {failure.gate for failure in result.stats["out"].failures} >= {"rms", "max"}
    assert run("fake", "named/forward_only", torch.float64).outcome == "fail"


class DoublesOneGradient(Fake):
    """Only where exactly `asked` want a gradient, and there the last of them."""

    def __init__(self, asked: tuple[str, ...]) -> None:
        self.asked = asked

    def backward(
        self, problem: Problem, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None, needs: Needs
    ) -> Gradients:
        gradients = super().backward(problem, saved, dout, dlse, needs)
        if tuple(name for name, needed in needs._asdict().items() if needed) != self.asked:
            return gradients
        last = self.asked[-1]
        return gradients._replace(**{last: 2 * getattr(gradients, last)})


@pytest.mark.parametrize(
    "case", [case for case in NAMED if case.id.startswith("named/grad_")], ids=lambda case: case.id
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_fault_of_one_set_of_gradients_is_found(register: Register, case: Case, dtype: torch.dtype) -> None:
    result = run(register(DoublesOneGradient(case.needs_grad)), case.id, dtype)
    assert result.outcome == "fail"
    assert f"d{case.needs_grad[-1]}: rms of z" in result.report()


def test_importing_a_part_loads_no_pytest() -> None:
    parts = ("cases", "inputs", "oracle", "philox", "suite", "tolerance")
    code = (
        f"import sys, {', '.join(f'flashdispatch_conformance.{p}' for p in parts)}; sys.exit('pytest' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_the_package_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flashdispatch_conformance.nothing


class TestMine(AttentionConformance):
    """What an author writes; here with few cases."""

    backend = "torch_reference"
    dtypes = (torch.bfloat16,)
    cases = (BY_ID["named/d8"], BY_ID["named/gqa_6_3"])
    device = "cpu"

    def test_ids_are_case_and_dtype(self, request: pytest.FixtureRequest) -> None:
        ids = {item.name for item in request.session.items if item.parent is request.node.parent}
        assert {"test_case[named/d8-bfloat16]", "test_case[named/gqa_6_3-bfloat16]"} <= ids


def test_the_readmes_ten_lines_work(tmp_path: Path) -> None:
    readme = Path(flashdispatch_conformance.__file__).with_name("README.md").read_text(encoding="utf-8")
    lines = readme.split("```python\n")[1].split("```")[0]
    lines = lines.replace("my_package.kernels", "flashdispatch_backends.torch_reference")
    (tmp_path / "test_my_backend.py").write_text(lines, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "d128-float16 or gqa_6_3 or minimum",
    ]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=240)
    assert "2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr


def test_the_minimum_says_when_no_declared_device_is_here(register: Register) -> None:
    class Elsewhere(AttentionConformance):
        backend = register(Fake(), replace(SUPPORT, devices=frozenset({"xpu"})))
        device = "cpu"

    with pytest.raises(AssertionError, match=r"declares devices \['xpu'\], the suite ran on 'cpu'"):
        Elsewhere().test_the_minimum_is_supported()


def test_the_minimum_says_what_was_refused(register: Register) -> None:
    class NoLse(AttentionConformance):
        backend = register(Fake(), replace(SUPPORT, lse=False, lse_grad=False))
        device = "cpu"

    with pytest.raises(AssertionError, match="lse refused: LSE"):
        NoLse().test_the_minimum_is_supported()


def test_the_minimum_needs_a_16_bit_dtype(register: Register) -> None:
    class Float32Only(AttentionConformance):
        backend = register(Fake())
        device = "cpu"
        dtypes = (torch.float32,)

    with pytest.raises(AssertionError, match="name one of them in `dtypes`"):
        Float32Only().test_the_minimum_is_supported()


def test_an_authors_test_module_fails_skips_and_passes(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent(
            """
            import flashdispatch
            import torch
            from flashdispatch_backends import torch_reference
            from flashdispatch_conformance import AttentionConformance
            from flashdispatch_conformance.cases import BY_ID
            from flashdispatch_registry import BackendSpec, Forward, HeadDims, Support

            class Mine:
                @staticmethod
                def forward(problem, q, k, v, extras):
                    out, lse, saved = torch_reference.forward(problem, q, k, v, extras)
                    return Forward(out * (1.1 if problem.head_dim == 96 else 1.0), lse, saved)

                backward, prepare = staticmethod(torch_reference.backward), staticmethod(torch_reference.prepare)

            support = Support(
                dtypes=frozenset({torch.float16}), head_dims=HeadDims(), devices=frozenset({"cpu"}), lse=True,
                causal=frozenset({"bottom_right"}),
            )
            flashdispatch.register(BackendSpec(name="mine", factory="test_mine:Mine", support=support))

            class TestMine(AttentionConformance):
                backend = "mine"
                dtypes = (torch.float16,)
                cases = [BY_ID[f"named/{name}"] for name in ("length_63", "d96", "gqa_6_3")]
                device = "cpu"
            """
        ),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=240)
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "PASSED test_mine.py::TestMine::test_case[named/length_63-float16]" in done.stdout
    assert "PASSED test_mine.py::TestMine::test_the_minimum_is_supported" in done.stdout
    assert "FAILED test_mine.py::TestMine::test_case[named/d96-float16]" in done.stdout
    assert "out refused: GQA" in done.stdout
    assert "out: rms of z is" in done.stdout  # the assert is explained by the report
