"""The reduced list of calls for compute-sanitizer: forward and backward of small problems on the edges of the contract.

    compute-sanitizer --tool memcheck python tests/backends/sanitized_calls.py cuda_fa2
    compute-sanitizer --tool racecheck python tests/backends/sanitized_calls.py cuda_fa2

On a machine without a GPU `torch_reference --device cpu` shows that the list itself works. Exits with 1 where a
gradient is not finite. torch's caching allocator is off: memcheck takes all that it holds for one piece of memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch first allocates

import torch
from torch import Tensor

import flashdispatch


class Calls:
    """Makes tensors on one device and calls one backend with them."""

    def __init__(self, backend: str, device: str) -> None:
        self.backend, self.device = backend, device
        self.finite = True
        self.numbers = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.numbers).to(dtype)

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device, generator=self.numbers) < 0.5

    def lengths(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def call(
        self, name: str, batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int, head_dim: int,
        head_dim_v: int | None = None, dtype: torch.dtype = torch.bfloat16, offset: int = 0, **arguments: Any,
    ) -> None:  # fmt: skip
        """Runs forward and backward. `offset`: numbers before each tensor, so that none is aligned."""

        def make(seqlen: int, count: int, dim: int) -> Tensor:
            flat = self.normal(batch * seqlen * count * dim + offset, dtype=dtype)
            return flat[offset:].view(batch, seqlen, count, dim).requires_grad_()

        q, k = make(seqlen_q, heads, head_dim), make(seqlen_k, heads_kv, head_dim)
        v = make(seqlen_k, heads_kv, head_dim if head_dim_v is None else head_dim_v)
        out, lse = flashdispatch.attention(q, k, v, return_lse=True, backend=self.backend, **arguments)
        (out.float().square().sum() + lse[lse.isfinite()].sum()).backward()
        finite = all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))
        self.finite &= finite
        sys.stdout.write(f"{name}: {'finite' if finite else 'NOT FINITE'}\n")


def run(calls: Calls) -> None:
    """All of them."""
    call, lengths, mask, normal = calls.call, calls.lengths, calls.mask, calls.normal
    call("length 1", 1, 1, 1, 1, 1, 64)
    call("tile + 1, causal", 1, 129, 130, 2, 2, 64, causal=True)
    call("rows that see no key", 1, 150, 70, 2, 1, 128, causal=True)
    lens = {"q_lens": lengths(100, 37), "kv_lens": lengths(91, 150)}
    call("lengths", 2, 100, 150, 4, 2, 64, causal=True, **lens)
    call("length 0", 2, 64, 64, 2, 2, 64, q_lens=lengths(0, 64), kv_lens=lengths(64, 0))
    call("window", 1, 200, 200, 2, 2, 128, window=(40, 3))
    call("D 256", 1, 130, 130, 1, 1, 256, causal=True)
    call("D 72, Dv 200", 1, 70, 90, 2, 1, 72, 200)
    call("unaligned", 1, 70, 90, 2, 1, 64, offset=1)
    call("softcap", 1, 130, 130, 2, 2, 96, dtype=torch.float16, softcap=20.0, causal=True)
    call("mask of odd rows", 1, 77, 131, 2, 2, 64, attn_mask=mask(1, 1, 77, 131))
    call("mask of even rows", 1, 77, 132, 2, 2, 64, attn_mask=mask(1, 2, 77, 132))
    call("float32 mask", 2, 77, 132, 2, 2, 128, attn_mask=normal(1, 2, 77, 132, dtype=torch.float32))
    call("coarse LSE", 2, 77, 132, 2, 2, 64, attn_mask=normal(2, 1, 1, 132) * 1e5)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    calls = Calls(arguments.backend, arguments.device)
    run(calls)
    return 0 if calls.finite else 1


if __name__ == "__main__":
    sys.exit(main())
