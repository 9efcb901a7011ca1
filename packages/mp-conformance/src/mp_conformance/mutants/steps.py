"""Seeded faults of the step over a history: order, decision, masters, windows, resume."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance.histories import StepTrace
from mp_conformance.implementations import reference_training
from mp_conformance.mutants.rows import Mutant
from mp_reference.amp.clipping import clip_by_norm
from mp_reference.amp.loss_scale import LossScale, LossScaleState
from mp_reference.amp.optimizers import OptimizerState
from mp_reference.amp.step import StepState, initial_state, step
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.formats import FP16

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mp_conformance.histories import History

__all__ = ["MUTANTS"]

Array = np.ndarray[Any, np.dtype[Any]]

_FIXED = LossScale(init_scale=1.0, dynamic=False, skip_limit=None)


def _divided(total: Sequence[Array], scale: float, count: int) -> list[Array]:
    return [np.asarray(g, np.float32) / np.float32(scale * count) for g in total]


def _all_finite(total: Sequence[Array], unscaled: Sequence[Array]) -> bool:
    del total
    return all(bool(np.isfinite(g).all()) for g in unscaled)


def _nothing(state: StepState) -> StepState:
    return state


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """The step taken apart; a mutant replaces one part."""

    unscale: Callable[[Sequence[Array], float, int], list[Array]] = _divided
    finite: Callable[[Sequence[Array], Sequence[Array]], bool] = _all_finite
    on_skip: Callable[[StepState], StepState] = _nothing
    after: Callable[[StepState], StepState] = _nothing
    resumed: Callable[[StepState], StepState] = _nothing
    scale_first: bool = False
    clip_scaled: bool = False
    lose_window: bool = False
    lose_scale: bool = False
    full_windows: bool = False
    zero_and_step: bool = False

    def __call__(self, history: History) -> list[StepTrace]:
        policy, fmt = reference_training.policy_of(history), reference_training.STORED[history.precision]
        inner = replace(policy, loss_scale=_FIXED)
        state, scale = initial_state(inner, list(history.parameters), fmt), policy.loss_scale.initial()
        trace, done = [], 0
        for window in history.windows:
            total: list[Array] = []
            for micro in window:
                factor = np.float32(1 if history.as_stored else scale.scale)
                scaled = [round_to(factor * g, fmt) for g in micro]
                total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
                done += 1
                if done in history.resume_after:
                    state, scale, total = self._resume(state, scale, total, policy.loss_scale)
            count = history.accumulate if self.full_windows else len(window)
            state, after, entry = self._step(history, inner, state, scale, total, count, policy.loss_scale)
            scale = after
            trace.append(entry)
        return trace

    def _resume(
        self, state: StepState, scale: LossScaleState, total: list[Array], rule: LossScale
    ) -> tuple[StepState, LossScaleState, list[Array]]:
        kept = [np.zeros_like(g) for g in total] if self.lose_window else total
        return self.resumed(state), rule.initial() if self.lose_scale else scale, kept

    def _step(
        self, history: History, inner: Any, state: StepState, scale: LossScaleState, total: list[Array], count: int,
        rule: LossScale,
    ) -> tuple[StepState, LossScaleState, StepTrace]:  # fmt: skip
        if self.clip_scaled and history.max_grad_norm is not None and _all_finite(total, total):
            total = list(clip_by_norm([np.asarray(g, np.float32) for g in total], history.max_grad_norm).gradients)
        probe = self.unscale(total, scale.scale, count)
        good = self.finite(total, probe)
        after = rule.next(scale, not good)
        unscaled = self.unscale(total, after.scale, count) if self.scale_first else probe
        norm = None
        if good or self.zero_and_step:
            given = unscaled if good else [np.where(np.isfinite(g), g, np.float32(0)) for g in unscaled]
            state, report = _forced(inner, state, given)
            norm = report.grad_norm if good and history.max_grad_norm is not None else None
            state = self.after(state)
        else:
            state = self.on_skip(state)
        entry = StepTrace(
            applied=good, loss_scale=scale.scale, next_loss_scale=after.scale, grad_norm=norm,
            parameters=state.parameters, masters=state.masters, slots=tuple(s.slots for s in state.optimizer),
        )  # fmt: skip
        return state, after, entry


def _forced(inner: Any, state: StepState, gradients: list[Array]) -> Any:
    """One step of the reference whatever the gradients are: what is not finite goes in as the largest number."""
    big = float(np.finfo(np.float32).max)
    new, report = step(inner, state, [np.nan_to_num(g, nan=big, posinf=big, neginf=-big) for g in gradients])
    return replace(new, loss_scale=state.loss_scale), report


def _reciprocal(total: Sequence[Array], scale: float, count: int) -> list[Array]:
    inverse = np.float32(1) / np.float32(scale * count)
    return [np.asarray(g, np.float32) * inverse for g in total]


def _unscaled_in_storage(total: Sequence[Array], scale: float, count: int) -> list[Array]:
    return [round_to(np.asarray(g, np.float32) / np.float32(scale), FP16) / np.float32(count) for g in total]


def _advance(state: StepState) -> StepState:
    return replace(state, optimizer=tuple(replace(s, step=s.step + 1) for s in state.optimizer))


def _decay(state: StepState) -> StepState:
    smaller = [{name: x * np.float32(0.9) for name, x in s.slots.items()} for s in state.optimizer]
    return replace(state, optimizer=tuple(replace(s, slots=x) for s, x in zip(state.optimizer, smaller, strict=True)))


def _forget_moments(state: StepState) -> StepState:
    return replace(state, optimizer=tuple(OptimizerState() for _ in state.optimizer))


def _forget_count(state: StepState) -> StepState:
    return replace(state, optimizer=tuple(replace(s, step=0) for s in state.optimizer))


def _masters_from_parameters(state: StepState) -> StepState:
    return replace(state, masters=tuple(p.astype(np.float32) for p in state.parameters))


def _truncated(state: StepState) -> StepState:
    kept = zip(state.masters, state.formats, strict=True)
    cut = [round_to(m, fmt, rounding="toward-zero").astype(fmt.dtype) for m, fmt in kept]
    return replace(state, parameters=tuple(cut))


def _row(word: str, sentence: str, steps: _Steps, caught_by: str) -> Mutant:
    return Mutant(id=f"step.{word}", sentence=sentence, operation="train", fault=steps, caught_by=caught_by)


MUTANTS: tuple[Mutant, ...] = (
    _row("scale-first", "the scale moves before the gradients are unscaled", _Steps(scale_first=True),
         "step.fp16-mixed"),
    _row("scaled-check", "the finite check looks at the scaled gradient", _Steps(
        finite=lambda total, unscaled: all(bool(np.isfinite(g).all()) for g in total)), "step.tiny-scale"),
    _row("no-nan-check", "only infinities count as not finite", _Steps(
        finite=lambda total, unscaled: not any(bool(np.isinf(g).any()) for g in unscaled)), "step.fp32"),
    _row("first-tensor-check", "only the first tensor is checked", _Steps(
        finite=lambda total, unscaled: bool(np.isfinite(unscaled[0]).all())), "step.bf16-mixed"),
    _row("sum-check", "the check looks at the fp32 sum of squares, which overflows for finite gradients", _Steps(
        finite=lambda total, unscaled: all(bool(np.isfinite(np.sum(g * g))) for g in unscaled)), "step.fp32"),
    _row("zeroes", "bad elements are zeroed and the step is taken", _Steps(zero_and_step=True), "step.skip"),
    _row("skip-counts", "a skipped step advances the bias correction", _Steps(on_skip=_advance), "step.fp16-mixed"),
    _row("skip-decays", "a skipped step decays the moments", _Steps(on_skip=_decay), "step.skip"),
    _row("reciprocal", "gradients are multiplied by the reciprocal of the divisor", _Steps(unscale=_reciprocal),
         "accumulation.mean"),
    _row("fp16-unscale", "gradients are unscaled into fp16", _Steps(unscale=_unscaled_in_storage), "step.fp16-mixed"),
    _row("window-sum", "a window adds up instead of averaging", _Steps(
        unscale=lambda total, scale, count: _divided(total, scale, 1)), "accumulation.mean"),
    _row("short-window", "a short last window is divided by the full length", _Steps(full_windows=True),
         "accumulation.mean"),
    _row("clip-scaled", "clipping comes before unscaling", _Steps(clip_scaled=True), "step.fp16-mixed"),
    _row("no-masters", "the masters are read back from the parameters", _Steps(after=_masters_from_parameters),
         "step.bf16-true"),
    _row("truncated-write-back", "the write-back cuts off", _Steps(after=_truncated), "step.bf16-true"),
    _row("resume-scale", "a resume starts the loss scale anew", _Steps(lose_scale=True), "resume.anywhere"),
    _row("resume-moments", "a resume forgets the moments", _Steps(resumed=_forget_moments), "resume.anywhere"),
    _row("resume-count", "a resume forgets how many updates were made", _Steps(resumed=_forget_count),
         "resume.anywhere"),
    _row("resume-window", "a resume inside a window loses what was accumulated", _Steps(lose_window=True),
         "resume.anywhere"),
    _row("resume-masters", "a resume rebuilds the masters from the parameters", _Steps(
        resumed=_masters_from_parameters), "resume.true-precision"),
)  # fmt: skip
"""Faults of a whole step."""
