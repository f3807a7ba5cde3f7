"""Calls that were once wrong on triton_fa2, run in a process that Triton interprets: prints the largest error of each.

Errors are relative to the reference in float64, over out, the LSE and the gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashdispatch import attention


def run(q: Tensor, k: Tensor, v: Tensor, backend: str, arguments: dict[str, Any]) -> list[Tensor]:
    out, lse = attention(q, k, v, return_lse=True, backend=backend, **arguments)
    seen = lse.isfinite()
    (out.square().sum() + lse.masked_fill(~seen, 0.0).sum()).backward()
    return [out, lse.masked_fill(~seen, 0.0), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]


def error(arguments: dict[str, Any], hook: Callable[[Tensor], Tensor] | None = None, **sizes: int) -> float:
    """Of one call with float32 tensors."""
    torch.manual_seed(0)
    dim, dim_v = sizes.get("head_dim", 32), sizes.get("head_dim_v", 32)
    layout = arguments.get("layout", "bshd")
    shapes = [(3, 20, 4, dim), (3, 20, 4, dim), (3, 20, 4, dim_v)]
    if layout == "bhsd":
        shapes = [(b, h, s, d) for b, s, h, d in shapes]
    tensors = [torch.randn(shape) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in tensors]
    if hook is None:
        got = run(*leaves, "triton_fa2", arguments)
    else:
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda x: x):
            got = run(*leaves, "triton_fa2", arguments)
    want = run(*(x.double().requires_grad_() for x in tensors), "torch_reference", arguments)
    return max(float((one - other).norm() / other.norm().clamp(min=1e-9)) for one, other in zip(got, want, strict=True))


def dense(x: Tensor) -> Tensor:
    """What an offloader that copies large tensors to dense memory does."""
    return x.contiguous() if x.dim() == 4 and x.shape[-1] == 64 else x


lens = torch.tensor([3, 99, 15, 99, 7, 99], dtype=torch.int32)[::2]
one_length = torch.tensor([5], dtype=torch.int32).expand(3)
FAULTS: dict[str, dict[str, Any]] = {
    "strided lengths": {"arguments": {"q_lens": lens, "kv_lens": lens}},
    "expanded lengths": {"arguments": {"q_lens": one_length, "kv_lens": one_length, "causal": True}},
    "strided sinks": {"arguments": {"sinks": torch.randn(8)[::2]}},
    "expanded sinks": {"arguments": {"sinks": torch.randn(1).expand(4)}},
    "strided slopes": {"arguments": {"alibi_slopes": torch.rand(8)[::2]}},
    "transposed slopes": {"arguments": {"alibi_slopes": torch.rand(4, 3).t()}},
    "slopes expanded over the heads": {"arguments": {"alibi_slopes": torch.rand(3, 1).expand(3, 4)}},
    "a strided seed": {"arguments": {"dropout_p": 0.3, "dropout_seed": torch.tensor([5, 9, 1, 9])[::2]}},
    "a mask with the negative bit": {"arguments": {"attn_mask": torch.randn(20, 20, dtype=torch.cfloat).conj().imag}},
    "softcap 50": {"arguments": {"softcap": 50.0}},
    "softcap 1e6": {"arguments": {"softcap": 1e6}},
    "softcap 1e30": {"arguments": {"softcap": 1e30}},
    "saved tensors made dense": {"arguments": {"layout": "bhsd"}, "hook": dense, "head_dim_v": 64},
}

if __name__ == "__main__":
    print(json.dumps({name: error(**fault) for name, fault in FAULTS.items()}))  # noqa: T201
