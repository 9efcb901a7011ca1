"""Seeded faults of the loss scale and of the op rules."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mp_conformance.implementations import reference_training
from mp_conformance.mutants.rows import Mutant
from mp_reference.amp.loss_scale import LossScale, LossScaleError, LossScaleState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MUTANTS"]

Settings = dict[str, Any]


def _with(change: Callable[[Settings], Settings]) -> Callable[..., Any]:
    """The right machine under changed settings."""

    def fault(settings: Mapping[str, Any], flags: Sequence[bool]) -> Any:
        return reference_training.loss_scale(change(dict(settings)), flags)

    return fault


def _machine(change: Callable[[LossScale, LossScaleState, LossScaleState, bool], LossScaleState]) -> Callable[..., Any]:
    """The right machine, whose every transition is changed afterwards: (rule, before, after, found_inf) -> after."""

    def fault(settings: Mapping[str, Any], flags: Sequence[bool]) -> Any:
        knobs = dict(settings)
        preset = knobs.pop("preset", None)
        rule = LossScale.preset(preset, **knobs) if preset else LossScale(**knobs)
        state = rule.initial()
        seen: list[tuple[Any, ...]] = []
        for flag in flags:
            try:
                state = change(rule, state, rule.next(state, flag), flag)
            except LossScaleError:
                return [*seen, ("raise",)]
            seen.append((state.scale, state.growth_tracker, state.hysteresis_tracker))
        return seen

    return fault


def _keeps_counting(rule: LossScale, old: LossScaleState, new: LossScaleState, bad: bool) -> LossScaleState:
    del rule
    return replace(new, growth_tracker=old.growth_tracker) if bad else new


def _no_refill(rule: LossScale, old: LossScaleState, new: LossScaleState, bad: bool) -> LossScaleState:
    del rule
    return new if bad else replace(new, hysteresis_tracker=old.hysteresis_tracker)


def _always_refill(rule: LossScale, old: LossScaleState, new: LossScaleState, bad: bool) -> LossScaleState:
    del old
    return new if bad else replace(new, hysteresis_tracker=rule.hysteresis)


def _overflow_refills(rule: LossScale, old: LossScaleState, new: LossScaleState, bad: bool) -> LossScaleState:
    shrank = new.scale < old.scale
    return replace(new, hysteresis_tracker=rule.hysteresis) if bad and shrank else new


def _grows_always(rule: LossScale, old: LossScaleState, new: LossScaleState, bad: bool) -> LossScaleState:
    return new if bad else replace(new, scale=min(old.scale * rule.growth_factor, rule.max_scale))


def _tracker_runs_on(rule: LossScale, old: LossScaleState, new: LossScaleState, bad: bool) -> LossScaleState:
    del rule
    return new if bad else replace(new, growth_tracker=old.growth_tracker + 1)


def _scale_row(word: str, sentence: str, fault: Callable[..., Any], caught_by: str = "loss-scale.machine") -> Mutant:
    return Mutant(id=f"loss-scale.{word}", sentence=sentence, operation="loss_scale", fault=fault, caught_by=caught_by)


MUTANTS: tuple[Mutant, ...] = (
    _scale_row("late-growth", "the scale grows one good step late", _with(
        lambda s: s | {"growth_interval": s["growth_interval"] + 1}), "loss-scale.trace.torch.A"),
    _scale_row("no-floor", "the floor is ignored", _with(lambda s: s | {"min_scale": 0.0}),
               "loss-scale.trace.megatron.B"),
    _scale_row("no-ceiling", "the ceiling is ignored", _with(
        lambda s: s | {"max_scale": float("inf"), "carried": "float64"})),
    _scale_row("no-hysteresis", "the first overflow shrinks the scale at once", _with(lambda s: s | {"hysteresis": 1}),
               "loss-scale.trace.megatron.A"),
    _scale_row("wrong-refill", "the hysteresis is refilled by any good step", _machine(_always_refill),
               "loss-scale.trace.megatron.A"),
    _scale_row("no-refill", "the hysteresis is never refilled", _machine(_no_refill), "loss-scale.trace.megatron.A"),
    _scale_row("overflow-refills", "a backoff refills the hysteresis", _machine(_overflow_refills)),
    _scale_row("keeps-counting", "an overflow does not restart the counter", _machine(_keeps_counting),
               "loss-scale.trace.torch.A"),
    _scale_row("tracker-runs-on", "growth does not restart the counter", _machine(_tracker_runs_on),
               "loss-scale.trace.torch.A"),
    _scale_row("grows-always", "every good step grows the scale", _machine(_grows_always), "loss-scale.trace.jmp.A"),
    _scale_row("growth-swapped", "growth and backoff factors are confused", _with(
        lambda s: s | {"growth_factor": 1 / s.get("backoff_factor", 0.25)})),
    _scale_row("static-moves", "a fixed scale moves", _with(lambda s: s | {"dynamic": True}),
               "loss-scale.trace.npu_static.A"),
    _scale_row("skip-limit-late", "one skip too many is allowed", _with(
        lambda s: s | ({"skip_limit": s["skip_limit"] + 1} if s.get("skip_limit") else {}))),
    _scale_row("floor-does-not-raise", "an overflow at the floor is no error",
               _with(lambda s: s | {"on_floor": "keep"}),
               "loss-scale.trace.ds_h1.B"),
    _scale_row("one-counting-rule", "every preset counts as torch does", _with(lambda s: s | {"counting": "n-good"}),
               "loss-scale.trace.flax.A"),
)  # fmt: skip
"""Faults of the loss scale."""
