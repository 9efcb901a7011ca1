"""However a model is spread over ranks, its training is the same: scales, skips, reports and parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DECISION, LAYOUTS, trace

from mp_torch import LossScale

SPREAD = [layout for layout in LAYOUTS if layout != "one"]
HISTORIES = {
    "no overflow": [None] * 5,
    "an overflow on each rank in turn": [0, None, 1, None, 2, None, None, None, 3, None],
    "overflows in a row": [None, 1, 0, None, None],
}


def of_all_ranks(pool, layout, overflows, precision="fp32", **settings):
    return pool.run(traced, LAYOUTS[layout], layout, overflows, precision, settings)


def traced(layout, overflows, precision, settings):
    return trace(layout, overflows, precision, **settings)


def merged(traces):
    """The parameters that all ranks know together: a stage of a pipeline knows its own."""
    together = {}
    for one in traces:
        for name, tensor in one.parameters.items():
            assert name not in together or torch.equal(together[name], tensor), f"{name} differs between ranks"
            together[name] = tensor
    return together


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("layout", SPREAD)
def test_a_layout_gives_the_reports_and_the_parameters_of_one_process_bit_for_bit(pool, layout, history):
    overflows = HISTORIES[history]
    expected = trace("one", [None if one is None else 0 for one in overflows])
    traces = of_all_ranks(pool, layout, overflows)
    for rank, one in enumerate(traces):
        assert one.reports == expected.reports, f"rank {rank}"
    found = merged(traces)
    assert found.keys() == expected.parameters.keys()
    for name, tensor in expected.parameters.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", SPREAD)
def test_clipping_sees_each_logical_parameter_once(pool, layout):
    expected = trace("one", [None], max_grad_norm=0.5)
    assert float(expected.reports[0]["clip_coef"]) < 1
    traces = of_all_ranks(pool, layout, [None], max_grad_norm=0.5)
    assert [one.reports for one in traces] == [expected.reports] * LAYOUTS[layout]
    found = merged(traces)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.parameters.items())


@settings(max_examples=6)
@given(overflows=st.lists(st.sampled_from([None, None, None, 0, 1, 2, 3]), min_size=1, max_size=8))
@pytest.mark.parametrize("layout", ["ddp", "fsdp4", "pp"])
def test_a_drawn_history_gives_one_sequence_of_scales_and_skips(pool, layout, overflows):
    expected = trace("one", [None if one is None else 0 for one in overflows])
    assert [one.reports for one in of_all_ranks(pool, layout, overflows)] == [expected.reports] * LAYOUTS[layout]


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp4", "tp", "pp", "tp+fsdp4"])
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed", "bf16-true"])
def test_low_precision_takes_the_same_decisions_and_ends_at_the_same_parameters(pool, layout, precision):
    overflows = [None, 1, None, None]
    expected = trace("one", [None if one is None else 0 for one in overflows], precision)
    traces = of_all_ranks(pool, layout, overflows, precision)
    for one in traces:
        assert one.reports == traces[0].reports, "ranks report differently"
        for ours, theirs in zip(one.reports, expected.reports, strict=True):
            assert {name: ours[name] for name in DECISION} == {name: theirs[name] for name in DECISION}
    found = merged(traces)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.parameters.items())


@pytest.mark.parametrize(("layout", "world"), [("ddp", 2), ("fsdp", 2), ("fsdp4", 4), ("tp", 2), ("pp", 2)])
def test_stochastic_rounding_draws_the_same_bits_in_every_layout(pool, layout, world):
    options = {"loss_scale": LossScale.off(), "seed": 5, "lr": 0.3}
    expected = trace("one", [None], "bf16-sr", **options)
    nearest = trace("one", [None], "bf16-true", master_weights="none", **options)
    found = merged(of_all_ranks(pool, layout, [None], "bf16-sr", **options))
    for name, tensor in expected.parameters.items():
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(expected.parameters[name], nearest.parameters[name]) for name in expected.parameters)
