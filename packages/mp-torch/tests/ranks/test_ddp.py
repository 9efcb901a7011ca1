"""Gradients on many ranks: what travels, where it is divided, and what each rank is left with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributed, nn

from mp_torch import AmpConfigError, AmpEngine
from mp_torch.ranks.average import WIRE, factors, mean_


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


def in_many_buckets(reduce_dtype: str, divide: str) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    """Of a model whose every layer travels alone: the gradients after backward, and what this rank had before."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(70, 70) for _ in range(5)))
    x = torch.randn(8, 70, generator=torch.Generator().manual_seed(distributed.get_rank()))
    model(x).square().sum().backward()
    mine = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    engine = AmpEngine(model, optimizer, "fp32", reduce_dtype=reduce_dtype, divide=divide, max_grad_norm=None)
    wrapped = engine.replicate(bucket_cap_mb=0.02, find_unused_parameters=False)
    for window in range(2):  # DistributedDataParallel makes its buckets anew after the first
        with engine.autocast():
            loss = wrapped(x).square().sum()
        engine.backward(loss)
        if window == 0:
            with torch.no_grad():
                before = [one.clone() for one in model.parameters()]
            engine.step()
            with torch.no_grad():
                for one, value in zip(model.parameters(), before, strict=True):
                    one.copy_(value)
    views = all(one.grad._base is not None or one.grad.storage_offset() for one in model.parameters())
    return views, mine, [one.grad.clone() for one in model.parameters()]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("wire", "divide"), [("fp32", "before"), ("fp16", "after"), ("bf16", "split"), ("bf16", "before")]
)
def test_gradients_in_many_buckets_are_the_means_of_what_the_ranks_had(pool, world, wire, divide):
    answers = pool.run(in_many_buckets, world, wire, divide)
    before, after = factors(divide, world)
    for place, found in enumerate(answers[0][2]):
        sent = [(one[1][place] / before).to(WIRE[wire]).float() for one in answers]
        mean = sum(sent[1:], sent[0]) / after
        if world > 2:  # rounded once more on the way back
            mean = mean.to(WIRE[wire]).float()
        if wire == "fp32":
            torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-6)  # torch adds in its own order
        else:
            assert torch.equal(found, mean)
        assert all(torch.equal(one[2][place], found) for one in answers)


def test_a_gradient_is_held_once_inside_its_bucket(pool):
    assert all(views for views, _, _ in pool.run(in_many_buckets, 2, "fp32", "before"))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("divide", ["before", "after", "split"])
def test_the_factors_multiply_to_the_number_of_ranks(divide, count):
    assert math.prod(factors(divide, count)) == count


def test_an_unknown_way_to_divide_is_refused_with_the_known_ones():
    with pytest.raises(AmpConfigError, match=r"divide='late' must be one of 'before', 'after', 'split'; 'after' loses"):
        factors("late", 2)
