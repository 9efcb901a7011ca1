"""The aligned arithmetic for finite factors of usual size: float32 products, int32 sums, nothing allocated.

An exponent is a field of the float32 pattern, a scale is built by subtracting fields, the cast to int32 is the cut
toward zero, and masking the low bits of an exact float64 is the rounding toward zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mp_reference.numerics.rounding_kernels import Workspace, kernel_for
from mp_reference.spec.formats import FP16, FloatFormat

if TYPE_CHECKING:
    from mp_reference.spec.tensor_cores import MatrixUnit

__all__ = ["FastAligned"]

Tile = NDArray[Any]
_BIAS = 127
_NO_PRODUCT = -4000
_MOST_FRACTION_BITS = 28  # a product, below 4, is then an int32


class FastAligned:
    """One step a block on one tile, in place; answers nothing where float32 and int32 do not hold the block."""

    @staticmethod
    def suits(unit: MatrixUnit) -> bool:
        """Whether this is the arithmetic of the row."""
        usual = {"fp32": ("toward-zero", unit.result_bits), "fp16": ("nearest-even", 10)}[unit.result]
        plain = unit.arithmetic == "aligned" and unit.group == 1 and unit.zero_products == "excluded"
        return plain and (unit.rounding, unit.result_bits) == usual and unit.fraction_bits <= _MOST_FRACTION_BITS

    @classmethod
    def of(
        cls, unit: MatrixUnit, formats: tuple[FloatFormat, FloatFormat], a: Tile, b: Tile, start: Tile
    ) -> FastAligned | None:
        """The steps of a tile, or nothing where its factors need the general arithmetic."""
        if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(start).all()):
            return None
        exponents = [_exponents(x, fmt) for x, fmt in zip((a, b), formats, strict=True)]
        low, high = (sum(ends) for ends in zip(*(_ends(e) for e in exponents), strict=True))
        if low + _BIAS <= unit.fraction_bits + 1 or high > _BIAS - 2:
            return None  # a scale or a product would leave float32
        return cls(unit, formats, a, b, start, exponents)

    def __init__(
        self, unit: MatrixUnit, formats: tuple[FloatFormat, FloatFormat], a: Tile, b: Tile, start: Tile,
        exponents: list[NDArray[np.int16]],
    ) -> None:  # fmt: skip
        self.unit, self.a, self.b = unit, a, b
        shape = start.shape
        narrow = all(fmt.exponent_bits <= 5 for fmt in formats)
        self.kind = np.uint8 if narrow else np.int16
        self.least = sum(fmt.min_exponent for fmt in formats) + _BIAS  # least biased exponent of a product
        self.exponent_a, self.exponent_b = self._tables(exponents, narrow)
        self.product, self.scale = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.whole, self.part = np.empty(shape, np.int32), np.empty(shape, np.int32)
        self.largest, self.exponent = np.empty(shape, self.kind), np.empty(shape, self.kind)
        self.exact = np.empty(shape, np.float64)
        self.together, self.roomy = self._int32_room(formats)
        if unit.result == "fp16":
            self.rounder = kernel_for(FP16, "nearest-even", "ieee", "", "float64")
            self.work = Workspace(start.size, np.dtype(np.float64))
        self.mask = np.int64(-1 << (52 - unit.result_bits))
        bound = float(np.abs(a).max(initial=0)) * float(np.abs(b).max(initial=0)) * len(a) + float(np.abs(start).max())
        self.bounded = bound < unit.result_format.max / 2

    def _tables(self, exponents: list[NDArray[np.int16]], narrow: bool) -> tuple[Tile, Tile]:
        """Exponents whose sum is biased by 127; a zero's keep the sum below that of any product."""
        if not narrow:
            return exponents[0] + np.int16(_BIAS), exponents[1]
        first, second = exponents
        return _lifted(first, 64), _lifted(second, 63)

    def _int32_room(self, formats: tuple[FloatFormat, FloatFormat]) -> tuple[int, bool]:
        """Products that may be added in int32 before they must move to float64; whether block and addend fit."""
        unit = 2.0**self.unit.fraction_bits
        largest = unit * (2 - formats[0].epsilon) * (2 - formats[1].epsilon)
        return int((2**31 - 1) // largest), self.unit.block * largest + 2 * unit < 2**31

    def __call__(self, total: Tile, first: int, last: int) -> Tile | None:
        """Add a block to ``total`` in place."""
        if not self._align(total, first, last):
            return None
        self._add_products(first, last)
        self._add_accumulator(total)
        self._round(total)
        if not self.bounded and not (total.max() < np.inf and total.min() > -np.inf):
            return None
        return total

    def _align(self, total: Tile, first: int, last: int) -> bool:
        """Set the largest exponent, biased, and the scale that brings its fraction bits to whole numbers."""
        unit, part, largest = self.unit, self.part, self.largest
        np.right_shift(total.view(np.int32), np.int32(23), out=part)
        if self.kind is not np.uint8 or unit.result == "fp16":  # else the cast drops the sign
            np.bitwise_and(part, np.int32(255), out=part)
        if unit.result == "fp16":
            np.maximum(part, np.int32(_BIAS + FP16.min_exponent), out=part, where=part > 0)
        np.copyto(largest, part, casting="unsafe")
        for k in range(first, last):
            np.add(self.exponent_a[k], self.exponent_b[k], out=self.exponent)
            np.maximum(largest, self.exponent, out=largest)
        if largest.min() <= max(self.least, unit.fraction_bits):
            np.copyto(largest, part, casting="unsafe", where=largest < self.least)
            if ((largest <= unit.fraction_bits) & (total != 0)).any():
                return False
            np.maximum(largest, self.kind(unit.fraction_bits + 1), out=largest)
        if unit.exponent_floor is not None and unit.exponent_floor + _BIAS > unit.fraction_bits + 1:
            np.maximum(largest, self.kind(unit.exponent_floor + _BIAS), out=largest)
        np.copyto(part, largest)
        np.left_shift(part, np.int32(23), out=part)
        fields = np.uint32((unit.fraction_bits + 2 * _BIAS) << 23)
        np.subtract(fields, part.view(np.uint32), out=self.scale.view(np.uint32))
        return True

    def _add_products(self, first: int, last: int) -> None:
        """The block's products in whole units, cut toward zero by the cast, their sum in float64."""
        product, whole, cut = self.product, self.whole, self.part
        for start in range(first, last, self.together):
            for k in range(start, min(start + self.together, last)):
                np.multiply(self.a[k], self.b[k], out=product)
                np.multiply(product, self.scale, out=product)
                if k == start:
                    np.copyto(whole, product, casting="unsafe")
                else:
                    np.copyto(cut, product, casting="unsafe")
                    np.add(whole, cut, out=whole)
            if start > first:
                np.add(self.exact, whole, out=self.exact)
            elif not self.roomy:
                np.copyto(self.exact, whole)

    def _add_accumulator(self, total: Tile) -> None:
        """The cut accumulator too; ``exact`` gets the sum."""
        np.multiply(total, self.scale, out=self.product)
        if self.roomy:
            np.copyto(self.part, self.product, casting="unsafe")
            np.add(self.whole, self.part, out=self.whole)
            np.copyto(self.exact, self.whole)
        else:
            np.trunc(self.product, out=self.product)
            np.add(self.exact, self.product, out=self.exact)

    def _round(self, total: Tile) -> None:
        """One rounding of the exact sum, and back from whole units."""
        unit, part = self.unit, self.part
        np.copyto(part, self.largest)
        np.left_shift(part, np.int32(23), out=part)
        np.subtract(part, np.int32(unit.fraction_bits << 23), out=self.scale.view(np.int32))
        if unit.result == "fp16":
            np.multiply(self.exact, self.scale, out=self.exact)
            flat = self.exact.reshape(-1)
            self.rounder(flat, flat, self.work, None, 0)
            np.add(flat, 0.0, out=flat)
            np.copyto(total, self.exact, casting="same_kind")
            return
        np.bitwise_and(self.exact.view(np.int64), self.mask, out=self.exact.view(np.int64))
        np.copyto(self.product, self.exact, casting="same_kind")
        np.multiply(self.product, self.scale, out=total)


def _exponents(x: Tile, fmt: FloatFormat) -> NDArray[np.int16]:
    """Exponents of the factors, of subnormals the least normal one's, of zeros none."""
    field = (x.view(np.uint32) >> np.uint32(23)).astype(np.uint8).astype(np.int16)  # the cast drops the sign
    exponent = np.maximum(field - np.int16(_BIAS), np.int16(fmt.min_exponent))
    return np.where(x == 0, np.int16(_NO_PRODUCT), exponent)


def _lifted(exponents: NDArray[np.int16], shift: int) -> NDArray[np.uint8]:
    return np.where(exponents == _NO_PRODUCT, 0, exponents + shift).astype(np.uint8)


def _ends(exponents: NDArray[np.int16]) -> tuple[int, int]:
    """Least and largest exponent of what is not zero."""
    used = exponents[exponents != _NO_PRODUCT]
    return (int(used.min()), int(used.max())) if used.size else (0, 0)
