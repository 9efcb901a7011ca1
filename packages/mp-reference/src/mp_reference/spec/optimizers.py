"""Optimizers as rows: their hyperparameters, the tensors they keep, and every point where a value is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_reference.spec import sources

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OPTIMIZERS", "OptimizerRow", "equations_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """One optimizer: what it is told, what it remembers, what it computes.

    Args:
        name: the name in lower case.
        defaults: hyperparameter -> default, PyTorch's.
        slots: the fp32 tensors that it keeps beside each master.
        equations: pairs of a condition ("" for always) and an assignment; ``equations_of`` says how to read them.
        source: the document that fixes the mathematics.

    >>> OPTIMIZERS["adamw"].slots
    ('m', 'v')
    """

    name: str
    defaults: Mapping[str, float | bool | tuple[float, float]]
    slots: tuple[str, ...]
    equations: tuple[tuple[str, str], ...]
    source: str


_ADAM_DEFAULTS: dict[str, float | bool | tuple[float, float]] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
}  # fmt: skip
_DECAY = ("weight_decay", "g = g + ([weight_decay] * w)")
_CLIMB = ("maximize", "g = -g")
_MOMENTS = (
    ("", "m = m + ([1 - beta1] * (g - m))"),
    ("", "v = ([beta2] * v) + (([1 - beta2] * g) * g)"),
    ("amsgrad", "vmax = max(vmax, v)"),
    ("amsgrad", "denominator = (sqrt(vmax) / [sqrt(1 - beta2**t)]) + [eps]"),
    ("not amsgrad", "denominator = (sqrt(v) / [sqrt(1 - beta2**t)]) + [eps]"),
    ("", "w = w - (([lr / (1 - beta1**t)] * m) / denominator)"),
)

OPTIMIZERS: dict[str, OptimizerRow] = {
    "sgd": OptimizerRow(
        name="sgd",
        defaults={
            "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False,
        },
        slots=("buffer",),
        equations=(
            _CLIMB,
            _DECAY,
            ("momentum and t == 1", "buffer = g"),
            ("momentum and t > 1", "buffer = ([momentum] * buffer) + ([1 - dampening] * g)"),
            ("momentum and not nesterov", "g = buffer"),
            ("momentum and nesterov", "g = g + ([momentum] * buffer)"),
            ("", "w = w - ([lr] * g)"),
        ),
        source=sources.SUTSKEVER,
    ),
    "adam": OptimizerRow(
        name="adam",
        defaults=_ADAM_DEFAULTS,
        slots=("m", "v"),
        equations=(_CLIMB, _DECAY, *_MOMENTS),
        source=sources.ADAM,
    ),
    "adamw": OptimizerRow(
        name="adamw",
        defaults=_ADAM_DEFAULTS | {"weight_decay": 1e-2},
        slots=("m", "v"),
        equations=(_CLIMB, ("", "w = w * [1 - lr * weight_decay]"), *_MOMENTS),
        source=sources.ADAMW,
    ),
}  # fmt: skip
"""Every optimizer of the reference, by name."""


def equations_of(name: str) -> str:
    """The update of an optimizer as text, one equation a line.

    Conditions are about the hyperparameters and t. Square brackets hold what is computed in float64 from the
    hyperparameters and rounded once to fp32; every other operation (each of + - * / sqrt max) is one fp32 operation,
    rounded to nearest even, in the order of the parentheses. w is the fp32 master, g the unscaled and clipped gradient,
    t the number of this update from 1.

    Args:
        name: a key of ``OPTIMIZERS``.

    Returns:
        The lines.

    Raises:
        ValueError: no optimizer has this name.

    Source: the rows.

    >>> print(equations_of("sgd").splitlines()[-1])
    w = w - ([lr] * g)
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(OPTIMIZERS)}; choose one of these")
    return "\n".join(f"if {when}: {what}" if when else what for when, what in OPTIMIZERS[name].equations)
