"""Random bits for stochastic rounding that depend on nothing but (seed, step, parameter, element).

A counter-based generator has no state to save, to replicate or to advance: a resumed run, another replica and another
layout of the same tensor draw the same bits because they ask for the same counters.
"""

from __future__ import annotations

import torch

__all__ = ["philox", "random_bits16"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Philox 4x32-10: four random words for each counter.

    Args:
        counter: four int64 tensors of one shape, each element a word in [0, 2**32).
        key: two words in [0, 2**32).

    Returns:
        Four int64 tensors of words.

    Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), 3.3.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [hex(word.item()) for word in philox((zero, zero, zero, zero), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], x0)
        high1, low1 = _product(_MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3


def random_bits16(
    seed: int, step: int, parameter: int, *, start: int = 0, count: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Sixteen random bits for each element of a range.

    Counter words: block of eight elements (low, high), step, parameter; key: the seed's two halves. Element e takes
    half e % 2 (low first) of word e // 2 % 4 of block e // 8.

    Args:
        seed: in [0, 2**64).
        step: number of the update.
        parameter: place of the parameter among all that are trained.
        start: place of the first element in the whole tensor's C order, wherever its parts may live.
        count: how many elements.
        device: where to make them; the bits are the same everywhere.

    Returns:
        int32 in [0, 65536), ``count`` of them.

    >>> random_bits16(0, 0, 0, count=3).tolist()
    [59605, 26151, 50573]
    >>> random_bits16(0, 0, 0, start=2, count=1).tolist()
    [50573]
    """
    first, last = start >> 3, (start + count + 7) >> 3
    blocks = torch.arange(first, last, device=device)
    counter = (
        blocks & _MASK,
        blocks >> 32 & _MASK,
        torch.full_like(blocks, step & _MASK),
        torch.full_like(blocks, parameter & _MASK),
    )
    words = torch.stack(philox(counter, (seed & _MASK, seed >> 32 & _MASK)), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1).reshape(-1)
    return halves[start - (first << 3) :][:count].to(torch.int32)


def _product(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low half of a 32 by 32 bit product; int64 wraps, its bits are those of the unsigned product."""
    wide = word * multiplier
    return wide >> 32 & _MASK, wide & _MASK
