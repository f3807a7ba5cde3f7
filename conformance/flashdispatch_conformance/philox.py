"""Philox4x32-10 in numpy, and the dropout mask that the contract builds from it.

Written from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011, doi
10.1145/2063384.2063405), section 3.3 and table 2, and checked against the published known-answer vectors. It shares no
code with any backend.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
"""The multipliers of the two halves."""
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
"""The Weyl increments of the key: the golden ratio and sqrt(3) - 1."""
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: tuple[UInt64Array, ...], key: tuple[int, int]) -> tuple[UInt64Array, ...]:
    """Four words below 2**32 for each counter: `counter` is four arrays of words that broadcast, `key` two words."""
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = _M0 * c0, _M1 * c2  # both factors below 2**32: the product fits in 64 bits
        c0, c1, c2, c3 = (
            (b >> _SHIFT) ^ c1 ^ np.uint64(k0),
            b & _LOW,
            (a >> _SHIFT) ^ c3 ^ np.uint64(k1),
            a & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_mask(seed: int, offset: int, stream: int, rows: int, keys: int, p: float) -> npt.NDArray[np.bool_]:
    """Which entries of P survive dropout, bool (rows, keys).

    Counter (j // 4, i, stream, offset) with stream = b * Hq + h, key (seed's low word, seed's high word), lane j % 4;
    an entry is kept iff its word is at least round(p * 2**32). p = 1 keeps nothing.
    """
    quads = -(-keys // 4)
    i = np.arange(rows, dtype=np.uint64)[:, None]
    quad = np.arange(quads, dtype=np.uint64)[None, :]
    counter = (quad, i, np.full((1, 1), stream, np.uint64), np.full((1, 1), offset & 0xFFFFFFFF, np.uint64))
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    lanes = np.stack(words, axis=-1).reshape(rows, quads * 4)[:, :keys]  # (rows, quads, 4) -> (rows, keys)
    kept: npt.NDArray[np.bool_] = lanes >= np.uint64(round(p * 2**32))
    return kept
