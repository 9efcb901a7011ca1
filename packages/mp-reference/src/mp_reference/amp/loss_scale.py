"""The loss scale as one pure state machine: every real loss scaler is a setting of its policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mp_reference.spec.loss_scale import LossScalePolicy

__all__ = ["LossScale", "LossScaleError", "LossScaleState"]


class LossScaleError(RuntimeError):
    """The policy says that this run must end: an overflow at the floor, or too many skipped steps in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleState:
    """What the loss scale remembers between steps.

    Args:
        scale: the factor for the next loss.
        growth_tracker: good steps counted towards growth; starts at -1 where the policy waits one step more.
        hysteresis_tracker: overflows left before the scale shrinks; at or below 0 every overflow shrinks it.
        consecutive_skips: overflows since the last good step.

    >>> LossScale(init_scale=16.0).initial().scale
    16.0
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_tracker: int = 1
    consecutive_skips: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale(LossScalePolicy):
    """A policy that moves: ``initial()`` gives the first state, ``next(state, found_inf)`` the one after a step.

    Args: those of ``LossScalePolicy``.

    Raises: as ``LossScalePolicy``.

    Source: the rows of ``mp_reference.spec.loss_scale.PRESETS``.

    >>> scale = LossScale.preset("deepspeed", init_scale=16.0, growth_interval=4)
    >>> state = scale.next(scale.initial(), found_inf=True)
    >>> state.scale, scale.next(state, found_inf=True).scale
    (16.0, 8.0)
    """

    def initial(self) -> LossScaleState:
        """The state before the first step.

        Returns:
            ``init_scale`` in the format that carries the scale, an empty counter, full hysteresis.

        Source: the policy.

        >>> LossScale(hysteresis=3).initial()
        LossScaleState(scale=65536.0, growth_tracker=0, hysteresis_tracker=3, consecutive_skips=0)
        """
        return LossScaleState(
            scale=self._carry(self.init_scale), growth_tracker=self.first_count, hysteresis_tracker=self.hysteresis
        )

    def next(self, state: LossScaleState, found_inf: bool) -> LossScaleState:
        """The state after one step.

        Args:
            state: the state that the step's gradients were made with; of another policy too (a resume), then the
                counter acts by this policy's interval at once.
            found_inf: whether any unscaled gradient was not finite, so that the step was skipped.

        Returns:
            A new state; ``state`` is unchanged.

        Raises:
            LossScaleError: more than ``skip_limit`` skips in a row, or an overflow at the floor under
                ``on_floor="raise"``.

        Source: the policy.

        >>> scale = LossScale(init_scale=4.0, growth_interval=1)
        >>> scale.next(scale.initial(), found_inf=False).scale, scale.next(scale.initial(), found_inf=True).scale
        (8.0, 2.0)
        """
        return self._after_overflow(state) if found_inf else self._after_good_step(state)

    def _after_overflow(self, state: LossScaleState) -> LossScaleState:
        skips = state.consecutive_skips + 1
        if self.skip_limit is not None and skips > self.skip_limit:
            raise LossScaleError(
                f"{skips} steps in a row were skipped, skip_limit={self.skip_limit} allows {self.skip_limit}; the loss "
                f"scale is {state.scale!r}, so look for infinities or NaNs in the data or the forward pass"
            )
        if not self.dynamic:
            return LossScaleState(
                scale=state.scale, hysteresis_tracker=state.hysteresis_tracker, consecutive_skips=skips
            )
        hysteresis_tracker = state.hysteresis_tracker - 1
        scale = state.scale
        if hysteresis_tracker <= 0:
            if self.on_floor == "raise" and scale <= self.min_scale:
                raise LossScaleError(
                    f"the gradients overflow although the loss scale is at its floor, {scale!r}; min_scale="
                    f"{self.min_scale!r} and on_floor='raise' end the run here: lower min_scale or look for "
                    "infinities or NaNs in the data or the forward pass"
                )
            scale = max(self._times(scale, self.backoff_factor), self._carry(self.min_scale))
        return LossScaleState(
            scale=scale,
            growth_tracker=self.first_count,
            hysteresis_tracker=hysteresis_tracker,
            consecutive_skips=skips,
        )

    def _after_good_step(self, state: LossScaleState) -> LossScaleState:
        if not self.dynamic:
            return LossScaleState(scale=state.scale, hysteresis_tracker=state.hysteresis_tracker)
        growth_tracker = state.growth_tracker + 1
        grows = growth_tracker >= self.growth_count  # never ==, which a lowered interval would step over
        refills = grows or self.hysteresis_refill == "on-good-step"
        return LossScaleState(
            scale=self._grown(state.scale) if grows else state.scale,
            growth_tracker=0 if grows else growth_tracker,
            hysteresis_tracker=self.hysteresis if refills else state.hysteresis_tracker,
        )

    def _grown(self, scale: float) -> float:
        grown = self._times(scale, self.growth_factor)
        if grown <= self.max_scale:
            return grown
        return self._carry(self.max_scale) if self.at_ceiling == "clamp" else scale

    def _times(self, scale: float, factor: float) -> float:
        """One product in float64, rounded once to the format that carries the scale."""
        return self._carry(scale * (_to_fp32(factor) if self.factors == "fp32" else factor))

    def _carry(self, scale: float) -> float:
        return _to_fp32(scale) if self.carried == "fp32" else scale


def _to_fp32(value: float) -> float:
    with np.errstate(over="ignore"):  # a product past fp32 is infinity by rule; the ceiling deals with it
        return float(np.float32(value))
