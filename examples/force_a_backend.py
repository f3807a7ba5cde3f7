"""Naming the backend yourself: how, what wins, and what happens when it can't run.

Four ways, strongest first: the argument backend=, the variable FLASHDISPATCH_BACKEND, use_backend() for a stretch of
code, set_default_backend(). FLASHDISPATCH_DISABLE=name beats them all. A backend that is named either runs or raises.
"""

import torch

import flashdispatch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(1, 64, 4, 64, device=device) for _ in range(3))

# Every backend that is ready here, one by one, on the same input.
truth = flashdispatch.attention(q.double(), k.double(), v.double(), causal=True, backend="torch_reference")
for backend in flashdispatch.backends():
    if not backend.ready:
        print(f"{backend.name:<16} not ready: {'; '.join(map(str, backend.reasons))}")
        continue
    try:
        out = flashdispatch.attention(q, k, v, causal=True, backend=backend.name)
    except flashdispatch.BackendUnsupportedError as error:
        print(f"{backend.name:<16} ready, but not for this: {error}")
    else:
        print(f"{backend.name:<16} largest error against float64: {(out - truth).abs().max():.1e}")

# For a stretch of code. The plan says who asked, and what was overruled.
with flashdispatch.use_backend("torch_reference"):
    plan = flashdispatch.explain(q, k, v, causal=True)
    print(f"\nin the with block: {plan.chosen}, forced: {plan.forced}")
print(f"after it: {flashdispatch.explain(q, k, v, causal=True).chosen}, chosen automatically")

# A misspelt name is an error, not a silent fallback.
try:
    flashdispatch.attention(q, k, v, backend="torch_refrence")
except flashdispatch.UnknownBackendError as error:
    print(f"\n{type(error).__name__}: {error}")
