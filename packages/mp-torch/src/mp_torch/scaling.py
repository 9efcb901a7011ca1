"""The loss scale: the policy that users write, and the state machine that moves it."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from mp_reference.spec.loss_scale import LossScalePolicy
from mp_torch.errors import AmpStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mp_torch.devices import Device

__all__ = ["LossScale", "MovingScale", "ScaleState", "fp32", "low_dtype", "representable"]


_LARGEST_IN_FP16 = 2.0**15
"""The largest power of two that fp16 holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale(LossScalePolicy):
    """How the loss scale starts, shrinks, grows and stops.

    Args: those of ``mp_reference.spec.loss_scale.LossScalePolicy``.

    Raises: as ``LossScalePolicy``.

    Source: the rows of ``mp_reference.spec.loss_scale.PRESETS``; ``LossScale.preset("megatron")`` takes one of them.

    >>> LossScale(init_scale=1024.0, growth_interval=100).dynamic
    True
    """

    @classmethod
    def static(cls, scale: float, **knobs: Any) -> Self:
        """A scale that never moves; steps that overflow are skipped all the same.

        Args:
            scale: finite and above 0; a power of two keeps scaling exact.
            knobs: ``skip_limit``, which still holds.

        >>> LossScale.static(2.0**-20).init_scale == 2.0**-20
        True
        """
        return cls(init_scale=scale, dynamic=False, min_scale=0.0, max_scale=math.inf, **knobs)

    @classmethod
    def off(cls, **knobs: Any) -> Self:
        """No loss scaling: the scale is 1 and stays so. Non-finite gradients are still skipped.

        >>> LossScale.off().init_scale
        1.0
        """
        return cls.static(1.0, **knobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """What the loss scale remembers between steps; every transition gives a new one.

    Args:
        scale: the factor for the next loss.
        growth_tracker: good steps counted towards growth.
        hysteresis_tracker: overflows left before the scale shrinks.
        consecutive_skips: overflows since the last good step.

    >>> policy = LossScale(init_scale=16.0, growth_interval=1)
    >>> first = ScaleState.initial(policy)
    >>> first.after_good_step(policy).scale, first.after_overflow(policy).scale
    (32.0, 8.0)
    """

    scale: float
    growth_tracker: int
    hysteresis_tracker: int
    consecutive_skips: int = 0

    @classmethod
    def initial(cls, policy: LossScalePolicy) -> ScaleState:
        """The state before the first step."""
        return cls(
            scale=_carried(policy.init_scale, policy),
            growth_tracker=policy.first_count,
            hysteresis_tracker=policy.hysteresis,
        )

    def after_good_step(self, policy: LossScalePolicy) -> ScaleState:
        """One more finite step: count it, and grow when enough were counted."""
        if not policy.dynamic:
            return ScaleState(scale=self.scale, growth_tracker=0, hysteresis_tracker=self.hysteresis_tracker)
        counted = self.growth_tracker + 1
        grow = counted >= policy.growth_count
        refill = grow or policy.hysteresis_refill == "on-good-step"
        return ScaleState(
            scale=_grown(self.scale, policy) if grow else self.scale,
            growth_tracker=0 if grow else counted,
            hysteresis_tracker=policy.hysteresis if refill else self.hysteresis_tracker,
        )

    def after_overflow(self, policy: LossScalePolicy) -> ScaleState:
        """One skipped step: restart the count, use up hysteresis, shrink when none is left."""
        skips = self.consecutive_skips + 1
        if not policy.dynamic:
            return ScaleState(
                scale=self.scale,
                growth_tracker=0,
                hysteresis_tracker=self.hysteresis_tracker,
                consecutive_skips=skips,
            )
        left = self.hysteresis_tracker - 1
        scale = self.scale
        if left <= 0:
            scale = max(_product(scale, policy.backoff_factor, policy), _carried(policy.min_scale, policy))
        return ScaleState(
            scale=scale, growth_tracker=policy.first_count, hysteresis_tracker=left, consecutive_skips=skips
        )

    def require_may_skip(self, policy: LossScalePolicy, cause: str) -> None:
        """Refuse the skip that would be one too many.

        Args:
            policy: whose limits hold.
            cause: what was found, for the message.

        Raises:
            AmpStateError: more than ``skip_limit`` skips in a row; or the scale is at its floor under
                ``on_floor="raise"``.
        """
        skips = self.consecutive_skips + 1
        if policy.skip_limit is not None and skips > policy.skip_limit:
            raise AmpStateError(
                f"{skips} steps in a row were skipped, skip_limit={policy.skip_limit}: {cause} at loss scale "
                f"{self.scale!r}; look for infinities or NaNs in the data and the forward pass, or raise skip_limit"
            )
        at_floor = policy.dynamic and self.hysteresis_tracker <= 1 and self.scale <= policy.min_scale
        if at_floor and policy.on_floor == "raise":
            raise AmpStateError(
                f"the loss scale is at its floor, min_scale={policy.min_scale!r}, and the gradients still overflow: "
                f"{cause}; look for infinities or NaNs in the data and the forward pass, lower min_scale, or use "
                "on_floor='keep'"
            )


class MovingScale:
    """The loss scale of a running engine.

    The state is on the host. Where reading a decision would mean waiting, the scale itself is on the device as well:
    the host knows both of its futures, and the device, which knows the outcome, chooses.

    Args:
        policy: its rules.
        device: where the losses are.

    >>> from mp_torch.devices import device_named
    >>> MovingScale(LossScale(init_scale=8.0), device_named("cpu")).seed(torch.zeros(2), None, 0.5)
    tensor([4., 4.])
    """

    def __init__(self, policy: LossScalePolicy, device: Device) -> None:
        self.policy, self.device = policy, device
        self.resume_(ScaleState.initial(policy))

    def resume_(self, state: ScaleState) -> None:
        """Take a state, and bring it to the device where it is needed there."""
        self.state = state
        self.there: Tensor | None = None
        if not self.device.reads_are_free:
            self.there = torch.full((), state.scale, dtype=torch.float32, device=self.device.device)

    @property
    def futures(self) -> tuple[ScaleState, ScaleState]:
        """The next state after a good step, and after an overflow."""
        return self.state.after_good_step(self.policy), self.state.after_overflow(self.policy)

    def choose_(self, found: Tensor, good: ScaleState, bad: ScaleState) -> None:
        """Move the scale on the device; the host learns later.

        Args:
            found: fp32 scalar there, 1.0 after an overflow.
            good: one future.
            bad: the other.
        """
        assert self.there is not None
        after_bad, after_good = (torch.full_like(self.there, fp32(one.scale)) for one in (bad, good))
        self.there = torch.where(found != 0, after_bad, after_good)

    def seed(self, loss: Tensor, loss_dtype: torch.dtype | None, weight: float) -> Tensor:
        """The gradient that a loss starts with: scale times weight, rounded once to fp32.

        Args:
            loss: of any shape and floating dtype.
            loss_dtype: the 16-bit dtype that bounds the scale of this window, or ``None``.
            weight: of the micro-step.

        Returns:
            A tensor of the loss's shape and dtype.
        """
        if self.there is None:
            scale = fp32(representable(self.state.scale, loss_dtype) * weight)
            seed = torch.full((), scale, dtype=torch.float32, device=loss.device)
            seed = seed.to(loss.dtype)  # too large for the loss's dtype, it overflows and is skipped
            return seed.expand(loss.shape) if loss.dim() else seed
        scale_there = self.there
        if loss_dtype is not None:
            capped = scale_there.clamp(max=_LARGEST_IN_FP16) if loss_dtype == torch.float16 else scale_there
            scale_there = capped.to(loss_dtype).float()
        if weight != 1.0:
            scale_there = (scale_there.double() * weight).float()
        return scale_there.to(loss.dtype).expand(loss.shape)


def _grown(scale: float, policy: LossScalePolicy) -> float:
    grown = _product(scale, policy.growth_factor, policy)
    if grown <= policy.max_scale:
        return grown
    return _carried(policy.max_scale, policy) if policy.at_ceiling == "clamp" else scale


def _product(scale: float, factor: float, policy: LossScalePolicy) -> float:
    return _carried(scale * (fp32(factor) if policy.factors == "fp32" else factor), policy)


def _carried(scale: float, policy: LossScalePolicy) -> float:
    return fp32(scale) if policy.carried == "fp32" else scale


def fp32(value: float) -> float:
    """The value rounded to fp32, nearest-even; past the largest fp32 it is infinite.

    >>> fp32(0.1), fp32(1e39)
    (0.10000000149011612, inf)
    """
    return ctypes.c_float(value).value


def low_dtype(losses: Sequence[Tensor]) -> torch.dtype | None:
    """The 16-bit dtype among the losses that bounds the scale of the window; fp16 before bf16.

    >>> low_dtype([torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)])
    torch.bfloat16
    """
    found = {one.dtype for one in losses}
    return next((one for one in (torch.float16, torch.bfloat16) if one in found), None)


def representable(scale: float, dtype: torch.dtype | None) -> float:
    """The scale that a loss of this dtype can hand to its gradient.

    The gradient that reaches a 16-bit loss is the scale itself in that dtype: 65536 would be infinite in fp16, and lose
    the first step.

    Args:
        scale: what the policy says.
        dtype: the loss's dtype if it is a 16-bit one, else ``None``.

    Returns:
        ``scale`` unless the dtype cannot hold it; then at most 2**15 in fp16, and rounded to the dtype.

    >>> representable(65536.0, torch.float16), representable(65536.0, torch.bfloat16), representable(65536.0, None)
    (32768.0, 65536.0, 65536.0)
    """
    if dtype is None:
        return scale
    capped = min(scale, _LARGEST_IN_FP16) if dtype == torch.float16 else scale
    return float(torch.tensor(capped).to(dtype))
