"""The loss scale: every recorded trace of the real scalers, the corners of the field's faults, and refused nonsense."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_reference.amp.loss_scale import LossScale, LossScaleError, LossScaleState
from mp_reference.spec.formats import FP32
from mp_reference.spec.loss_scale import PRESETS, LossScalePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACES: list[dict[str, Any]] = [
    trace
    for trace in json.loads((Path(__file__).parents[1] / "data" / "scaler_traces.json").read_text())["traces"]
    if trace["key"] != "optax"  # a skip rule without a scale
]
SCALES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # key of the recording -> preset and the knobs that the recording turned
    "torch": ("torch", {}),
    "sharded": ("sharded", {}),
    "megatron": ("megatron", {}),
    "apex_amp": ("apex", {}),
    "apex_amp_min1": ("apex", {"min_scale": 1.0}),
    "apex_fp16_utils": ("apex-fp16-utils", {}),
    "apex_hyst_kernel": ("apex-hysteresis", {}),
    "jmp": ("jmp", {}),
    "flax": ("flax", {}),
    "npu_dynamic": ("torch_npu", {}),
    "npu_static": ("torch_npu-static", {}),
    "ds_h2": ("deepspeed", {}),
    "ds_h2_noraise": ("deepspeed", {"on_floor": "keep"}),
    "ds_h2_consec": ("deepspeed-consecutive", {}),
    "ds_h1": ("deepspeed", {"hysteresis": 1}),
    "ds_fused": ("deepspeed-fused", {}),
}
AT_THE_FLOOR = (
    "the gradients overflow although the loss scale is at its floor, 1.0; min_scale=1.0 and on_floor='raise' end the "
    "run here: lower min_scale or look for infinities or NaNs in the data or the forward pass"
)


def seen_as(name: str, state: LossScaleState, step: int, last_overflow: int, found_inf: bool) -> float | str:
    """What the recorded engine calls ``name``, read off our state."""
    return {
        "scale": state.scale,
        "growth_tracker": state.growth_tracker,
        "unskipped": state.growth_tracker,
        "counter": state.growth_tracker,
        "fin_steps": state.growth_tracker,
        "hysteresis_tracker": state.hysteresis_tracker,
        "hysteresis": max(state.hysteresis_tracker, 1),  # DeepSpeed stops counting at 1, with the same effect
        "last_overflow_iter": last_overflow,
        "cur_iter": step + 1,
        "skip": "skip" if found_inf else "",
    }[name]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace['key']}-{trace['flags']}")
def test_every_recorded_trace_of_a_real_scaler_is_reproduced_step_by_step(trace: dict[str, Any]) -> None:
    name, knobs = SCALES[trace["key"]]
    scale = LossScale.preset(name, init_scale=16.0, growth_interval=4, **knobs)
    state, last_overflow = scale.initial(), -1
    for step, (flag, recorded) in enumerate(zip(trace["flags"], trace["steps"], strict=False)):
        found_inf = flag == "X"
        if recorded[-1] == "RAISE":
            with pytest.raises(LossScaleError, match=f"^{re.escape(AT_THE_FLOOR)}$"):
                scale.next(state, found_inf)
            assert step == len(trace["steps"]) - 1
            return
        state = scale.next(state, found_inf)
        last_overflow = step if found_inf else last_overflow
        assert [seen_as(field, state, step, last_overflow, found_inf) for field in trace["fields"]] == recorded
    assert len(trace["steps"]) == len(trace["flags"])


def test_the_recordings_cover_every_preset() -> None:
    assert {SCALES[trace["key"]][0] for trace in TRACES} == set(PRESETS)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("torch", "apex-hysteresis", "jmp", "torch_npu"), [2.0**127] * 4),
        (("flax",), [2.0**126, 2.0**127, 2.0**127, FP32.max]),
        (("sharded", "megatron"), [2.0**127, math.inf, math.inf, math.inf]),
        (("apex",), [2.0**24] * 4),
        (("deepspeed",), [2.0**126, 2.0**127, 2.0**128, 2.0**129]),
    ],
)
def test_growth_near_the_top_of_fp32_ends_as_in_the_real_scalers(names: tuple[str, ...], expected: list[float]) -> None:
    for name in names:
        scale = LossScale.preset(name, init_scale=2.0**126, growth_interval=1)
        state, seen = scale.initial(), []
        for _ in expected:
            state = scale.next(state, False)
            seen.append(state.scale)
        assert seen == expected, name


@pytest.mark.parametrize(
    ("name", "expected"),
    [("torch", 0.0), ("sharded", 0.0), ("torch_npu", 0.0), ("apex-hysteresis", 0.0), ("apex", 16 * 2.0**-160),
     ("flax", 2.0**-126)],
)  # fmt: skip
def test_a_scaler_without_a_floor_decays_as_the_real_one_does(name: str, expected: float) -> None:
    scale = LossScale.preset(name, init_scale=16.0, hysteresis=1)
    state = scale.initial()
    for _ in range(160):
        state = scale.next(state, True)
    assert state.scale == expected


def test_deepspeed_fused_keeps_its_scale_at_the_floor_and_grows_after_one_step_more() -> None:
    scale = LossScale.preset("deepspeed-fused", init_scale=1.0, growth_interval=2)
    state = scale.next(scale.initial(), True)
    scales = []
    for _ in range(5):
        state = scale.next(state, False)
        scales.append(state.scale)
    assert scales == [1.0, 1.0, 2.0, 2.0, 4.0]


def test_hysteresis_three_absorbs_two_overflows_and_then_halves_each_time() -> None:
    scale = LossScale.preset("deepspeed", hysteresis=3)
    state, seen = scale.initial(), []
    for _ in range(5):
        state = scale.next(state, True)
        seen.append((state.scale, max(state.hysteresis_tracker, 1)))
    assert seen == [(65536.0, 2), (65536.0, 1), (32768.0, 1), (16384.0, 1), (8192.0, 1)]


@pytest.mark.parametrize(
    ("refill", "expected"),
    [
        ("on-growth", [(65536.0, 2), (65536.0, 1), (65536.0, 1), (32768.0, 0), (16384.0, -1), (8192.0, -2)]),
        ("on-good-step", [(65536.0, 2), (65536.0, 1), (65536.0, 3), (65536.0, 2), (65536.0, 1), (32768.0, 0)]),
    ],
)
def test_one_good_step_restores_the_hysteresis_only_under_the_consecutive_rule(
    refill: Any, expected: list[tuple[float, int]]
) -> None:
    scale = LossScale(hysteresis=3, hysteresis_refill=refill)
    state, seen = scale.initial(), []
    for found_inf in (True, True, False, True, True, True):
        state = scale.next(state, found_inf)
        seen.append((state.scale, state.hysteresis_tracker))
    assert seen == expected


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_an_interval_lowered_on_resume_acts_at_the_next_good_step(name: str) -> None:
    long = LossScale.preset(name, init_scale=16.0, growth_interval=100)
    state = long.initial()
    for _ in range(50):
        state = long.next(state, False)
    short = LossScale.preset(name, init_scale=16.0, growth_interval=3)
    assert short.next(state, False).scale == (16.0 if name == "torch_npu-static" else 32.0)


def test_a_fixed_scale_never_moves_and_counts_its_skips_all_the_same() -> None:
    scale = LossScale(init_scale=128.0, dynamic=False)
    state = scale.next(scale.next(scale.initial(), True), True)
    assert state == LossScaleState(scale=128.0, consecutive_skips=2)
    assert scale.next(state, False) == LossScaleState(scale=128.0)


def test_a_fixed_scale_keeps_what_is_left_of_the_hysteresis() -> None:
    scale = LossScale(dynamic=False, hysteresis=3)
    state = LossScaleState(scale=4.0, hysteresis_tracker=2)  # a dynamic run that resumes with a fixed scale
    assert scale.next(state, True) == LossScaleState(scale=4.0, hysteresis_tracker=2, consecutive_skips=1)
    assert scale.next(state, False) == state


def test_one_skip_more_than_the_limit_ends_the_run_and_says_where_to_look() -> None:
    scale = LossScale(skip_limit=3)
    state = scale.initial()
    for _ in range(3):
        state = scale.next(state, True)
    message = (
        "4 steps in a row were skipped, skip_limit=3 allows 3; the loss scale is 8192.0, so look for infinities or "
        "NaNs in the data or the forward pass"
    )
    with pytest.raises(LossScaleError, match=f"^{re.escape(message)}$"):
        scale.next(state, True)
    assert scale.next(state, False).consecutive_skips == 0


def test_growth_by_one_percent_is_a_legal_policy_of_the_same_machine() -> None:
    scale = LossScale(init_scale=1024.0, growth_factor=1.01, growth_interval=1)
    state = scale.next(scale.initial(), False)
    assert state.scale == float(np.float32(1024 * 1.01))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_factors_held_in_fp32_differ_from_factors_held_in_float64_by_one_rounding(name: str) -> None:
    start = float(np.float32(65536.0 * 1.1))
    scale = LossScale.preset(name, init_scale=start, growth_factor=1.3, growth_interval=1)
    state = scale.initial()
    for _ in range(2):  # some need a good step more
        state = scale.next(state, False) if state.scale == start else state
    by_single = float(np.float32(start) * np.float32(1.3))
    by_double = float(np.float32(start * 1.3))
    assert by_single != by_double
    in_python = {"apex", "apex-fp16-utils", "deepspeed", "deepspeed-consecutive", "deepspeed-fused"}
    singles = {"sharded", "megatron", "jmp", "flax", "torch_npu"}
    wanted = start * 1.3 if name in in_python else by_single if name in singles else by_double
    assert state.scale == (start if name == "torch_npu-static" else wanted)


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"init_scale": 0.0}, "init_scale=0.0 must be finite and above 0; 65536.0 is the usual start"),
    ({"init_scale": -2.0}, "init_scale=-2.0 must be finite and above 0; 65536.0 is the usual start"),
    ({"init_scale": math.nan}, "init_scale=nan must be finite and above 0; 65536.0 is the usual start"),
    ({"init_scale": math.inf}, "init_scale=inf must be finite and above 0; 65536.0 is the usual start"),
    (
        {"init_scale": 1e-50, "min_scale": 0.0},
        "init_scale=1e-50 must lie within fp32, 1.401298464324817e-45 to 3.4028234663852886e+38; choose one inside, or "
        "carried='float64'",
    ),
    (
        {"init_scale": 1e39, "max_scale": math.inf},
        "init_scale=1e+39 must lie within fp32, 1.401298464324817e-45 to 3.4028234663852886e+38; choose one inside, or "
        "carried='float64'",
    ),
    *[
        (
            {"growth_factor": value},
            f"growth_factor={value!r} must be finite and above 1; for a fixed loss scale use dynamic=False",
        )
        for value in (1.0, 0.5, math.nan, math.inf)
    ],
    *[
        (
            {"backoff_factor": value},
            f"backoff_factor={value!r} must lie between 0 and 1; the cure for an overflow is a smaller scale, 0.5 is "
            "usual",
        )
        for value in (1.0, 0.0, math.nan)
    ],
    ({"growth_interval": 0}, "growth_interval=0 must be at least 1; for a fixed loss scale use dynamic=False"),
    ({"hysteresis": 0}, "hysteresis=0 must be at least 1; 1 shrinks the scale at every overflow"),
    ({"skip_limit": 0}, "skip_limit=0 must be at least 1; for no limit use skip_limit=None"),
    *[
        ({"min_scale": value}, f"min_scale={value!r} must be finite and at least 0; 0.0 is no floor")
        for value in (-1.0, math.nan, math.inf)
    ],
    *[
        ({"max_scale": value}, f"max_scale={value!r} must be above 0; math.inf is no ceiling")
        for value in (0.0, math.nan)
    ],
    ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale=8.0 must not exceed max_scale=4.0; swap them"),
    (
        {"init_scale": 0.5},
        "init_scale=0.5 must lie between min_scale=1.0 and max_scale=1.7014118346046923e+38; choose one inside, or "
        "move the bound",
    ),
    (
        {"max_scale": 4.0},
        "init_scale=65536.0 must lie between min_scale=1.0 and max_scale=4.0; choose one inside, or move the bound",
    ),
    *[
        ({name: "?"}, f"{name}='?' must be one of {', '.join(map(repr, legal))}")
        for name, legal in {
            "hysteresis_refill": ("on-growth", "on-good-step"),
            "on_floor": ("keep", "raise"),
            "counting": ("n-good", "n-plus-one-at-first", "n-plus-one"),
            "at_ceiling": ("clamp", "drop"),
            "carried": ("fp32", "float64"),
            "factors": ("fp32", "float64"),
        }.items()
    ],
]


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"init_scale": True}, "init_scale=True must be a number, got bool; write 65536.0"),
    ({"init_scale": "2"}, "init_scale='2' must be a number, got str; write 65536.0"),
    ({"growth_factor": None}, "growth_factor=None must be a number, got NoneType; write 65536.0"),
    ({"backoff_factor": "0.5"}, "backoff_factor='0.5' must be a number, got str; write 65536.0"),
    ({"min_scale": 1j}, "min_scale=1j must be a number, got complex; write 65536.0"),
    ({"max_scale": "inf"}, "max_scale='inf' must be a number, got str; write 65536.0"),
    ({"growth_interval": 2.5}, "growth_interval=2.5 must be a whole number, got float; write 2000"),
    ({"growth_interval": None}, "growth_interval=None must be a whole number, got NoneType; write 2000"),
    ({"hysteresis": True}, "hysteresis=True must be a whole number, got bool; write 2000"),
    ({"skip_limit": "9"}, "skip_limit='9' must be a whole number, got str; write 2000"),
    ({"dynamic": 1}, "dynamic=1 must be True or False"),
    ({"clamp_init": 0}, "clamp_init=0 must be True or False"),
]


def names(cases: Sequence[tuple[dict[str, Any], str]]) -> list[str]:
    """Each test's name: the knobs that it turns."""
    return [",".join(f"{name}={value}" for name, value in knobs.items()) for knobs, _ in cases]


@pytest.mark.parametrize(("knobs", "message"), NONSENSE, ids=names(NONSENSE))
def test_a_nonsensical_policy_is_refused_when_it_is_built(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LossScale(**knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"skip_limit": 1},
        {"growth_interval": 1},
        {"hysteresis": 1},
        {"min_scale": 0.0},
        {"init_scale": 0.25, "min_scale": 0.25, "max_scale": 0.25},  # a floor that is the ceiling
        {"init_scale": FP32.min_subnormal, "min_scale": 0.0},
        {"init_scale": FP32.max, "max_scale": math.inf},
        {"init_scale": 1e-50, "min_scale": 0.0, "carried": "float64"},
        {"init_scale": 1e39, "max_scale": math.inf, "carried": "float64"},
    ],
    ids=str,
)
def test_the_last_sensible_value_of_a_knob_is_legal(knobs: dict[str, Any]) -> None:
    scale = LossScale(**knobs)
    assert {name: getattr(scale, name) for name in knobs} == knobs


@pytest.mark.parametrize(("knobs", "message"), WRONG_TYPES, ids=names(WRONG_TYPES))
def test_a_knob_of_another_type_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        LossScale(**knobs)


def test_whole_numbers_are_legal_scales_and_are_held_as_floats() -> None:
    scale = LossScale(init_scale=16, growth_factor=4, min_scale=2, max_scale=64)
    held = (scale.init_scale, scale.growth_factor, scale.min_scale, scale.max_scale)
    assert held == (16.0, 4.0, 2.0, 64.0)
    assert all(type(value) is float for value in held)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    message = f"preset 'horovod' is not one of {', '.join(PRESETS)}; for other rules give the fields"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LossScalePolicy.preset("horovod")


# What each scaler does when nothing is configured, as its code says: the recordings all turn the first and the third.
DEFAULTS: dict[
    str, tuple[float, float, int, int, float, float]
] = {  # init, backoff, interval, hysteresis, floor, ceiling
    "torch": (2.0**16, 0.5, 2000, 1, 0.0, FP32.max),
    "sharded": (2.0**16, 0.5, 2000, 1, 0.0, math.inf),
    "megatron": (2.0**32, 0.5, 1000, 2, 1.0, math.inf),
    "apex": (2.0**16, 0.5, 2000, 1, 0.0, 2.0**24),
    "apex-fp16-utils": (2.0**32, 0.5, 1000, 1, 1.0, math.inf),
    "apex-hysteresis": (2.0**16, 0.5, 2000, 2, 0.0, FP32.max),  # a kernel without defaults; its start is ours
    "jmp": (2.0**15, 0.5, 2000, 1, 1.0, FP32.max),
    "flax": (2.0**16, 0.5, 2000, 1, FP32.min_normal, FP32.max),
    "torch_npu": (2.0**16, 0.5, 2000, 1, 0.0, FP32.max),
    "torch_npu-static": (2.0**16, 0.5, 2000, 1, 0.0, FP32.max),
    "deepspeed": (2.0**16, 0.5, 1000, 2, 1.0, math.inf),
    "deepspeed-consecutive": (2.0**16, 0.5, 1000, 2, 1.0, math.inf),
    "deepspeed-fused": (2.0**16, 0.5, 1000, 1, 1.0, math.inf),
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_that_nothing_configures_starts_as_its_scaler_does(name: str) -> None:
    row = LossScalePolicy.preset(name)
    numbers = (row.init_scale, row.backoff_factor, row.growth_interval, row.hysteresis, row.min_scale, row.max_scale)
    assert numbers == DEFAULTS[name]
    assert row.growth_factor == 2.0
    assert row.skip_limit is None  # none of the scalers of the field stops a run by itself


def test_a_policy_that_nothing_configures_gives_up_after_a_hundred_skips() -> None:
    row = LossScalePolicy()
    assert (row.growth_interval, row.skip_limit, row.source) == (2000, 100, "the caller")
    assert row == LossScalePolicy(source="elsewhere")  # where rules were read is no rule


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_says_where_it_was_read(name: str) -> None:
    assert "/" in PRESETS[name].source
    assert LossScale.preset(name).source == PRESETS[name].source


@given(
    init=st.floats(1e-6, 1e9),
    growth=st.floats(1.001, 16),
    backoff=st.floats(1e-3, 0.999),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    refill=st.sampled_from(["on-growth", "on-good-step"]),
    ceiling=st.sampled_from(["clamp", "drop"]),
    flags=st.lists(st.booleans(), max_size=60),
)
def test_any_legal_policy_keeps_its_scale_between_floor_and_ceiling_for_ever(
    init: float, growth: float, backoff: float, interval: int, hysteresis: int, refill: Any, ceiling: Any,
    flags: list[bool],
) -> None:  # fmt: skip
    scale = LossScale(
        init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval, hysteresis=hysteresis,
        hysteresis_refill=refill, min_scale=2.0**-20, max_scale=2.0**30, at_ceiling=ceiling, skip_limit=None,
    )  # fmt: skip
    state = scale.initial()
    for found_inf in flags:
        before, state = state, scale.next(state, found_inf)
        assert 2.0**-20 <= state.scale <= 2.0**30
        assert state.scale <= before.scale if found_inf else state.scale >= before.scale
        assert state.scale == float(np.float32(state.scale))


def test_growth_stops_at_the_ceiling_and_an_overflow_there_still_shrinks_the_scale() -> None:
    scale = LossScale(growth_interval=1)
    state = scale.initial()
    for _ in range(200):
        state = scale.next(state, False)
    assert state.scale == 2.0**127
    assert scale.next(state, True).scale == 2.0**126
