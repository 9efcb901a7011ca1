"""Block-scaled products: operands in block formats, scales in place, one matrix after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.bits import format_of
from mp_reference.numerics.blocks import BlockArray
from mp_reference.numerics.products import Problem, widened
from mp_reference.numerics.tensor_core import run_unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mp_reference.spec.tensor_cores import MatrixUnit, TensorCore

__all__ = ["scaled_product", "unit_and_scales", "unpacked"]

Scales = tuple[Any, Any]


def unpacked(a: Any, b: Any, scales: Scales | None = None) -> tuple[Any, Any, Scales | None, float]:
    """Take block arrays apart for a product; other factors pass as they are.

    Args:
        a: (..., m, k), if a block array with blocks along the last axis.
        b: (..., k, n), with blocks along the last but one.
        scales: block scales of plain factors, or nothing.

    Returns:
        Elements, elements, both scales with K where the factors have it, and the product of the tensor scales in fp32.
        A last block that is short is filled up with zeros.

    Raises:
        TypeError: one factor is a block array and the other is not.
        ValueError: scales besides those of block arrays, or blocks that do not run along one K.

    Source: OCP MX v1.0, 6.1.

    >>> from mp_reference.numerics.blocks import quantize
    >>> from mp_reference.spec.blocks import MXFP8_E4M3
    >>> x = np.ones((2, 40), np.float32)
    >>> parts = unpacked(quantize(x, MXFP8_E4M3), quantize(x.T, MXFP8_E4M3, axis=0))
    >>> parts[0].shape, parts[1].shape, parts[2][1].shape
    ((2, 64), (64, 2), (2, 2))
    """
    blocked = [isinstance(x, BlockArray) for x in (a, b)]
    if not any(blocked):
        return a, b, scales, 1.0
    if not all(blocked):
        raise TypeError(
            f"{'a' if blocked[0] else 'b'} is a BlockArray and the other factor is not; quantize that one too, or "
            "multiply dequantize(...) rounded to a format"
        )
    if scales is not None:
        raise ValueError("block arrays bring their scales along; leave scales out")
    for name, array, axis in (("a", a, -1), ("b", b, -2)):
        if array.elements.ndim < 2 or array.axis % array.elements.ndim != array.elements.ndim + axis:
            raise ValueError(
                f"the blocks of {name}, of shape {array.elements.shape}, run along axis {array.axis}, and must run "
                f"along axis {axis} of a matrix, that of the sum: quantize(x, format, axis={axis})"
            )
    if a.elements.shape[-1] != b.elements.shape[-2]:
        raise ValueError(
            f"matmul of {a.elements.shape} by {b.elements.shape}: the last axis of a must equal the last but one of b"
        )
    missing = a.scales.shape[-1] * a.format.block_size - a.elements.shape[-1]
    left = np.pad(a.elements, [(0, 0)] * (a.elements.ndim - 1) + [(0, missing)])
    right = np.pad(b.elements, [(0, 0)] * (b.elements.ndim - 2) + [(0, missing), (0, 0)])
    first, second = (x.scales.view(x.format.scale_format.dtype) for x in (a, b))
    elements = left.view(a.format.element_format.dtype), right.view(b.format.element_format.dtype)
    return *elements, (first, np.swapaxes(second, -1, -2)), float(np.float32(a.tensor_scale * b.tensor_scale))


def unit_and_scales(row: TensorCore, problem: Problem) -> tuple[MatrixUnit, list[NDArray[np.float32]]]:
    """The row of a unit that takes the operands' scales, and the scales as float32.

    Args:
        row: the unit.
        problem: the operands, with scales.

    Returns:
        The row, and the scales of both factors.

    Raises:
        ValueError: scales that do not fit the factors or each other, or that the unit does not take.

    Source: the row's ``source``.

    >>> from mp_reference import tensor_core
    >>> import ml_dtypes
    >>> ones, scale = np.ones((1, 32), ml_dtypes.float8_e4m3fn), np.ones((1, 1), ml_dtypes.float8_e8m0fnu)
    >>> unit_and_scales(tensor_core("blackwell"), Problem(ones, ones.T, scales=(scale, scale)))[0].scale_block
    32
    """
    assert problem.scales is not None
    scales = [np.asarray(scale) for scale in problem.scales]
    blocks = scales[0].shape[-1] if scales[0].ndim > 1 else 0
    fits = blocks and problem.length % blocks == 0 and scales[0].shape[-2] == problem.shape[-2]
    if not fits or scales[1].shape[-2:] != (blocks, problem.shape[-1]):
        raise ValueError(
            f"scales of shapes {scales[0].shape} and {scales[1].shape} do not fit factors of {problem.a.shape} and "
            f"{problem.b.shape}: they must be (..., m, k / block) and (..., k / block, n)"
        )
    if scales[0].dtype != scales[1].dtype:
        raise ValueError(f"scales are {scales[0].dtype} and {scales[1].dtype}, and must be of one format; cast one")
    unit = row.row_for(*problem.formats, format_of(scales[0].dtype).name, problem.length // blocks)
    return unit, [widened(scale) for scale in scales]


def scaled_product(row: TensorCore, problem: Problem) -> NDArray[np.float32]:
    """A product of factors with block scales on a unit that takes them, one matrix after the other.

    Args:
        row: the unit.
        problem: the operands, with scales.

    Returns:
        float32, (..., m, n).

    Raises:
        ValueError: as ``unit_and_scales``.

    Source: the row's ``source``.

    >>> from mp_reference import tensor_core
    >>> import ml_dtypes
    >>> ones = np.ones((1, 32), ml_dtypes.float8_e4m3fn)
    >>> twos = np.full((1, 1), 2, ml_dtypes.float8_e8m0fnu)
    >>> scaled_product(tensor_core("blackwell"), Problem(ones, ones.T, scales=(twos, twos)))
    array([[128.]], dtype=float32)
    """
    unit, scales = unit_and_scales(row, problem)
    lead = problem.shape[:-2]
    out = np.empty(problem.shape, np.float32)
    operands = [np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (problem.a, problem.b, *scales)]
    missing = -scales[0].shape[-1] % (unit.block // unit.scale_block)  # the unit fills up with zero elements
    for index in np.ndindex(lead):
        a, b, scale_a, scale_b = (x[index] for x in operands)
        c = None if problem.c is None else problem.c[index][np.newaxis]
        padded = (np.pad(x, [(0, missing), (0, 0)], constant_values=1) for x in (scale_a.T, scale_b))
        first, second = padded
        placed = (first[:, np.newaxis, :, np.newaxis], second[:, np.newaxis, np.newaxis, :])
        out[index] = run_unit(unit, problem.formats, a[np.newaxis], b[np.newaxis], c, placed)[0]
    return out
