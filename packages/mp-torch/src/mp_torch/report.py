"""What a step did, read when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OptimizerOutcome", "Outcome", "StepReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOutcome:
    """What one of several optimizers did.

    Args:
        name: its class and its place, such as ``"AdamW 0"``.
        applied: its parameters were updated.
        skipped: they were not, for a reason that is no user's wish.
        reason: why not; empty if applied.
    """

    name: str
    applied: bool
    skipped: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The values behind a ``StepReport``, all on the host."""

    applied: bool
    skipped: bool
    reason: str
    grad_norm: float
    clipped_norm: float
    clip_coef: float
    loss_scale: float
    next_loss_scale: float
    first_nonfinite: str | None
    nonfinite_kind: str | None
    update_index: int
    consecutive_skips: int
    micro_steps: int
    rounded_away: float | None = None
    optimizers: tuple[OptimizerOutcome, ...] = field(default=())


class StepReport:
    """What ``engine.step()`` did; equal on all ranks.

    Building one reads nothing from the device; the first field that is read waits for the step, and then all are known.

    Args:
        read: gives the ``Outcome``; called at most once.

    >>> import math
    >>> report = StepReport(lambda: Outcome(applied=False, skipped=True, reason="NaN in weight", grad_norm=math.nan,
    ...     clipped_norm=math.nan, clip_coef=1.0, loss_scale=4.0, next_loss_scale=2.0, first_nonfinite="weight",
    ...     nonfinite_kind="NaN", update_index=3, consecutive_skips=1, micro_steps=1))
    >>> report.skipped, report.next_loss_scale
    (True, 2.0)
    """

    __slots__ = ("_outcome", "_read")

    def __init__(self, read: Callable[[], Outcome]) -> None:
        self._read: Callable[[], Outcome] | None = read
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """All values at once; waits for the step on an accelerator."""
        if self._outcome is None:
            assert self._read is not None
            self._outcome = self._read()
            self._read = None  # it would keep the engine alive, for as long as a log keeps the report
        return self._outcome

    @property
    def applied(self) -> bool:
        """Some parameter was updated."""
        return self.outcome.applied

    @property
    def skipped(self) -> bool:
        """An update was due and not applied, by at least one optimizer."""
        return self.outcome.skipped

    @property
    def reason(self) -> str:
        """Why not, in words; empty if everything was applied."""
        return self.outcome.reason

    @property
    def grad_norm(self) -> float:
        """Norm of the unscaled gradients before clipping; NaN or infinite if they were not finite."""
        return self.outcome.grad_norm

    @property
    def clipped_norm(self) -> float:
        """Norm that the update was made with."""
        return self.outcome.clipped_norm

    @property
    def clip_coef(self) -> float:
        """What the gradients were multiplied by to respect ``max_grad_norm``; 1.0 if they did already."""
        return self.outcome.clip_coef

    @property
    def clipped(self) -> bool:
        """Whether clipping changed the gradients."""
        return self.outcome.clip_coef < 1.0

    @property
    def loss_scale(self) -> float:
        """The scale that these gradients were made with."""
        return self.outcome.loss_scale

    @property
    def next_loss_scale(self) -> float:
        """The scale of the next window."""
        return self.outcome.next_loss_scale

    @property
    def first_nonfinite(self) -> str | None:
        """Name of the first parameter with a non-finite gradient, in the optimizers' order."""
        return self.outcome.first_nonfinite

    @property
    def nonfinite_kind(self) -> str | None:
        """The word NaN if that gradient holds any, else Inf."""
        return self.outcome.nonfinite_kind

    @property
    def update_index(self) -> int:
        """Updates applied since the engine was built, this one included."""
        return self.outcome.update_index

    @property
    def consecutive_skips(self) -> int:
        """Skipped steps in a row, this one included."""
        return self.outcome.consecutive_skips

    @property
    def micro_steps(self) -> int:
        """Micro-steps in the window."""
        return self.outcome.micro_steps

    @property
    def rounded_away(self) -> float | None:
        """Share of the parameters whose update rounding lost entirely; ``None`` where masters or the like keep it."""
        return self.outcome.rounded_away

    @property
    def optimizers(self) -> tuple[OptimizerOutcome, ...]:
        """What each optimizer did."""
        return self.outcome.optimizers

    def __reduce__(self) -> Any:
        """Its values, read now: a report can be pickled and sent."""
        return _told, (self.outcome,)

    def __repr__(self) -> str:
        """Every field, read now."""
        values = ", ".join(f"{one.name}={getattr(self.outcome, one.name)!r}" for one in fields(Outcome))
        return f"StepReport({values})"


def _told(outcome: Outcome) -> StepReport:
    return StepReport(lambda: outcome)
