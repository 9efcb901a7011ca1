"""The random bits of stochastic rounding: the published generator, and what their key makes them independent of."""

from __future__ import annotations

import numpy as np
import pytest

from mp_reference.amp.stochastic import philox, random_bits16

# Known answers of philox4x32 with 10 rounds, as the authors publish them: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox(np.array(counter, np.uint32), key).tolist() == list(words)


def test_a_part_of_a_tensor_gets_the_bits_that_the_whole_gets_there() -> None:
    whole = random_bits16(7, 3, 2, np.arange(1000))
    for part in (np.arange(13, 77), np.arange(999, 0, -7), np.arange(12).reshape(3, 4)):
        assert (random_bits16(7, 3, 2, part) == whole[part]).all()


def test_seed_step_and_parameter_each_change_the_bits() -> None:
    places = np.arange(64)
    drawn = {
        random_bits16(*key, places).tobytes() for key in ((0, 0, 0), (1, 0, 0), (2**40, 0, 0), (0, 1, 0), (0, 0, 1))
    }
    assert len(drawn) == 5


def test_elements_past_four_billion_have_bits_of_their_own() -> None:
    places = np.array([5, 5 + 2**35, 5 + 2**36])
    assert len(set(random_bits16(0, 0, 0, places).tolist())) == 3


def test_the_bits_are_uniform_within_what_chance_allows() -> None:
    """256 cells of 1024 expected draws each: chi-square with 255 degrees stays below 361 with probability 0.99999."""
    bits = random_bits16(11, 0, 0, np.arange(2**18))
    for shift in (0, 8):
        counts = np.bincount(bits >> np.uint16(shift) & np.uint16(255), minlength=256)
        assert (np.square(counts - 1024.0) / 1024.0).sum() < 361
