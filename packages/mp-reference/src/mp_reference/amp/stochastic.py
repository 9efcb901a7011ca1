"""Random bits for stochastic rounding that depend on nothing but (seed, step, parameter, element).

The generator is counter-based: it has no state to save or to advance, and a resumed run, a replica or another layout of
the same tensor gets the same bits because it asks for the same counters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["philox", "random_bits16"]

Words = NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox 4x32-10: four random words for each counter.

    Args:
        counter: uint32, shape (..., 4).
        key: two words in [0, 2**32).

    Returns:
        uint32, shape of ``counter``.

    Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), 3.3.

    >>> [f"{word:08x}" for word in philox(np.zeros(4, np.uint32), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = (counter[..., place].astype(np.uint64) for place in range(4))
    first, second = key
    for _ in range(10):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 32 by 32 bits: exact in 64
        a, b = (right >> _HALF) ^ b ^ np.uint64(first), right & _LOW
        c, d = (left >> _HALF) ^ d ^ np.uint64(second), left & _LOW
        first, second = (first + _KEY_STEPS[0]) % 2**32, (second + _KEY_STEPS[1]) % 2**32
    return np.stack((a, b, c, d), axis=-1).astype(np.uint32)


def random_bits16(seed: int, step: int, parameter: int, elements: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Sixteen random bits for each element, what a write-back to bf16 rounds away from fp32.

    The counter is (block, block >> 32, step, parameter) with block = element // 8; the key is the seed's low and high
    word. An element takes one half of one word: word element // 2 % 4, the low half if the element is even.

    Args:
        seed: in [0, 2**64).
        step: updates before this one.
        parameter: place of the parameter among all that are trained.
        elements: places in the whole tensor's C order, any shape.

    Returns:
        uint16, shape of ``elements``.

    Source: ``philox``.

    >>> random_bits16(0, 0, 0, np.arange(3))
    array([59605, 26151, 50573], dtype=uint16)
    """
    places = np.asarray(elements, np.uint64)
    block = places >> np.uint64(3)
    counter = np.stack(
        (block & _LOW, block >> _HALF, np.full_like(block, step % 2**32), np.full_like(block, parameter % 2**32)),
        axis=-1,
    ).astype(np.uint32)
    words = philox(counter, (seed % 2**32, seed >> 32))
    word = np.take_along_axis(words, (places >> np.uint64(1) & np.uint64(3)).astype(np.int64)[..., None], -1)[..., 0]
    odd = (places & np.uint64(1)).astype(bool)
    return np.where(odd, word >> np.uint32(16), word & np.uint32(0xFFFF)).astype(np.uint16)
