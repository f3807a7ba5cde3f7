"""What a compiled kernel depends on beside the GPU: everything else is an argument of its launch."""

from __future__ import annotations

from dataclasses import dataclass

from flashdispatch_backends.cuda_fa2 import tiles
from flashdispatch_registry.tile_table import Shape

MASK_KINDS = {None: 0, "bool": 1, "float16": 2, "bfloat16": 2, "float32": 3}
"""attn_mask's dtype as scores.cuh numbers it."""
ARGUMENT_BYTES = 432
"""The size of what a kernel is launched with, which arguments.cuh compares with its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One kernel in one form."""

    kernel: str
    """"forward", "dq" or "dkdv"."""
    dtype: str
    """"float16" or "bfloat16"."""
    block_d: int
    """D on the chip."""
    block_dv: int
    shape: Shape
    aligned: bool = True
    """Rows of what others made (q, k, v, out, dout) begin at multiples of 16 bytes: 16 are copied at once."""
    mask: str | None = None
    """The dtype of attn_mask."""
    paired_mask: bool = False
    """Neighbours along the keys lie side by side, and begin at multiples of two: they are read at once."""
    softcap: bool = False
    natural: bool = False
    """Scores are natural, not in units of log 2: see scores.cuh."""
    plain: bool = True
    """A score is scale * q.k with scale > 0, and nothing else."""
    outputs: tuple[str, ...] = ()
    """Of the dK/dV kernel: which of "dk" and "dv" it makes."""

    @property
    def source(self) -> str:
        """The file it is in."""
        return "forward.cu" if self.kernel == "forward" else "backward.cu"

    @property
    def entry(self) -> str:
        """The function's name."""
        return f"{self.kernel}_kernel"

    @property
    def sides(self) -> int:
        """See `tiles.sides`."""
        return tiles.sides(self.kernel, max(self.block_d, self.block_dv), self.shape)

    @property
    def threads(self) -> int:
        """Of one block."""
        return 32 * self.shape.num_warps

    @property
    def shared_bytes(self) -> int:
        """Of one block."""
        return tiles.shared_bytes(self.kernel, self.block_d, self.block_dv, self.shape, natural=self.natural)

    @property
    def options(self) -> tuple[str, ...]:
        """The macros of arguments.cuh, as NVRTC takes them."""
        macros = {
            "BLOCK_M": self.shape.block_m, "BLOCK_N": self.shape.block_n, "NUM_WARPS": self.shape.num_warps,
            "NUM_STAGES": self.shape.num_stages, "SIDES": self.sides, "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv, "BFLOAT16": self.dtype == "bfloat16", "ALIGNED": self.aligned,
            "MASK": MASK_KINDS[self.mask], "PAIRED_MASK": self.paired_mask, "SOFTCAP": self.softcap,
            "NATURAL": self.natural, "PLAIN": self.plain, "DQ": self.kernel == "dq",
            "MAKES_DK": "dk" in self.outputs, "MAKES_DV": "dv" in self.outputs, "ARGUMENT_BYTES": ARGUMENT_BYTES,
        }  # fmt: skip
        return tuple(f"-D{name}={int(value)}" for name, value in macros.items())
