"""One more rounding kernel: to nearest even, for values that are known to stay below the format's largest number.

Adding and subtracting 1.5 times a power of two far above ``x`` leaves ``x`` rounded at the last place of that power.
Five passes instead of eight; what it gives up is the overflow rule and the sign of zeros that it rounds to (+0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mp_reference.numerics.rounding_kernels import Workspace
    from mp_reference.spec.formats import FloatFormat

__all__ = ["BoundedKernel"]

_UNSIGNED = {np.dtype(np.float32): (np.uint32, 23, 127), np.dtype(np.float64): (np.uint64, 52, 1023)}


class BoundedKernel:
    """Round chunks of finite values below half of ``fmt.max`` to nearest even; every zero comes out as +0.

    >>> from mp_reference.numerics.rounding_kernels import Workspace
    >>> from mp_reference.spec.formats import FP16
    >>> x = np.array([2049.0, 2051.0, -1e-9])
    >>> BoundedKernel(FP16, x.dtype)(x, x, Workspace(3, x.dtype), None, 0)
    >>> x
    array([2048., 2052.,    0.])
    """

    @staticmethod
    def suits(fmt: FloatFormat, carrier: np.dtype[Any]) -> bool:
        """Whether the powers that are added stay within the carrier."""
        _, stored_bits, bias = _UNSIGNED[carrier]
        dropped = stored_bits - fmt.mantissa_bits
        return dropped > 1 and fmt.max_exponent + dropped < bias and fmt.min_exponent > 2 - bias

    def __init__(self, fmt: FloatFormat, carrier: np.dtype[Any]) -> None:
        unsigned, stored_bits, bias = _UNSIGNED[carrier]
        self.unsigned: Any = unsigned
        self.exponent_mask: Any = unsigned((2 * bias + 1) << stored_bits)
        self.least, self.most = carrier.type(fmt.min_normal), carrier.type(2.0 ** (fmt.max_exponent + 1))
        self.above = carrier.type(1.5 * 2.0 ** (stored_bits - fmt.mantissa_bits))

    def __call__(
        self, x: NDArray[Any], out: NDArray[Any], work: Workspace, random: NDArray[Any] | None, width: int
    ) -> None:
        """Round the chunk ``x`` into ``out``; the last two arguments are those of every kernel."""
        del random, width
        power = work.power[: x.size]
        np.bitwise_and(x.view(self.unsigned), self.exponent_mask, out=power.view(self.unsigned))
        np.clip(power, self.least, self.most, out=power)
        np.multiply(power, self.above, out=power)
        np.add(x, power, out=out)
        np.subtract(out, power, out=out)
