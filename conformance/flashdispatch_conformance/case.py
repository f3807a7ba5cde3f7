"""What a case is: one attention problem with the values and the memory of its tensors, as frozen data.

A case says everything but the dtype, the device and the seed, and goes to JSON and back, so that one line replays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Values = Literal["normal", "shifted_v", "peaked", "logits_minus_120", "all_equal", "zeros", "outliers"]
"""Value families.

normal            N(0, 1)
shifted_v         N(0, 1), and V one higher: sums of one sign show the bias of a low-precision accumulator
peaked            q times 4, k times 2: a few weights near 1
logits_minus_120  every score near -120, where exp(0 - lse) of a key that should be masked overflows
all_equal         every query and every key the same vector, scores near 1000: the weights are all 1/n
zeros             q, k and v are 0
outliers          like activations: mean 0.5 and one channel in 16 eight times as large
"""

View = Literal[
    "contiguous", "transposed", "sliced", "padded_rows", "every_other", "unaligned", "expanded_batch", "expanded_heads",
    "last_dim_strided", "expanded_all",
]  # fmt: skip
"""How a tensor lies in its storage. NaN stands everywhere that is not part of it.

contiguous        dense in the caller's order
transposed        dense in the other layout's order: (B, H, S, D) memory seen as (B, S, H, D), or the reverse
sliced            the middle heads of a tensor with three times as many, like q of packed qkv
padded_rows       rows of D + 8
every_other       every other sequence of a batch twice as large (``x[::2]``)
unaligned         contiguous, but one element past an aligned address
expanded_batch    stride 0 over the batch
expanded_heads    stride 0 over the heads
last_dim_strided  stride 2 in the last dim: the one form that has to be copied
expanded_all      one number, stride 0 everywhere: what ``out.sum().backward()`` sends
"""

MaskPattern = Literal[
    "random", "all_true", "all_false", "first_half", "empty_rows", "band", "finfo_min", "finfo_min_row"
]
"""What a mask says.

random            bool: 7 in 10 visible. float: N(0, 1), and one in 10 -inf
all_true, all_false
first_half        the first 58 % of the keys
empty_rows        like random, and every fourth row sees nothing
band              i - 9 <= j <= i, the rest -inf or False: whole tiles of a row are hidden
finfo_min         float: 0, and in one of 3 entries the most negative number of the dtype
finfo_min_row     the same, and row 1 is full of it
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """An attn_mask: `shape` as the caller gives it, broadcastable to (B, Hq, Sq, Sk)."""

    shape: tuple[int, ...]
    kind: Literal["bool", "float", "float32"] = "bool"
    """"float" has q's dtype."""
    pattern: MaskPattern = "random"
    view: Literal["contiguous", "expanded", "padded_rows"] = "contiguous"
    """expanded: one number a row, with stride 0 over the keys."""
    grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. Forward, LSE and the gradients named by `grads` are all checked."""

    id: str
    why: str
    batch: int = 1
    heads: tuple[int, int] = (2, 2)
    """Hq, Hkv."""
    seqlens: tuple[int, int] = (64, 64)
    """Sq, Sk."""
    dims: tuple[int, int] = (64, 64)
    """D, Dv."""
    causal: bool | Literal["top_left"] = False
    window: tuple[int | None, int | None] | None = None
    mask: Mask | None = None
    alibi: Literal["heads", "batch"] | None = None
    """Slopes of shape (Hq,) or (B, Hq)."""
    sinks: bool = False
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | tuple[int, int] = 0
    """An int, or (seed, offset) given as a tensor."""
    layout: Literal["bshd", "bhsd"] = "bshd"
    deterministic: bool | None = None
    grads: tuple[Literal["q", "k", "v", "sinks"], ...] = ("q", "k", "v")
    """Inputs that want a gradient, besides a mask with `Mask.grad`; empty is a forward-only case."""
    dout: bool = True
    """A gradient arrives for the output."""
    dlse: bool = False
    """A gradient arrives for the LSE, which is then an output of the differentiable call."""
    values: Values = "normal"
    q_view: View = "contiguous"
    k_view: View = "contiguous"
    v_view: View = "contiguous"
    dout_view: View = "contiguous"

    @property
    def needs_grad(self) -> tuple[str, ...]:
        """Names of the inputs that want a gradient, in the order of `Problem.needs_grad`."""
        wanted = {*self.grads, *(("attn_mask",) if self.mask is not None and self.mask.grad else ())}
        return tuple(name for name in ("q", "k", "v", "attn_mask", "sinks") if name in wanted)
