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


class Apart(nn.Module):
    """Three layers, and perhaps one that is never used."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.used = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.never = nn.Linear(6, 6) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def with_a_rank_without_gradients(idle_in: int, reduce_dtype: str, unused: bool, micro_steps: int):
    """Three windows, in one of which the last loss of rank 0 touches no parameter; what the ranks report and end at."""
    torch.manual_seed(0)
    model = Apart(unused)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    settings = {"reduce_dtype": reduce_dtype, "divide": "after", "accumulate_steps": micro_steps}
    engine = AmpEngine(model, optimizer, "fp32", update="exact", **settings)
    wrapped = engine.replicate(bucket_cap_mb=0.0001, find_unused_parameters=unused)
    reports = []
    for window in range(3):
        for place in range(micro_steps):
            last = place == micro_steps - 1
            with engine.autocast():
                loss = wrapped(torch.full((2, 6), 1.0 + place)).square().sum()
                if window == idle_in and last and distributed.get_rank() == 0:
                    loss = torch.zeros(1, requires_grad=True).sum()
            engine.backward(loss)
            report = engine.step()
        reports.append(repr(report))
    return reports, [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("idle_in", [0, 1])
@pytest.mark.parametrize(("unused", "micro_steps"), [(False, 1), (True, 1), (False, 2)])
@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_a_rank_whose_loss_touches_no_parameter_counts_as_zeros_and_stays_in_step(
    pool, wire, unused, micro_steps, idle_in
):
    (first, mine), (second, others) = pool.run(
        with_a_rank_without_gradients, 2, idle_in, wire, unused, micro_steps, timeout=40.0
    )
    assert first == second
    assert all("applied=True" in report for report in first)
    assert all(torch.equal(one, other) for one, other in zip(mine, others, strict=True))
    busy, ends = pool.run(with_a_rank_without_gradients, 2, -1, wire, unused, micro_steps)[0]
    assert busy[:idle_in] == first[:idle_in]
    assert busy[idle_in] != first[idle_in], "half of the gradient made no difference"
    if unused:  # nobody's loss touches it on any rank: it is not even decayed
        assert all(torch.equal(one, other) for one, other in zip(mine[-2:], ends[-2:], strict=True))


def with_another_loss(beside: bool):
    """A second loss after the boundary, which touches none of the parameters; how often gradients were exchanged."""
    model = nn.Linear(3, 3)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    wrapped = engine.replicate()
    sent, real = [], distributed.all_reduce
    distributed.all_reduce = lambda one, *rest, **options: (sent.append(one.numel()), real(one, *rest, **options))[1]
    try:
        for _ in range(2):
            with engine.autocast():
                loss = wrapped(torch.ones(2, 3)).sum()
            engine.backward(loss)
            if beside:
                engine.backward(torch.zeros(1, requires_grad=True).sum())
            assert engine.step().applied
    finally:
        distributed.all_reduce = real
    return sent.count(12)  # nine weights and three biases


def test_another_loss_of_a_window_that_touches_no_parameter_exchanges_nothing_again(pool):
    assert pool.run(with_another_loss, 2, False) == pool.run(with_another_loss, 2, True) == [2, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("divide", ["before", "after", "split"])
def test_the_factors_multiply_to_the_number_of_ranks(divide, count):
    assert math.prod(factors(divide, count)) == count


def test_an_unknown_way_to_divide_is_refused_with_the_known_ones():
    with pytest.raises(AmpConfigError, match=r"divide='late' must be one of 'before', 'after', 'split'; 'after' loses"):
        factors("late", 2)
