"""A tiny causal language model on the bytes of a text, trained through `flashdispatch.attention`.

Small, but all of it is real: RoPE, grouped-query attention (4 query heads share 2 key/value heads), RMSNorm, AdamW. How
well it does is measured against two yardsticks that are counted from the text itself, not against a taste:

    byte entropy   -Σ p(b) log p(b)            the best loss for a model that knows only how often each byte occurs
    pair entropy   -Σ p(a, b) log p(b | a)     the best loss for a model that sees only the byte before

In this model attention is the only way for one position to know of another. A loss below the pair entropy is therefore
something that only attention, forward and backward, can have brought about.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import flashdispatch
from flashdispatch.demo.errors import DemoFailedError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: q (B, S, Hq, D), k and v (B, S, Hkv, D) -> (B, S, Hq, D)."""

BYTES = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model and its batches."""

    layers: int = 2
    width: int = 96
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    context: int = 64
    """S, in bytes."""
    batch: int = 8


def attend_dispatched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Through flashdispatch: this line is the whole integration."""
    return flashdispatch.attention(q, k, v, causal=True)


def attend_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own, for comparison."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, D)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    """One pre-norm layer: attention, then a two-layer perceptron."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        q_width, kv_width = sizes.heads_q * sizes.head_dim, sizes.heads_kv * sizes.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, q_width + 2 * kv_width, bias=False)
        self.out = nn.Linear(q_width, sizes.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width)
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """From x (B, S, C) to (B, S, C)."""
        heads_q, heads_kv = self.sizes.heads_q, self.sizes.heads_kv
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.sizes.head_dim))  # (B, S, Hq + 2 Hkv, D)
        q, k, v = heads.split((heads_q, heads_kv, heads_kv), dim=2)
        mixed = attend(rotate(q, rope), rotate(k, rope), v)  # (B, S, Hq, D)
        x = x + self.out(mixed.flatten(2))
        mlp: Tensor = self.mlp(self.norm2(x))
        return x + mlp


class TinyLM(nn.Module):
    """Bytes in, logits for the next byte out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(BYTES, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """From tokens (B, S) int64 to logits (B, S, 256). The embedding is also the output layer."""
        rope = rope_table(tokens.shape[1], self.sizes.head_dim, tokens.device)
        x = self.embed(tokens)  # (B, S, C)
        for block in self.blocks:
            x = block(x, rope, attend)
        return functional.linear(self.norm(x), self.embed.weight)


def rope_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The cosines and sines, each (S, 1, D/2), of rotary position embedding (arXiv 2104.09864)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)  # (D/2,)
    angles = torch.arange(length, device=device)[:, None, None] * frequencies  # (S, 1, D/2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (x_i, x_{i + D/2}) of x (B, S, H, D) by its position's angle."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)  # (B, S, H, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def byte_entropy(data: bytes) -> float:
    """In nats."""
    return _entropy(Counter(data))


def pair_entropy(data: bytes) -> float:
    """Entropy of a byte given the byte before it, in nats."""
    return _entropy(Counter(pairwise(data))) - _entropy(Counter(data[:-1]))


def _entropy(counts: Counter[int] | Counter[tuple[int, int]]) -> float:
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


class Trainer:
    """A model, its text and its optimizer.

    The first weights and the batches follow from `seed`; the learning rate and the number of steps follow the clock, so
    losses differ a little from run to run.
    """

    def __init__(self, data: bytes, device: torch.device, *, sizes: Sizes | None = None, seed: int = 1) -> None:
        self.sizes = sizes or Sizes()
        if len(data) < 4 * self.sizes.context:
            raise DemoFailedError(
                f"the text has {len(data)} bytes; training needs at least {4 * self.sizes.context} (--text another)"
            )
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        self.device = device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = TinyLM(self.sizes).to(device)
        self.draw = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)

    def batch(self) -> Tensor:
        """Random stretches of the text, (B, S + 1)."""
        span = self.sizes.context + 1
        starts = torch.randint(len(self.data) - span + 1, (self.sizes.batch, 1), generator=self.draw)
        return self.data[starts + torch.arange(span)].to(self.device)

    def loss(self, batch: Tensor, attend: Attend) -> Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        with self._precision():
            logits = self.model(batch[:, :-1], attend)
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def _precision(self) -> AbstractContextManager[object]:
        """bfloat16 on a GPU, where the fast kernels are; float32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors such as the model gives to its attention while training, for `flashdispatch.explain`."""
        sizes = self.sizes
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

        def like(heads: int) -> Tensor:
            shape = (sizes.batch, sizes.context, heads, sizes.head_dim)
            return torch.empty(shape, dtype=dtype, device=self.device, requires_grad=True)

        return like(sizes.heads_q), like(sizes.heads_kv), like(sizes.heads_kv)

    def gradient_difference(self) -> float:
        """Relative difference of one float32 batch's gradients, through flashdispatch and through PyTorch's SDPA."""
        batch = self.batch()
        gradients = []
        for attend in (attend_dispatched, attend_torch):
            loss = functional.cross_entropy(self.model(batch[:, :-1], attend).flatten(0, 1), batch[:, 1:].flatten())
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.model.parameters()))]))
        ours, torchs = gradients
        return float((ours - torchs).norm() / torchs.norm())

    def train(self, seconds: float, *, min_steps: int = 120, max_steps: int = 2000) -> Iterator[float]:
        """Trains for `seconds`, but no fewer than `min_steps`; yields each step's loss.

        The learning rate falls to zero with the time that is left. A first step is thrown away before the clock starts:
        on a GPU it compiles.
        """
        self.loss(self.batch(), attend_dispatched).backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        start = time.monotonic()
        for step in range(max_steps):
            done = min(max((time.monotonic() - start) / seconds, step / max_steps), 1.0)
            if done >= 1.0 and step >= min_steps:
                return
            for group in self.optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * max(1.0 - done, 0.05)
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(self.batch(), attend_dispatched)
            loss.backward()  # type: ignore[no-untyped-call]  # likewise
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            yield loss.item()

    @torch.no_grad()
    def write(self, prompt: str, length: int) -> str:
        """Continues `prompt` by `length` bytes, sampled at temperature 0.6."""
        tokens = torch.frombuffer(bytearray(prompt.encode()), dtype=torch.uint8).long()
        for _ in range(length):
            seen = tokens[None, -self.sizes.context :].to(self.device)  # (1, S)
            with self._precision():
                logits = self.model(seen, attend_dispatched)[0, -1]
            chances = (logits.float().cpu() / 0.6).softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(chances, 1, generator=self.draw)))
        return bytes(tokens.tolist()).decode(errors="replace")
