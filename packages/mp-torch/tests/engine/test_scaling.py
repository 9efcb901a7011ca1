"""The loss scale of the engine against recordings of real scalers, the reference, and its own device."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mp_reference as mp
from mp_reference.amp.loss_scale import LossScaleError
from mp_reference.spec.loss_scale import PRESETS
from mp_torch import AmpStateError, LossScale
from mp_torch.devices import Device, device_named
from mp_torch.scaling import MovingScale, ScaleState, fp32, representable

RECORDINGS = Path(__file__).parents[3] / "mp-reference" / "tests" / "data" / "scaler_traces.json"
KEYS = {
    "torch": ("torch", {}), "sharded": ("sharded", {}), "megatron": ("megatron", {}), "apex_amp": ("apex", {}),
    "apex_amp_min1": ("apex", {"min_scale": 1.0}), "apex_fp16_utils": ("apex-fp16-utils", {}),
    "apex_hyst_kernel": ("apex-hysteresis", {}), "jmp": ("jmp", {}), "flax": ("flax", {}),
    "npu_dynamic": ("torch_npu", {}), "npu_static": ("torch_npu-static", {}), "ds_h2": ("deepspeed", {}),
    "ds_h2_noraise": ("deepspeed", {"on_floor": "keep"}), "ds_h2_consec": ("deepspeed-consecutive", {}),
    "ds_h1": ("deepspeed", {"hysteresis": 1}), "ds_fused": ("deepspeed-fused", {}),
}  # fmt: skip


def traces():
    recorded = json.loads(RECORDINGS.read_text())["traces"]
    return [one for one in recorded if one["key"] in KEYS]


@dataclass(frozen=True)
class Elsewhere(Device):
    """The CPU, which pretends that reading from it means waiting."""


def moved(policy, state, found_inf):
    """One transition as the engine makes it."""
    if not found_inf:
        return state.after_good_step(policy)
    state.require_may_skip(policy, "Inf in weight")
    return state.after_overflow(policy)


@pytest.mark.parametrize("trace", traces(), ids=lambda one: f"{one['key']}-{one['flags']}")
def test_every_recorded_scale_of_a_real_scaler_is_reproduced_step_by_step(trace):
    name, knobs = KEYS[trace["key"]]
    policy = LossScale.preset(name, init_scale=16.0, growth_interval=4, **knobs)
    state = ScaleState.initial(policy)
    for flag, recorded in zip(trace["flags"], trace["steps"], strict=False):
        if recorded[-1] == "RAISE":
            with pytest.raises(AmpStateError, match=r"at its floor, min_scale=1.0"):
                moved(policy, state, flag == "X")
            return
        state = moved(policy, state, flag == "X")
        assert state.scale == recorded[0]


@st.composite
def policies(draw):
    """Policies of every kind, near their borders."""
    power = draw(st.integers(-20, 120))
    low = draw(st.integers(-40, power))
    return {
        "init_scale": 2.0**power,
        "growth_interval": draw(st.integers(1, 4)),
        "growth_factor": draw(st.sampled_from([2.0, 1.1, 4.0])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.9, 2.0**-10])),
        "hysteresis": draw(st.integers(1, 3)),
        "hysteresis_refill": draw(st.sampled_from(["on-growth", "on-good-step"])),
        "min_scale": draw(st.sampled_from([0.0, 2.0**low])),
        "max_scale": draw(st.sampled_from([2.0**power, 2.0**127])),
        "on_floor": draw(st.sampled_from(["keep", "raise"])),
        "skip_limit": draw(st.sampled_from([None, 1, 5])),
        "dynamic": draw(st.booleans()),
        "counting": draw(st.sampled_from(["n-good", "n-plus-one-at-first", "n-plus-one"])),
        "at_ceiling": draw(st.sampled_from(["clamp", "drop"])),
        "carried": draw(st.sampled_from(["fp32", "float64"])),
        "factors": draw(st.sampled_from(["fp32", "float64"])),
    }


@given(knobs=policies(), flags=st.lists(st.booleans(), max_size=30))
def test_the_engines_scale_moves_as_the_references_over_any_history(knobs, flags):
    policy, reference = LossScale(**knobs), mp.LossScale(**knobs)
    state, expected = ScaleState.initial(policy), reference.initial()
    for found_inf in flags:
        try:
            expected = reference.next(expected, found_inf)
        except LossScaleError:
            with pytest.raises(AmpStateError):
                moved(policy, state, found_inf)
            return
        state = moved(policy, state, found_inf)
        assert (state.scale, state.hysteresis_tracker) == (expected.scale, expected.hysteresis_tracker)
        assert (state.growth_tracker, state.consecutive_skips) == (expected.growth_tracker, expected.consecutive_skips)


@given(knobs=policies(), flags=st.lists(st.booleans(), max_size=200))
def test_a_scale_with_a_floor_stays_finite_positive_and_within_its_bounds(knobs, flags):
    knobs |= {"min_scale": min(2.0**-20, knobs["init_scale"]), "skip_limit": None, "on_floor": "keep"}
    policy = LossScale(**knobs)
    state = ScaleState.initial(policy)
    for found_inf in flags:
        state = moved(policy, state, found_inf)
        assert policy.min_scale <= state.scale <= policy.max_scale


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_there_under_its_name(name):
    assert LossScale.preset(name).growth_interval == PRESETS[name].growth_interval


@pytest.mark.parametrize(
    "knobs",
    [
        {"init_scale": 0.0}, {"init_scale": -2.0}, {"init_scale": math.nan}, {"init_scale": math.inf},
        {"growth_interval": 0}, {"growth_interval": -1}, {"growth_factor": 1.0}, {"backoff_factor": 1.0},
        {"min_scale": 4.0, "max_scale": 2.0, "init_scale": 3.0},
    ],
)  # fmt: skip
def test_nonsense_is_refused_when_the_policy_is_built(knobs):
    with pytest.raises(ValueError, match="must"):
        LossScale(**knobs)


def test_a_lowered_interval_on_resume_acts_at_the_next_good_step():
    state = ScaleState(scale=4.0, growth_tracker=5, hysteresis_tracker=1)
    assert state.after_good_step(LossScale(init_scale=4.0, growth_interval=3)).scale == 8.0


@given(st.lists(st.booleans(), max_size=20))
def test_a_scale_on_the_device_takes_the_same_course_without_being_read(flags):
    policy = LossScale(init_scale=1024.0, growth_interval=2)
    there, here = (MovingScale(policy, one) for one in (Elsewhere(torch.device("cpu")), device_named("cpu")))
    for found_inf in flags:
        good, bad = there.futures
        there.choose_(torch.tensor(float(found_inf)), good, bad)
        there.state = bad if found_inf else good
        here.state = moved(policy, here.state, found_inf)
        for loss_dtype in (None, torch.float16, torch.bfloat16):
            loss = torch.zeros(3, dtype=loss_dtype or torch.float32)
            assert torch.equal(there.seed(loss, loss_dtype, 0.1), here.seed(loss, loss_dtype, 0.1))
    assert there.there.item() == here.state.scale


@pytest.mark.parametrize(
    ("scale", "dtype", "expected"),
    [
        (65536.0, None, 65536.0),
        (65536.0, torch.float16, 32768.0),
        (1024.0, torch.float16, 1024.0),
        (65536.0, torch.bfloat16, 65536.0),
        (1001.0, torch.bfloat16, 1000.0),
    ],
)
def test_a_16_bit_loss_gets_a_scale_that_it_can_hold(scale, dtype, expected):
    assert representable(scale, dtype) == expected


@pytest.mark.parametrize(("value", "expected"), [(0.1, 0.10000000149011612), (1e39, math.inf), (2.0**-149, 2.0**-149)])
def test_fp32_rounds_once_and_overflows_to_infinity(value, expected):
    assert fp32(value) == expected


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-60, 60))
def test_a_power_of_two_scales_and_unscales_without_a_trace(value, power):
    scaled = torch.tensor(value) * 2.0**power
    if scaled.isfinite() and (value == 0 or scaled.abs() >= 2.0**-126):
        assert (scaled / torch.tensor(2.0**power)).item() == value
