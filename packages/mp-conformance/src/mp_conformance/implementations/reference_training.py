"""The reference's training operations: loss scale, clipping, optimizers, steps over a history."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance.histories import StepTrace
from mp_reference.amp import optimizers
from mp_reference.amp.clipping import clip_by_norm
from mp_reference.amp.fused import fused_step
from mp_reference.amp.loss_scale import LossScale, LossScaleError
from mp_reference.amp.optimizers import OptimizerState
from mp_reference.amp.step import StepPolicy, StepState, initial_state, step
from mp_reference.amp.stochastic import random_bits16
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.formats import BF16, FP16, FP32
from mp_reference.spec.op_rules import op_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mp_conformance.histories import History
    from mp_reference.spec.formats import FloatFormat

__all__ = ["OPERATIONS", "optimizer_of", "policy_of", "random_bits_of", "train"]

Array = np.ndarray[Any, np.dtype[Any]]

STORED = {
    "fp32": FP32, "fp16-mixed": FP32, "bf16-mixed": FP32, "fp16-true": FP16, "bf16-true": BF16, "bf16-sr": BF16,
}  # fmt: skip


def loss_scale(settings: Mapping[str, Any], flags: Sequence[bool]) -> list[tuple[float | str, ...]]:
    """(scale, growth_tracker, hysteresis_tracker) after each flag; ("raise",) where the run ends."""
    knobs = dict(settings)
    preset = knobs.pop("preset", None)
    scale = LossScale.preset(preset, **knobs) if preset else LossScale(**knobs)
    state = scale.initial()
    seen: list[tuple[float | str, ...]] = []
    for flag in flags:
        try:
            state = scale.next(state, flag)
        except LossScaleError:
            return [*seen, ("raise",)]
        seen.append((state.scale, state.growth_tracker, state.hysteresis_tracker))
    return seen


def clip(gradients: Sequence[Array], max_norm: float) -> tuple[float, list[Array]]:
    """The norm, and the gradients scaled to it."""
    clipped = clip_by_norm(list(gradients), max_norm)
    return clipped.norm, list(clipped.gradients)


def optimizer_of(kind: str, settings: Mapping[str, Any]) -> Any:
    """The reference's optimizer of that name."""
    return {"sgd": optimizers.SGD, "adam": optimizers.Adam, "adamw": optimizers.AdamW}[kind](**settings)


def optimizer(
    parameters: Sequence[Array], gradients: Sequence[Sequence[Array]], kind: str, settings: Mapping[str, Any]
) -> list[list[Array]]:
    """The fp32 parameters after each step."""
    rule = optimizer_of(kind, settings)
    now, states, trail = list(parameters), [OptimizerState()] * len(parameters), []
    with np.errstate(all="ignore"):
        for step_gradients in gradients:
            pairs = [rule.update(w, g, s) for w, g, s in zip(now, step_gradients, states, strict=True)]
            now, states = [w for w, _ in pairs], [s for _, s in pairs]
            trail.append(list(now))
    return trail


def policy_of(history: History) -> StepPolicy:
    """A history's settings as the reference takes them."""
    off = LossScale(init_scale=1.0, dynamic=False, skip_limit=None)
    stochastic = history.precision == "bf16-sr"
    return StepPolicy(
        optimizer=optimizer_of(history.optimizer, history.settings),
        max_grad_norm=history.max_grad_norm,
        loss_scale=LossScale(**history.loss_scale) if history.loss_scale else off,
        master_weights="none" if stochastic else "fp32",
        write_back="stochastic" if stochastic else "nearest-even",
    )


def random_bits_of(history: History, state: StepState) -> list[Array] | None:
    """What the next write-back rounds with; None where nothing is random."""
    if history.precision != "bf16-sr":
        return None
    return [
        random_bits16(history.seed, state.update_index, place, np.arange(p.size)).reshape(p.shape)
        for place, p in enumerate(history.parameters)
    ]


def train(history: History, *, save: Callable[[StepState], StepState] | None = None) -> list[StepTrace]:
    """A history, step by step; a resume pickles the state and reads it back.

    Args:
        history: the drawn run.
        save: what saving and loading does to the state; a faithful copy unless given.
    """
    policy, fmt = policy_of(history), STORED[history.precision]
    state = initial_state(policy, list(history.parameters), fmt)
    copy = save or (lambda one: pickle.loads(pickle.dumps(one)))  # our own bytes
    trace, done = [], 0
    for window in history.windows:
        total: list[Array] = []
        for micro in window:
            factor = 1.0 if history.as_stored else state.loss_scale.scale
            scaled = [_scaled(g, factor, fmt) for g in micro]
            with np.errstate(all="ignore"):
                total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
            done += 1
            if done in history.resume_after:
                state = copy(state)
        bits = random_bits_of(history, state)
        state, report = step(policy, state, total, weight=float(len(window)), random_bits=bits)
        asked = report.applied and history.max_grad_norm is not None
        entry = StepTrace(
            applied=report.applied, loss_scale=report.loss_scale, next_loss_scale=report.next_loss_scale,
            grad_norm=report.grad_norm if asked else None, parameters=state.parameters, masters=state.masters,
            slots=tuple(s.slots for s in state.optimizer),
        )  # fmt: skip
        trace.append(entry)
    return trace


def train_fused(history: History) -> list[StepTrace]:
    """A history by the reference's model of the fused kernels."""
    policy, fmt = policy_of(history), STORED[history.precision]
    state = initial_state(policy, list(history.parameters), fmt)
    trace = []
    for window in history.windows:
        before = state.loss_scale.scale
        total: list[Array] = []
        for micro in window:
            scaled = [_scaled(g, 1.0 if history.as_stored else before, fmt) for g in micro]
            with np.errstate(all="ignore"):
                total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
        updates = state.update_index
        state, norm, _ = fused_step(policy, state, total, weight=float(len(window)))
        applied = state.update_index > updates
        entry = StepTrace(
            applied=applied, loss_scale=before, next_loss_scale=state.loss_scale.scale,
            grad_norm=norm if applied and history.max_grad_norm is not None else None, parameters=state.parameters,
            masters=state.masters, slots=tuple(s.slots for s in state.optimizer),
        )  # fmt: skip
        trace.append(entry)
    return trace


def _scaled(gradient: Array, factor: float, fmt: FloatFormat) -> Array:
    with np.errstate(all="ignore"):
        return round_to(np.float32(factor) * gradient, fmt)


def rules(device: str) -> dict[str, str]:
    """The spec's op rules of one device."""
    return {name: row.rule for name, row in op_rules(device).items()}


OPERATIONS: dict[str, Callable[..., Any]] = {
    "loss_scale": loss_scale,
    "clip": clip,
    "optimizer": optimizer,
    "train": train,
    "op_rules": rules,
}
"""What the reference offers of training, by the names of ``implementations.OPERATIONS``."""
