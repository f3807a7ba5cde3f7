"""What a compiled kernel depends on beside the GPU: everything else is an argument of its launch."""

from __future__ import annotations

from dataclasses import dataclass

from flashdispatch_backends.tilelang_fa2.tiles import padded, splits
from flashdispatch_registry.tile_table import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One kernel in one form."""

    kernel: str
    """"forward", "delta", "total", "dq" or "dkdv"."""
    dtype: str
    """"float16" or "bfloat16"."""
    head_dim: int
    """D, as it is in memory."""
    head_dim_v: int
    shape: Shape
    tma: bool
    """Tiles are loaded and results stored by TMA: from sm_90 on, with strides and addresses in units of 16 bytes."""
    packed: bool = False
    """Sequences lie behind each other in one tensor, each from its own start."""
    q_lens: bool = False
    kv_lens: bool = False
    mask: str | None = None
    """The dtype of attn_mask."""
    softcap: bool = False
    natural: bool = False
    """Scores are natural, not in units of log 2: see scores.py."""
    plain: bool = True
    """A score is scale * q.k with scale > 0, and nothing else."""
    outputs: tuple[str, ...] = ()
    """Of the dK/dV kernel: which of "dk" and "dv" it makes."""
    lse: bool = True
    """The forward writes the LSE."""
    dlse: bool = False
    """The LSE has a gradient."""

    def __post_init__(self) -> None:
        if self.packed and self.tma:
            raise ValueError("TMA would read and write past the end of a packed sequence, where its neighbour begins")

    @property
    def block_d(self) -> int:
        """D on the chip."""
        return padded(self.head_dim)

    @property
    def block_dv(self) -> int:
        """Dv on the chip."""
        return padded(self.head_dim_v)

    @property
    def tile_name(self) -> str:
        """The kernel as tiles know it: "dk" and "dv" where dK and dV have a pass each."""
        split = self.outputs and splits(self.head_dim, self.head_dim_v)
        return "".join(self.outputs) if split else self.kernel
