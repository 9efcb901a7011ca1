"""Casts as other producers do them: NumPy, ml_dtypes, torch on the CPU, an Ascend in saturation mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.arguments import carried
from mp_reference.numerics.codec import cast
from mp_reference.spec.casts import cast_rule
from mp_reference.spec.formats import FP32

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.spec.formats import FloatFormat

__all__ = ["cast_as"]


def cast_as(x: ArrayLike, fmt: FloatFormat, producer: str) -> NDArray[Any]:
    """Cast as a producer does, its double roundings, saturation and treatment of NaN included.

    Args:
        x: whatever ``round_to`` takes, any shape.
        fmt: the target format.
        producer: one of ``spec.casts.PRODUCERS``.

    Returns:
        Array of ``fmt.dtype``. Every NaN is this project's: compare NaN as a class.

    Raises:
        TypeError: as ``round_to``.
        ValueError: no row for this producer and format.

    Source: the row's own ``source`` field.

    >>> from mp_reference import E4M3FN
    >>> cast_as(np.float32([465.0, np.inf]), E4M3FN, "torch-cpu").tolist()
    [448.0, 448.0]
    >>> cast_as(np.float32([465.0, np.inf]), E4M3FN, "ml_dtypes").tolist()
    [nan, nan]
    """
    rule = cast_rule(producer, fmt.name)
    values = np.asarray(x)
    if values.dtype.kind not in "iu":
        values = carried(values)
    if rule.wide == "through-fp32" and (values.dtype.kind in "iu" or values.dtype == np.float64):
        values = cast(values, FP32)
    if values.dtype.kind in "iu":
        return cast(values, fmt, overflow=rule.overflow)
    values = values.astype(np.float64)  # exact, and the same NaN rules for every input
    nan = np.isnan(values)
    if rule.nan == "zero":
        values = np.where(nan, 0.0, values)
    elif rule.nan == "zero-opposite-sign":
        values = np.where(nan, np.where(np.signbit(values), 0.0, -0.0), values)
    if rule.unsigned == "magnitude":
        values = np.maximum(np.abs(values), fmt.min_normal)
    if rule.below_normal == "up":
        values = np.where((values > 2.0**-127) & (values < 2.0**-126), 2.0**-126, values)
    return cast(values, fmt, overflow=rule.overflow)
