"""Histories for many ranks, drawn window by window; overflows fall on each rank in turn.

A draw is a window of micro-steps. Ten windows make a history, under one drawn plan: precision, optimizer, loss scale,
clipping, sizes. So a history is long, and what it costs to build an engine on every rank is paid once in ten draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from mp_conformance.histories import SETTINGS, History, policies

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mp_conformance.claims.rows import Run
    from mp_conformance.histories import Wire
    from mp_conformance.layouts import Layout

__all__ = ["GRADIENT_KEEPER", "LENGTH", "Plan", "Window", "drawn_histories", "exact_windows", "rounded_windows"]

Array = np.ndarray[Any, np.dtype[Any]]
Windows = tuple[tuple[tuple[Array, ...], ...], ...]

LENGTH = 10
"""Windows in a history."""

_HIGH = 2.0**80
_BEYOND = 60
"""2**60 times a scale near 2**80 is beyond fp32, wherever the scale has moved within a history."""

_NARROW = ("bf16-true", "bf16-sr")
_BAD = (math.inf, -math.inf, math.nan)

GRADIENT_KEEPER = {"lr": 0.5, "momentum": 1e-40}
"""SGD whose momentum buffer is the gradient itself: what is left of the old one is below half an ulp of the new."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A drawn window, before it is known on which layout it falls.

    Args:
        seed: of its numbers.
        shift: exponent of their common factor; ``_BEYOND`` overflows a high loss scale.
        bad: what one gradient becomes on one rank; None leaves all finite.
    """

    seed: int
    shift: int
    bad: float | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What stays for a whole history.

    Args:
        shapes: of the parameters, in the order of ``layouts.PARAMETERS``.
        seed: of the starting values, and of the rounding where it is stochastic.
        fields: the other fields of ``History``.
    """

    shapes: tuple[tuple[int, ...], ...]
    seed: int
    fields: Mapping[str, Any]


_WINDOWS = st.builds(
    Window, seed=st.integers(0, 2**63), shift=st.sampled_from((0, -6, -12, _BEYOND)),
    bad=st.sampled_from((None, None, None, *_BAD)),
)  # fmt: skip


@st.composite
def _plans(draw: st.DrawFn, precisions: tuple[str, ...]) -> Plan:
    inner, outer, whole = draw(st.integers(1, 3)), draw(st.sampled_from((2, 4))), draw(st.integers(1, 3))
    precision = draw(st.sampled_from(precisions))
    optimizer = draw(st.sampled_from(("sgd", "adam", "adamw")))
    scale = draw(policies()) | {"init_scale": draw(st.sampled_from((1.0, 65536.0, _HIGH, _HIGH, _HIGH)))}
    return Plan(
        shapes=((outer, inner), (outer,), (inner, outer), (inner,), (whole,)),
        seed=draw(st.integers(0, 2**63)),
        fields={
            "precision": precision, "optimizer": optimizer, "settings": draw(st.sampled_from(SETTINGS[optimizer])),
            "loss_scale": scale if precision.startswith("fp16") else {},
            "max_grad_norm": draw(st.sampled_from((None, 1.0, 0.25, 1e4))),
        },
    )  # fmt: skip


def drawn_histories(run: Run, layout: Layout, precisions: tuple[str, ...]) -> list[History]:
    """As many windows as the run's budget says, made into histories for one layout.

    Args:
        run: the budget; counts the draws.
        layout: on whose ranks the overflows fall, each in turn.
        precisions: which precisions to draw from.

    Returns:
        Histories whose every sum is exact, in any order. A window has four micro-steps, or two where every rank
        computes all of them.

    Source: this project.
    """
    windows: list[Window] = []
    run.draw(_WINDOWS, windows.append)
    plans: list[Plan] = []
    run.draw(_plans(precisions), plans.append, share=LENGTH)
    turn, micro_steps = _turns(layout), 2 if layout.shares == 1 else 4
    return [
        History(
            windows=exact_windows(plan, windows[place * LENGTH : (place + 1) * LENGTH], layout, turn, micro_steps),
            parameters=_starting_values(plan), seed=plan.seed, **plan.fields,
        )
        for place, plan in enumerate(plans[: -(-len(windows) // LENGTH)])
    ]  # fmt: skip


def _turns(layout: Layout) -> Iterator[int]:
    """Ranks in turn, for ever."""
    while True:
        yield from range(layout.world)


def _starting_values(plan: Plan) -> tuple[Array, ...]:
    random = np.random.Generator(np.random.PCG64(plan.seed))
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in plan.shapes)


def exact_windows(
    plan: Plan, windows: Sequence[Window], layout: Layout, turn: Iterator[int], micro_steps: int
) -> Windows:
    """Gradients that are whole numbers times a power of two, so that they add up without rounding, in any order.

    They have 20 bits, so that four of them fit fp32, and the squares of all elements' means add up to a float64; and
    4 bits where gradients are kept in bf16.

    Args:
        plan: shapes and precision.
        windows: the drawn ones.
        layout: which rank computes what.
        turn: the rank on which the next overflow falls.
        micro_steps: in each window.

    Returns:
        As ``History.windows``.

    Source: 24 bits of fp32 hold sums of four; 53 bits of float64 hold sums of up to 512 squares of 22 bits.
    """
    bits = 4 if plan.fields["precision"] in _NARROW else 20
    high = plan.fields["loss_scale"].get("init_scale") == _HIGH
    made = []
    for window in windows:
        random = np.random.Generator(np.random.PCG64(window.seed))
        factor = 2.0 ** (0 if window.shift == _BEYOND and not high else window.shift)
        micros = [[_whole_numbers(random, shape, bits, factor) for shape in plan.shapes] for _ in range(micro_steps)]
        if window.bad is not None:
            rank = next(turn)
            micro = random.choice(layout.micro_steps(rank, micro_steps))
            place, element = random.choice(layout.computes(rank, plan.shapes))
            micros[micro][place].reshape(-1)[element] = window.bad
        made.append(tuple(tuple(micro) for micro in micros))
    return tuple(made)


def _whole_numbers(random: np.random.Generator, shape: tuple[int, ...], bits: int, factor: float) -> Array:
    numbers = random.integers(-(2**bits) + 1, 2**bits, shape) * (random.random(shape) < 0.8)
    return np.asarray(numbers * factor, np.float32) + np.float32(0)  # no negative zeros: sums of them have either sign


def rounded_windows(run: Run, micro_steps: int, wire: Wire = "fp32") -> History:
    """One long run whose sums do round: full fp32 gradients of many magnitudes and both signs.

    Args:
        run: the budget; counts the draws.
        micro_steps: in each window, on all ranks together.
        wire: what gradients travel in; a 16-bit one travels without a loss scale, since fp16 would overflow.

    Returns:
        A history whose momentum buffers are the gradients themselves, see ``GRADIENT_KEEPER``.

    Source: this project.
    """
    seeds: list[int] = []
    run.draw(st.integers(0, 2**63), seeds.append)
    shapes = ((4, 3), (4,), (3, 4), (3,), (2,))

    def window(seed: int) -> tuple[tuple[Array, ...], ...]:
        random = np.random.Generator(np.random.PCG64(seed))
        middle, spread = int(random.integers(-18, 1)), int(random.integers(1, 12))  # fp16 overflows from 2**16 on

        def numbers(shape: tuple[int, ...]) -> Array:
            return np.ldexp(random.uniform(-1, 1, shape), middle + random.integers(-spread, spread, shape)).astype(
                np.float32
            )

        return tuple(tuple(numbers(shape) for shape in shapes) for _ in range(micro_steps))

    scale = {
        "init_scale": 1024.0, "growth_interval": 7, "max_scale": 2.0**40, "min_scale": 1.0, "hysteresis": 1,
        "hysteresis_refill": "on-growth",
    }  # fmt: skip
    return History(
        precision="fp16-mixed" if wire == "fp32" else "fp32", loss_scale=scale if wire == "fp32" else {},
        optimizer="sgd", settings=GRADIENT_KEEPER, max_grad_norm=None, reduce_dtype=wire,
        parameters=tuple(np.zeros(shape, np.float32) for shape in shapes),
        windows=tuple(window(seed) for seed in seeds),
    )  # fmt: skip
