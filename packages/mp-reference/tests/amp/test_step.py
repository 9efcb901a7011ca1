"""The step: its order, what a skip leaves alone, and every way to keep or not keep masters."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_reference.amp.loss_scale import LossScale, LossScaleError
from mp_reference.amp.optimizers import SGD, AdamW
from mp_reference.amp.step import StepPolicy, StepState, divisor_of, initial_state, step
from mp_reference.spec.formats import BF16, FP16, FP32, FloatFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray


def f64(values: list[Any]) -> NDArray[np.float64]:
    """An array of float64."""
    return np.array(values, np.float64)


def f16(values: list[Any]) -> NDArray[np.float16]:
    """An array of float16."""
    return np.array(values, np.float16)


def f32(values: list[Any]) -> NDArray[np.float32]:
    """An array of float32."""
    return np.array(values, np.float32)


E5M4 = FloatFormat("e5m4", exponent_bits=5, mantissa_bits=4)


def bytes_of(state: StepState) -> list[bytes]:
    """Everything that training remembers but the loss scale, as bytes."""
    slots = [value for one in state.optimizer for value in one.slots.values()]
    steps = [str((one.step, state.update_index)).encode() for one in state.optimizer]
    arrays = [*state.masters, *state.parameters, *state.compensation, *slots]
    return [array.tobytes() for array in arrays] + steps


def test_the_step_divides_clips_updates_writes_back_and_then_moves_the_scale() -> None:
    policy = StepPolicy(
        optimizer=SGD(lr=1.0), loss_scale=LossScale(init_scale=4.0, growth_interval=1), max_grad_norm=1.0
    )
    state = initial_state(policy, [f32([1.0, 1.0])], BF16)
    new, report = step(policy, state, [f16([24.0, 32.0])], weight=2.0)
    coefficient = np.float32(1) / np.float32(5.000001)
    masters = f32([1, 1]) - f32([3, 4]) * coefficient
    assert (report.grad_norm, report.clip_coef) == (5.0, float(coefficient))
    assert report.clipped_norm == pytest.approx(1.0, rel=1e-6)
    assert new.masters[0].tobytes() == masters.tobytes()
    assert new.parameters[0].tobytes() == masters.astype(BF16.dtype).tobytes()
    assert (report.loss_scale, report.next_loss_scale, new.loss_scale.scale) == (4.0, 8.0, 8.0)
    assert (report.applied, report.skipped, report.reason, report.update_index) == (True, False, "", 1)


def test_clipping_by_value_comes_after_clipping_by_norm() -> None:
    policy = StepPolicy(optimizer=SGD(lr=1.0), max_grad_norm=1.0, clip_value=0.7)
    new, report = step(policy, initial_state(policy, [np.zeros(2, np.float32)]), [f32([3, 4])])
    assert new.masters[0].tolist() == [-float(np.float32(3) * np.float32(report.clip_coef)), -float(np.float32(0.7))]
    assert report.clipped_norm < 1.0


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), AdamW(weight_decay=0.1)])
def test_a_skip_changes_not_one_bit_but_the_scale(optimizer: Any, poison: float) -> None:
    policy = StepPolicy(optimizer=optimizer, loss_scale=LossScale(init_scale=16.0), max_grad_norm=1.0)
    state = initial_state(policy, [f32([1.0, 2.0]), f32([3.0])], FP16)
    state, _ = step(policy, state, [f32([16.0, 8.0]), f32([4.0])])
    new, report = step(policy, state, [f32([16.0, 8.0]), f32([poison])])
    assert bytes_of(new) == bytes_of(state)
    assert (report.applied, report.skipped, report.first_nonfinite, report.next_loss_scale) == (False, True, 1, 8.0)
    assert report.reason == "gradient 1 is not finite after unscaling by 16.0"
    assert not math.isfinite(report.grad_norm)
    assert (report.clip_coef, report.rounded_away, report.update_index) == (1.0, 0, 1)


def test_an_overflow_made_by_unscaling_is_seen() -> None:
    policy = StepPolicy(optimizer=SGD(lr=0.1), loss_scale=LossScale(init_scale=2.0**-20, min_scale=0.0))
    state = initial_state(policy, [f32([1.0, 1.0])])
    new, report = step(policy, state, [f32([1e36, 1.0])])
    assert report.skipped
    assert bytes_of(new) == bytes_of(state)
    assert report.next_loss_scale == 2.0**-21


def test_a_scale_of_zero_never_reaches_the_weights() -> None:
    loss_scale = LossScale.preset("torch", backoff_factor=2.0**-100)
    policy = StepPolicy(optimizer=SGD(lr=0.1), loss_scale=loss_scale)
    state = initial_state(policy, [f32([1.0])])
    for _ in range(3):
        state, _ = step(policy, state, [f32([math.nan])])
    assert state.loss_scale.scale == 0.0
    new, report = step(policy, state, [f32([0.0])])
    assert report.skipped
    assert new.masters[0].tolist() == [1.0]


def test_a_run_that_the_policy_ends_leaves_the_state_as_it_was() -> None:
    policy = StepPolicy(optimizer=SGD(), loss_scale=LossScale(skip_limit=1))
    state, _ = step(policy, initial_state(policy, [f32([1.0])]), [f32([math.inf])])
    kept = copy.deepcopy(state)
    with pytest.raises(LossScaleError, match="2 steps in a row were skipped, skip_limit=1 allows 1"):
        step(policy, state, [f32([math.inf])])
    assert bytes_of(state) == bytes_of(kept)
    assert state.loss_scale == kept.loss_scale


def test_a_parameter_without_a_gradient_keeps_its_moments_and_its_count() -> None:
    policy = StepPolicy(optimizer=AdamW())
    state = initial_state(policy, [f32([1.0]), f32([2.0])])
    new, _ = step(policy, state, [None, f32([1.0])])
    assert new.masters[0] is state.masters[0]
    assert [one.step for one in new.optimizer] == [0, 1]


def test_no_gradient_at_all_changes_nothing_and_says_so() -> None:
    policy = StepPolicy(optimizer=AdamW(), loss_scale=LossScale(growth_interval=1))
    state = initial_state(policy, [f32([1.0])])
    new, report = step(policy, state, [None])
    assert new is state
    assert (report.applied, report.skipped, report.reason) == (False, False, "no gradients")


def test_each_parameter_may_have_an_optimizer_and_a_format_of_its_own() -> None:
    policy = StepPolicy(optimizer=[SGD(lr=1.0), SGD(lr=0.5)])
    state = initial_state(policy, [f32([1.0]), f32([1.0])], [FP16, E5M4])
    new, _ = step(policy, state, [f32([0.5]), f32([0.5])])
    assert [one.tolist() for one in new.masters] == [[0.5], [0.75]]
    assert [one.dtype for one in new.parameters] == [np.float16, np.float32]


def test_a_frozen_bf16_weight_moves_with_masters_and_not_without() -> None:
    gradients = [f32([1.0])]
    ends = {}
    for masters in ("fp32", "none", "kahan"):
        policy = StepPolicy(optimizer=AdamW(lr=1.9e-3, weight_decay=0.0), master_weights=masters)
        state, away = initial_state(policy, [f32([1.0])], BF16), 0
        for _ in range(200):
            state, report = step(policy, state, gradients)
            away += report.rounded_away
        ends[masters] = (float(state.parameters[0][0]), away)
    assert ends["none"] == (1.0, 200)
    assert ends["fp32"] == (0.62109375, 103)
    assert ends["kahan"][0] == pytest.approx(0.62, abs=0.004)


def test_stochastic_write_back_moves_a_bf16_weight_on_average() -> None:
    policy = StepPolicy(optimizer=SGD(lr=2.0**-12), master_weights="none", write_back="stochastic")
    state = initial_state(policy, [np.ones(4096, np.float32)], BF16)
    random = np.random.default_rng(0)
    bits = [random.integers(0, 2**32, 4096, dtype=np.uint32)]
    new, report = step(policy, state, [np.ones(4096, np.float32)], random_bits=bits)
    moved = np.count_nonzero(new.masters[0] != 1)
    assert moved / 4096 == pytest.approx(1 / 16, abs=0.02)  # 2**-12 of a step of 2**-8
    assert report.rounded_away == 4096 - moved
    again, _ = step(policy, state, [np.ones(4096, np.float32)], random_bits=bits)
    assert again.parameters[0].tobytes() == new.parameters[0].tobytes()


@pytest.mark.parametrize("write_back", ["toward-zero", "toward-positive", "to-odd", "nearest-away"])
def test_the_write_back_takes_any_rounding(write_back: Any) -> None:
    policy = StepPolicy(optimizer=SGD(lr=1.0), write_back=write_back)
    state = initial_state(policy, [f32([0.0])], BF16)
    new, _ = step(policy, state, [f32([-1 - 2.0**-8])])
    expected = {"toward-zero": 1.0, "toward-positive": 1 + 2.0**-7, "to-odd": 1 + 2.0**-7, "nearest-away": 1 + 2.0**-7}
    assert float(new.parameters[0][0]) == expected[write_back]
    assert new.masters[0].tolist() == [1 + 2.0**-8]


@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=1, max_size=4),
    exponent=st.integers(-8, 8),
    gradient=st.floats(-100, 100, width=16),
)
def test_the_update_uses_the_weighted_mean_over_the_window_whatever_the_scale(
    weights: list[float], exponent: int, gradient: float
) -> None:
    policy = StepPolicy(
        optimizer=SGD(lr=1.0), loss_scale=LossScale(init_scale=2.0**exponent, min_scale=0.0, dynamic=False)
    )
    total = np.float32(sum(weight * gradient * 2.0**exponent for weight in weights))
    new, _ = step(policy, initial_state(policy, [f32([0.0])]), [total.reshape(1)], weight=sum(weights))
    assert new.masters[0][0] == -np.float32(total / 2.0**exponent / sum(weights))


def test_growing_the_scale_never_changes_an_update_of_powers_of_two() -> None:
    masters = []
    for scale in (1.0, 2.0**10, 2.0**20):
        policy = StepPolicy(optimizer=AdamW(), loss_scale=LossScale(init_scale=scale), max_grad_norm=0.1)
        new, _ = step(policy, initial_state(policy, [f32([1.0, 3.0])]), [f32([0.3, -0.7]) * np.float32(scale)])
        masters.append(new.masters[0].tobytes())
    assert len(set(masters)) == 1


def test_the_state_before_and_the_gradients_are_never_written_to() -> None:
    policy = StepPolicy(optimizer=AdamW(amsgrad=True), max_grad_norm=0.5, clip_value=0.4, master_weights="kahan")
    state, _ = step(policy, initial_state(policy, [f32([1.0])], BF16), [f32([2.0])])
    kept, gradient = bytes_of(state), f32([1.0])
    step(policy, state, [gradient])
    assert bytes_of(state) == kept
    assert gradient.tolist() == [1.0]


def test_the_divisor_is_rounded_once_to_fp32() -> None:
    policy = StepPolicy(optimizer=SGD(), loss_scale=LossScale(init_scale=3.0))
    assert divisor_of(initial_state(policy, []), weight=0.1) == np.float32(3.0 * 0.1)


ONE = [f32([1.0])]


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda: StepPolicy(optimizer=SGD(), master_weights=cast("Any", "fp64")),
            ValueError,
            "master_weights='fp64' must be one of",
        ),
        (
            lambda: StepPolicy(optimizer=SGD(), max_grad_norm=-1.0),
            ValueError,
            r"max_norm=-1\.0 must be a number above 0",
        ),
        (lambda: StepPolicy(optimizer=SGD(), norm_type=3.0), ValueError, r"norm_type=3\.0 must be 2\.0 or math\.inf"),
        (lambda: StepPolicy(optimizer=SGD(), clip_value=0.0), ValueError, r"clip_value=0\.0 must be a number above 0"),
        (
            lambda: initial_state(StepPolicy(optimizer=SGD()), [cast("Any", f64([1.0]))]),
            TypeError,
            "parameter 0 has dtype float64",
        ),
        (
            lambda: initial_state(StepPolicy(optimizer=SGD()), ONE, [FP32, FP32]),
            ValueError,
            "2 formats for 1 parameters",
        ),
        (lambda: initial_state(StepPolicy(optimizer=[SGD()] * 2), ONE), ValueError, "2 optimizers for 1 parameters"),
        (lambda: one_step([None, None]), ValueError, "2 gradients for 1 parameters; give None where there is none"),
        (lambda: one_step([f32([1, 2])]), ValueError, r"gradient 0 has shape \(2,\), its parameter has \(1,\)"),
        (lambda: one_step([f64([1])]), TypeError, "gradient 0 has dtype float64; give at most 32 bits"),
        (lambda: one_step(ONE, weight=0.0), ValueError, r"weight=0\.0 must be finite and above 0"),
        (lambda: one_step(ONE, weight=math.nan), ValueError, "weight=nan must be finite and above 0"),
        (lambda: one_step(ONE, random_bits=ONE), ValueError, "write_back='nearest-even' with random_bits given"),
        (
            lambda: one_step(ONE, write_back="stochastic"),
            ValueError,
            "write_back='stochastic' with random_bits missing",
        ),
        (
            lambda: one_step(ONE, write_back="stochastic", random_bits=[]),
            ValueError,
            "0 arrays of random_bits for 1 parameters; give one each",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(act: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


def one_step(gradients: Any, write_back: Any = "nearest-even", **options: Any) -> Any:
    """One step of one parameter."""
    policy = StepPolicy(optimizer=SGD(), write_back=write_back)
    return step(policy, initial_state(policy, ONE), gradients, **options)
