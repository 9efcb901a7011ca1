"""The model of torch's fused kernels: where it contracts, where it does not, and what its step leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_reference.amp.fused import FUSED_WIDTH, fused_norm, fused_step, fused_update, update_bound
from mp_reference.amp.loss_scale import LossScale
from mp_reference.amp.optimizers import SGD, Adam, AdamW, OptimizerState
from mp_reference.amp.step import StepPolicy, initial_state, step
from mp_reference.spec.formats import BF16, FP32

if TYPE_CHECKING:
    from numpy.typing import NDArray


def f32(values: Any) -> NDArray[np.float32]:
    """An array of fp32."""
    return np.asarray(values, np.float32)


def drawn(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Numbers of many magnitudes."""
    rng = np.random.default_rng(seed)
    return f32(rng.standard_normal(count) * 10.0 ** rng.uniform(-3, 3, count))


def once(exact: Fraction) -> np.float32:
    """The fp32 number nearest to a fraction that float64 holds well enough here."""
    return np.float32(float(exact))


def test_a_plain_sgd_update_rounds_product_and_difference_once() -> None:
    w, g, lr = drawn(41, 1), drawn(41, 2), 0.03
    updated, _ = fused_update(SGD(lr=lr), w, g, OptimizerState())
    factor = Fraction(float(np.float32(-lr)))
    expected = [once(Fraction(float(a)) + factor * Fraction(float(b))) for a, b in zip(w, g, strict=True)]
    assert updated.tobytes() == f32(expected).tobytes()
    assert updated.tobytes() != (w - np.float32(lr) * g).tobytes(), "the contraction would not show in these numbers"


def test_body_and_tail_contract_the_second_moment_in_different_places() -> None:
    count = 2 * FUSED_WIDTH + 5
    g, v = np.full(count, np.float32(0.1)), np.full(count, np.float32(0.0123))
    state = OptimizerState(step=3, slots={"m": np.zeros_like(g), "v": v})
    _, after = fused_update(Adam(), np.ones_like(g), g, state)
    body, tail = after.slots["v"][: 2 * FUSED_WIDTH], after.slots["v"][2 * FUSED_WIDTH :]
    assert len(np.unique(body)) == len(np.unique(tail)) == 1
    assert body[0] != tail[0]


@pytest.mark.parametrize("width", [1, 8, 16])
def test_the_width_moves_the_border_between_body_and_tail(width: int) -> None:
    g, v = np.full(37, np.float32(0.1)), np.full(37, np.float32(0.0123))
    state = OptimizerState(step=3, slots={"m": np.zeros_like(g), "v": v})
    after = fused_update(Adam(), np.ones_like(g), g, state, width=width)[1].slots["v"]
    body = fused_update(Adam(), np.ones_like(g), g, state, width=1)[1].slots["v"]
    assert ((after == body) == (np.arange(37) < 37 // width * width)).all()


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        SGD(lr=0.1, maximize=True),
        Adam(weight_decay=0.01, amsgrad=True),
        Adam(betas=(0.3, 0.9)),
        AdamW(maximize=True),
        AdamW(weight_decay=0.0),
    ],
)
def test_a_fused_update_stays_within_a_few_ulp_of_the_separately_rounded_one(optimizer: SGD | Adam) -> None:
    w = f32(np.random.default_rng(5).uniform(1, 2, 50))
    exact, fused, states = w, w, [OptimizerState(), OptimizerState()]
    for t in range(5):
        g = drawn(50, t)
        exact, states[0] = optimizer.update(exact, g, states[0])
        fused, states[1] = fused_update(optimizer, fused, g, states[1])
    assert exact == pytest.approx(fused, rel=1e-4)
    assert states[0].step == states[1].step == 5


def test_the_scale_is_divided_by_before_anything_else() -> None:
    w, g = drawn(9, 6), drawn(9, 7)
    a = fused_update(SGD(lr=0.1), w, g, OptimizerState(), scale=3.0)[0]
    b = fused_update(SGD(lr=0.1), w, g / np.float32(3.0), OptimizerState())[0]
    assert a.tobytes() == b.tobytes()


def test_an_optimizer_without_a_model_is_refused() -> None:
    class Other:
        def update(self, *_: Any) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match="Other has no model of a fused kernel; use SGD, Adam or AdamW"):
        fused_update(Other(), f32([1]), f32([1]), OptimizerState())


def test_the_norm_is_taken_again_in_float64_where_fp32_loses_it() -> None:
    assert fused_norm([np.full(4, np.float32(3e19))]) == pytest.approx(6e19)
    assert fused_norm([np.full(4, np.float32(1e-30))]) == pytest.approx(2e-30)
    assert fused_norm([np.full(100, np.float32(3e38))]) == pytest.approx(3e39)
    assert math.isnan(fused_norm([f32([math.nan, 1.0])]))


def test_the_step_skips_what_is_not_finite_and_moves_only_the_loss_scale() -> None:
    policy = StepPolicy(optimizer=SGD(lr=0.5), loss_scale=LossScale(init_scale=4.0), max_grad_norm=1.0)
    state = initial_state(policy, [f32([1.0, 2.0])], BF16)
    new, norm, coefficient = fused_step(policy, state, [f32([math.inf, 1.0])])
    assert (new.masters, new.parameters, new.update_index) == (state.masters, state.parameters, 0)
    assert (new.loss_scale.scale, norm, coefficient) == (2.0, math.inf, 1.0)


def test_a_scale_below_one_makes_a_finite_gradient_overflow() -> None:
    policy = StepPolicy(
        optimizer=SGD(lr=0.5), loss_scale=LossScale(init_scale=2.0**-20, min_scale=0.0), max_grad_norm=None
    )
    state = initial_state(policy, [f32([1.0])])
    assert fused_step(policy, state, [f32([1e36])])[0].masters == state.masters


def test_without_contraction_in_reach_both_steps_agree() -> None:
    policy = StepPolicy(optimizer=[SGD(lr=0.5)], loss_scale=LossScale(init_scale=4.0), max_grad_norm=None)
    state = initial_state(policy, [f32([1.0, 2.0])], FP32)
    gradient = [f32([8.0, 16.0])]
    fused, exact = fused_step(policy, state, gradient, weight=2.0)[0], step(policy, state, gradient, weight=2.0)[0]
    assert fused.masters[0].tobytes() == exact.masters[0].tobytes()
    assert fused.update_index == exact.update_index == 1


def test_a_divisor_and_a_coefficient_that_one_number_cannot_hold_are_applied_one_after_the_other() -> None:
    policy = StepPolicy(optimizer=SGD(lr=1.0), max_grad_norm=1.0)
    state = initial_state(policy, [f32(np.ones(100))])
    new, norm, coefficient = fused_step(policy, state, [np.full(100, np.float32(3e38))])
    assert norm == pytest.approx(3e39)
    assert 0 < coefficient < 1e-38
    assert new.masters[0] == pytest.approx(np.full(100, 0.9))


OPTIMIZERS = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    Adam(weight_decay=0.1, amsgrad=True),
    Adam(lr=0.5, betas=(0.3, 0.5), maximize=True),
    AdamW(lr=0.1, weight_decay=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_contracted_update_lies_within_its_derived_bound_of_the_separately_rounded_one(optimizer: SGD | Adam) -> None:
    state, seen = OptimizerState(), 0.0
    for t in range(12):
        w, g = drawn(403, 2 * t), drawn(403, 2 * t + 1)
        bound = update_bound(optimizer, w, g, state)
        exact, after = optimizer.update(w, g, state)
        contracted, _ = fused_update(optimizer, w, g, state)
        apart = np.abs(exact.astype(np.float64) - contracted)
        assert (apart <= bound).all()
        seen = max(seen, float((apart / bound).max()))
        state = after
    assert seen > 1e-3, "the bound would be vacuous"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bound_notices_a_learning_rate_that_is_off_by_a_thousandth(optimizer: SGD | Adam) -> None:
    w, g = np.full(9, np.float32(0.5)), drawn(9, 3)
    off = replace(optimizer, lr=optimizer.lr * 1.001)
    exact, wrong = (one.update(w, g, OptimizerState())[0] for one in (optimizer, off))
    assert (np.abs(exact - wrong) > update_bound(optimizer, w, g, OptimizerState())).any()
