"""The grids: which problems are measured. `--grid NAME` or several as `NAME,NAME`; `main` is the default.

| grid | what |
|---|---|
| `main` | docs' main table: bf16, 16k tokens, hidden 2048, D 64/128/256, S 1k/4k/16k, full and causal, fwd and bwd |
| `fp16` | the same in fp16 |
| `fp32` | IEEE float32, 8k tokens, D 64/128, S 1k/4k, fwd and bwd |
| `extra` | other head dims, GQA, windows, softcap, padding, short and long sequences; fwd and bwd |
| `smoke` | tiny, also on a CPU: does the harness work? Its times mean nothing |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashdispatch_registry.masks import Band

from .rows import Direction

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS, HIDDEN = 16384, 2048
BOTH: tuple[Direction, ...] = ("fwd", "bwd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention problem of a benchmark. Letters as in the Problem of the registry."""

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    kv_lens: tuple[int, ...] | None = None
    """True key lengths of a padded batch."""

    @classmethod
    def of(cls, dtype: str, batch: int, heads: int, seqlen: int, head_dim: int, *, causal: bool = True) -> Case:
        """The usual kind: one length, one head dim, as many KV heads as query heads."""
        return cls(
            dtype=dtype, batch=batch, heads_q=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_k=seqlen,
            head_dim=head_dim, head_dim_v=head_dim, causal=causal,
        )  # fmt: skip

    @property
    def band(self) -> Band:
        """causal and window as one band."""
        return Band.of(causal=self.causal, window=self.window)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_kv

    @property
    def line(self) -> str:
        """All that `column` and the dtype leave out, but for batch and heads of plain multi-head attention."""
        words = [f"D{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")]
        if self.group > 1:
            words.append(f"H{self.heads_q}k{self.heads_kv}")
        band = self.band
        limits = ["" if limit is None else str(limit) for limit in (band.left, band.right)]
        words.append("full" if band.is_full else "window" + ",".join(limits) if band.has_window else "causal")
        if self.softcap is not None:
            words.append(f"softcap{self.softcap:g}")
        if self.kv_lens is not None:
            words.append("kv_lens" + ",".join(map(str, self.kv_lens)))
        return " ".join(words)

    @property
    def column(self) -> str:
        """The length."""
        return f"S{self.seqlen_q}" + (f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else "")

    @property
    def id(self) -> str:
        """Stable and readable: what rows and test names carry."""
        heads = () if self.group > 1 else (f"H{self.heads_q}",)
        return "-".join((self.dtype, f"B{self.batch}", *heads, self.column, *self.line.split(" ")))

    def pairs(self) -> float:
        """(query, key) pairs of one head, all sequences. Causal counts half the square; a window exactly."""
        n, m = self.seqlen_q, self.seqlen_k
        if self.kv_lens is not None:
            if not self.band.is_full:
                raise ValueError("kv_lens is counted for the full mask only")
            return float(n * sum(self.kv_lens))
        if self.band.is_full:
            one = float(n * m)
        elif not self.band.has_window and m >= n:
            one = n * (m - n) + n * n / 2
        else:
            ranges = (self.band.key_range(i, i, n, m) for i in range(n))
            one = float(sum(last - first for first, last in ranges))
        return self.batch * one

    def flops(self, direction: Direction) -> float:
        """Two GEMMs forward; backward 2.5 times that, whatever an implementation recomputes."""
        forward = 2.0 * self.heads_q * (self.head_dim + self.head_dim_v) * self.pairs()
        return forward if direction == "fwd" else 2.5 * forward


Grid = tuple[tuple[Case, Direction], ...]


def grid(name: str) -> Grid:
    """The cases of a grid with their directions. Raises ValueError for an unknown name."""
    if name not in GRIDS:
        raise ValueError(f"no grid is called {name!r}; there are {', '.join(GRIDS)}")
    return GRIDS[name]


def _square(dtype: str, tokens: int, dims: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[Case]:
    for dim in dims:
        for causal in (False, True):
            for length in lengths:
                yield Case.of(dtype, tokens // length, HIDDEN // dim, length, dim, causal=causal)


def _extra() -> Iterator[Case]:
    for dim, heads in ((80, 32), (96, 32), (192, 16)):
        yield Case.of("bf16", 4, heads, 4096, dim)
    yield replace(Case.of("bf16", 4, 16, 4096, 192), head_dim_v=128)
    yield replace(Case.of("bf16", 2, 32, 8192, 128), heads_kv=8)
    for dim in (64, 128):
        yield replace(Case.of("bf16", 2, HIDDEN // dim, 8192, dim), window=(1023, 0))
    base = Case.of("bf16", 4, 16, 4096, 128)
    yield replace(base, softcap=30.0)
    yield replace(base, causal=False, kv_lens=(3072, 4096, 2048, 1024))
    yield Case.of("bf16", 32, 32, 512, 64)
    for causal in (False, True):
        yield Case.of("bf16", 32, 16, 512, 128, causal=causal)
    yield Case.of("bf16", 2, 16, 8192, 128)


def _smoke() -> Iterator[Case]:
    tiny = Case.of("fp32", 2, 4, 48, 16)
    yield from (tiny, replace(tiny, causal=False, kv_lens=(31, 48)))
    yield replace(tiny, heads_kv=2, window=(15, 0), softcap=20.0)


def _with(directions: tuple[Direction, ...], cases: Iterator[Case]) -> Grid:
    listed = tuple(cases)
    return tuple((case, direction) for direction in directions for case in listed)


GRIDS: dict[str, Grid] = {
    "main": _with(BOTH, _square("bf16", TOKENS, (64, 128, 256), (1024, 4096, 16384))),
    "fp16": _with(BOTH, _square("fp16", TOKENS, (64, 128, 256), (1024, 4096, 16384))),
    "fp32": _with(BOTH, _square("fp32", TOKENS // 2, (64, 128), (1024, 4096))),
    "extra": _with(BOTH, _extra()),
    "smoke": _with(BOTH, _smoke()),
}
