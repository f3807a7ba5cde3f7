"""Which keys a query may see by position alone: causal and window, folded into one band.

Both arguments say the same kind of thing, so backends get one concept. For query i of sequence b with Sq_b queries and
Sk_b keys, the **position** is

    p(i) = i + Sk_b - Sq_b     bottom-right (the default, flash-attention >= 2.1's meaning of causal)
    p(i) = i                   top-left     (PyTorch SDPA's meaning of is_causal)

and key j is inside the band iff ``p(i) - left <= j <= p(i) + right``, both ends inclusive, None meaning no limit.
``causal=True`` is ``right = 0``. Everything else that hides a key (attn_mask, q_lens, kv_lens) is ANDed with the band.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Align = Literal["bottom_right", "top_left"]


@dataclass(frozen=True, slots=True)
class Band:
    """Keys visible by position: ``p - left <= j <= p + right``, inclusive; None is no limit on that side."""

    left: int | None = None
    right: int | None = None
    align: Align = "bottom_right"

    def __post_init__(self) -> None:
        for side, limit in (("left", self.left), ("right", self.right)):
            if limit is not None and limit < 0:
                raise ValueError(f"Band.{side} must be >= 0 or None, got {limit}")

    @classmethod
    def of(
        cls, *, causal: bool, align: Align = "bottom_right", window: tuple[int | None, int | None] | None = None
    ) -> Band:
        """The band of a call: causal caps the right side at 0, whatever the window allows."""
        left, right = window if window is not None else (None, None)
        return cls(left, 0 if causal else right, align)

    @property
    def is_full(self) -> bool:
        """True when position hides nothing."""
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """True when no query sees past its own position."""
        return self.right == 0

    @property
    def has_window(self) -> bool:
        """True for anything beyond plain causal: a left limit, or a right limit other than 0."""
        return self.left is not None or self.right not in (None, 0)

    def position(self, i: int, seqlen_q: int, seqlen_k: int) -> int:
        """p(i) for a sequence with these two lengths."""
        return i + seqlen_k - seqlen_q if self.align == "bottom_right" else i

    def key_range(self, first: int, last: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Half-open range of keys that at least one of the queries first..last (inclusive) sees; empty as (0, 0).

        A kernel skips every key block outside it.
        """
        lo = 0 if self.left is None else max(0, self.position(first, seqlen_q, seqlen_k) - self.left)
        hi = seqlen_k if self.right is None else min(seqlen_k, self.position(last, seqlen_q, seqlen_k) + self.right + 1)
        return (lo, hi) if lo < hi else (0, 0)

    def dense(self, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        """The meaning, spelled out: bool (Sq, Sk), True where query i sees key j. For tests, docs and small sizes."""
        i = torch.arange(seqlen_q)[:, None]
        j = torch.arange(seqlen_k)[None, :]
        p = i + (seqlen_k - seqlen_q) if self.align == "bottom_right" else i
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if self.left is not None:
            visible &= j >= p - self.left
        if self.right is not None:
            visible &= j <= p + self.right
        return visible

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        aligned = "" if self.align == "bottom_right" else " top_left"
        if not self.has_window:
            return f"causal{aligned}"
        return f"window({self.left}, {self.right}){aligned}"


FULL = Band()
"""Position hides nothing."""
