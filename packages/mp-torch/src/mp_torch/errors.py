"""What can go wrong, one class for each thing that a caller can do about it."""

from __future__ import annotations

__all__ = ["AmpConfigError", "AmpError", "AmpStateError", "CheckpointError", "UnsupportedDeviceError"]


class AmpError(Exception):
    """Anything this package refuses; the message says what was asked, the value, the rule and the way out."""


class AmpConfigError(AmpError, ValueError):
    """A configuration that cannot be honoured; change the arguments."""


class AmpStateError(AmpError, RuntimeError):
    """A call out of order, or a run that went wrong; change the training loop or the data."""


class UnsupportedDeviceError(AmpError):
    """A device that cannot do what was asked; change the device or the precision."""


class CheckpointError(AmpError):
    """A checkpoint that is damaged, unknown, or of another run; use another file."""
