"""Mixed-precision training on real tensors, through ``AmpEngine``.

One engine replaces autocast, gradient scaler, clipping, master weights and their bookkeeping; ``emulate`` gives another
device's arithmetic on the CPU; ``select_precision`` and ``memory_estimate`` help to choose.
"""

from mp_torch.choice import select_precision
from mp_torch.config import AmpConfig
from mp_torch.engine import AmpEngine
from mp_torch.errors import AmpConfigError, AmpError, AmpStateError, CheckpointError, UnsupportedDeviceError
from mp_torch.memory import memory_estimate
from mp_torch.report import StepReport
from mp_torch.scaling import LossScale

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
    "memory_estimate",
    "select_precision",
]
