"""A-priori error bounds: how far a result under a named accumulator can be from the exact one.

Every bound is derived, not fitted. ``T = |c| + |a| @ |b|`` is the size of a sum, ``u`` half the distance from 1 to the
next number. To nearest, a dot product of n terms errs by at most ``n u T`` in any order and for every n (Jeannerod and
Rump 2013); n directed roundings in a chain by ``((1 + 2 u)**n - 1) T``. Where products may underflow, half the
smallest number is added for each. Overflow is not allowed for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mp_reference.numerics.products import Problem, own_format, parts_of, prepared, result_format, widened
from mp_reference.numerics.scaled import unit_and_scales, unpacked
from mp_reference.numerics.tensor_core import exponents_of
from mp_reference.spec.accumulators import (
    Accumulator,
    Blocked,
    Exact,
    Kahan,
    Pairwise,
    Sequential,
    SplitK,
    accumulator_named,
)  # fmt: skip
from mp_reference.spec.formats import FORMATS, FP32, FloatFormat
from mp_reference.spec.tensor_cores import MatrixUnit, TensorCore

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.numerics.blocks import BlockArray

    Sizes = NDArray[np.float64]

__all__ = ["bound"]

_SLACK = 1 + 2.0**-40  # float64's own errors in computing a bound
_ABSENT = -2000  # 2.0**_ABSENT is zero


def bound(
    a: ArrayLike | BlockArray,
    b: ArrayLike | BlockArray,
    accumulator: str | FloatFormat | Accumulator = "fp32",
    c: ArrayLike | None = None,
    *,
    out_format: FloatFormat | None = None,
    scales: tuple[ArrayLike, ArrayLike] | None = None,
) -> NDArray[np.float64]:
    """Bound ``|matmul(a, b, c, accumulator) - (c + a @ b)|``, element by element.

    Args:
        a: as ``matmul``; finite.
        b: as ``matmul``.
        accumulator: as ``matmul``.
        c: as ``matmul``.
        out_format: as ``matmul``; the last rounding into it is part of the bound.
        scales: as ``matmul``.

    Returns:
        float64, the shape of the product; infinite where nothing can be promised. It holds as long as nothing
        overflows.

    Raises:
        TypeError: as ``matmul``.
        ValueError: as ``matmul``.

    Source: Jeannerod and Rump, Improved error bounds for inner products, SIMAX 34 (2013); Higham, Accuracy and
        Stability of Numerical Algorithms, 2nd ed., chapters 3 and 4; for matrix units derived from their rows.

    >>> from mp_reference import FP16, matmul
    >>> a, b = np.full((1, 512), 0.1, np.float16), np.full((512, 1), 0.1, np.float16)
    >>> exact = matmul(a, b, accumulator="exact", out_format=FP32).item()
    >>> abs(matmul(a, b, accumulator=FP16).item() - exact) < bound(a, b, FP16).item()
    True
    """
    row = accumulator_named(accumulator)
    a, b, scales, factor = unpacked(a, b, scales)
    problem = Problem(np.asarray(a), np.asarray(b), None if c is None else np.asarray(c), scales)
    if scales is not None and not isinstance(row, TensorCore):
        raise ValueError(f"{row.name} takes no scales; use tensor_core('blackwell'), or multiply them in first")
    out = result_format(row, problem, out_format)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        size = _size(problem)
        error = factor * _error(row, problem, size)
        size = factor * size
        if isinstance(row, Exact) or out != own_format(row) or factor != 1:
            error = error + _one_rounding(out, size + error)
        return np.asarray(problem.shaped(error * _SLACK))


def _size(problem: Problem) -> Sizes:
    addend = 0.0 if problem.c is None else np.abs(problem.c.astype(np.float64))
    first, second = (np.abs(x.astype(np.float64)) for x in (problem.a, problem.b))
    if problem.scales is not None:
        scales = [np.abs(widened(np.asarray(scale)).astype(np.float64)) for scale in problem.scales]
        first, second = _along(first, second, *scales)
    return np.asarray(addend + np.matmul(first, second))


def _along(a: Sizes, b: Sizes, scale_a: Sizes, scale_b: Sizes) -> tuple[Sizes, Sizes]:
    """Both factors times the scales of their blocks."""
    block = a.shape[-1] // scale_a.shape[-1]
    return a * np.repeat(scale_a, block, axis=-1), b * np.repeat(scale_b, block, axis=-2)


def _one_rounding(fmt: FloatFormat, size: Sizes) -> Sizes:
    return size * (fmt.epsilon / 2) + fmt.min_subnormal / 2


def _error(row: Accumulator, problem: Problem, size: Sizes) -> Sizes:
    """The bound before the last rounding into the result's format."""
    if isinstance(row, Exact):
        return np.zeros_like(size)
    if isinstance(row, Blocked | SplitK):
        return _combined(row, problem, size)
    if isinstance(row, TensorCore):
        return _on_unit(row, problem, size)
    fmt, terms = own_format(row), problem.length + (problem.c is not None)
    if isinstance(row, Kahan):
        return _kahan(fmt, terms, size)
    if isinstance(row, Sequential) and not row.rounding.startswith("nearest"):
        return size * _growth(fmt.epsilon, 2 * terms) + 2 * terms * fmt.min_subnormal
    error = _any_order(fmt, terms, size)
    if isinstance(row, Pairwise):
        halvings = math.ceil(math.log2(max(problem.length, row.base) / row.base))
        error = np.minimum(error, size * _growth(fmt.epsilon / 2, row.base + halvings + 1))
    return error + 2 * terms * (fmt.min_subnormal / 2)


def _any_order(fmt: FloatFormat, terms: int, size: Sizes) -> Sizes:
    """Rounded products, their sum in any order: ``u`` for the products and ``terms - 1`` times ``u`` for the sum."""
    unit = fmt.epsilon / 2
    return size * (terms * unit * (1 + unit))


def _growth(relative: float, times: float) -> float:
    """``(1 + relative)**times - 1``, infinite where float64 does not hold it."""
    exponent = times * math.log1p(relative)
    return math.expm1(exponent) if exponent < 700 else math.inf


def _combined(row: Blocked | SplitK, problem: Problem, size: Sizes) -> Sizes:
    """Partial sums err by their own bound and one rounding each; then they are added in any order."""
    total, parts = np.zeros_like(size), parts_of(row, problem.length)
    for k in parts:
        part = problem.part(k)
        part_size = _size(part)
        error = _error(row.inner, part, part_size)
        total += error + _one_rounding(row.outer, part_size + error)
    return total + _any_order(row.outer, len(parts) + 1, size + total)


def _kahan(fmt: FloatFormat, terms: int, size: Sizes) -> Sizes:
    """Products err by u; what is added errs by ``2 u`` of itself, every sum by ``7 u**2``; the last excess is lost.

    Write ``s`` for the sum and ``e`` for its excess. A step moves ``s - e`` by the term, but for ``(2 u + 3 u**2)``
    times what is added and ``(2 u**2 + u**3)`` times the sum; it leaves ``|e|`` at most ``2.1 u`` times the sum, which
    the next step adds and the result lacks.
    """
    unit = fmt.epsilon / 2
    drift = 7 * terms * unit**2
    if drift >= 0.5:
        return np.full_like(size, np.inf)
    relative = unit + (1 + unit) * (4.2 * unit + drift) / (1 - drift)
    return size * relative + 4 * terms * fmt.min_subnormal


def _on_unit(row: TensorCore, problem: Problem, size: Sizes) -> Sizes:
    """A matrix unit on what it reads, and what the factors lose before it reads them."""
    read = prepared(row, problem)
    unit = row.row_for(*read.formats) if read.scales is None else unit_and_scales(row, read)[0]
    lost = np.zeros_like(size)
    if read.left is not problem.left or read.right is not problem.right:
        a, b, cut_a, cut_b = (np.abs(x.astype(np.float64)) for x in (problem.a, problem.b, read.a, read.b))
        lost = np.matmul(a - cut_a, b) + np.matmul(cut_a, b - cut_b)
    blocks = -(-problem.length // unit.block) + 1
    if unit.arithmetic == "pairwise":
        return lost + _flushing(read, size)
    if unit.arithmetic == "exact":
        return lost + size * _growth(FP32.epsilon / 2, blocks) + blocks * FP32.min_subnormal
    if unit.arithmetic == "fma":
        terms = problem.length + 1
        return lost + _any_order(FP32, terms, size) + terms * FP32.min_subnormal
    return lost + _aligned(unit, read, size, blocks)


def _aligned(unit: MatrixUnit, problem: Problem, size: Sizes, blocks: int) -> Sizes:
    """A block cuts every term by less than a unit in place ``fraction_bits`` and rounds once.

    The largest exponent of a block belongs to a product, to the accumulator, which is no larger than the size and the
    error so far, or to a floor: so an error grows by ``1 + rho`` a block, with ``rho`` the cuts' and the rounding's
    part, and what products and floors add to it grows along.
    """
    fmt = unit.result_format
    two_stage = unit.arithmetic == "two-stage"
    place = 2.0**-unit.fraction_bits * (unit.block + (4 if two_stage else 1))
    last = 2.0**-unit.result_bits * (1.0 if unit.rounding == "toward-zero" else 0.5)
    late = fmt.epsilon / 2 if unit.addend == "late" else 0.0
    zero = -126 if unit.zero_products == "minimum-exponent" else _ABSENT
    first, second = (
        np.ldexp(1.0, exponents_of(x, form, zero))
        for x, form in zip((problem.a, problem.b), problem.formats, strict=True)
    )
    if problem.scales is not None:
        form = FORMATS[unit.scale]
        scales = (np.abs(widened(np.asarray(scale))) for scale in problem.scales)
        powers = [np.ldexp(1.0, exponents_of(scale, form, _ABSENT)) for scale in scales]
        if unit.group > 1:  # a group's exponent is that of its scales alone
            first, second = np.ones_like(first), np.ones_like(second)
        first, second = _along(first, second, *powers)
    products = np.matmul(first, second)
    floor = fmt.min_normal + (0.0 if unit.exponent_floor is None else 2.0**unit.exponent_floor)
    smallest = 2.0 ** (fmt.min_exponent - unit.result_bits) + fmt.min_subnormal
    rho = place + last + late
    added = blocks * rho * size + place * products + blocks * (place * floor + smallest)
    return np.asarray(added * (1 + _growth(rho, blocks)))


def _flushing(problem: Problem, size: Sizes) -> Sizes:
    """Single precision in a tree, and what is flushed: small factors whole, small results each."""
    a, b = (np.abs(x.astype(np.float64)) for x in (problem.a, problem.b))
    small_a, small_b = (np.where(x < fmt.min_normal, x, 0.0) for x, fmt in zip((a, b), problem.formats, strict=True))
    factors = np.matmul(small_a, b) + np.matmul(a, small_b)
    results = (3 * problem.length + 2) * FP32.min_normal
    terms = problem.length + 1
    return np.asarray((_any_order(FP32, terms, size) + factors + results) * (1 + _growth(FP32.epsilon, terms)))
