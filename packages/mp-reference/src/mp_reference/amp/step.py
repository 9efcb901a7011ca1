"""One training step as a pure function: unscale, decide, clip, update fp32 masters, write back, move the loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mp_reference.amp.clipping import clip_by_norm, clip_by_value, gradient_norm
from mp_reference.amp.loss_scale import LossScale, LossScaleState
from mp_reference.amp.optimizers import Optimizer, OptimizerState
from mp_reference.numerics.rounding import Rounding, round_to
from mp_reference.spec.formats import FP32, FloatFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StepPolicy", "StepReport", "StepState", "divisor_of", "initial_state", "step"]

Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """Everything that a step is told and does not remember.

    Args:
        optimizer: one for all parameters, or one for each (parameter groups with settings of their own).
        loss_scale: the loss scale's policy; a fixed 1.0 unless given.
        max_grad_norm: clip all gradients together to this norm; None does not.
        norm_type: 2.0 or infinity.
        clip_value: then limit every element to this magnitude; None does not.
        master_weights: "fp32" keeps fp32 masters; "none" keeps only the parameters and widens them for the update;
            "kahan" keeps beside each parameter, in its format, what its last write-back lost.
        write_back: the rounding of the write-back; "stochastic" needs ``random_bits`` at every step.

    Raises:
        ValueError: a norm, a bound or a choice that has no meaning.

    Source: the module's docstring is the order; docs/step.md states every rounding.

    >>> from mp_reference.amp.optimizers import SGD
    >>> StepPolicy(optimizer=SGD(lr=0.5)).master_weights
    'fp32'
    """

    optimizer: Optimizer | Sequence[Optimizer]
    loss_scale: LossScale = field(default_factory=lambda: LossScale(init_scale=1.0, dynamic=False, skip_limit=None))
    max_grad_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    master_weights: Literal["fp32", "none", "kahan"] = "fp32"
    write_back: Rounding = "nearest-even"

    def __post_init__(self) -> None:
        """Refuse at once what the first step would refuse."""
        if self.master_weights not in ("fp32", "none", "kahan"):
            raise ValueError(f"master_weights={self.master_weights!r} must be one of 'fp32', 'none', 'kahan'")
        gradient_norm([], self.norm_type)
        if self.max_grad_norm is not None:
            clip_by_norm([], self.max_grad_norm, self.norm_type)
        if self.clip_value is not None:
            clip_by_value([], self.clip_value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """Everything that training remembers between steps; a step returns a new one.

    Args:
        formats: the format of each parameter.
        masters: what the update works on, fp32: the masters, or the widened parameters where there are none.
        parameters: what the model computes with, arrays of ``format.dtype``.
        compensation: what the last write-back lost, fp32 arrays of values of the format; empty but for "kahan".
        optimizer: one state a parameter.
        loss_scale: the loss scale's state.
        update_index: updates applied so far.
    """

    formats: tuple[FloatFormat, ...]
    masters: tuple[Float32Array, ...]
    parameters: tuple[NDArray[Any], ...]
    compensation: tuple[Float32Array, ...]
    optimizer: tuple[OptimizerState, ...]
    loss_scale: LossScaleState
    update_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step did and why.

    Args:
        applied: whether the parameters were updated.
        skipped: whether gradients were there and were rejected.
        reason: why not applied, "" if it was.
        grad_norm: norm of the unscaled gradients, an fp32 value or a float64 one beyond fp32.
        clipped_norm: the same after clipping.
        clip_coef: what clipping by norm multiplied by.
        loss_scale: the scale that these gradients were made with.
        next_loss_scale: the scale for the next loss.
        first_nonfinite: index of the first parameter whose unscaled gradient is not finite, or None.
        update_index: updates applied, this one included.
        rounded_away: elements with a gradient that is not zero whose parameter kept its bits.
    """

    applied: bool
    skipped: bool
    reason: str
    grad_norm: float
    clipped_norm: float
    clip_coef: float
    loss_scale: float
    next_loss_scale: float
    first_nonfinite: int | None
    update_index: int
    rounded_away: int


def initial_state(
    policy: StepPolicy, parameters: Sequence[Float32Array], formats: FloatFormat | Sequence[FloatFormat] = FP32
) -> StepState:
    """The state before the first step.

    Args:
        policy: what the steps will be told.
        parameters: fp32 arrays, the original values: masters keep them unrounded.
        formats: the format the parameters are stored in, one for all or one each.

    Returns:
        A state whose parameters are the originals rounded to nearest even.

    Raises:
        TypeError: a parameter is not fp32.
        ValueError: the counts of parameters, formats and optimizers differ.

    Source: docs/step.md.

    >>> from mp_reference.amp.optimizers import SGD
    >>> from mp_reference.spec.formats import BF16
    >>> state = initial_state(StepPolicy(optimizer=SGD()), [np.float32([1.001])], BF16)
    >>> state.masters[0], state.parameters[0]
    (array([1.001], dtype=float32), array([1], dtype=bfloat16))
    """
    for index, parameter in enumerate(parameters):
        if parameter.dtype != np.float32:
            raise TypeError(
                f"parameter {index} has dtype {parameter.dtype}, masters are made from fp32; widen 16-bit arrays with "
                "x.astype(np.float32) and give their format as formats="
            )
    rows = (formats,) * len(parameters) if isinstance(formats, FloatFormat) else tuple(formats)
    if len(rows) != len(parameters):
        raise ValueError(f"{len(rows)} formats for {len(parameters)} parameters; give one format for all, or one each")
    _optimizers(policy, len(parameters))
    rounded = [round_to(parameter, fmt) for parameter, fmt in zip(parameters, rows, strict=True)]
    masters = [parameter.copy() for parameter in (parameters if policy.master_weights == "fp32" else rounded)]
    return StepState(
        formats=rows,
        masters=tuple(masters),
        parameters=tuple(_stored(value, fmt) for value, fmt in zip(rounded, rows, strict=True)),
        compensation=tuple(
            round_to(parameter - value, fmt) for parameter, value, fmt in zip(parameters, rounded, rows, strict=True)
        ) if policy.master_weights == "kahan" else (),
        optimizer=(OptimizerState(),) * len(parameters),
        loss_scale=policy.loss_scale.initial(),
    )  # fmt: skip


def divisor_of(state: StepState, weight: float = 1.0) -> np.float32:
    """What stored gradients are divided by: the loss scale times the window's total weight, rounded once to fp32.

    Args:
        state: the state that the gradients were made with.
        weight: the sum of the weights of the window's micro-steps, > 0; 1.0 each unless weighted by hand.

    Returns:
        An fp32 number.

    Raises:
        ValueError: ``weight`` is not above 0 and finite.

    Source: docs/step.md.

    >>> from mp_reference.amp.optimizers import SGD
    >>> divisor_of(initial_state(StepPolicy(optimizer=SGD()), []), weight=4.0)
    np.float32(4.0)
    """
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"weight={weight!r} must be finite and above 0; it is the number of micro-steps if unweighted")
    return np.float32(state.loss_scale.scale * weight)


def step(
    policy: StepPolicy,
    state: StepState,
    gradients: Sequence[NDArray[Any] | None],
    weight: float = 1.0,
    random_bits: Sequence[NDArray[Any]] | None = None,
) -> tuple[StepState, StepReport]:
    """Apply the accumulated gradients, or skip the update if any unscaled one is not finite.

    The order: divide by the scale that made these gradients; decide; clip; update; write back; only then move the
    scale. What is skipped changes nothing but the loss scale's state.

    Args:
        policy: what is told; may differ from step to step (a learning-rate schedule).
        state: what is remembered; unchanged.
        gradients: one array a parameter, of its shape and at most 32 bits: the sum over the window of the gradients of
            the scaled and weighted losses; None where there is none, which leaves parameter and moments alone.
        weight: the window's total weight, see ``divisor_of``.
        random_bits: one array of unsigned integers a parameter for stochastic write-back.

    Returns:
        The new state and the report.

    Raises:
        ValueError: counts or shapes that do not fit.
        TypeError: a gradient of float64, which fp32 does not hold.
        LossScaleError: the loss scale's policy ends the run; nothing has changed.

    Source: docs/step.md.

    >>> from mp_reference.amp.optimizers import SGD
    >>> policy = StepPolicy(optimizer=SGD(lr=0.5), loss_scale=LossScale(init_scale=1024.0))
    >>> state, report = step(policy, initial_state(policy, [np.float32([1.0])]), [np.float16([512.0])])
    >>> state.parameters[0], report.applied, report.grad_norm
    (array([0.75], dtype=float32), True, 0.5)
    """
    _check(policy, state, gradients, random_bits)
    if all(gradient is None for gradient in gradients):
        return state, _nothing_to_do(state)
    divisor = divisor_of(state, weight)
    with np.errstate(all="ignore"):  # what overflows here is data: the decision below is about it
        unscaled = [None if g is None else np.asarray(g, np.float32) / divisor for g in gradients]
        present = [g for g in unscaled if g is not None]
        bad = [index for index, g in enumerate(unscaled) if g is not None and not np.isfinite(g).all()]
        norm = gradient_norm(present, policy.norm_type)
    loss_scale = policy.loss_scale.next(state.loss_scale, found_inf=bool(bad))
    clipped, coefficient = (present, 1.0) if bad else _clip(policy, present)
    new = state if bad else _update(policy, state, unscaled, clipped, random_bits)
    report = StepReport(
        applied=not bad,
        skipped=bool(bad),
        reason=f"gradient {bad[0]} is not finite after unscaling by {float(divisor)!r}" if bad else "",
        grad_norm=norm,
        clipped_norm=norm if clipped is present else gradient_norm(clipped, policy.norm_type),
        clip_coef=coefficient,
        loss_scale=state.loss_scale.scale,
        next_loss_scale=loss_scale.scale,
        first_nonfinite=bad[0] if bad else None,
        update_index=new.update_index,
        rounded_away=sum(_kept_bits(state, new, unscaled)) if not bad else 0,
    )
    return replace(new, loss_scale=loss_scale), report


def _nothing_to_do(state: StepState) -> StepReport:
    scale = state.loss_scale.scale
    return StepReport(
        applied=False, skipped=False, reason="no gradients", grad_norm=0.0, clipped_norm=0.0, clip_coef=1.0,
        loss_scale=scale, next_loss_scale=scale, first_nonfinite=None, update_index=state.update_index, rounded_away=0,
    )  # fmt: skip


def _check(policy: StepPolicy, state: StepState, gradients: Sequence[Any], random_bits: Sequence[Any] | None) -> None:
    count = len(state.parameters)
    _optimizers(policy, count)
    if len(gradients) != count:
        raise ValueError(f"{len(gradients)} gradients for {count} parameters; give None where there is none")
    for index, (gradient, parameter) in enumerate(zip(gradients, state.parameters, strict=True)):
        if gradient is not None and gradient.shape != parameter.shape:
            raise ValueError(f"gradient {index} has shape {gradient.shape}, its parameter has {parameter.shape}")
        if gradient is not None and gradient.dtype.itemsize > 4:
            raise TypeError(f"gradient {index} has dtype {gradient.dtype}; give at most 32 bits, which widen exactly")
    if (policy.write_back == "stochastic") != (random_bits is not None):
        raise ValueError(
            f"write_back={policy.write_back!r} with random_bits {'missing' if random_bits is None else 'given'}; "
            "random bits are an argument of stochastic rounding and of no other"
        )
    if random_bits is not None and len(random_bits) != count:
        raise ValueError(f"{len(random_bits)} arrays of random_bits for {count} parameters; give one each")


def _optimizers(policy: StepPolicy, count: int) -> Sequence[Optimizer]:
    if not isinstance(policy.optimizer, Sequence):
        return [policy.optimizer] * count
    if len(policy.optimizer) != count:
        raise ValueError(f"{len(policy.optimizer)} optimizers for {count} parameters; give one for all, or one each")
    return policy.optimizer


def _clip(policy: StepPolicy, gradients: list[Float32Array]) -> tuple[Sequence[Float32Array], float]:
    coefficient = 1.0
    clipped: Sequence[Float32Array] = gradients
    if policy.max_grad_norm is not None:
        by_norm = clip_by_norm(gradients, policy.max_grad_norm, policy.norm_type)
        coefficient = by_norm.coefficient
        clipped = by_norm.gradients if coefficient < 1 else gradients
    if policy.clip_value is not None:
        clipped = clip_by_value(clipped, policy.clip_value)
    return clipped, coefficient


def _update(
    policy: StepPolicy,
    state: StepState,
    unscaled: list[Float32Array | None],
    clipped: Sequence[Float32Array],
    random_bits: Sequence[NDArray[Any]] | None,
) -> StepState:
    masters, parameters, compensation = list(state.masters), list(state.parameters), list(state.compensation)
    states, remaining = list(state.optimizer), iter(clipped)
    for index, optimizer in enumerate(_optimizers(policy, len(masters))):
        if unscaled[index] is None:
            continue
        fmt, base = state.formats[index], masters[index]
        with np.errstate(all="ignore"):  # an update may overflow or divide as it likes; IEEE says what it gives
            if policy.master_weights == "kahan":
                base = base + compensation[index]
            updated, states[index] = optimizer.update(base, next(remaining), states[index])
            bits = None if random_bits is None else random_bits[index]
            rounded = round_to(updated, fmt, rounding=policy.write_back, random_bits=bits)
            if policy.master_weights == "kahan":
                compensation[index] = round_to(updated - rounded, fmt)
        masters[index] = updated if policy.master_weights == "fp32" else rounded
        parameters[index] = _stored(rounded, fmt)
    return StepState(
        formats=state.formats,
        masters=tuple(masters),
        parameters=tuple(parameters),
        compensation=tuple(compensation),
        optimizer=tuple(states),
        loss_scale=state.loss_scale,
        update_index=state.update_index + 1,
    )


def _kept_bits(old: StepState, new: StepState, unscaled: list[Float32Array | None]) -> Iterator[int]:
    for before, after, gradient in zip(old.parameters, new.parameters, unscaled, strict=True):
        if gradient is not None:
            yield int(np.count_nonzero((gradient != 0) & (before == after)))


def _stored(rounded: Float32Array, fmt: FloatFormat) -> NDArray[Any]:
    """Values of the format as an array of its dtype, which is exact."""
    return rounded.astype(fmt.dtype)
