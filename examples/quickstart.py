"""One call, its gradients, and why that backend: the whole library in three steps. CPU or GPU."""

import torch

import flashdispatch

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
batch, seqlen, heads_q, heads_kv, head_dim = 2, 128, 8, 2, 64  # 8 query heads share 2 key/value heads (GQA)


def random(heads: int) -> torch.Tensor:
    """A tensor (B, S, H, D) that wants a gradient."""
    return torch.randn(batch, seqlen, heads, head_dim, device=device, dtype=dtype, requires_grad=True)


torch.manual_seed(0)
q, k, v = random(heads_q), random(heads_kv), random(heads_kv)

# 1. The call. Sequence 0 has 90 real tokens, sequence 1 all 128; what the padding holds never matters.
lens = torch.tensor([90, 128], dtype=torch.int32, device=device)
out, lse = flashdispatch.attention(q, k, v, causal=True, q_lens=lens, kv_lens=lens, return_lse=True)
print(f"out {tuple(out.shape)} {out.dtype}, lse {tuple(lse.shape)} {lse.dtype}")
print(f"rows past the length are zero: {bool((out[0, 90:] == 0).all())}")

# 2. The gradients, in the inputs' shapes: those of K and V are already summed over the query heads that share them.
out.float().square().mean().backward()
for name, tensor in (("q", q), ("k", k), ("v", v)):
    print(f"d{name} {tuple(tensor.grad.shape)}, norm {tensor.grad.float().norm():.4f}")

# 3. Which backend that was, and why; then the same question for a GPU that need not be here.
arguments = {"causal": True, "q_lens": lens, "kv_lens": lens, "return_lse": True}
print()
print(flashdispatch.explain(q, k, v, **arguments).table())
print("\n--- and on a Blackwell GPU (sm_120) ---\n")
print(flashdispatch.explain(q, k, v, arch="sm_120", **arguments).table())
