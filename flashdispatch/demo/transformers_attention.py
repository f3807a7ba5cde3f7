"""flashdispatch as an attention of the transformers library: two functions, and both must be registered.

transformers looks an attention up by name in two tables, one for the attention and one for its mask. A name that is
only in the first table runs, with no word of warning, and gets no mask: padding is then attended to like any other
token. So `register` fills both, and a test shows what happens otherwise.

The name must not contain "flash": transformers takes any such name for a kernel of its own hub and tries to load it.

How padding travels
-------------------
The mask function turns the tokenizer's (B, S) mask into what the attention function is then given in every layer.

- A right-padded batch becomes **kv_lens**, (B,) int32: how many keys of each sequence are real. It is all there is to
  know, it costs B numbers instead of B * S * S, and a kernel can stop at the length instead of computing what a mask
  then hides. Queries past the length keep running, as they do in transformers' own attention: what a query position
  means is the model's matter (in cross-attention its length is another one), and pooling leaves them out.
- Anything else (left padding, causal or sliding-window models, packed sequences) becomes the bool mask (B, 1, Sq, Sk)
  that transformers itself makes for SDPA. That is right for every model, only not as cheap.

To see which of the two it is, the mask function reads the mask's values, once per forward pass of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import flashdispatch

NAME = "fdispatch"
"""What to give to ``model.set_attn_implementation(...)``."""


def register() -> str:
    """Makes flashdispatch known to transformers as an attention, with its mask function; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding)
    return NAME


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function: query (B, Hq, Sq, D), key and value (B, Hkv, Sk, D), result (B, Sq, Hq, D).

    `attention_mask` is what `padding` made: lengths (B,), a bool mask (B, 1, Sq, Sk), or None. `s_aux` are softmax
    sinks.

    Raises InvalidRequestError for what would otherwise be dropped: a position bias, a request for the weights, or a
    causal layer whose mask never arrived.
    """
    if position_bias is not None or output_attentions:
        asked = "the attention weights" if position_bias is None else "a position bias"
        raise flashdispatch.InvalidRequestError(
            f"{type(module).__name__} asks for {asked}, which {NAME!r} doesn't give"
        )
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if attention_mask is None and causal and query.shape[2] > 1:
        raise flashdispatch.InvalidRequestError(
            f"{type(module).__name__} is causal and got no mask: was the mask function of {NAME!r} registered too?"
        )
    lengths = attention_mask is not None and attention_mask.dim() == 1
    out = flashdispatch.attention(
        query.transpose(1, 2),  # (B, Sq, Hq, D): a view
        key.transpose(1, 2),
        value.transpose(1, 2),
        kv_lens=attention_mask if lengths else None,
        attn_mask=None if lengths else attention_mask,
        sinks=None if s_aux is None else s_aux.float(),
        softcap=softcap,
        scale=scaling,
        dropout_p=dropout,
    )
    return out, None


def padding(**call: Any) -> Tensor | None:
    """The mask function: the padding of one batch, as `attend` wants it.

    Everything is passed by name, and names come and go between versions, so only those needed are read here.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function

    mask: Tensor | None = call.get("attention_mask")  # (B, Sk) bool, True = a real token
    if call["mask_function"] is bidirectional_mask_function:  # padding is all there is
        if mask is None:
            return None
        if mask.shape[-1] == call["kv_length"]:
            lens = mask.sum(dim=-1, dtype=torch.int32)  # (B,)
            right_padded = torch.arange(mask.shape[-1], device=mask.device) < lens[:, None]  # (B, Sk)
            if torch.equal(mask.bool(), right_padded):
                return lens
    # "Skip" would leave the mask out where SDPA's is_causal can say the same; here it has to be in the mask.
    call |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**call)
    return dense
