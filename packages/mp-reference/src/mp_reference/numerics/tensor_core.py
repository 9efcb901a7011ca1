"""Matrix units on one tile, bit for bit as their rows say: blocks of products chained through the accumulator.

Everything here is exact float64 arithmetic on integers below 2**53 and one rounding a block; ``aligned_fast`` does
the same for finite factors of usual size in float32 and int32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mp_reference.numerics.aligned_fast import FastAligned
from mp_reference.numerics.chains import Factors, buffer_size, run_chain
from mp_reference.numerics.rounding import round_to
from mp_reference.numerics.superaccumulator import exact_products
from mp_reference.spec.accumulators import sequential
from mp_reference.spec.formats import FORMATS, FP32, FloatFormat

if TYPE_CHECKING:
    from mp_reference.spec.tensor_cores import MatrixUnit

__all__ = ["exponents_of", "run_unit"]

Tile = NDArray[Any]
Formats = tuple[FloatFormat, FloatFormat]
Scales = tuple[Tile, Tile]

_NONE = -5000  # exponent of what takes no part in an alignment
_ZERO_EXPONENT = -126  # of zeros, in the models that count them
_BELOW_ALL = -500  # an exponent below that of any product, and one that float64 has
_PAST_FP32 = 2.0**128


class _Step(Protocol):
    """One block: ``total`` becomes the rounded sum of itself and the products ``first`` to ``last``."""

    def __call__(self, total: Tile, first: int, last: int) -> Tile | None: ...


def run_unit(
    unit: MatrixUnit, formats: Formats, a: Tile, b: Tile, c: Tile | None, scales: Scales | None = None
) -> NDArray[np.float32]:
    """Multiply a tile on a matrix unit.

    Args:
        unit: the row.
        formats: the formats of ``a`` and ``b``.
        a: float32, (batch, m, k).
        b: float32, (batch, k, n).
        c: float32 numbers of the row's result format, (batch, m, n), or nothing.
        scales: for scaled rows, float32 with K / scale_block in front: (blocks, batch, m, 1), (blocks, batch, 1, n).

    Returns:
        float32 numbers of the row's result format, (batch, m, n).

    Source: the row's ``source`` and ``witness``.

    >>> from mp_reference import FP16, tensor_core
    >>> unit = tensor_core("volta").rows[0]
    >>> ones = np.ones((1, 1, 4), np.float32)
    >>> c = np.full((1, 1, 1), np.float32(2.0**24))
    >>> run_unit(unit, (FP16, FP16), ones, ones.reshape(1, 4, 1), c).item()  # every 1 is cut off
    16777216.0
    """
    a, b = _padded(unit, a, b)
    left = np.ascontiguousarray(np.moveaxis(a, -1, 0))[..., np.newaxis]
    right = np.ascontiguousarray(np.moveaxis(b, -2, 0))[..., np.newaxis, :]
    shape = np.broadcast_shapes(left.shape[1:], right.shape[1:])
    start = np.zeros(shape, np.float32) if c is None else np.array(c, np.float32)
    with np.errstate(all="ignore"):  # which also brings the buffer size back
        np.setbufsize(buffer_size(shape[-1]))
        if unit.arithmetic == "fma":
            bits = max(fmt.mantissa_bits + 1 for fmt in formats)
            return run_chain(sequential(FP32, fused=True), Factors(left, right, bits), start).astype(np.float32)
        total = None
        if scales is None and FastAligned.suits(unit):
            total = _run_fast(unit, formats, left, right, start)
        if total is None:
            total = _chained(unit, _step_of(unit, formats, left, right, scales), start, len(left))
    return total


def _padded(unit: MatrixUnit, a: Tile, b: Tile) -> tuple[Tile, Tile]:
    """Whole instructions, K filled with zeros; the order of K that the unit sees."""
    whole = unit.span or unit.block
    missing = -a.shape[-1] % whole
    if missing:
        a = np.pad(a, ((0, 0), (0, 0), (0, missing)))
        b = np.pad(b, ((0, 0), (0, missing), (0, 0)))
    if not unit.quads:
        return a, b
    quads = np.arange(a.shape[-1]).reshape(-1, whole // 4, 2, 2)  # (instruction, quad, pair, element)
    order = quads.transpose(0, 2, 1, 3).reshape(-1)
    return a[..., order], b[..., order, :]


def _run_fast(unit: MatrixUnit, formats: Formats, a: Tile, b: Tile, start: Tile) -> Tile | None:
    """The chain in float32 and int32, or nothing where a tile needs more than they hold."""
    step = FastAligned.of(unit, formats, a, b, start)
    return None if step is None else _chained(unit, step, start.copy(), len(a))


def _chained(unit: MatrixUnit, step: _Step, total: Tile, length: int) -> Any:
    """Blocks in order; a late addend joins once an instruction, to nearest even."""
    late = unit.addend == "late" and unit.span > 0
    for instruction in range(0, length, unit.span or length or 1):
        part = np.zeros_like(total) if late else total
        for first in range(instruction, min(instruction + (unit.span or length), length), unit.block):
            stepped = step(part, first, min(first + unit.block, length))
            if stepped is None:
                return None
            part = stepped
        total = round_to(part + total, unit.result_format) if late else part
    return total


def _step_of(unit: MatrixUnit, formats: Formats, a: Tile, b: Tile, scales: Scales | None) -> _Step:
    if unit.arithmetic == "aligned":
        return _Aligned(unit, formats, a, b, scales)
    if unit.arithmetic == "two-stage":
        return _TwoStage(unit, formats, a, b)
    return (_Pairwise if unit.arithmetic == "pairwise" else _Exact)(formats, a, b)


def exponents_of(x: Tile, fmt: FloatFormat, zero: int) -> NDArray[np.int32]:
    """Exponents as a multiplier sees them: of subnormals the least normal one's.

    Args:
        x: numbers of ``fmt``.
        fmt: their format.
        zero: the answer for zeros.

    Returns:
        int32, the same shape.

    Source: Fasi et al., Numerical behavior of NVIDIA tensor cores (2021).

    >>> from mp_reference import FP16
    >>> exponents_of(np.array([1.0, 2.0**-20, 0.0]), FP16, -126)
    array([   0,  -14, -126], dtype=int32)
    """
    exponent = np.maximum(np.frexp(x)[1] - 1, fmt.min_exponent)
    return np.where(x == 0, zero, exponent).astype(np.int32)


def _power(exponent: Tile) -> NDArray[np.float64]:
    """2.0**exponent for whole exponents that float64 has as normal numbers."""
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


class _Terms:
    """Products (or exact sums of groups of them) with the exponents that take part in the alignment."""

    def __init__(self, unit: MatrixUnit, formats: Formats, a: Tile, b: Tile, scales: Scales | None = None) -> None:
        self.unit = unit
        counted = unit.zero_products == "minimum-exponent"
        self.zero = _ZERO_EXPONENT if counted else _NONE
        self.finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
        self.raw = (a.astype(np.float64), b.astype(np.float64))
        self.a, self.b = (np.where(np.isfinite(x), x, 0.0) for x in self.raw)
        self.exponent_a, self.exponent_b = (
            exponents_of(x, fmt, self.zero) for x, fmt in zip((self.a, self.b), formats, strict=True)
        )
        if scales is not None:
            self._scale(scales)

    def _scale(self, scales: Scales) -> None:
        """Fold the scales in: into each factor, or for groups keep significand and exponent apart."""
        per_group = self.unit.scale_block // self.unit.group
        magnitudes = [np.repeat(np.abs(scale).astype(np.float64), per_group, axis=0) for scale in scales]
        self.scale_finite = [np.isfinite(scale) for scale in magnitudes]
        powers = [exponents_of(scale, FORMATS[self.unit.scale], 0) for scale in magnitudes]
        self.finite = self.finite and all(ok.all() for ok in self.scale_finite)
        if self.unit.group > 1:
            self.significands = [scale * _power(-power) for scale, power in zip(magnitudes, powers, strict=True)]
            self.powers = powers
            return
        self.raw = (self.raw[0] * magnitudes[0], self.raw[1] * magnitudes[1])
        self.a, self.b = self.a * _power(powers[0]), self.b * _power(powers[1])
        self.exponent_a, self.exponent_b = self.exponent_a + powers[0], self.exponent_b + powers[1]

    def largest(self, first: int, last: int, stride: int = 1) -> NDArray[np.int32]:
        """The largest exponent of a block."""
        group = self.unit.group
        if group > 1:
            exponents = [self._group(g)[1] for g in range(first // group, last // group)]
        else:
            exponents = [self.exponent_a[k] + self.exponent_b[k] for k in range(first, last, stride)]
        return np.asarray(np.maximum.reduce(exponents), np.int32)

    def cut_sum(self, scale: Tile, first: int, last: int, stride: int = 1) -> NDArray[np.float64]:
        """The block's terms in units of 1 / scale, each cut to a whole number, added."""
        group = self.unit.group
        total = np.zeros(scale.shape)
        for k in range(first // group, last // group, stride):
            term = self._group(k)[0] if group > 1 else self.a[k] * self.b[k]
            total += np.trunc(term * scale)
        return total

    def _group(self, g: int) -> tuple[Tile, Tile]:
        """Value and exponent of the exact sum of one group under its two scales."""
        size = self.unit.group
        part = slice(g * size, (g + 1) * size)
        dot = np.sum(self.a[part] * self.b[part], axis=0)
        exponent = self.powers[0][g] + self.powers[1][g]
        value = dot * (self.significands[0][g] * self.significands[1][g]) * _power(exponent)
        return value, np.where(value == 0, self.zero, exponent)

    def special(self, total: Tile, first: int, last: int) -> NDArray[np.float64]:
        """The IEEE value of addend and products, where it is not finite; 0 elsewhere."""
        value = total.astype(np.float64)
        if not self.finite:
            for k in range(first, last):
                value = value + self.raw[0][k] * self.raw[1][k]
            if self.unit.group > 1:
                blocks = slice(first // self.unit.group, last // self.unit.group)
                for ok in self.scale_finite:
                    value = np.where(ok[blocks].all(axis=0), value, np.nan)
        return np.where(np.isfinite(value), 0.0, value)


class _Aligned:
    """Terms and an early addend cut below the largest exponent, added exactly, rounded once."""

    def __init__(self, unit: MatrixUnit, formats: Formats, a: Tile, b: Tile, scales: Scales | None) -> None:
        self.unit = unit
        self.terms = _Terms(unit, formats, a, b, scales)
        self.early = unit.addend == "early"

    def __call__(self, total: Tile, first: int, last: int) -> Tile:
        """One block; within a late instruction ``total`` is the chain so far, which takes part like any addend."""
        unit = self.unit
        largest = np.maximum(self.terms.largest(first, last), exponents_of(total, unit.result_format, self.terms.zero))
        if unit.exponent_floor is not None:
            largest = np.maximum(largest, unit.exponent_floor)
        largest = np.where(largest < _NONE // 2, 0, largest)  # nothing but zeros
        scale = _power(unit.fraction_bits - largest)
        finite = np.where(np.isfinite(total), total, 0).astype(np.float64)
        whole = self.terms.cut_sum(scale, first, last) + np.trunc(finite * scale)
        result = _rounded(unit, whole * _power(largest - unit.fraction_bits))
        special = self.terms.special(total, first, last)
        return np.where(special == 0, result, special).astype(np.float32)


def _rounded(unit: MatrixUnit, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """The block's one rounding; a zero is +0, and what reaches 2**128 is infinite in every direction."""
    fmt = unit.result_format
    if unit.result_bits != fmt.mantissa_bits:
        fmt = FloatFormat(f"e{fmt.exponent_bits}m{unit.result_bits}", exponent_bits=8, mantissa_bits=unit.result_bits)
    rounded = round_to(exact, fmt, "toward-zero" if unit.rounding == "toward-zero" else "nearest-even")
    if unit.rounding == "toward-zero":
        rounded = np.where(np.abs(exact) >= _PAST_FP32, np.copysign(np.inf, exact), rounded)
    return rounded + 0.0


class _TwoStage:
    """Products aligned among themselves, then their sum and the addend cut again at the larger exponent."""

    def __init__(self, unit: MatrixUnit, formats: Formats, a: Tile, b: Tile) -> None:
        self.unit = unit
        self.terms = _Terms(unit, formats, a, b)
        self.a, self.b = a, b

    def __call__(self, total: Tile, first: int, last: int) -> Tile:
        unit, bits = self.unit, self.unit.fraction_bits
        cut = np.floor if unit.second_cut == "toward-negative" else np.trunc
        if unit.even_odd:
            halves = [self._products(first + i, last, 2) for i in (0, 1)]
            largest = np.maximum(halves[0][1], halves[1][1])
            cuts = [cut(value * _power(bits - largest)) for value, _ in halves]
            value = (cuts[0] + cuts[1]) * _power(largest - bits)
        else:
            value, largest = self._products(first, last, 1)
        addend = exponents_of(total, FP32, _NONE)
        exponent = np.maximum(np.maximum(largest, addend), unit.exponent_floor or _NONE)
        finite = np.where(np.isfinite(total), total, 0).astype(np.float64)
        if unit.even_odd:
            finite = np.where(addend < exponent - bits - 1, 0.0, finite)
        summed = cut(value * _power(31 - exponent)) * _power(exponent - 31)
        kept = cut(finite * _power(bits - exponent)) * _power(exponent - bits)
        result = round_to(summed + kept, FP32) + 0.0
        special = self._special(total, first, last)
        return np.where(special == 0, result, special).astype(np.float32)

    def _products(self, first: int, last: int, stride: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """The cut sum of some products and the exponent that they were aligned to."""
        largest = self.terms.largest(first, last, stride)
        used = np.where(largest < _NONE // 2, 0, largest)
        cut = self.terms.cut_sum(_power(self.unit.fraction_bits - used), first, last, stride)
        return cut * _power(used - self.unit.fraction_bits), np.where(largest < _NONE // 2, _BELOW_ALL, largest)

    def _special(self, total: Tile, first: int, last: int) -> NDArray[np.float64]:
        """Infinities and NaN; a product that fp32 does not hold is infinite at once."""
        value = self.terms.special(total, first, last)
        for k in range(first, last):
            product = self.terms.raw[0][k] * self.terms.raw[1][k]
            value = value + np.where(np.abs(product) >= _PAST_FP32, np.copysign(np.inf, product), 0.0)
        return np.where(np.isfinite(value), 0.0, value)


class _Pairwise:
    """fp32 products and a tree of fp32 sums, subnormal factors, addends and results flushed to zero."""

    def __init__(self, formats: Formats, a: Tile, b: Tile) -> None:
        self.a, self.b = (
            np.where(np.abs(x) < fmt.min_normal, np.float32(0), x) for x, fmt in zip((a, b), formats, strict=True)
        )

    def __call__(self, total: Tile, first: int, last: int) -> Tile:
        level = [_flushed(self.a[k] * self.b[k]) for k in range(first, last)]
        while len(level) > 1:
            level = [_flushed(level[i] + level[i + 1]) for i in range(0, len(level), 2)]
        start = np.where(np.abs(total) < FP32.min_normal, np.float32(0), total)
        return _flushed(start + level[0])


def _flushed(x: Tile) -> Tile:
    return np.where(np.abs(x) < np.float32(FP32.min_normal), x * np.float32(0), x)


class _Exact:
    """A block and the addend exactly, rounded once to nearest even."""

    def __init__(self, formats: Formats, a: Tile, b: Tile) -> None:
        del formats  # every number counts as it is
        self.a, self.b = a, b

    def __call__(self, total: Tile, first: int, last: int) -> Tile:
        a = np.moveaxis(self.a[first:last, ..., 0], 0, -1)
        b = np.moveaxis(self.b[first:last, ..., 0, :], 0, -2)
        return round_to(exact_products(a, b, total), FP32).astype(np.float32)
