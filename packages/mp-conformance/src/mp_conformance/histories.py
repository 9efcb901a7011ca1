"""Histories of training, drawn: finite, tiny, huge, infinite and NaN gradients, windows, clipping, save and resume."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "EVENTS", "SETTINGS", "History", "StepTrace", "Wire", "events", "flags", "histories", "policies", "tensors",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]
Wire = Literal["fp32", "fp16", "bf16"]

EVENTS = (
    "applied", "skipped", "inf", "nan", "overflow by scaling", "scale grew", "scale shrank", "window of many",
    "short last window", "resume", "resume inside a window", "clipped", "skip after applied", "applied after skip",
)  # fmt: skip
"""What a set of histories must contain; the meta-tests count it."""


@dataclass(frozen=True, kw_only=True)
class History:
    """A run of training, given by its gradients.

    Args:
        precision: a precision of the engine.
        optimizer: ``sgd``, ``adam`` or ``adamw``.
        settings: its hyperparameters, PyTorch's names.
        loss_scale: fields of ``LossScalePolicy``; empty turns loss scaling off.
        max_grad_norm: clip, or None.
        parameters: fp32 starting values.
        windows: one tuple a step; in it one tuple a micro-step; in it one fp32 gradient a parameter: that of the
            micro-step's unscaled loss.
        resume_after: counts of micro-steps after which everything is saved, rebuilt from nothing and loaded.
        as_stored: the gradients are those of the scaled loss already, so that an unscaled one can be beyond fp32.
        seed: of the rounding, where it is stochastic.
        reduce_dtype: what gradients travel in where there are several ranks.
    """

    precision: str
    optimizer: str
    settings: Mapping[str, Any]
    loss_scale: Mapping[str, Any]
    max_grad_norm: float | None
    parameters: tuple[Array, ...]
    windows: tuple[tuple[tuple[Array, ...], ...], ...]
    resume_after: tuple[int, ...] = ()
    as_stored: bool = False
    seed: int = 0
    reduce_dtype: Wire = "fp32"

    @property
    def accumulate(self) -> int:
        """Micro-steps in a full window."""
        return max(len(window) for window in self.windows)


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What one step left behind.

    ``grad_norm`` is None where no norm was asked for and where the step was skipped; ``parameters`` are in their own
    dtype, ``masters`` in fp32; ``slots`` are the optimizer's tensors by parameter; ``report`` is all that the engine
    says, where ranks must say the same.
    """

    applied: bool
    loss_scale: float
    next_loss_scale: float
    grad_norm: float | None
    parameters: tuple[Array, ...]
    masters: tuple[Array, ...]
    slots: tuple[Mapping[str, Array], ...] = field(default_factory=tuple)
    report: str = ""


_ORDINARY = (1.0, -0.5, 0.25, 3.0, -1e-3, 0.1, -7.0, 1e-8, 0.0, -0.0)
_EDGE = (1e30, -3e38, 6e-5, -1e-38, 1e-45)
_TAME = (*_ORDINARY, *_ORDINARY, *_EDGE[2:])
_BAD = (float("inf"), float("-inf"), float("nan"))
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "sgd": (
        {"lr": 0.1},
        {"lr": 0.3, "momentum": 0.9},
        {"lr": 0.01, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02},
        {"lr": 0.2, "momentum": 0.7, "dampening": 0.3, "maximize": True},
    ),
    "adam": ({"lr": 1e-3}, {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}, {"lr": 0.1, "amsgrad": True}),
    "adamw": ({"lr": 1e-3, "weight_decay": 0.01}, {"lr": 0.05, "betas": (0.5, 0.9), "weight_decay": 0.3, "eps": 1e-6}),
}


@st.composite
def _gradients(draw: st.DrawFn, sizes: tuple[int, ...], bad: bool) -> tuple[Array, ...]:
    table = np.array((*_ORDINARY, *_ORDINARY, *_EDGE) if draw(st.integers(0, 5)) == 0 else _TAME, np.float32)
    data = np.frombuffer(draw(st.binary(min_size=sum(sizes), max_size=sum(sizes))), np.uint8)
    arrays = np.split(table[data % len(table)], np.cumsum(sizes)[:-1])
    if bad:
        where = draw(st.integers(0, len(sizes) - 1))
        arrays[where][draw(st.integers(0, sizes[where] - 1))] = draw(st.sampled_from(_BAD))
    return tuple(arrays)


@st.composite
def histories(
    draw: st.DrawFn,
    precisions: tuple[str, ...] = ("fp16-mixed", "fp32", "fp16-mixed", "bf16-mixed"),
    resume: bool = False,
    longest: int = 6,
    finite: bool = False,
    optimizers: tuple[str, ...] = ("sgd", "adam", "adamw"),
    accumulates: tuple[int, ...] = (1, 1, 2, 3),
    tiny_scale: bool = False,
) -> History:
    """Histories of up to ``longest`` steps on two or three small parameters.

    Args:
        draw: Hypothesis' own.
        precisions: which precisions to draw from.
        resume: whether to save, rebuild and load, at one to three places.
        longest: the most steps.
        finite: draw no infinities and NaNs.
        optimizers: which optimizers to draw from.
        accumulates: which window lengths to draw from.
        tiny_scale: start at a loss scale far below 1, where unscaling overflows.

    Returns:
        A history whose loss scale moves within its few steps: the interval is 1 to 3, the factors are powers of two.

    Source: this project.
    """
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    optimizer = draw(st.sampled_from(optimizers))
    accumulate = draw(st.sampled_from(accumulates))
    steps = draw(st.integers(1, longest))
    windows = []
    for index in range(steps):
        short = index == steps - 1 and accumulate > 1 and draw(st.booleans())
        length = draw(st.integers(1, accumulate - 1)) if short else accumulate
        bad = not finite and draw(st.integers(0, 3)) == 0
        spoiled = draw(st.integers(0, length - 1))
        windows.append(tuple(draw(_gradients(sizes, bad and i == spoiled)) for i in range(length)))
    total = sum(len(window) for window in windows)
    precision = draw(st.sampled_from(precisions))
    return History(
        precision=precision,
        optimizer=optimizer,
        settings=draw(st.sampled_from(SETTINGS[optimizer])),
        loss_scale=draw(policies(tiny_scale)) if precision.startswith("fp16") else {},
        max_grad_norm=draw(st.sampled_from((None, 1.0, 0.25, 1e4))),
        parameters=draw(_gradients(sizes, bad=False)),
        windows=tuple(windows),
        as_stored=tiny_scale,
        resume_after=tuple(sorted(draw(st.sets(st.integers(1, total), min_size=1, max_size=3)))) if resume else (),
    )


@st.composite
def policies(draw: st.DrawFn, tiny: bool = False) -> dict[str, Any]:
    """Loss scales that move within a few steps.

    Args:
        draw: Hypothesis' own.
        tiny: start far below 1.

    Returns:
        Fields of ``LossScalePolicy``.

    Source: this project.
    """
    policy: dict[str, Any] = {
        "init_scale": 2.0**-20 if tiny else draw(st.sampled_from((1.0, 16.0, 65536.0, 2.0**100))),
        "growth_interval": draw(st.integers(1, 3)),
        "hysteresis": draw(st.sampled_from((1, 1, 2, 3))),
        "hysteresis_refill": draw(st.sampled_from(("on-growth", "on-good-step"))),
        "min_scale": 2.0**-24 if tiny else draw(st.sampled_from((1.0, 0.25))),
        "max_scale": draw(st.sampled_from((2.0**127, 2.0**101))),
    }
    return policy


def tensors() -> st.SearchStrategy[tuple[Array, ...]]:
    """One to three small fp32 tensors of finite values, huge and tiny ones among them.

    Returns:
        A strategy of tuples of 1-D arrays.

    Source: this project.
    """
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
    return sizes.flatmap(lambda shape: _gradients(shape, bad=False))


def flags(longest: int = 40) -> st.SearchStrategy[tuple[bool, ...]]:
    """Sequences of ``found_inf``, with runs of both kinds.

    Args:
        longest: the most flags.

    Returns:
        A strategy of tuples of bool.

    Source: this project.
    """
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=longest // 4)
    return runs.map(lambda parts: tuple(flag for flag, length in parts for _ in range(length))[:longest])


def events(history: History, trace: list[StepTrace]) -> set[str]:
    """Which of ``EVENTS`` a history contains, told from it and from what it left behind.

    Args:
        history: the drawn one.
        trace: one entry a step.

    Returns:
        Names of events.

    Source: this project.
    """
    found = {"applied" if step.applied else "skipped" for step in trace}
    values = [g for window in history.windows for micro in window for g in micro]
    found |= {"inf"} if any(np.isinf(g).any() for g in values) else set()
    found |= {"nan"} if any(np.isnan(g).any() for g in values) else set()
    for window, step in zip(history.windows, trace, strict=True):
        finite = all(np.isfinite(g).all() for micro in window for g in micro)
        found |= {"overflow by scaling"} if finite and not step.applied else set()
        found |= {"scale grew"} if step.next_loss_scale > step.loss_scale else set()
        found |= {"scale shrank"} if step.next_loss_scale < step.loss_scale else set()
        if step.grad_norm is not None and history.max_grad_norm is not None and step.grad_norm > history.max_grad_norm:
            found.add("clipped")
    found |= {"window of many"} if history.accumulate > 1 else set()
    found |= {"short last window"} if len(history.windows[-1]) < history.accumulate else set()
    found |= {"resume"} if history.resume_after else set()
    inside = {i for i in history.resume_after if i % history.accumulate and i < sum(map(len, history.windows))}
    found |= {"resume inside a window"} if inside else set()
    pairs = [(a.applied, b.applied) for a, b in pairwise(trace)]
    found |= {"skip after applied"} if (True, False) in pairs else set()
    found |= {"applied after skip"} if (False, True) in pairs else set()
    return found
