"""Mixed-precision training on real tensors, through ``AmpEngine``.

One engine replaces autocast, gradient scaler, clipping, master weights and their bookkeeping; ``emulate`` gives another
device's arithmetic on the CPU, and loads on first use; ``select_precision`` and ``memory_estimate`` help to choose.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mp_torch.choice import select_precision
from mp_torch.config import AmpConfig
from mp_torch.engine import AmpEngine
from mp_torch.errors import AmpConfigError, AmpError, AmpStateError, CheckpointError, UnsupportedDeviceError
from mp_torch.memory import memory_estimate
from mp_torch.report import StepReport
from mp_torch.scaling import LossScale

if TYPE_CHECKING:
    from mp_torch.emulate import emulate

__version__ = "0.1.0"
__all__ = [
    "AmpConfig",
    "AmpConfigError",
    "AmpEngine",
    "AmpError",
    "AmpStateError",
    "CheckpointError",
    "LossScale",
    "StepReport",
    "UnsupportedDeviceError",
    "emulate",
    "memory_estimate",
    "select_precision",
]


def __getattr__(name: str) -> Any:
    """Load ``emulate``, which needs more than an engine does, on first use (PEP 562)."""
    if name == "emulate":
        return import_module("mp_torch.emulate")
    raise AttributeError(f"module 'mp_torch' has no attribute {name!r}; it offers {', '.join(__all__)}")
