"""Plans: what explain() says, what is cached, and what happens when the choice goes wrong."""

from __future__ import annotations

import json
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashdispatch
from flashdispatch import (
    FallbackError,
    FallbackWarning,
    NoBackendError,
    Plan,
    Problem,
    _plans,
    _registry,
    attention,
    explain,
)
from flashdispatch_registry import BackendSpec, HeadDims, Support


def test_explain_takes_what_attention_takes(qkv: Any) -> None:
    q, k, v = qkv(heads_kv=2, head_dim_v=8, dtype=torch.bfloat16, requires_grad=True)
    plan = explain(
        q, k, v, causal=True, window=(4, None), attn_mask=torch.ones(9, 9), sinks=torch.ones(4), softcap=3.0,
        dropout_p=0.1, return_lse=True, deterministic=True, scale=0.5,
    )  # fmt: skip
    assert plan.chosen == "torch_reference"
    assert plan.problem.describe() == (
        "cpu bfloat16, B2 Hq4 Hkv2 Sq9 Sk9 D16 Dv8, window(4, 0), float attn_mask (1, 1, 9, 9), sinks, softcap 3, "
        "dropout 0.1, scale 0.5, gradients of q, k, v, with LSE, deterministic, layout bshd"
    )


def test_explain_runs_nothing(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy")
    explain(*qkv(), backend="spy")
    assert spy.problems == []


def test_explain_answers_for_an_architecture_this_machine_has_not(qkv: Any, add_backend: Any) -> None:
    add_backend(
        "kernel", devices=frozenset({"cuda"}), min_arch="sm_80", priority={"sm_120": 70, "*": 10},
        impossible={"sm_100": "tcgen05 is not used"},
    )  # fmt: skip
    plan = explain(*qkv(), arch="sm_120")
    assert plan.chosen == "kernel"
    assert plan.candidate("kernel").arch_state == "untested"
    assert plan.candidate("kernel").priority == 70
    old = explain(*qkv(), arch="sm_75").candidate("kernel")
    assert old.arch_state == "impossible"
    assert [reason.code for reason in old.reasons] == ["ARCH_IMPOSSIBLE"]
    assert "sm_80" in old.reasons[0].allowed
    assert "tcgen05" in explain(*qkv(), arch="sm_100").candidate("kernel").reasons[0].allowed
    assert [reason.code for reason in explain(*qkv()).candidate("kernel").reasons] == ["DEVICE"]


def test_explain_works_on_fake_tensors() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 1024, 8, 64, dtype=torch.float64, device="cuda") for _ in range(3))
        plan = explain(q, k, v, causal=True, arch="sm_90")
    assert plan.problem.arch == "sm_90"
    assert plan.chosen == "torch_reference"  # nobody else takes float64


def test_explain_takes_a_problem(qkv: Any) -> None:
    problem = explain(*qkv()).problem
    assert explain(problem).problem == problem
    assert explain(problem, arch="sm_90").problem == problem.with_arch("sm_90")
    with pytest.raises(TypeError, match="only arch= and backend="):
        explain(problem, causal=True)


def test_a_plan_goes_to_json_and_its_problem_back(qkv: Any) -> None:
    plan = explain(*qkv(), causal="top_left", window=(2, 2), kv_lens=torch.ones(2, dtype=torch.int32))
    data = json.loads(json.dumps(plan.to_json()))
    assert data["chosen"] == "torch_reference"
    assert data["versions"]["torch"] == torch.__version__
    assert Problem.from_json(data["problem"]) == plan.problem


def test_a_plan_shows_itself_as_text_and_html(qkv: Any) -> None:
    plan = explain(*qkv())
    assert "torch_reference" in plan.table()
    assert "torch_reference" in plan._repr_html_()


def test_copies_and_casts_are_in_the_plan_with_their_bytes(qkv: Any) -> None:
    q, k, v = qkv()
    strided = q.transpose(1, 3).contiguous().transpose(1, 3)
    (copy,) = explain(strided, k, v).adapters
    assert (copy.name, copy.tensor, copy.bytes) == ("copy", "q", q.numel() * 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = explain(q, k, v)
    assert [(a.name, a.tensor, a.bytes) for a in plan.adapters] == [("cast", name, q.numel() * 2) for name in "qkv"]
    assert plan.problem.dtype is torch.bfloat16


def test_strides_of_a_dim_of_size_one_ask_for_no_copy() -> None:
    q = torch.randn(2, 5, 3, 1).as_strided((2, 5, 3, 1), (15, 3, 1, 7))
    assert explain(q, q, q).adapters == ()


def test_same_metadata_is_planned_once(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = _plans.select
    monkeypatch.setattr(_plans, "select", lambda *a, **k: made.append(1) or original(*a, **k))
    for _ in range(3):
        attention(*qkv(), causal=True)
    attention(*qkv(), causal=False)
    with torch.no_grad():
        attention(*qkv(requires_grad=True))
    attention(*qkv(requires_grad=True))
    assert len(made) == 4


def test_a_cached_plan_sees_grad_mode(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy")
    inputs = qkv(requires_grad=True)
    with torch.no_grad():
        assert not attention(*inputs, backend="spy").requires_grad
    assert attention(*inputs, backend="spy").requires_grad
    assert [problem.needs_grad for problem in spy.problems] == [(), ("q", "k", "v")]


def test_the_cache_is_bounded(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plans, "CACHE_LIMIT", 4)
    for seqlen in range(1, 12):
        attention(*qkv(seqlen_q=seqlen))
    assert len(_plans.cache) <= 4


def test_registering_a_better_backend_reaches_cached_calls(qkv: Any, add_backend: Any) -> None:
    inputs = qkv()
    attention(*inputs)
    spy = add_backend("better", priority={"*": 1})
    attention(*inputs)
    assert len(spy.problems) == 1
    flashdispatch.unregister("better")
    attention(*inputs)
    assert len(spy.problems) == 1


def test_only_what_was_registered_at_run_time_can_be_unregistered() -> None:
    with pytest.raises(flashdispatch.PluginError, match="was not registered at run time"):
        flashdispatch.unregister("torch_reference")
    with pytest.raises(flashdispatch.UnknownBackendError, match="no backend is called 'nobody'"):
        flashdispatch.unregister("nobody")


def test_a_backend_whose_code_fails_to_import_is_passed_over_with_its_reason(
    qkv: Any, add_backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    add_backend("broken", priority={"*": 99}, factory="no_such_module_at_all:backend", install="pip install it")
    inputs = qkv()
    attention(*inputs)
    plan = explain(*inputs)
    assert plan.chosen == "torch_reference"
    (reason,) = plan.candidate("broken").reasons
    assert reason.code == "LOAD_FAILED"
    assert "No module named 'no_such_module_at_all'" in reason.got
    assert reason.fix == "pip install it"
    assert "broken (no_such_module_at_all:backend) failed to load" in caplog.text
    with pytest.raises(flashdispatch.BackendUnsupportedError, match="LOAD_FAILED"):
        attention(*inputs, backend="broken")


def test_a_backend_that_lacks_a_function_is_refused(qkv: Any, add_backend: Any) -> None:
    add_backend("half", backend=object())
    with pytest.raises(flashdispatch.BackendUnsupportedError, match="lacks forward, backward, prepare"):
        attention(*qkv(), backend="half")


def test_an_error_inside_a_backend_keeps_its_type_and_says_where(qkv: Any, add_backend: Any) -> None:
    class Failing:
        def forward(self, *arguments: Any) -> Any:
            raise torch.OutOfMemoryError("tried to allocate")

        backward = prepare = forward

    add_backend("failing", backend=Failing())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        attention(*qkv(), backend="failing")
    assert "in the forward of backend failing, asked: cpu float32" in caught.value.__notes__[0]


def test_quantized_backends_are_never_chosen_unasked(qkv: Any, add_backend: Any) -> None:
    add_backend("eight_bit", priority={"*": 99}, numerics="quantized")
    plan = explain(*qkv())
    assert plan.chosen == "torch_reference"
    assert [reason.code for reason in plan.candidate("eight_bit").reasons] == ["NOT_AUTO"]
    assert explain(*qkv(), backend="eight_bit").chosen == "eight_bit"


def cuda_plan(qkv: Any, **changes: Any) -> Plan:
    """On a GPU, in float64: no kernel takes it, only the reference."""
    return explain(*qkv(dtype=torch.float64, **changes), arch="sm_90")


def test_an_unfused_backend_on_a_gpu_is_an_event(qkv: Any) -> None:
    assert "not a fused kernel" in (cuda_plan(qkv).fallback or "")
    assert explain(*qkv()).fallback is None  # on a CPU it is the normal choice


def test_fallback_warns_once_per_class(qkv: Any) -> None:
    with pytest.warns(FallbackWarning, match="FLASHDISPATCH_FALLBACK=allow accepts it"):
        _plans._fallback_event(cuda_plan(qkv))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _plans._fallback_event(cuda_plan(qkv, seqlen_q=33))
    with pytest.warns(FallbackWarning):
        _plans._fallback_event(explain(*qkv(dtype=torch.float64), arch="sm_90", causal=True))


def test_fallback_error_refuses_and_explain_says_so(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = _plans.ask(None)
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "error")
    plan = cuda_plan(qkv)
    assert plan.chosen is None
    assert [reason.code for reason in plan.candidate("torch_reference").reasons] == ["FALLBACK"]
    with pytest.raises(FallbackError, match="FLASHDISPATCH_FALLBACK=error refuses it") as caught:
        _plans.commit(plan.problem, asked, None)
    assert caught.value.plan == plan
    assert explain(*qkv(), arch="sm_90", backend="torch_reference").chosen == "torch_reference"
    monkeypatch.setenv("FLASHDISPATCH_FALLBACK", "allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _plans.commit(plan.problem, asked, None)[0].chosen == "torch_reference"


def test_a_forced_slow_backend_is_no_event(qkv: Any) -> None:
    assert explain(*qkv(), arch="sm_90", backend="torch_reference").fallback is None


def test_prepare_compiles_ahead_and_returns_the_plan(qkv: Any, add_backend: Any) -> None:
    spy = add_backend("spy")
    plan = flashdispatch.prepare(*qkv(), causal=True, backend="spy")
    assert plan.chosen == "spy"
    assert spy.prepared == [plan.problem]
    assert spy.problems == []
    flashdispatch.prepare(plan.problem, backend="spy")
    assert len(spy.prepared) == 2
    with pytest.raises(flashdispatch.BackendUnsupportedError, match="DEVICE"):
        flashdispatch.prepare(plan.problem.with_arch("xpu"), backend="spy")


def test_nobody_can_run_it_says_everybodys_reasons(qkv: Any, add_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDISPATCH_DISABLE", "torch_reference")
    add_backend("half_only", dtypes=frozenset({torch.float16}), backward=False, attn_mask_grad=False, sinks_grad=False,
                lse_grad=False, deterministic=False)  # fmt: skip
    with pytest.raises(NoBackendError) as caught:
        attention(*qkv(requires_grad=True))
    message = str(caught.value)
    assert "torch_reference (flashdispatch" in message
    assert "DTYPE: dtype is float32; takes float16 (fix: cast q, k and v to float16)" in message
    assert "BACKWARD: needs_grad is q, k, v; takes forward only" in message


def test_backends_lists_what_is_ready_here(add_backend: Any) -> None:
    add_backend("gpu_only", devices=frozenset({"cuda"}))
    add_backend("needs_more", requires=("no-such-distribution>=3",), install="pip install more")
    status = {backend.name: backend for backend in flashdispatch.backends()}
    assert status["torch_reference"].ready
    assert status["torch_reference"].distribution == "flashdispatch"
    if not torch.cuda.is_available():
        assert [reason.code for reason in status["gpu_only"].reasons] == ["DEVICE"]
    (missing,) = status["needs_more"].reasons
    assert (missing.code, missing.fix) == ("DEP_MISSING", "pip install more")


def test_a_backend_registered_while_a_plan_is_made_is_seen_by_the_next_call(qkv: Any, add_backend: Any) -> None:
    added = []

    def slow(problem: Problem) -> Any:
        if not added:
            added.append(add_backend("better", priority={"*": 100}))
        return ()

    add_backend("slow", priority={"*": 50}, why_not=slow)
    inputs = qkv()
    attention(*inputs)
    attention(*inputs)
    assert len(added[0].problems) == 1


def test_unregistering_after_the_plan_was_made_makes_another(qkv: Any, add_backend: Any) -> None:
    add_backend("gone", priority={"*": 50})
    inputs = qkv()
    registry = _registry.registry()
    plan = explain(*inputs)
    assert plan.chosen == "gone"
    flashdispatch.unregister("gone")
    with pytest.raises(flashdispatch.BackendLoadError, match="not registered any more"):
        registry.load("gone")
    attention(*inputs)


def test_a_plan_prints_as_its_table(qkv: Any) -> None:
    plan = explain(*qkv())
    assert str(plan) == plan.table()


@pytest.mark.parametrize(("arch", "hint"), [("h100", ""), ("sm90", "sm_90"), ("SM-120", "sm_120"), ("banana", "")])
def test_a_name_that_is_no_architecture_is_refused(qkv: Any, arch: str, hint: str) -> None:
    with pytest.raises(
        flashdispatch.InvalidRequestError, match=f"got '{arch}'.{f' Did you mean .{hint}' * bool(hint)}"
    ):
        explain(*qkv(), arch=arch)
    with pytest.raises(flashdispatch.InvalidTypeError, match="arch must be a string"):
        explain(*qkv(), arch=90)  # type: ignore[arg-type]


def test_arguments_that_do_not_exist_are_named(qkv: Any) -> None:
    with pytest.raises(
        flashdispatch.InvalidTypeError, match="attention\\(\\) has no argument is_causal; it has causal"
    ):
        explain(*qkv(), is_causal=True)
    with pytest.raises(flashdispatch.InvalidTypeError, match="for q's own device"):
        flashdispatch.prepare(*qkv(), arch="sm_90")


def test_wrong_things_given_to_the_registry_are_refused_in_words() -> None:
    with pytest.raises(flashdispatch.InvalidTypeError, match="takes a BackendSpec, got NoneType"):
        flashdispatch.register(None)  # type: ignore[arg-type]
    for name in ("auto", 5):
        with pytest.raises(flashdispatch.UnknownBackendError, match=f"no backend is called {name!r}"):
            flashdispatch.unregister(name)  # type: ignore[arg-type]


def test_a_factory_or_why_not_that_exits_harms_nobody(
    qkv: Any, add_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(problem: Problem) -> Any:
        raise SystemExit(3)

    add_backend("leaving", priority={"*": 50}, why_not=leave)
    assert explain(*qkv()).candidate("leaving").reasons[0].code == "WHY_NOT_RAISED"
    add_backend("exiting", priority={"*": 40}, factory="antigravity_exits:backend")
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name: (_ for _ in ()).throw(SystemExit(4)) if "exits" in name else __import__(name),
    )
    attention(*qkv(), backend="auto")
    assert explain(*qkv()).candidate("exiting").reasons[0].code == "LOAD_FAILED"


def test_a_mask_that_autocast_casts_is_in_the_plan(qkv: Any) -> None:
    q, k, v = (tensor.half() for tensor in qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = explain(q, k, v, attn_mask=torch.zeros(9, 9).half())
    assert [(adapter.tensor, adapter.bytes) for adapter in plan.adapters][-1] == ("attn_mask", 9 * 9 * 2)


def test_unregistering_in_four_threads_at_once_raises_only_what_is_documented() -> None:
    spec = BackendSpec(
        name="racing", factory="nowhere", support=Support(dtypes=frozenset({torch.float32}), head_dims=HeadDims())
    )
    others: list[BaseException] = []

    def race() -> None:
        for _ in range(300):
            try:
                flashdispatch.register(spec)
                flashdispatch.unregister("racing")
            except (flashdispatch.PluginError, flashdispatch.UnknownBackendError):
                continue
            except BaseException as error:  # noqa: BLE001  whatever else it is, the test must see it
                others.append(error)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "racing" in [backend.name for backend in flashdispatch.backends()]:
        flashdispatch.unregister("racing")
    assert others == []


@pytest.mark.parametrize("field", ["memory", "numerics"])
def test_a_spec_with_an_unknown_word_is_refused(add_backend: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be one of .*, got 'banana'"):
        add_backend("odd", **{field: "banana"})


def test_the_versions_of_a_plan_are_its_own_copy(qkv: Any) -> None:
    explain(*qkv()).to_json()["versions"].clear()
    assert explain(*qkv()).to_json()["versions"]["torch"] == torch.__version__


def test_what_backends_says_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(flashdispatch.backends())) == flashdispatch.backends()
