"""Another device's mixed precision on CPU tensors: its op rules and its matmul arithmetic, without the device."""

import sys
from types import ModuleType
from typing import Any

from mp_torch.emulate.context import ARITHMETICS, Emulation, emulate
from mp_torch.emulate.numerics_report import NumericsReport
from mp_torch.emulate.rules import EmulationWarning

__all__ = ["ARITHMETICS", "Emulation", "EmulationWarning", "NumericsReport", "emulate"]


class _Callable(ModuleType):
    """``mp_torch.emulate`` is this package and the promised function at once."""

    def __call__(self, *args: Any, **kwargs: Any) -> Emulation:
        """As ``mp_torch.emulate.emulate``."""
        return emulate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
