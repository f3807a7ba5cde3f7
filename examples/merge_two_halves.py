"""Attention over half the keys, twice, joined exactly: what ring attention, paged caches and shared prefixes do.

Each part gives its output and its LSE, the logarithm of its softmax denominator. That one number per row is enough to
weigh the parts against each other, as if all keys had been seen at once; gradients flow through it too.
"""

import torch

import flashdispatch

torch.manual_seed(0)
keys, half = 256, 128
q = torch.randn(2, 64, 8, 64, dtype=torch.float64, requires_grad=True)  # (B, Sq, H, D)
k, v = (torch.randn(2, keys, 8, 64, dtype=torch.float64, requires_grad=True) for _ in range(2))

whole, whole_lse = flashdispatch.attention(q, k, v, return_lse=True)
first = flashdispatch.attention(q, k[:, :half], v[:, :half], return_lse=True)
second = flashdispatch.attention(q, k[:, half:], v[:, half:], return_lse=True)
merged, merged_lse = flashdispatch.merge_attention(*first, *second)

print(f"output differs by {(merged - whole).abs().max():.1e}, LSE by {(merged_lse - whole_lse).abs().max():.1e}")
torch.testing.assert_close(merged, whole)
torch.testing.assert_close(merged_lse, whole_lse)

# The halves alone are not close: their average is no attention.
average = (first[0] + second[0]) / 2
print(f"a plain average of the halves differs by {(average - whole).abs().max():.1e}")

# Backward through the merge gives the gradients of the whole.
cotangent = torch.randn_like(whole)
ours = torch.autograd.grad(merged, (q, k, v), cotangent)
right = torch.autograd.grad(whole, (q, k, v), cotangent)
for name, a, b in zip("qkv", ours, right, strict=True):
    print(f"d{name} differs by {(a - b).abs().max():.1e}")
    torch.testing.assert_close(a, b)
