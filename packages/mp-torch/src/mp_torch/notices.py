"""What an engine says unasked, once each: warnings about the loop, and log lines about the run."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mp_torch.assembly import Assembly
    from mp_torch.buffers import BufferSnapshot
    from mp_torch.outcome import Step
    from mp_torch.scaling import MovingScale

__all__ = ["Notices", "warn"]

_log = logging.getLogger("mp_torch")

_INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)
"""Files that no user wrote."""


def warn(message: str) -> None:
    """Warn, pointing at the user's own line, however deep in this package and torch it was found.

    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn("look here")
    >>> str(caught[0].message)
    'look here'
    """
    frame, level = sys._getframe(1), 2  # noqa: SLF001  # inspect's own way reads every source file
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class Notices:
    """What is worth a warning in a training loop.

    Args:
        assembly: whose precision and parameters they are about.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._given: set[str] = set()

    def once(self, message: str) -> None:
        """Warn, unless this message was given before."""
        if message not in self._given:
            self._given.add(message)
            warn(message)

    def outer_autocast(self) -> None:
        """Somebody else's autocast surrounds the engine's, with another dtype."""
        outer = torch.get_autocast_dtype(self._assembly.device.type)
        if outer != self._assembly.row.compute:
            self.once(
                f"engine.autocast() inside torch.autocast of {outer}: within it the engine's precision "
                f"{self._assembly.config.precision!r} holds"
            )

    def missing_snapshot(self, buffers: BufferSnapshot) -> None:
        """A loss comes from a forward pass that the engine did not see the beginning of."""
        if buffers.needed and not buffers.taken:
            self.once(
                "backward() of a loss that was not computed inside engine.autocast(): if the step is skipped, buffers "
                "such as BatchNorm statistics cannot be given back; enter it around the forward, or set "
                "restore_buffers=False"
            )

    def foreign_changes(self) -> None:
        """Somebody changed 16-bit parameters; every time, since bits are lost every time."""
        changed = self._assembly.reconcile_()
        if changed:
            warn(
                f"{len(changed)} parameters, {changed[0]!r} first, were changed from outside; their masters are "
                "rebuilt from them and lose the bits that 16 do not hold. Load the engine's state as well to keep them"
            )

    def outcome(self, step: Step, scale: MovingScale) -> None:
        """Log what would otherwise be seen only in reports: a skip that no loss scale explains, a scale at its ceiling.

        Args:
            step: its outcome is known.
            scale: as it was before the step.
        """
        policy, before = scale.policy, scale.state
        if any(step.known):
            self._overflown_weight()
        if any(step.known) and (not policy.dynamic or before.scale <= policy.min_scale):
            self._log_once("skip", f"step skipped: {step.cause}; no smaller loss scale could help, parameters are kept")
        after = step.next_state
        grown = after.scale > before.scale or after.growth_tracker < before.growth_tracker
        if grown and not any(step.known) and after.scale >= policy.max_scale < math.inf:
            self._log_once(
                "ceiling",
                f"the loss scale stops at its ceiling, {policy.max_scale!r}: gradients seldom need a larger one, look "
                "whether the loss still depends on the parameters",
            )

    def _overflown_weight(self) -> None:
        """An update carried a weight past fp16: its own gradients were finite, those of every later step are not."""
        for part in self._assembly.parts:
            held = part.weight.held
            if held.dtype == torch.float16 and bool(held.isinf().any()):  # NaNs are no update's
                self.once(
                    f"{part.weight.name} holds values past fp16's largest, 65504: an update wrote them back as "
                    "infinities, and every step will be skipped. Load an earlier state, and train with a lower "
                    "learning rate, with its module in keep_fp32, or in 'bf16-true'"
                )
                return

    def _log_once(self, key: str, message: str) -> None:
        if key not in self._given:
            self._given.add(key)
            _log.warning("%s; further ones are told by the reports alone", message)
