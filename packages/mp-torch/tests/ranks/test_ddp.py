"""Gradients on many ranks: what travels, where it is divided, and what each rank is left with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributed

from mp_torch.errors import AmpConfigError
from mp_torch.ranks.average import factors, mean_


def mean_of(value: float, wire: str, divide: str, numbers: int = 5) -> list[float]:
    flat = torch.full((numbers,), value)
    mean_(flat, distributed.group.WORLD, getattr(torch, wire), divide)
    return flat.tolist()


@pytest.mark.parametrize("divide", ["after", "split"])
@pytest.mark.parametrize("value", [40000.0, 2.0**-24])
def test_an_fp16_wire_neither_overflows_nor_underflows(pool, value, divide):
    assert pool.run(mean_of, 2, value, "float16", divide) == [[value] * 5] * 2


def test_dividing_before_the_wire_loses_the_smallest_gradient_and_keeps_the_largest(pool):
    assert pool.run(mean_of, 2, 40000.0, "float16", "before")[0] == [40000.0] * 5
    assert pool.run(mean_of, 2, 2.0**-24, "float16", "before")[0] == [0.0] * 5


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("divide", ["before", "after", "split"])
def test_equal_gradients_are_their_own_mean(pool, world, wire, divide):
    assert pool.run(mean_of, world, 1.5, wire, divide) == [[1.5] * 5] * world


def unequal(wire: str) -> list[float]:
    flat = torch.tensor([1.0, 2.0, 3.0]) * (distributed.get_rank() + 1)
    mean_(flat, distributed.group.WORLD, getattr(torch, wire), "after")
    return flat.tolist()


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_a_length_that_the_ranks_do_not_divide_is_averaged_to_its_end(pool, wire):
    assert pool.run(unequal, 4, wire) == [[2.5, 5.0, 7.5]] * 4


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("divide", ["before", "after", "split"])
def test_the_factors_multiply_to_the_number_of_ranks(divide, count):
    assert math.prod(factors(divide, count)) == count


def test_an_unknown_way_to_divide_is_refused_with_the_known_ones():
    with pytest.raises(AmpConfigError, match=r"divide='late' must be one of 'before', 'after', 'split'; 'after' loses"):
        factors("late", 2)
