"""Dropout's random numbers: known answers, and the mask that the contract builds from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdispatch_backends.torch_reference.philox import dropped_weights, philox4x32
from flashdispatch_conformance.philox import keep_mask

# Random123's kat_vectors for philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = [(0, 0), (42, 7), (2**40 + 5, 2**31), (-1, -1), (-(2**63), 2**32 + 3)]


def words(text: str) -> list[Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


def mask(seed: tuple[int, int], heads: int, rows: slice, keys: slice, p: float) -> Tensor:
    return dropped_weights(torch.tensor(seed), torch.arange(heads).view(heads, 1, 1), rows, keys, p)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    assert torch.stack(philox4x32((c0, c1, c2, c3), (k0, k1))).tolist() == torch.stack(words(answer)).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mask_equals_the_one_of_the_conformance_suite_for_seeds_of_any_size_and_sign(seed: tuple[int, int]) -> None:
    dropped = mask(seed, 3, slice(0, 9), slice(0, 11), 0.3)
    for head in range(3):
        kept = torch.from_numpy(keep_mask(*seed, stream=head, rows=9, keys=11, p=0.3))
        assert torch.equal(dropped[head], ~kept)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 8), slice(15, 16)])
@pytest.mark.parametrize("keys", [slice(0, 1), slice(1, 4), slice(3, 9), slice(4, 8), slice(5, 6), slice(17, 21)])
def test_a_tile_of_the_mask_is_a_cut_of_the_whole_mask(rows: slice, keys: slice) -> None:
    whole = mask((1, 2), 2, slice(0, 16), slice(0, 21), 0.5)
    assert torch.equal(mask((1, 2), 2, rows, keys, 0.5), whole[:, rows, keys])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_weights_is_p(p: float) -> None:
    dropped = mask((3, 0), 4, slice(0, 256), slice(0, 256), p)
    sigma = (p * (1 - p) / dropped.numel()) ** 0.5
    assert abs(dropped.double().mean().item() - p) < 4 * sigma
    for lane in range(4):  # all four words of a counter are used
        assert abs(dropped[..., lane::4].double().mean().item() - p) < 8 * sigma


def test_p_0_drops_nothing_and_p_1_drops_everything() -> None:
    assert not mask((3, 0), 1, slice(0, 64), slice(0, 64), 0.0).any()
    assert mask((3, 0), 1, slice(0, 64), slice(0, 64), 1.0).all()


@pytest.mark.parametrize("other", [(4, 0), (3, 1), (3 + 2**32, 0)])
def test_seed_low_word_high_word_and_offset_each_change_the_mask(other: tuple[int, int]) -> None:
    assert not torch.equal(
        mask((3, 0), 1, slice(0, 32), slice(0, 32), 0.5), mask(other, 1, slice(0, 32), slice(0, 32), 0.5)
    )
