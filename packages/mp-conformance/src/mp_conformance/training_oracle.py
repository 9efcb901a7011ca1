"""Training steps in exact arithmetic: every fp32 operation a fraction rounded once, one scalar at a time.

Written from the equations of ``mp_reference.spec.optimizers`` and from the order of a step alone. It shares nothing
with ``mp_reference.amp``, which is a subject here, but the exact oracle.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance.histories import StepTrace
from mp_conformance.oracle import cast, values_of
from mp_reference.numerics import exact
from mp_reference.spec.formats import BF16, FP16, FP32

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mp_conformance.histories import History
    from mp_reference.spec.formats import FloatFormat

__all__ = ["F32", "clip", "norm_of", "run_history", "update"]

STORED = {"fp32": FP32, "fp16-mixed": FP32, "bf16-mixed": FP32, "fp16-true": FP16, "bf16-true": BF16}
"""The format of the parameters under each precision."""


class F32:
    """An fp32 scalar whose every operation is exact and then rounded once.

    >>> (F32(1.0) + F32(2.0**-24)).value, (F32(0.1) * F32(3.0)).value
    (1.0, 0.30000001192092896)
    """

    __slots__ = ("value",)

    def __init__(self, value: float | Fraction) -> None:
        self.value = exact.round_exact(value, FP32)

    def __add__(self, other: F32) -> F32:
        return F32(exact.add(self.value, other.value))

    def __sub__(self, other: F32) -> F32:
        return F32(exact.sub(self.value, other.value))

    def __mul__(self, other: F32) -> F32:
        return F32(exact.mul(self.value, other.value))

    def __truediv__(self, other: F32) -> F32:
        return F32(exact.div(self.value, other.value))

    def __neg__(self) -> F32:
        return F32(-self.value)

    def sqrt(self) -> F32:
        """The correctly rounded square root."""
        return F32(exact.sqrt(self.value))

    def max(self, other: F32) -> F32:
        """The larger one; NaN if either is."""
        if math.isnan(self.value) or math.isnan(other.value):
            return F32(math.nan)
        return self if self.value >= other.value else other


def norm_of(tensors: list[list[float]]) -> float:
    """The Euclidean norm of all tensors: exact squares, a float64 tree, one rounded root.

    >>> norm_of([[3.0], [4.0]])
    5.0
    """
    square = _tree([_tree([g * g for g in tensor]) for tensor in tensors])
    if not math.isfinite(square):
        return math.nan if math.isnan(square) else math.inf
    root = exact.sqrt(square)
    rounded = exact.round_exact(root, FP32)
    return rounded if math.isfinite(rounded) else float(root)


def _tree(values: list[float]) -> float:
    if not values:
        return 0.0
    row = values + [0.0] * ((1 << (len(values) - 1).bit_length()) - len(values))
    while len(row) > 1:
        half = len(row) // 2
        row = [row[i] + row[half + i] for i in range(half)]
    return row[0]


def clip(tensors: list[list[float]], norm: float, max_norm: float) -> list[list[float]]:
    """Gradients scaled to ``max_norm`` where their norm exceeds it."""
    bound, guard = exact.round_exact(max_norm, FP32), exact.round_exact(1e-6, FP32)
    if norm > FP32.max:
        coefficient = exact.round_exact(bound / (norm + guard), FP32)
    else:
        coefficient = min(1.0, (F32(bound) / (F32(norm) + F32(guard))).value)
    if coefficient >= 1:
        return tensors
    return [[(F32(g) * F32(coefficient)).value for g in tensor] for tensor in tensors]


def update(
    kind: str, settings: Mapping[str, Any], w: float, g: float, state: dict[str, float], t: int
) -> tuple[float, dict[str, float]]:
    """One scalar's update.

    Args:
        kind: sgd, adam or adamw.
        settings: its hyperparameters; what is missing has PyTorch's default.
        w: fp32 master.
        g: fp32 gradient, unscaled and clipped.
        state: what the last update left; empty before the first.
        t: the number of this update, from 1.

    Returns:
        The new master and state.

    Source: ``mp_reference.spec.optimizers.equations_of``.

    >>> update("sgd", {"lr": 0.5}, 1.0, 0.25, {}, 1)[0]
    0.875
    """
    weight, gradient = F32(w), F32(-g if settings.get("maximize") else g)
    if kind == "sgd":
        return _sgd(settings, weight, gradient, state)
    lr, eps = settings.get("lr", 1e-3), settings.get("eps", 1e-8)
    decay = settings.get("weight_decay", 1e-2 if kind == "adamw" else 0.0)
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    if kind == "adamw":
        weight = weight * F32(1 - lr * decay)
    elif decay:
        gradient = gradient + F32(decay) * weight
    m, v = F32(state.get("m", 0.0)), F32(state.get("v", 0.0))
    m = m + F32(1 - beta1) * (gradient - m)
    v = (F32(beta2) * v) + ((F32(1 - beta2) * gradient) * gradient)
    new = {"m": m.value, "v": v.value}
    if settings.get("amsgrad"):
        v = F32(state.get("vmax", 0.0)).max(v)
        new["vmax"] = v.value
    denominator = (v.sqrt() / F32(math.sqrt(1 - beta2**t))) + F32(eps)
    weight = weight - ((F32(lr / (1 - beta1**t)) * m) / denominator)
    return weight.value, new


def _sgd(settings: Mapping[str, Any], w: F32, g: F32, state: dict[str, float]) -> tuple[float, dict[str, float]]:
    momentum, new = settings.get("momentum", 0.0), {}
    if settings.get("weight_decay"):
        g = g + (F32(settings["weight_decay"]) * w)
    if momentum:
        buffer = g
        if "buffer" in state:
            buffer = (F32(momentum) * F32(state["buffer"])) + (F32(1 - settings.get("dampening", 0.0)) * g)
        new["buffer"] = buffer.value
        g = g + (F32(momentum) * buffer) if settings.get("nesterov") else buffer
    return (w - (F32(settings["lr"]) * g)).value, new


class _Scale:
    """The loss scale with the rules of ``LossScalePolicy``, restated for powers of two."""

    def __init__(self, policy: Mapping[str, Any]) -> None:
        self.policy = policy
        self.value = policy.get("init_scale", 1.0)
        self.good, self.left = 0, policy.get("hysteresis", 1)

    def move(self, found_inf: bool) -> None:
        """One step's transition."""
        if not self.policy:
            return
        if found_inf:
            self.good, self.left = 0, self.left - 1
            if self.left <= 0:
                self.value = max(self.value / 2, self.policy["min_scale"])
            return
        self.good += 1
        if self.policy["hysteresis_refill"] == "on-good-step":
            self.left = self.policy["hysteresis"]
        if self.good >= self.policy["growth_interval"]:
            self.good, self.left = 0, self.policy["hysteresis"]
            self.value = min(self.value * 2, self.policy["max_scale"])


def run_history(history: History) -> list[StepTrace]:
    """What every step of a history must leave behind.

    Args:
        history: of a precision in ``STORED``.

    Returns:
        One entry a step. Saving and resuming change nothing, so the oracle does not look at ``resume_after``.

    Source: the order of a step, and ``mp_reference.spec.optimizers``.
    """
    fmt = STORED[history.precision]
    masters = [values_of(p) for p in history.parameters]
    states: list[list[dict[str, float]]] = [[{} for _ in tensor] for tensor in masters]
    scale, trace, t = _Scale(history.loss_scale), [], 0
    for window in history.windows:
        before = scale.value
        divisor = F32(Fraction(before) * len(window))
        stored = _accumulate(window, 1.0 if history.as_stored else before, fmt)
        unscaled = [[(F32(g) / divisor).value for g in tensor] for tensor in stored]
        found_inf = not all(math.isfinite(g) for tensor in unscaled for g in tensor)
        norm = None
        if not found_inf:
            t += 1
            if history.max_grad_norm is not None:
                norm = norm_of(unscaled)
                unscaled = clip(unscaled, norm, history.max_grad_norm)
            for i, tensor in enumerate(unscaled):
                for j, g in enumerate(tensor):
                    masters[i][j], states[i][j] = update(
                        history.optimizer, history.settings, masters[i][j], g, states[i][j], t
                    )
        scale.move(found_inf)
        trace.append(_entry(history, fmt, not found_inf, (before, scale.value), norm, masters, states))
    return trace


def _accumulate(window: tuple[tuple[Any, ...], ...], scale: float, fmt: FloatFormat) -> list[list[float]]:
    """Each micro-step's gradient times the scale, rounded to the parameter's format, summed in fp32."""
    total: list[list[F32]] = []
    for micro in window:
        scaled = [[exact.round_exact((F32(scale) * F32(g)).value, fmt) for g in values_of(x)] for x in micro]
        if not total:
            total = [[F32(g) for g in tensor] for tensor in scaled]
        else:
            total = [
                [a + F32(g) for a, g in zip(sums, tensor, strict=True)]
                for sums, tensor in zip(total, scaled, strict=True)
            ]
    return [[g.value for g in tensor] for tensor in total]


def _entry(
    history: History, fmt: FloatFormat, applied: bool, scales: tuple[float, float], norm: float | None,
    masters: list[list[float]], states: list[list[dict[str, float]]],
) -> StepTrace:  # fmt: skip
    fp32 = tuple(np.array(m, np.float64).astype(np.float32) for m in masters)  # exact: they are fp32 values
    slots = []
    for tensor in states:
        names = tensor[0].keys() if tensor else ()
        slots.append({name: np.array([s[name] for s in tensor], np.float64).astype(np.float32) for name in names})
    del history
    return StepTrace(
        applied=applied, loss_scale=scales[0], next_loss_scale=scales[1], grad_norm=norm,
        parameters=tuple(cast(m, fmt) for m in fp32), masters=fp32, slots=tuple(slots),
    )  # fmt: skip
