"""The demo, told in four chapters on a console. What it says holds, or it raises DemoFailedError."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

import flashdispatch
from flashdispatch.cli.machine import this_machine
from flashdispatch.demo import accuracy, sentence_model, tiny_lm, transformers_attention
from flashdispatch.demo.accuracy import TENSORS, YARDSTICK, Measured
from flashdispatch.demo.errors import require
from flashdispatch.demo.sentence_model import Batch, SentenceModel
from flashdispatch.demo.sentences import SENTENCES
from flashdispatch_registry.arch import arch_of
from flashdispatch_registry.problem import DTYPE_NAMES
from flashdispatch_registry.render import STYLES, Fact, facts_view, human_bytes, reasons_view

TOLERANCE = 1e-4
"""How far the sentence model's outputs may move, on real tokens, when its attention is replaced. They are of size 1."""
LAYER = 2
"""The layer whose Q, K and V chapter 4 looks at."""


def run_demo(console: Console, *, text: Path, seconds: float, device: torch.device) -> dict[str, Any]:
    """Runs the whole demo and returns its numbers, JSON-able.

    Args:
        console: where the story is told.
        text: what the tiny language model learns, any text file of a few hundred bytes or more.
        seconds: how long it learns.
        device: where everything runs.

    Raises:
        MissingPackageError: transformers or the package with the weights is not installed.
        DemoFailedError: something shown here is not true on this machine.
        FlashDispatchError: from the calls themselves.
    """
    start = time.monotonic()
    with _one_thread(device):
        summary: dict[str, Any] = _machine(console, device)
        model = _load(console, device)
        batch = sentence_model.tokenize(model, [sentence for _, sentence in SENTENCES])
        summary["sentence_model"] = _sentences(console, model, batch)
        summary["language_model"] = _language_model(console, text, seconds, device)
        summary["accuracy"] = _accuracy(console, model, batch)
    summary["seconds"] = time.monotonic() - start
    summary["verdict"] = _verdict(summary)
    console.print(Rule(style="dim"))
    console.print(Text.assemble(("✔ ", STYLES["good"]), (summary["verdict"], "bold")))
    return summary


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """The matrices here are so small that on a CPU more threads mostly wait for each other: long, on a busy one."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _chapter(console: Console, title: str, why: str) -> None:
    console.print(Rule(Text(title, "bold"), align="left", style="dim"))
    console.print(Padding(Text(why), (0, 0, 1, 0)))


def _indent(view: RenderableType, below: int = 1) -> Padding:
    return Padding(view, (0, 0, below, 2), expand=False)


def _machine(console: Console, device: torch.device) -> dict[str, Any]:
    _chapter(
        console,
        "1. This machine",
        "A backend is a set of kernels for one call, attention(q, k, v, ...). Which of them can run is known before "
        "anything runs, and a backend that can't says why.",
    )
    machine, backends = this_machine(), flashdispatch.backends()
    where = str(device) if str(device) == arch_of(device) else f"{device} ({arch_of(device)})"
    facts = [Fact("running on", where, "good"), Fact("system", machine.system)]
    facts += [
        Fact("GPU", f"{gpu.index}: {gpu.name}, {gpu.arch}, {human_bytes(gpu.memory_bytes)}", "good")
        for gpu in machine.gpus
    ]
    if not machine.gpus:
        facts.append(Fact("GPU", "none that torch can use", "quiet"))
    if machine.complaint:
        facts.append(Fact("", machine.complaint, "warn"))
    facts.append(
        Fact("versions", f"Python {machine.python}, torch {machine.torch} for {machine.runtime or 'CPU only'}")
    )
    console.print(_indent(facts_view(facts)))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("backend")
    table.add_column("here")
    for backend in backends:
        owner = f"{backend.distribution} {backend.version}".rstrip()
        here: RenderableType = Text("ready", STYLES["good"]) if backend.ready else reasons_view(backend.reasons)
        table.add_row(Text.assemble((backend.name, "bold"), "\n", (owner, "dim")), here)
    console.print(_indent(table))
    require(
        any(backend.ready for backend in backends), "no backend is ready on this machine; see `flashdispatch doctor`"
    )
    return {
        "machine": asdict(machine)
        | {"gpus": [asdict(gpu) for gpu in machine.gpus], "device": str(device), "arch": arch_of(device)},
        "backends": [
            {"name": b.name, "ready": b.ready, "reasons": [reason.to_json() for reason in b.reasons]} for b in backends
        ],
    }


def _load(console: Console, device: torch.device) -> SentenceModel:
    _chapter(
        console,
        "2. A pretrained sentence model with its attention replaced",
        "all-MiniLM-L6-v2 turns a sentence into a vector, such that sentences of similar meaning are close. It reads "
        "twelve sentences of very different lengths in one padded batch: once with its own attention, once with "
        "flashdispatch in every layer. If flashdispatch is exact, nobody can tell which was which.",
    )
    with console.status("loading the model from its Python package"):
        return sentence_model.load(device)


def _sentences(console: Console, model: SentenceModel, batch: Batch) -> dict[str, Any]:
    name = transformers_attention.register()
    own = sentence_model.hidden_states(model, batch, model.own_attention)
    ours = sentence_model.hidden_states(model, batch, name)
    unmasked = sentence_model.hidden_states_without_mask(model, batch)
    difference = sentence_model.difference(own, ours, batch.mask)
    forgotten = sentence_model.difference(own, unmasked, batch.mask)
    index, cosine = sentence_model.nearest(sentence_model.pool(ours, batch.mask))
    own_index, _ = sentence_model.nearest(sentence_model.pool(own, batch.mask))

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", expand=True)
    table.add_column("sentence", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("tokens", justify="right")
    table.add_column("nearest to it, by flashdispatch", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("cosine", justify="right")
    lens = batch.lens.tolist()
    for at, (_, sentence) in enumerate(SENTENCES):
        nearest = SENTENCES[int(index[at])][1]
        table.add_row(Text(sentence), str(lens[at]), Text(nearest), f"{float(cosine[at]):.2f}")
    console.print(Padding(table, (0, 0, 1, 2)))

    size, real = batch.mask.numel(), int(batch.mask.sum())
    rows, columns = batch.mask.shape
    exact = difference < TOLERANCE
    facts = [
        Fact("batch", f"{rows} sentences of up to {columns} tokens: {size - real} of {size} places are padding"),
        Fact(
            "difference",
            f"{difference:.1e} at most on real tokens, with flashdispatch instead of {model.own_attention!r} in six "
            f"layers (required: < {TOLERANCE:.0e})",
            "good" if exact else "bad",
        ),
        Fact(
            "a trap",
            f"{forgotten:.1e} when only the attention function is registered with transformers and not its mask "
            "function: padding is read as text, and nothing warns",
            "warn",
        ),
    ]
    console.print(_indent(facts_view(facts)))
    captured = sentence_model.attention_inputs(model, batch, LAYER)
    plan = flashdispatch.explain(captured.q, captured.k, captured.v, kv_lens=captured.lens)
    console.print(_indent(Text("Which kernels ran, and why: flashdispatch.explain(q, k, v, kv_lens=lens)", "dim")))
    console.print(_indent(plan))
    require(exact, f"the sentence model's outputs moved by {difference:.2e} on real tokens; allowed is {TOLERANCE:.0e}")
    require(bool((index == own_index).all()), "with flashdispatch a sentence has another nearest neighbour")
    return {
        "max_difference": difference,
        "tolerance": TOLERANCE,
        "max_difference_without_mask_function": forgotten,
        "tokens": lens,
        "nearest": index.tolist(),
        "cosine": [round(float(value), 4) for value in cosine],
        "backend": plan.chosen,
    }


def _language_model(console: Console, text: Path, seconds: float, device: torch.device) -> dict[str, Any]:
    data = text.read_bytes()
    _chapter(
        console,
        "3. A tiny language model, trained through flashdispatch",
        f"Forward and backward: a causal transformer learns the bytes of {text.name} ({len(data):,} bytes). In it "
        "attention is the only way for one position to know of another, so a loss below the entropy of byte pairs can "
        "only have come through attention, forward and backward.",
    )
    trainer = tiny_lm.Trainer(data, device)
    sizes = trainer.sizes
    gradients = trainer.gradient_difference()
    losses: list[float] = []
    columns = (
        TextColumn("  training"),
        BarColumn(bar_width=20),
        TextColumn("step {task.fields[step]:>4}"),
        TextColumn("loss {task.fields[loss]:.2f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=seconds, step=0, loss=0.0)
        for loss in trainer.train(seconds):
            losses.append(loss)
            done = min(progress.tasks[task].elapsed or 0.0, seconds)
            progress.update(task, completed=done, step=len(losses), loss=loss)
        progress.update(task, completed=seconds)
    first, last = _mean(losses[:3]), _mean(losses[-10:])
    byte_entropy, pair_entropy = tiny_lm.byte_entropy(data), tiny_lm.pair_entropy(data)
    written = trainer.write("The keeper", 120)
    plan = flashdispatch.explain(*trainer.example_inputs(), causal=True)
    require(plan.chosen is not None, "no backend can run the language model's attention")
    below = last < pair_entropy
    without = "it is below, so attention is learning" if below else "not yet below; --seconds gives it more time"
    facts = [
        Fact("", sparkline(losses, 60), "good"),
        Fact("loss", f"{first:.2f} → {last:.2f} nats per byte in {len(losses)} steps", "good"),
        Fact("", f"{byte_entropy:.2f} is the best that byte frequencies alone can do", "quiet"),
        Fact("", f"{pair_entropy:.2f} is the best without attention: {without}", "good" if below else "warn"),
        Fact("gradients", f"{gradients:.1e} relative difference to the same model on PyTorch's SDPA, in float32"),
        Fact(
            "attention",
            f"{sizes.heads_q} query heads share {sizes.heads_kv} key/value heads, causal, "
            f"{DTYPE_NAMES[plan.problem.dtype]}, forward and backward on {plan.chosen}",
        ),
        Fact("it writes", " ".join(written.split())),
    ]
    console.print(_indent(facts_view(facts)))
    require(last < byte_entropy, f"the loss fell to {last:.2f} only; byte frequencies alone give {byte_entropy:.2f}")
    require(
        gradients < TOLERANCE, f"the gradients differ from PyTorch's by {gradients:.2e}; allowed is {TOLERANCE:.0e}"
    )
    return {
        "text": text.name,
        "steps": len(losses),
        "first_loss": first,
        "last_loss": last,
        "byte_entropy": byte_entropy,
        "pair_entropy": pair_entropy,
        "below_pair_entropy": below,
        "gradient_difference": gradients,
        "losses": [round(loss, 4) for loss in losses],
        "backend": plan.chosen,
        "written": written,
    }


def _accuracy(console: Console, model: SentenceModel, batch: Batch) -> list[dict[str, Any]]:
    _chapter(
        console,
        "4. Every ready backend against float64",
        f"Q, K and V are the sentence model's own, from layer {LAYER + 1} of 6, and the truth is dense attention in "
        "float64. The padding is filled with NaN first: what is past a sequence's length must not matter. Columns: the "
        "largest error, its rms, and rms relative to the truth's; for gradients the worst of dQ, dK and dV. "
        f"{YARDSTICK} is the yardstick: exact means errors of the same size.",
    )
    measured: list[Measured] = []
    with console.status("measuring"):
        measured.extend(accuracy.measure(sentence_model.attention_inputs(model, batch, LAYER)))
    for dtype in accuracy.DTYPES:
        rows = [row for row in measured if row.dtype is dtype]
        console.print(_indent(_error_table(DTYPE_NAMES[dtype], rows)))
        for row in rows:
            if row.reasons:
                console.print(_indent(Text.assemble((row.backend, "bold"), " can't run this:"), 0))
                console.print(Padding(reasons_view(row.reasons), (0, 0, 1, 4), expand=False))
    ran = [row for row in measured if row.errors and row.backend != YARDSTICK]
    require(bool(ran), "no ready backend could run the sentence model's attention")
    wrong = ", ".join(f"{row.backend} ({DTYPE_NAMES[row.dtype]})" for row in ran if not row.passes)
    require(not wrong, f"errors above rounding size, see the table: {wrong}")
    return [row.to_json() for row in measured]


def _error_table(dtype: str, rows: Sequence[Measured]) -> Table:
    """Fits 80 columns: that is what a terminal has when nobody knows."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(dtype, overflow="fold")
    for column in ("out max", "rms", "rel", "grad max", "rms", "rel", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        yardstick = row.backend == YARDSTICK
        numbers = ["–"] * 6
        if row.errors:
            out, gradients = row.errors["out"], [row.errors[name] for name in TENSORS[1:]]
            worst = (
                max(e.max_abs for e in gradients),
                max(e.rms for e in gradients),
                max(e.relative for e in gradients),
            )
            numbers = [f"{value:.1e}" for value in (out.max_abs, out.rms, out.relative, *worst)]
        verdict = Text("exact", STYLES["good"]) if row.passes else Text("wrong" if row.errors else "", STYLES["bad"])
        table.add_row(Text(row.backend, "dim" if yardstick else "bold"), *numbers, "" if yardstick else verdict)
    return table


def _verdict(summary: dict[str, Any]) -> str:
    sentences, language = summary["sentence_model"], summary["language_model"]
    exact = dict.fromkeys(
        row["backend"] for row in summary["accuracy"] if row["passes"] and row["backend"] != YARDSTICK
    )
    return (
        f"Same embeddings to {sentences['max_difference']:.0e}, loss {language['first_loss']:.2f} → "
        f"{language['last_loss']:.2f}, exact to rounding: {', '.join(exact)}; in {summary['seconds']:.0f} s."
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of at most `width` blocks, each the mean of a stretch; the highest value fills a block."""
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [at * len(values) // width for at in range(width + 1)]
    means = [_mean(values[a:b]) for a, b in pairwise(cuts)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / span)] for mean in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
