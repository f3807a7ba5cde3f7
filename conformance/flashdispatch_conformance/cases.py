"""The named cases: small problems, each for one reason, with ids that never change.

A case says everything but the dtype, the device and the seed. Ids are public: they are the same in pytest, in reports
and in bug reports, so a case may be added but not renamed. `why` names the edge, the model or the public report that
the case stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
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


NAMED: tuple[Case, ...] = (
    # Lengths and tile tails
    Case(id="named/length_1", why="S = 1: one query, one key", seqlens=(1, 1)),
    Case(id="named/length_63", why="S = 63: one short of a tile", seqlens=(63, 63), causal=True),
    Case(id="named/length_64", why="S = 64: exactly a tile", causal=True, values="shifted_v"),
    Case(id="named/length_65", why="S = 65: a tile and one row", seqlens=(65, 65), causal=True),
    Case(
        id="named/length_704_minus_120",
        why="pytorch/pytorch#196678: S % 128 = 64 with every score near -120 made dQ NaN",
        heads=(1, 1),
        seqlens=(704, 704),
        mask=Mask(shape=(1, 1, 704, 704), pattern="all_true"),
        values="logits_minus_120",
    ),
    Case(
        id="named/length_137",
        why="meta-pytorch/attention-gym#50: 128 rows right, the last 9 wrong",
        heads=(1, 1),
        seqlens=(137, 137),
        causal=True,
    ),
    Case(
        id="named/length_192_d16",
        why="jax-ml/jax#27224: right only for multiples of a block of 128",
        seqlens=(192, 192),
        dims=(16, 16),
    ),
    Case(
        id="named/keys_200_minus_120",
        why="flashinfer-ai/flashinfer#5090: keys past the end got weight exp(0)",
        seqlens=(33, 200),
        dims=(128, 128),
        values="logits_minus_120",
    ),
    Case(id="named/no_keys", why="Sk = 0: out 0, LSE -inf, gradients 0", seqlens=(5, 0)),
    Case(id="named/no_queries", why="Sq = 0: nothing comes out, dK and dV are 0", seqlens=(0, 5)),
    Case(
        id="named/batch_60",
        why="tile-ai/tilelang-ascend#949: wrong only with many blocks in the grid",
        batch=60,
        heads=(1, 1),
        seqlens=(17, 17),
        dims=(16, 16),
        causal=True,
    ),
    # Sq and Sk differ
    Case(id="named/cross_wide", why="Sq < Sk without a mask", seqlens=(45, 113)),
    Case(id="named/cross_tall", why="Sq > Sk without a mask", seqlens=(113, 45), values="shifted_v"),
    Case(
        id="named/causal_wide",
        why="ml-explore/mlx#2835: Sq < Sk, bottom-right: the last query sees every key",
        seqlens=(37, 101),
        causal=True,
    ),
    Case(
        id="named/causal_wide_top_left",
        why="ml-explore/mlx#2835: Sq < Sk, top-left: nobody sees the last keys, whose gradients are 0",
        seqlens=(37, 101),
        causal="top_left",
    ),
    Case(
        id="named/causal_tall",
        why="Dao-AILab/flash-attention#1778: Sq > Sk, bottom-right: the first rows see nothing",
        seqlens=(101, 37),
        causal=True,
    ),
    Case(
        id="named/causal_tall_top_left",
        why="Sq > Sk, top-left: the last rows see every key",
        seqlens=(101, 37),
        causal="top_left",
    ),
    Case(
        id="named/causal_5_2",
        why="pytorch/pytorch#103082: rows 0 to 2 of (5, 2) see nothing",
        seqlens=(5, 2),
        dims=(8, 8),
        causal=True,
        dlse=True,
    ),
    Case(
        id="named/decode_minus_120",
        why="NVIDIA/cudnn-frontend#1072: one query, scores near -122, dK and dV were NaN",
        heads=(1, 1),
        seqlens=(1, 128),
        dims=(128, 128),
        values="logits_minus_120",
    ),
    Case(
        id="named/decode_causal",
        why="pytorch/pytorch#103082, thu-ml/SageAttention#372: one causal query sees every key, not key 0 alone",
        heads=(8, 2),
        seqlens=(1, 65),
        causal=True,
    ),
    Case(
        id="named/decode_lens_gqa",
        why="tile-ai/tilelang#290: decode with key lengths that are no multiple of a block",
        batch=3,
        heads=(8, 2),
        seqlens=(1, 100),
        kv_lens=(100, 37, 0),
        causal=True,
        grads=(),
    ),
    # Head dims
    Case(id="named/d8", why="the smallest head dim in use", seqlens=(65, 65), dims=(8, 8), causal=True),
    Case(
        id="named/d40",
        why="Dao-AILab/flash-attention#2552: D = 40 is padded inside a kernel, and Dv / 2 is no multiple of 32",
        seqlens=(65, 65),
        dims=(40, 40),
        causal=True,
    ),
    Case(id="named/d63", why="66RING/tiny-flash-attention#12: an odd head dim", seqlens=(33, 33), dims=(63, 63)),
    Case(id="named/d96", why="D = 96 (Phi-3)", seqlens=(65, 65), dims=(96, 96), causal=True),
    Case(id="named/d128", why="D = 128 (Llama, Qwen, Mistral)", seqlens=(65, 65), dims=(128, 128), causal=True),
    Case(
        id="named/d256_outliers",
        why="NVIDIA/TransformerEngine#3216: dQ wrong at D = 256, batch 2, outlier channels (Gemma)",
        batch=2,
        heads=(4, 1),
        seqlens=(33, 33),
        dims=(256, 256),
        causal=True,
        values="outliers",
    ),
    Case(
        id="named/d128_dv96",
        why="Dao-AILab/flash-attention#2552: dV wrong when Dv / 2 is no multiple of 32",
        seqlens=(65, 65),
        dims=(128, 96),
        causal=True,
    ),
    Case(id="named/d64_dv128", why="Dv larger than D", seqlens=(33, 65), dims=(64, 128)),
    Case(
        id="named/d192_dv128",
        why="D = 192, Dv = 128 (DeepSeek's latent attention)",
        seqlens=(33, 33),
        dims=(192, 128),
        causal=True,
    ),
    # Grouped query heads
    Case(
        id="named/gqa_8_2",
        why="ModelTC/LightX2V#1472: grouped heads; gradients are summed over the group",
        heads=(8, 2),
        seqlens=(33, 65),
        causal=True,
    ),
    Case(id="named/gqa_6_3", why="a group that is no power of two of heads", heads=(6, 3), seqlens=(33, 33)),
    Case(id="named/mqa_4_1", why="pytorch/pytorch#191085: one KV head", batch=2, heads=(4, 1), seqlens=(33, 33)),
    # Windows
    Case(id="named/window_0_0", why="every query sees its own position only", window=(0, 0), dlse=True),
    Case(id="named/window_1_1", why="three keys around each position", seqlens=(65, 65), window=(1, 1)),
    Case(id="named/window_63", why="one key fewer than a tile", seqlens=(130, 130), causal=True, window=(63, 0)),
    Case(
        id="named/window_64",
        why="vllm-project/vllm#3385: a window of 64 is 65 keys, as documented",
        heads=(1, 1),
        seqlens=(130, 130),
        causal=True,
        window=(64, None),
    ),
    Case(id="named/window_65_1", why="one key more than a tile, one to the right", seqlens=(130, 130), window=(65, 1)),
    Case(id="named/window_as_wide_as_s", why="a window that hides nothing", seqlens=(33, 65), window=(65, 65)),
    Case(id="named/window_left_only", why="no limit on the right", seqlens=(33, 65), window=(5, None)),
    Case(id="named/window_right_only", why="no limit on the left", seqlens=(65, 33), window=(None, 3)),
    Case(
        id="named/window_top_left",
        why="Sq > Sk, top-left: the last rows have left every key behind",
        seqlens=(65, 33),
        causal="top_left",
        window=(7, None),
    ),
    Case(
        id="named/decode_window",
        why="sgl-project/sglang#32087: the oldest key inside the window counts",
        heads=(4, 2),
        seqlens=(1, 200),
        causal=True,
        window=(63, 0),
    ),
    # attn_mask
    Case(
        id="named/mask_bool_empty_rows",
        why="pytorch/pytorch#103963: rows that see nothing are 0, with LSE -inf",
        batch=2,
        seqlens=(33, 45),
        mask=Mask(shape=(2, 2, 33, 45), pattern="empty_rows"),
        dlse=True,
    ),
    Case(
        id="named/mask_bool_all_false",
        why="huggingface/diffusers#12605: a mask that hides everything was dropped",
        batch=1,
        heads=(2, 2),
        seqlens=(10, 10),
        mask=Mask(shape=(1, 1, 10, 10), pattern="all_false"),
    ),
    Case(
        id="named/mask_bool_keys",
        why="pytorch/pytorch#163588: only the first 58 % of the keys are visible",
        heads=(1, 1),
        seqlens=(1, 100),
        mask=Mask(shape=(1, 1, 1, 100), pattern="first_half"),
    ),
    Case(
        id="named/mask_bool_batch_of_keys",
        why="a padding mask (B, 1, 1, Sk), as transformers makes it",
        batch=2,
        heads=(4, 2),
        seqlens=(33, 33),
        causal=True,
        mask=Mask(shape=(2, 1, 1, 33)),
    ),
    Case(
        id="named/mask_bool_2d_causal",
        why="onnx/onnx#8068: mask and causal together leave rows that see nothing",
        seqlens=(33, 45),
        causal=True,
        mask=Mask(shape=(33, 45), pattern="empty_rows"),
    ),
    Case(
        id="named/mask_bool_rows",
        why="a mask that is broadcast over the keys hides whole rows",
        seqlens=(33, 33),
        mask=Mask(shape=(1, 2, 33, 1)),
    ),
    Case(
        id="named/mask_float_grad",
        why="Dao-AILab/flash-attention#429: a full float bias in q's dtype, with its gradient",
        batch=2,
        seqlens=(33, 45),
        mask=Mask(shape=(2, 2, 33, 45), kind="float", grad=True),
    ),
    Case(
        id="named/mask_float32_shared_grad",
        why="jax-ml/jax#32242: a float32 bias shared by the batch; its gradient was not finite",
        batch=3,
        heads=(4, 4),
        seqlens=(33, 33),
        dims=(32, 32),
        mask=Mask(shape=(1, 4, 33, 33), kind="float32", grad=True),
    ),
    Case(
        id="named/mask_float_keys_grad",
        why="a bias per key, its gradient summed over heads and queries",
        batch=2,
        heads=(4, 2),
        seqlens=(33, 45),
        causal=True,
        mask=Mask(shape=(2, 1, 1, 45), kind="float32", grad=True),
    ),
    Case(
        id="named/mask_float_rows_grad",
        why="a bias per row changes nothing: its gradient is dLSE",
        seqlens=(33, 45),
        mask=Mask(shape=(1, 2, 33, 1), kind="float", grad=True),
        dlse=True,
    ),
    Case(
        id="named/mask_float_band",
        why="pytorch/pytorch#127055: the first key tiles of a row are all -inf",
        heads=(1, 1),
        seqlens=(150, 150),
        dims=(8, 8),
        mask=Mask(shape=(1, 1, 150, 150), kind="float", pattern="band"),
    ),
    Case(
        id="named/mask_float_43_keys",
        why="facebookresearch/xformers#813: rows of 43 keys, and the same as a slice of 51",
        seqlens=(16, 43),
        mask=Mask(shape=(1, 2, 16, 43), kind="float", view="padded_rows"),
    ),
    Case(
        id="named/mask_float_expanded",
        why="pytorch/pytorch#139424: a bias expanded over the keys, last stride 0",
        batch=2,
        heads=(4, 4),
        seqlens=(33, 33),
        mask=Mask(shape=(2, 1, 33, 33), kind="float", view="expanded"),
    ),
    Case(
        id="named/mask_float_finfo_min",
        why="a padding mask of finfo.min, as transformers makes it: a number whose weight underflows to 0",
        seqlens=(16, 33),
        mask=Mask(shape=(1, 1, 16, 33), kind="float", pattern="finfo_min", grad=True),
    ),
    Case(
        id="named/mask_float_finfo_min_row",
        why="finfo.min is not -inf: a row full of it sees every key, has a finite LSE, and is no NaN",
        seqlens=(16, 33),
        mask=Mask(shape=(1, 1, 16, 33), kind="float", pattern="finfo_min_row"),
    ),
    # Lengths of padded sequences; NaN past them
    Case(
        id="named/lens_causal",
        why="pytorch/pytorch#81077: padded batch with lengths 0, partial and full",
        batch=4,
        seqlens=(33, 45),
        q_lens=(33, 0, 12, 20),
        kv_lens=(45, 7, 40, 0),
        causal=True,
        dlse=True,
    ),
    Case(
        id="named/lens_kv_only",
        why="Dao-AILab/flash-attention#1745: NaN in the padding of the key cache",
        batch=2,
        seqlens=(3, 33),
        kv_lens=(1, 33),
    ),
    Case(
        id="named/lens_q_only_top_left",
        why="query lengths alone; top-left positions do not move",
        batch=2,
        seqlens=(33, 33),
        q_lens=(5, 33),
        causal="top_left",
    ),
    Case(
        id="named/lens_window_gqa_mask",
        why="NVIDIA/TransformerEngine#2186, vllm-project/vllm#30887: lengths, window, bias and GQA; NaN in padding",
        batch=2,
        heads=(4, 2),
        seqlens=(40, 50),
        q_lens=(40, 21),
        kv_lens=(31, 50),
        window=(9, 4),
        mask=Mask(shape=(2, 1, 40, 50), kind="float", grad=True),
    ),
    # ALiBi, softcap, sinks, dropout
    Case(
        id="named/alibi_causal",
        why="ALiBi with offset positions",
        heads=(4, 4),
        seqlens=(33, 65),
        causal=True,
        alibi="heads",
    ),
    Case(
        id="named/alibi_batch_lens",
        why="ALiBi slopes per sequence; positions follow each sequence's own lengths, both sides of the diagonal",
        batch=2,
        heads=(4, 2),
        seqlens=(33, 45),
        q_lens=(33, 10),
        kv_lens=(20, 45),
        alibi="batch",
    ),
    Case(
        id="named/softcap_peaked",
        why="Dao-AILab/flash-attention#2466: softcap (Gemma 2) where tanh bends",
        seqlens=(65, 65),
        causal=True,
        softcap=10.0,
        values="peaked",
    ),
    Case(
        id="named/softcap_lens",
        why="Dao-AILab/flash-attention#2544: softcap with lengths gave a wrong dQ",
        batch=2,
        seqlens=(40, 57),
        q_lens=(40, 13),
        kv_lens=(57, 30),
        softcap=15.0,
    ),
    Case(
        id="named/sinks_window_gqa",
        why="sinks, window and grouped heads (gpt-oss), with the sinks' gradient",
        batch=2,
        heads=(8, 2),
        seqlens=(65, 65),
        causal=True,
        window=(16, 0),
        sinks=True,
        grads=("q", "k", "v", "sinks"),
    ),
    Case(
        id="named/sinks_empty_rows",
        why="NVIDIA/TransformerEngine#3249: an empty row has LSE = sink and adds its dLSE to dsink",
        batch=2,
        seqlens=(45, 33),
        q_lens=(45, 20),
        kv_lens=(33, 0),
        causal=True,
        sinks=True,
        grads=("q", "k", "v", "sinks"),
        dlse=True,
    ),
    Case(
        id="named/dropout",
        why="the Philox contract, bit for bit",
        heads=(2, 2),
        seqlens=(65, 67),
        dropout_p=0.17,
        dropout_seed=1234,
        causal=True,
    ),
    Case(
        id="named/dropout_lens_gqa",
        why="rows and keys are counted per sequence, heads per batch; a negative seed and an offset",
        batch=2,
        heads=(4, 2),
        seqlens=(33, 45),
        q_lens=(20, 33),
        kv_lens=(45, 31),
        dropout_p=0.5,
        dropout_seed=(-(2**40) - 3, 7),
        dlse=True,
    ),
    Case(id="named/dropout_everything", why="p = 1 gives 0 and a finite LSE", seqlens=(16, 16), dropout_p=1.0),
    # Scale and values
    Case(id="named/scale_zero", why="pytorch/pytorch#105202: scale 0 is the mean of V", seqlens=(33, 33), scale=0.0),
    Case(
        id="named/scale_negative",
        why="pytorch/pytorch#105202: sqrt(scale) of a negative scale is NaN",
        seqlens=(33, 65),
        causal=True,
        scale=-0.125,
    ),
    Case(
        id="named/scale_one",
        why="NVIDIA/TransformerEngine#1197: scale 1 makes peaked rows (T5)",
        seqlens=(65, 65),
        window=(20, 0),
        scale=1.0,
    ),
    Case(id="named/peaked", why="a few weights near 1, most near 0", seqlens=(65, 130), values="peaked"),
    Case(
        id="named/all_equal",
        why="pytorch/pytorch#125674: equal keys and scores near 1000; the weights are 1/n and dQ is 0",
        seqlens=(50, 50),
        values="all_equal",
    ),
    Case(
        id="named/zeros",
        why="facebookresearch/xformers#719: all inputs 0",
        seqlens=(33, 65),
        causal=True,
        values="zeros",
    ),
    # Gradients: the LSE's, fewer than all, bitwise repeatable
    Case(
        id="named/lse_gradient",
        why="pytorch/pytorch#136232: the loss uses the LSE",
        seqlens=(33, 65),
        causal=True,
        dlse=True,
        heads=(4, 2),
    ),
    Case(id="named/lse_gradient_alone", why="only the LSE has a gradient", seqlens=(33, 45), dout=False, dlse=True),
    Case(id="named/grad_v_only", why="one gradient asked for", seqlens=(33, 45), grads=("v",)),
    Case(id="named/grad_q_only", why="one gradient asked for", seqlens=(33, 45), grads=("q",), causal=True),
    Case(id="named/grad_k_only", why="one gradient asked for", heads=(4, 2), seqlens=(33, 45), grads=("k",)),
    Case(
        id="named/grad_k_v",
        why="dK and dV have a kernel of their own in many backends; queries are frozen",
        heads=(4, 2),
        seqlens=(33, 45),
        grads=("k", "v"),
    ),
    Case(id="named/grad_q_v", why="dV without dK", seqlens=(33, 45), grads=("q", "v")),
    Case(id="named/grad_q_k", why="dS without dV", seqlens=(33, 45), grads=("q", "k")),
    Case(
        id="named/grad_mask_only",
        why="a trained bias on frozen q, k and v: dS is needed, and no product of it",
        seqlens=(33, 45),
        mask=Mask(shape=(1, 2, 33, 45), kind="float", grad=True),
        grads=(),
    ),
    Case(
        id="named/grad_sinks_only",
        why="trained sinks on frozen q, k and v: only Delta is needed",
        heads=(4, 2),
        seqlens=(33, 45),
        causal=True,
        sinks=True,
        grads=("sinks",),
    ),
    Case(id="named/forward_only", why="no gradient asked for", seqlens=(65, 65), causal=True, grads=()),
    Case(
        id="named/deterministic",
        why="Dao-AILab/flash-attention#359: gradients bitwise repeatable when asked",
        batch=2,
        heads=(4, 2),
        seqlens=(130, 65),
        deterministic=True,
    ),
    # Strides and layouts
    Case(
        id="named/view_transposed",
        why="pytorch/pytorch#112577: (B, H, S, D) memory in a (B, S, H, D) call",
        batch=2,
        seqlens=(33, 45),
        q_view="transposed",
        k_view="transposed",
        v_view="transposed",
        dout_view="transposed",
    ),
    Case(
        id="named/view_sliced",
        why="Dao-AILab/flash-attention#2611: slices of packed tensors; dout has long rows",
        batch=2,
        seqlens=(33, 33),
        causal=True,
        q_view="sliced",
        k_view="sliced",
        v_view="sliced",
        dout_view="sliced",
    ),
    Case(
        id="named/view_padded_unaligned",
        why="facebookresearch/xformers#813: rows longer than D, and addresses that are not aligned",
        batch=2,
        seqlens=(33, 45),
        q_view="padded_rows",
        k_view="unaligned",
        v_view="padded_rows",
        dout_view="unaligned",
    ),
    Case(
        id="named/view_expanded",
        why="stride 0 over heads or batch; the gradient of an expanded input is dense",
        batch=2,
        heads=(4, 2),
        seqlens=(33, 45),
        q_view="expanded_batch",
        k_view="expanded_heads",
        v_view="expanded_batch",
        dout_view="expanded_heads",
    ),
    Case(
        id="named/dout_expanded_all",
        why="Dao-AILab/flash-attention#355: out.sum().backward() sends one expanded number",
        batch=2,
        seqlens=(33, 33),
        causal=True,
        dout_view="expanded_all",
    ),
    Case(
        id="named/dout_every_other",
        why="Dao-AILab/flash-attention#355: dout[::2] of a larger batch",
        batch=2,
        heads=(4, 1),
        seqlens=(32, 32),
        dims=(128, 128),
        dout_view="every_other",
    ),
    Case(
        id="named/view_last_dim_strided",
        why="pytorch/pytorch#187506: a last dim that is not contiguous gives the same result",
        seqlens=(33, 33),
        q_view="last_dim_strided",
        k_view="last_dim_strided",
        v_view="last_dim_strided",
        dout_view="last_dim_strided",
    ),
    Case(
        id="named/bhsd",
        why="pytorch/pytorch#153903: the other layout, whose output has q's strides",
        batch=2,
        heads=(4, 2),
        seqlens=(33, 45),
        causal=True,
        layout="bhsd",
        dlse=True,
    ),
    Case(
        id="named/bhsd_transposed",
        why="pytorch/pytorch#181133: (B, S, H, D) memory in a (B, H, S, D) call, as models make it",
        batch=2,
        heads=(3, 3),
        seqlens=(33, 33),
        layout="bhsd",
        q_view="transposed",
        k_view="transposed",
        v_view="transposed",
        dout_view="every_other",
    ),
    Case(
        id="named/bhsd_expanded",
        why="expanded heads and batch in the other layout",
        batch=2,
        heads=(4, 4),
        seqlens=(33, 33),
        layout="bhsd",
        q_view="expanded_heads",
        k_view="expanded_heads",
        v_view="expanded_batch",
    ),
    Case(
        id="named/everything",
        why="every argument at once",
        batch=2,
        heads=(4, 2),
        seqlens=(40, 50),
        dims=(64, 32),
        causal=True,
        window=(30, None),
        mask=Mask(shape=(1, 4, 40, 50), kind="float32", grad=True),
        alibi="heads",
        sinks=True,
        q_lens=(40, 23),
        kv_lens=(33, 50),
        scale=0.2,
        softcap=20.0,
        dropout_p=0.1,
        dropout_seed=(99, 3),
        layout="bhsd",
        deterministic=True,
        grads=("q", "k", "v", "sinks"),
        dlse=True,
        q_view="transposed",
        k_view="sliced",
        v_view="padded_rows",
        dout_view="transposed",
    ),
)
"""All named cases, in reading order."""

BY_ID: Mapping[str, Case] = MappingProxyType({case.id: case for case in NAMED})
