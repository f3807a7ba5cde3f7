"""How a call is cut into tiles, what position means in a tile, and how tiles are read and written.

Everything about shapes, strides, dtypes and lengths is here, so that the algorithm beside it reads as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdispatch_backends.torch_reference.philox import dropped_weights
from flashdispatch_registry import Extras, Problem

TILE_ELEMENTS = 1 << 20
"""Most scores in a tile, over all sequences and heads: 4 MiB in float32, of which up to about six live at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How one call is cut into tiles, and how tiles are read and written. `rows` are queries, `keys` are keys.

    All sizes come from the tensors; no method reads a value of one.
    """

    problem: Problem
    extras: Extras
    device: torch.device
    dtype: torch.dtype
    """Of everything computed: float32, or float64 for float64."""
    batch: int
    heads: tuple[int, int]
    """Hkv and G."""
    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int
    bool_mask: Tensor | None
    float_mask: Tensor | None
    """The attn_mask, as one or the other; (B|1, Hq|1, Sq|1, Sk|1)."""
    slopes: Tensor | None
    """The ALiBi slopes, (Hkv, G, 1, 1) or (B, Hkv, G, 1, 1)."""
    q_lens: Tensor | None
    """(B, 1, 1, 1, 1), in 0..Sq."""
    kv_lens: Tensor | None
    """(B, 1, 1, 1, 1), in 0..Sk."""
    shift: int | Tensor
    """p(i) - i: a number, or (B, 1, 1, 1, 1) where it depends on the sequence."""

    @classmethod
    def of(cls, problem: Problem, q: Tensor, k: Tensor, extras: Extras) -> Tiles:
        """The tiles of a call. Square if they can be: that suits the band, and reads each K_j for many queries."""
        batch, seqlen_q, heads_q, _ = q.shape
        _, seqlen_k, heads_kv, _ = k.shape
        heads = (heads_kv, heads_q // max(1, heads_kv))
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

        per_head = max(1, TILE_ELEMENTS // max(1, batch * heads_q))
        block_n = max(1, min(seqlen_k, math.isqrt(per_head)))
        block_m = max(1, min(seqlen_q, per_head // block_n))
        block_n = max(1, min(seqlen_k, per_head // block_m))

        mask, slopes = extras.attn_mask, extras.alibi_slopes
        if slopes is not None:
            slopes = torch.unflatten(slopes.to(dtype), -1, heads)[..., None, None]
        q_lens = None if extras.q_lens is None else extras.q_lens.clamp(0, seqlen_q).view(batch, 1, 1, 1, 1)
        kv_lens = None if extras.kv_lens is None else extras.kv_lens.clamp(0, seqlen_k).view(batch, 1, 1, 1, 1)
        shift: int | Tensor = 0
        if problem.band.align == "bottom_right":
            shift = (seqlen_k if kv_lens is None else kv_lens) - (seqlen_q if q_lens is None else q_lens)
        return cls(
            problem=problem,
            extras=extras,
            device=q.device,
            dtype=dtype,
            batch=batch,
            heads=heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            block_m=block_m,
            block_n=block_n,
            bool_mask=mask if mask is not None and mask.dtype == torch.bool else None,
            float_mask=mask if mask is not None and mask.dtype != torch.bool else None,
            slopes=slopes,
            q_lens=q_lens,
            kv_lens=kv_lens,
            shift=shift,
        )

    def row_blocks(self) -> Iterator[slice]:
        """The query blocks."""
        for start in range(0, self.seqlen_q, self.block_m):
            yield slice(start, min(start + self.block_m, self.seqlen_q))

    def key_blocks(self, rows: slice) -> Iterator[slice]:
        """The key blocks in which the band shows at least one key to one of `rows`."""
        first, end = 0, self.seqlen_k
        if isinstance(self.shift, int):
            first, end = self.problem.band.key_range(rows.start, rows.stop - 1, self.seqlen_q, self.seqlen_k)
        for start in range(first, end, self.block_n):
            yield slice(start, min(start + self.block_n, end))

    def band_cuts(self, rows: slice, keys: slice) -> bool:
        """Whether the band may hide one of `keys` from one of `rows`."""
        band, shift = self.problem.band, self.shift
        if not isinstance(shift, int):
            return not band.is_full
        left = band.left is not None and keys.start < rows.stop - 1 + shift - band.left
        right = band.right is not None and keys.stop - 1 > rows.start + shift + band.right
        return left or right

    def index(self, block: slice) -> Tensor:
        """The numbers i or j of a block."""
        return torch.arange(block.start, block.stop, device=self.device)

    def distance(self, rows: slice, keys: slice) -> Tensor:
        """The signed distance j - p(i): (m, n), or (B, 1, 1, m, n) where positions depend on the sequence."""
        return self.index(keys) - self.index(rows)[:, None] - self.shift

    def dropped(self, rows: slice, keys: slice) -> Tensor | None:
        """Which weights dropout takes, bool (B, Hkv, G*m, n); None without dropout."""
        p, seed = self.problem.dropout_p, self.extras.dropout_seed
        if not p:
            return None
        if seed is None:
            raise ValueError("dropout needs extras.dropout_seed")
        heads = torch.arange(self.batch * math.prod(self.heads), device=self.device)  # b * Hq + h
        heads = heads.view(self.batch, *self.heads, 1, 1)
        return dropped_weights(seed, heads, rows, keys, p).flatten(2, 3)

    def load_rows(self, x: Tensor, rows: slice) -> Tensor:
        """A tile of q, out or dout: (B, Sq, Hq, D) -> (B, Hkv, G*m, D). Upcast first: a CPU crawls in 16 bit."""
        tile = torch.unflatten(x[:, rows].to(self.dtype), 2, self.heads)  # (B, m, Hkv, G, D)
        return tile.permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()

    def load_keys(self, x: Tensor, keys: slice) -> Tensor:
        """A tile of k or v: (B, Sk, Hkv, D) -> (B, Hkv, n, D), zero past kv_lens."""
        tile = x[:, keys].to(self.dtype).transpose(1, 2)
        if self.kv_lens is not None:
            tile = tile.masked_fill(self.index(keys)[:, None] >= self.kv_lens[..., 0], 0.0)
        return tile.contiguous()

    def load_column(self, x: Tensor, rows: slice) -> Tensor:
        """One number per query, of lse or dlse: (B, Hq, Sq) -> (B, Hkv, G*m, 1)."""
        return torch.unflatten(x[:, :, rows].to(self.dtype), 1, self.heads).flatten(2, 3)[..., None]

    def sink_column(self, rows: slice) -> Tensor:
        """The sink of each query's head: (Hq,) -> (B, Hkv, G*m, 1); -inf without sinks."""
        shape = (self.batch, *self.heads, rows.stop - rows.start)
        column = torch.full(shape, -math.inf, dtype=self.dtype, device=self.device)
        if self.extras.sinks is not None:
            column.copy_(self.extras.sinks.view(*self.heads, 1))
        return column.flatten(2, 3)[..., None]

    def store_rows(self, x: Tensor, rows: slice, tile: Tensor) -> None:
        """The way back of `load_rows`, rounding once."""
        torch.unflatten(x, 2, self.heads)[:, rows] = self.by_head(tile, rows).permute(0, 3, 1, 2, 4)

    def store_column(self, x: Tensor, rows: slice, column: Tensor) -> None:
        """The way back of `load_column`."""
        torch.unflatten(x, 1, self.heads)[..., rows] = self.by_head(column, rows)[..., 0]

    def by_head(self, tile: Tensor, rows: slice) -> Tensor:
        """(B, Hkv, G*m, n) -> (B, Hkv, G, m, n), a view."""
        return torch.unflatten(tile, 2, (self.heads[1], rows.stop - rows.start))

    def of_mask(self, mask: Tensor, rows: slice, keys: slice) -> Tensor:
        """The tile's part of a mask, a view: (B|1, Hq|1, Sq|1, Sk|1) -> (B|1, Hkv|1, G|1, m|1, n|1)."""
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        mask = mask[..., keys] if mask.shape[3] > 1 else mask
        return torch.unflatten(mask, 1, self.heads if mask.shape[1] != 1 else (1, 1))

    def zeros(self, shape: torch.Size) -> Tensor:
        """Where a gradient is summed up."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
