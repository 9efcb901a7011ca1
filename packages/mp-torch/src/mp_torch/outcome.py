"""A step on its way, and what can be said of it once its outcome is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.report import OptimizerOutcome, Outcome
from mp_torch.scaling import fp32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from mp_torch.decision import Decision
    from mp_torch.scaling import ScaleState

__all__ = ["Step", "idle_outcome"]


@dataclass(slots=True)
class Step:
    """One step, from its decision to its outcome.

    Args:
        names: of the parameters that had a gradient, in the optimizers' order; the gradients themselves are let go.
        decision: what was found.
        scale: the loss scale that these gradients were made with.
        good: the scale's state if nothing is wrong.
        bad: its state after an overflow.
        micro_steps: of the window.
        active: one for each optimizer, whether it has any gradient.
        found: one for each optimizer, whether it must not step; ``None`` until the device has told.
        flags: waits for ``found`` and gives it.
        lost: pairs (updates lost in rounding, updates asked for), where rounding may lose any.
        clipped_norm: norm of the clipped gradients, where it was measured.
        update_index: updates applied, this step included, once known.
    """

    names: list[str]
    decision: Decision
    scale: float
    good: ScaleState
    bad: ScaleState
    micro_steps: int
    active: list[bool]
    found: list[bool] | None = None
    flags: Callable[[], list[float]] | None = None
    lost: list[Tensor] = field(default_factory=list)
    clipped_norm: Any = None
    update_index: int = 0

    @property
    def known(self) -> list[bool]:
        """``found``, once the device has told."""
        assert self.found is not None
        return self.found

    @property
    def applied(self) -> bool:
        """Some optimizer stepped."""
        return self.applied_by(range(len(self.active)))

    def applied_by(self, places: Iterable[int]) -> bool:
        """Some optimizer of these places stepped."""
        return any(self.active[at] and not self.known[at] for at in places)

    @property
    def next_state(self) -> ScaleState:
        """Where the loss scale went: one overflow anywhere is an overflow."""
        return self.bad if any(self.known) else self.good

    @property
    def cause(self) -> str:
        """What was found first; reads from the device."""
        name, kind = self.decision.first_nonfinite(self.names)
        return "the device's overflow flag: a kernel of this window saturated" if name is None else f"{kind} in {name}"

    def outcome(self, optimizers: Sequence[torch.optim.Optimizer]) -> Outcome:
        """Everything a report says; reads from the device."""
        skipped = any(self.known)
        name, kind = self.decision.first_nonfinite(self.names) if skipped else (None, None)
        reason = f"non-finite gradient: {self.cause}" if skipped else ""
        coefficient, clipped_norm = self._clipping()
        return Outcome(
            applied=self.applied,
            skipped=skipped,
            reason=reason,
            grad_norm=float(self.decision.norm),
            clipped_norm=clipped_norm,
            clip_coef=coefficient,
            loss_scale=self.scale,
            next_loss_scale=self.next_state.scale,
            first_nonfinite=name,
            nonfinite_kind=kind,
            update_index=self.update_index,
            consecutive_skips=self.next_state.consecutive_skips,
            micro_steps=self.micro_steps,
            rounded_away=self._share_lost(),
            optimizers=tuple(self._of(place, one, reason) for place, one in enumerate(optimizers)),
        )

    def _clipping(self) -> tuple[float, float]:
        """Coefficient (the smallest, with several clip sets) and norm after clipping."""
        norm = float(self.decision.norm)
        if all(self.known):
            return 1.0, norm
        coefficient = min((float(one) for one in self.decision.coefficients if one is not None), default=1.0)
        if self.clipped_norm is not None:
            return coefficient, float(self.clipped_norm)
        return coefficient, norm if coefficient == 1.0 else fp32(norm * coefficient)

    def _share_lost(self) -> float | None:
        if not self.lost:
            return None
        away, asked = torch.stack(self.lost).sum(0).tolist()
        return away / asked if asked else 0.0

    def _of(self, place: int, optimizer: torch.optim.Optimizer, reason: str) -> OptimizerOutcome:
        here, bad = self.active[place], self.known[place]
        return OptimizerOutcome(
            name=f"{type(optimizer).__name__} {place}",
            applied=here and not bad,
            skipped=here and bad,
            reason=(reason if bad else "") if here else "no gradients",
        )


def idle_outcome(reason: str, scale: float, state: ScaleState, update_index: int, micro_steps: int) -> Outcome:
    """What a step says that had nothing to do.

    Args:
        reason: why, in words.
        scale: the loss scale of the window.
        state: of the loss scale, which did not move.
        update_index: updates applied so far.
        micro_steps: of the window so far.

    >>> from mp_torch.scaling import LossScale, ScaleState
    >>> idle_outcome("no gradients", 1.0, ScaleState.initial(LossScale.off()), 3, 1).skipped
    False
    """
    return Outcome(
        applied=False, skipped=False, reason=reason, grad_norm=0.0, clipped_norm=0.0, clip_coef=1.0,
        loss_scale=scale, next_loss_scale=state.scale, first_nonfinite=None, nonfinite_kind=None,
        update_index=update_index, consecutive_skips=state.consecutive_skips, micro_steps=micro_steps,
    )  # fmt: skip
