"""Sums, means, dot products and norms under a named accumulator."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.codec import cast
from mp_reference.numerics.matmul import accumulate, matmul
from mp_reference.numerics.odd import ODD
from mp_reference.numerics.products import Problem, result_format, widened
from mp_reference.numerics.superaccumulator import digits_of_products
from mp_reference.spec.accumulators import Accumulator, Exact, Fast, accumulator_named
from mp_reference.spec.formats import FloatFormat

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["dot", "mean", "norm", "sum"]

_WIDENED = 2**20  # numbers that are in float32 at a time

Axis = int | tuple[int, ...] | None
Named = str | FloatFormat | Accumulator


def sum(  # noqa: A001  # mp.sum, as np.sum
    x: ArrayLike, accumulator: Named = "fp32", *, axis: Axis = None, out_format: FloatFormat | None = None
) -> NDArray[Any]:
    """Add numbers as a named accumulator does, and round the result once.

    Args:
        x: of a named format's dtype, any shape.
        accumulator: a row of ``spec.accumulators`` or ``spec.tensor_cores``, "exact", "fp32" (single precision in
            NumPy's own order), or a format, which means ``sequential(format)``. It starts at +0.
        axis: which axes to add over, C order; all unless given.
        out_format: the result's format; unless given, as ``matmul``'s: that of ``x``, or fp32 for 8 bits and fewer.

    Returns:
        Array of ``out_format.dtype`` without the axes added over; 0-d for all. An empty sum is +0.

    Raises:
        TypeError: the dtype stores no named format.
        ValueError: no such accumulator, or an axis that ``x`` does not have.

    Source: the accumulator's ``source``.

    >>> from mp_reference import FP16
    >>> x = np.full(4096, 1.0, np.float16)
    >>> float(sum(x, "exact")), float(sum(x, FP16))  # 2048 + 1 is 2048 in fp16
    (4096.0, 2048.0)
    """
    row, given = accumulator_named(accumulator), np.asarray(x)
    total, _ = _summed(row, given, axis)
    return cast(total, result_format(row, _as_problem(given[..., np.newaxis]), out_format))


def mean(
    x: ArrayLike, accumulator: Named = "fp32", *, axis: Axis = None, out_format: FloatFormat | None = None
) -> NDArray[Any]:
    """Add numbers as a named accumulator does, divide by their number, and round the result once.

    Args:
        x: as ``sum``.
        accumulator: as ``sum``. The sum is rounded to the accumulator's format, the quotient once to the result's;
            "exact" rounds only the quotient.
        axis: as ``sum``.
        out_format: as ``sum``.

    Returns:
        As ``sum``; NaN where nothing was added.

    Raises:
        TypeError: as ``sum``.
        ValueError: as ``sum``.

    Source: IEEE 754-2019, 9.4 for "exact"; else the accumulator's ``source``.

    >>> float(mean(np.array([1, 2, 2], np.float16), "exact"))
    1.6669921875
    """
    row, given = accumulator_named(accumulator), np.asarray(x)
    out = result_format(row, _as_problem(given[..., np.newaxis]), out_format)
    total, count = _summed(row, given, axis)
    with np.errstate(all="ignore"):  # 24 bits by 27: a quotient that is no midpoint is 2**-53 away from any
        quotient = np.asarray(total.astype(np.float64) / count)
    if isinstance(row, Exact) and count:
        table, finite, low = _integers(given, axis, squared=False)
        exact = np.array([Fraction(number) * Fraction(2) ** low / count for number in table], dtype=object)
        return np.where(finite, cast(exact, out).reshape(total.shape), cast(np.where(finite, 0.0, quotient), out))
    return cast(quotient, out)


def dot(
    a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, accumulator: Named = "fp32", *,
    out_format: FloatFormat | None = None,
) -> NDArray[Any]:  # fmt: skip
    """Multiply and add along the last axis: ``c + sum(a * b)``.

    Args:
        a: (..., k), of a named format's dtype.
        b: (..., k), likewise; leading axes broadcast.
        c: addend (...), or nothing.
        accumulator: as ``matmul``.
        out_format: as ``matmul``.

    Returns:
        Array of ``out_format.dtype``, the broadcast shape without the last axis.

    Raises:
        TypeError: as ``matmul``.
        ValueError: as ``matmul``.

    Source: the accumulator's ``source``.

    >>> float(dot(np.float16([3, 4]), np.float16([3, 4]), accumulator="exact"))
    25.0
    """
    first, second = np.asarray(a), np.asarray(b)
    if first.ndim == 0 or second.ndim == 0:
        raise ValueError(f"dot takes arrays of one axis or more, got shapes {first.shape} and {second.shape}; use mul")
    left, right = first[..., np.newaxis, :], second[..., np.newaxis]
    addend = None if c is None else np.asarray(c)[..., np.newaxis, np.newaxis]
    return matmul(left, right, addend, accumulator, out_format=out_format)[..., 0, 0]


def norm(
    x: ArrayLike, accumulator: Named = "fp32", *, axis: Axis = None, out_format: FloatFormat | None = None
) -> NDArray[Any]:
    """Euclidean norm: squares added as a named accumulator does, the root of their sum rounded once.

    Args:
        x: as ``sum``.
        accumulator: as ``sum``; ``lanes()`` is the order of torch's vector_norm on a CPU.
            The sum is rounded to the accumulator's format, the root once to the result's; "exact" rounds only the root.
        axis: as ``sum``.
        out_format: as ``sum``.

    Returns:
        As ``sum``.

    Raises:
        TypeError: as ``sum``.
        ValueError: as ``sum``.

    Source: IEEE 754-2019, 9.4 (sumSquare) and 5.4.1 (squareRoot).

    >>> float(norm(np.float16([3, 4])))
    5.0
    """
    row, given = accumulator_named(accumulator), np.asarray(x)
    rows, shape = _rows(given, axis)
    out = result_format(row, _as_problem(given[..., np.newaxis]), out_format)
    if isinstance(row, Exact):
        table, finite, low = _integers(given, axis, squared=True)
        roots = [_odd_root(number, low) for number in table]
        infinite = np.where(np.isnan(widened(rows)).any(axis=1), np.nan, np.inf)
        return cast(np.where(finite, np.reshape(roots, shape), infinite.reshape(shape)), out)
    problem = _as_problem(given.reshape(1) if given.ndim == 0 else given)
    problem.left, problem.right = rows[:, np.newaxis, :], rows[..., np.newaxis]
    problem.shape = (len(rows), 1, 1)
    total = accumulate(row, problem).reshape(shape)
    with np.errstate(all="ignore"):
        return cast(ODD["sqrt"](total.astype(np.float64)), out)


def _as_problem(x: NDArray[Any]) -> Problem:
    """What result_format and accumulate ask of operands: the formats; both factors are of the one of ``x``."""
    return Problem(x.reshape(-1, 1)[:1], x.reshape(-1, 1)[:1].T)


def _rows(x: NDArray[Any], axis: Axis) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Numbers as stored with what is added last, (results, terms), and the shape of the results."""
    axes = tuple(range(x.ndim)) if axis is None else np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    kept = [i for i in range(x.ndim) if i not in axes]
    shape = tuple(x.shape[i] for i in kept)
    moved = x.transpose(*kept, *axes)
    return moved.reshape(math.prod(shape), -1 if moved.size else math.prod(x.shape[i] for i in axes)), shape


def _summed(row: Accumulator, x: NDArray[Any], axis: Axis) -> tuple[NDArray[Any], int]:
    """Sums before the last rounding, and the number of terms: a product with ones, which is exact."""
    rows, shape = _rows(x, axis)
    if isinstance(row, Fast):
        with np.errstate(all="ignore"):
            return _added(rows).reshape(shape), rows.shape[1]
    problem = _as_problem(x)
    problem.left, problem.right = rows, np.broadcast_to(np.float32(1), (rows.shape[1], 1))
    problem.shape = (len(rows), 1)
    return accumulate(row, problem).reshape(shape), rows.shape[1]


def _added(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Sums of rows in single precision, with no more than a part of the rows in float32 at a time."""
    out = np.zeros(len(rows), np.float32)
    together = max(1, _WIDENED // max(rows.shape[1], 1))
    for i in range(0, len(rows), together):
        for k in range(0, rows.shape[1], _WIDENED):
            part = widened(rows[i : i + together, k : k + _WIDENED]).sum(axis=1, dtype=np.float32)
            out[i : i + together] = out[i : i + together] + part if k else part
    return out


def _integers(x: NDArray[Any], axis: Axis, *, squared: bool) -> tuple[list[int], NDArray[np.bool_], int]:
    """Exact sums of the terms or their squares in units of ``2**low``, and where all terms are finite."""
    stored, shape = _rows(x, axis)
    rows = widened(stored)
    finite = np.isfinite(rows).all(axis=1)
    wide = np.where(np.isfinite(rows), rows, 0).astype(np.float64)
    if squared:
        digits = digits_of_products(wide[:, np.newaxis, :], wide[..., np.newaxis], None)
    else:
        digits = digits_of_products(wide, np.ones((rows.shape[1], 1)), None)
    return digits.to_integers(), finite.reshape(shape), digits.low


def _odd_root(number: int, low: int) -> float:
    """The root of ``number * 2**low`` to float64, to odd."""
    shift = max(0, 110 - number.bit_length())
    shift += (low - shift) % 2
    root = math.isqrt(number << shift)
    inexact = root * root != number << shift
    extra = max(root.bit_length() - 53, 0)
    cut = root >> extra
    odd = cut | int(inexact or cut << extra != root)
    return math.ldexp(odd, (low - shift) // 2 + extra)
