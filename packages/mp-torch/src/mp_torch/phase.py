"""What may follow what: a window of micro-steps, then one step."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from typing import Any

from mp_torch.errors import AmpConfigError, AmpStateError, CheckpointError

__all__ = ["Phase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Where the engine stands inside a window of micro-steps.

    Args:
        accumulate_steps: micro-steps of a full window.
        micro_steps: those done since the last step.
        weight: their total weight, the W of the weighted mean.
        complete: the boundary was reached, so that ``step()`` will act.
        loss_dtype: the 16-bit dtype of the first loss, where it was one; it bounds the scale of the window.

    >>> Phase(accumulate_steps=2).after_backward(boundary=None, weight=1.0).complete
    False
    """

    accumulate_steps: int = 1
    micro_steps: int = 0
    weight: float = 0.0
    complete: bool = False
    loss_dtype: Any = None

    @property
    def open(self) -> bool:
        """Whether any micro-step came since the last step."""
        return self.micro_steps > 0

    def is_last(self, boundary: bool | None) -> bool:
        """Whether the next backward reaches the boundary."""
        return self.micro_steps + 1 >= self.accumulate_steps if boundary is None else boundary

    def after_backward(self, *, boundary: bool | None, weight: float) -> Phase:
        """One backward later; past the boundary it is a further loss of the last micro-step, and not counted.

        Args:
            boundary: ``None`` counts up to ``accumulate_steps``; ``True`` or ``False`` decides by hand.
            weight: what this micro-step counts in the mean.

        Returns:
            A new phase.

        Raises:
            AmpStateError: ``boundary=False`` after the boundary, which would take it back.

        >>> Phase(accumulate_steps=8).after_backward(boundary=True, weight=2.0)
        Phase(accumulate_steps=8, micro_steps=1, weight=2.0, complete=True, loss_dtype=None)
        """
        if self.complete and boundary is False:
            raise AmpStateError(
                f"backward(boundary=False) after the boundary of a window of {self.micro_steps} micro-steps; call "
                "step() first, or give boundary=False to every micro-step but the last"
            )
        if self.complete:
            return self
        return replace(
            self, micro_steps=self.micro_steps + 1, weight=self.weight + weight, complete=self.is_last(boundary)
        )

    def after_step(self) -> Phase:
        """An empty window of the same length."""
        return Phase(accumulate_steps=self.accumulate_steps)

    def require_backward(self) -> None:
        """Refuse a step without gradients.

        Raises:
            AmpStateError: no ``backward()`` came since the last step.

        >>> Phase().require_backward()
        Traceback (most recent call last):
        mp_torch.errors.AmpStateError: step() without backward() since the last step: there is nothing to apply; ...
        """
        if not self.open:
            raise AmpStateError(
                "step() without backward() since the last step: there is nothing to apply; call engine.backward(loss) "
                "once for each micro-step first"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        loss_dtype = None if self.loss_dtype is None else str(self.loss_dtype).removeprefix("torch.")
        return {
            "micro_steps": self.micro_steps,
            "weight": self.weight,
            "complete": self.complete,
            "loss_dtype": loss_dtype,
        }


def checked_boundary(boundary: Any) -> bool | None:
    """Whether a micro-step is the last of its window: ``None`` counts.

    Raises:
        AmpConfigError: it is no truth value.

    >>> checked_boundary("last")
    Traceback (most recent call last):
    mp_torch.errors.AmpConfigError: boundary='last' must be True, False, or None to count up to accumulate_steps
    """
    if boundary is None or isinstance(boundary, bool):
        return boundary
    if type(boundary).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(boundary)
    raise AmpConfigError(f"boundary={boundary!r} must be True, False, or None to count up to accumulate_steps")


def _is_fp32(value: Any) -> bool:
    return bool(2.0**-149 <= value <= (2 - 2.0**-23) * 2.0**127)


def checked_weight(weight: Any) -> float:
    """The weight of a micro-step, refused unless a mean can be taken with it.

    Raises:
        AmpConfigError: it is not a finite number above 0.

    >>> checked_weight(3)
    3.0
    """
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not _is_fp32(weight):
        number = " (a tensor is none: .item() reads one)" if hasattr(weight, "item") else ""
        raise AmpConfigError(
            f"weight={weight!r} must be a finite fp32 number above 0{number}, such as the number of samples in the "
            "micro-batch; leave it out for equal micro-batches"
        )
    return float(weight)


def phase_from_state(state: dict[str, Any], accumulate_steps: int, dtypes: dict[str, Any]) -> Phase:
    """The phase that ``Phase.state`` saved, under this run's ``accumulate_steps``.

    Args:
        state: from a checkpoint.
        accumulate_steps: of the running engine.
        dtypes: the legal loss dtypes by name.

    Raises:
        CheckpointError: an unknown loss dtype.

    >>> phase_from_state(Phase().state(), 4, {})
    Phase(accumulate_steps=4, micro_steps=0, weight=0.0, complete=False, loss_dtype=None)
    """
    name = state["loss_dtype"]
    if name is not None and name not in dtypes:
        raise CheckpointError(f"loss_dtype={name!r} of the checkpoint must be one of {', '.join(dtypes)} or None")
    return Phase(
        accumulate_steps=accumulate_steps,
        micro_steps=int(state["micro_steps"]),
        weight=float(state["weight"]),
        complete=bool(state["complete"]),
        loss_dtype=None if name is None else dtypes[name],
    )
