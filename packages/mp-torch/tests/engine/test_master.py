"""What carries the bits that 16-bit parameters cannot."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from mp_reference.amp import stochastic as reference
from mp_torch import AmpEngine, LossScale
from mp_torch.remainder import join, split
from mp_torch.stochastic import philox, random_bits16


def test_a_split_value_is_joined_to_the_same_bits_for_every_upper_half_ties_included():
    high = torch.arange(65536, dtype=torch.int64)
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        value = (high << 16 | low).to(torch.int32).view(torch.float32)
        again = join(*split(value))
        same = (again.view(torch.int32) == value.view(torch.int32)) | (value.isnan() & again.isnan())
        assert same.all()


def test_the_upper_half_is_a_nearest_bf16_value_and_a_nan_stays_one():
    value = torch.randn(100_000).exp() * torch.tensor([1.0, -1.0]).repeat(50_000)
    high, _ = split(value)
    assert torch.equal(high, value.bfloat16())
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert split(nans)[0].isnan().all()


def test_ties_go_away_from_zero_because_sixteen_bits_cannot_tell_more():
    tie = torch.tensor([1.00390625, -1.00390625])
    assert split(tie)[0].tolist() == [1.0078125, -1.0078125]
    assert tie.bfloat16().tolist() == [1.0, -1.0]


def train(precision, steps=40, optimizer=torch.optim.AdamW, lr=1e-5, **settings):
    """A layer of ones under a tiny learning rate and a constant gradient."""
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    engine = AmpEngine(
        model,
        optimizer(model.parameters(), lr=lr),
        precision,
        loss_scale=LossScale.off(),
        max_grad_norm=None,
        **settings,
    )
    for _ in range(steps):
        with engine.autocast():
            loss = (model.weight.float() * 0.5).sum()
        engine.backward(loss)
        report = engine.step()
    return model, engine, report


@pytest.mark.parametrize(
    ("precision", "settings"),
    [("bf16-true", {}), ("fp16-true", {}), ("bf16-true", {"master_weights": "remainder"}), ("bf16-mixed", {})],
)
def test_weights_at_one_move_under_a_tiny_learning_rate_exactly_as_fp32_would(precision, settings):
    expected = train("fp32")[1].masters()["weight"]
    model, engine, report = train(precision, **settings)
    assert torch.equal(engine.masters()["weight"], expected)
    assert report.rounded_away is None
    assert model.weight.dtype == (torch.float32 if precision == "bf16-mixed" else engine.assembly.row.parameter)


def test_compensation_follows_fp32_where_a_bare_bf16_weight_stands_still():
    expected = train("fp32")[1].masters()["weight"]
    _, kahan, report = train("bf16-kahan")
    assert report.rounded_away is None
    assert kahan.masters()["weight"].flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=2e-5)
    bare, _, report = train("bf16-true", master_weights="none")
    assert (bare.weight == 1.0).all()
    assert report.rounded_away == 1.0


def test_stochastic_rounding_is_right_on_average_within_what_chance_allows():
    """40 updates of 1e-5 from 1.0 move by a tenth of a bf16 step; the mean of 4096 weights has a known deviation."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=1e-5), "bf16-sr", max_grad_norm=None, seed=3)
    for _ in range(40):
        engine.backward((model.weight.float()).sum())
        assert engine.step().rounded_away is None
    mean = model.weight.float().mean().item()
    step = 2.0**-8
    deviation = step * math.sqrt(40 * (1e-5 / step) / 4096)
    assert abs(mean - (1 - 40e-5)) < 6 * deviation
    assert (model.weight != 1.0).any()


@pytest.mark.parametrize("exact", [0.25, 0.5, 0.75])
def test_a_value_between_two_bf16_numbers_goes_to_each_in_proportion(exact):
    from mp_torch.master import StochasticWeight, WriteBack

    count = 1 << 16
    parameter = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    weight = StochasticWeight("w", parameter, parameter.detach().float(), seed=5)
    weight.store_(torch.full((count,), 1.0 + exact * 2.0**-7), WriteBack(update_index=9, key=1))
    seen = Counter(parameter.detach().float().tolist())
    assert set(seen) == {1.0, 1.0 + 2.0**-7}
    assert abs(seen[1.0 + 2.0**-7] / count - exact) < 6 * math.sqrt(exact * (1 - exact) / count)


def test_stochastic_rounding_keeps_what_bf16_holds_and_what_is_not_finite():
    from mp_torch.master import StochasticWeight, WriteBack

    values = torch.tensor([1.0, -2.5, 0.0, math.inf, -math.inf, math.nan])
    parameter = nn.Parameter(values.bfloat16())
    weight = StochasticWeight("w", parameter, values, seed=5)
    weight.store_(values, WriteBack(update_index=1))
    assert parameter.detach().float().tolist()[:5] == values.tolist()[:5]
    assert parameter[5].isnan()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**64 - 1])
@pytest.mark.parametrize(("step", "parameter"), [(0, 0), (5, 0), (0, 7), (2**31, 12345)])
def test_the_random_bits_are_the_references(seed, step, parameter):
    ours = random_bits16(seed, step, parameter, count=1000)
    assert ours.tolist() == reference.random_bits16(seed, step, parameter, np.arange(1000)).tolist()


@pytest.mark.parametrize("start", [0, 1, 7, 8, 2**33 + 5])
@pytest.mark.parametrize("count", [0, 1, 9, 64])
def test_any_range_of_a_tensor_draws_the_bits_that_the_whole_draws_there(start, count):
    part = random_bits16(3, 1, 0, start=start, count=count)
    assert part.tolist() == reference.random_bits16(3, 1, 0, np.arange(start, start + count)).tolist()


def test_philox_gives_its_authors_words():
    counter = tuple(torch.tensor([one]) for one in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    words = [one.item() for one in philox(counter, (0xA4093822, 0x299F31D0))]
    assert words == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_a_skipped_step_uses_up_no_random_bits():
    runs = []
    for skips in (0, 2):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=1e-3), "bf16-sr", max_grad_norm=None)
        for at in range(3 + skips):
            factor = math.nan if at < skips else 1.0
            engine.backward((model.weight.float() * factor).sum() + model.bias.float().sum())
            engine.step()
        runs.append(model.weight.detach().clone())
    assert torch.equal(*runs)


@pytest.mark.parametrize(
    ("precision", "settings"),
    [("bf16-true", {}), ("bf16-true", {"master_weights": "remainder"}), ("bf16-kahan", {})],
)
def test_model_weights_alone_rebuild_masters_with_a_warning(precision, settings):
    model, engine, _ = train(precision, **settings)
    model.load_state_dict({"weight": torch.full((8, 8), 0.3, dtype=torch.bfloat16)})
    engine.backward((model.weight.float() * 0).sum())
    with pytest.warns(UserWarning, match=r"1 parameters, 'weight' first, were changed from outside; their masters are"):
        engine.step()
    assert engine.masters()["weight"].flatten().tolist() == pytest.approx([0.3] * 64, abs=1e-2)


def test_swapping_averaged_weights_in_and_back_keeps_the_masters_bits():
    model, engine, _ = train("bf16-true", optimizer=torch.optim.SGD)
    before, own = engine.masters()["weight"].clone(), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(5.0)
        model.weight.copy_(own)
    engine.backward((model.weight.float() * 0).sum())
    engine.step()
    assert torch.equal(engine.masters()["weight"], before)


def test_gradients_of_16_bit_parameters_are_summed_in_fp32_if_asked():
    """256 + 1 + 1 + 1 + 1 is 260; a bf16 sum stays at 256."""
    totals = {}
    for accumulate in ("fp32", "parameter"):
        model = nn.Linear(1, 1, bias=False)
        engine = AmpEngine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-true", accumulate=accumulate, accumulate_steps=5
        )
        for value in (256.0, 1.0, 1.0, 1.0, 1.0):
            engine.backward(model.weight.sum() * value)
        totals[accumulate] = engine.gradients()["weight"]
    assert (totals["fp32"].dtype, totals["fp32"].item()) == (torch.float32, 260.0)
    assert (totals["parameter"].dtype, totals["parameter"].item()) == (torch.bfloat16, 256.0)
