"""The random numbers of dropout: Philox4x32-10, the same on every backend, device and tile size.

Requirement: whether weight (b, h, i, j) is dropped is a pure function of the seed and of b, h, i, j, so that the
backward recomputes it instead of storing it, and two backends with two tilings drop the same weights:

    counter = (j // 4, i, b * Hq + h, offset)     key = (seed bits 0..31, seed bits 32..63)
    u32     = output word j % 4 of Philox4x32-10
    dropped iff u32 < round(p * 2**32)

Philox is from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011, doi
10.1145/2063384.2063405); the constants and the known answers of the test are those of the authors' Random123 library.
PyTorch's unsigned 32-bit arithmetic is not there on every device, so words live in int64: the product of two words may
wrap to a negative number, but its high word is right once the sign extension of ``>>`` is masked away.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
"""Added to the key after each round: the golden ratio and sqrt(3) - 1, as 0.32 bit fractions."""
WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product."""
    product = word * multiplier
    return (product >> 32) & WORD, product & WORD


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random 32-bit words per counter; all tensors int64 in 0..2**32-1, broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        # The first rounds are cheap: their words depend on some of b, h, i and j only, and broadcast late.
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def dropped_weights(seed: Tensor, heads: Tensor, rows: slice, keys: slice, p: float) -> Tensor:
    """Which weights of one tile dropout sets to zero: bool (..., m, n) for `heads` (..., 1, 1).

    Args:
        seed: (2,) int64, seed and offset, on the tile's device.
        heads: b * Hq + h of each (sequence, query head), int64, with two trailing dims of size 1.
        rows: queries i of the tile, from start to stop (exclusive).
        keys: keys j of the tile, likewise; any start, also inside a group of four lanes.
        p: probability of dropping, 0..1.
    """
    first_group, end_group = keys.start // 4, -(-keys.stop // 4)
    i = torch.arange(rows.start, rows.stop, device=seed.device)[:, None]  # (m, 1)
    groups = torch.arange(first_group, end_group, device=seed.device)  # (ceil(n / 4),)
    key = (seed[0] & WORD, (seed[0] >> 32) & WORD)
    threshold = round(p * 2**32)
    lanes = [word < threshold for word in philox4x32((groups, i, heads, seed[1] & WORD), key)]
    dropped = torch.stack(lanes, dim=-1).flatten(-2)  # (..., m, 4 * groups)
    skip = keys.start - 4 * first_group
    return dropped[..., skip : skip + keys.stop - keys.start]
