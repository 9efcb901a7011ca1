"""The machine's own product: BLAS in single precision, on panels of the factors, widened one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.codec import cast, encode_into
from mp_reference.numerics.crew import share
from mp_reference.numerics.products import widen_into
from mp_reference.numerics.workspace import Panels, borrowed
from mp_reference.spec.formats import BF16, FP16, FP32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from mp_reference.numerics.products import Problem
    from mp_reference.spec.formats import FloatFormat

__all__ = ["fast_product", "stored"]

_SIDE = 1024  # rows, columns and K of a panel: widening it costs little beside its product, and four are 16 MiB
Tile = tuple[slice, slice, slice]


def fast_product(problem: Problem, out_format: FloatFormat, threads: int = 1) -> NDArray[Any]:
    """Multiply in single precision, in the order that BLAS likes; add ``c``; round once.

    Where K is longer than a panel, the sums over its panels are added in fp32.

    Args:
        problem: the operands.
        out_format: the format of the result.
        threads: tiles computed at once.

    Returns:
        Array of ``out_format.dtype``, the shape of ``problem``.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.5, for what blocked sums keep.

    >>> from mp_reference.numerics.products import Problem
    >>> half = np.ones((1, 3), np.float16)
    >>> fast_product(Problem(half, half.T), FP32)
    array([[3.]], dtype=float32)
    """
    if problem.left.dtype == problem.right.dtype == np.float32 and out_format == FP32:
        with np.errstate(all="ignore"):
            total = np.asarray(np.matmul(problem.left, problem.right))
            return total if problem.c is None else np.add(total, problem.c, out=total)
    a, b, c = problem.matrices()
    out = np.empty((len(a), a.shape[1], b.shape[2]), out_format.dtype)

    def run(tiles: Iterator[Tile]) -> None:
        with np.errstate(all="ignore"), borrowed(np.float32, _SIDE * _SIDE, Panels) as panels:
            for tile in tiles:
                _multiply(a, b, None if c is None else c[tile], out[tile], tile, panels, out_format)

    share(list(_tiles(len(out), out.shape[1], out.shape[2], a.shape[2])), run, threads)
    return out.reshape(problem.shape)


def _tiles(batch: int, m: int, n: int, length: int) -> Iterator[Tile]:
    """Parts of the result whose factors and sums fit panels: of one matrix, or several small ones."""
    longest = max(m * min(length, _SIDE), min(length, _SIDE) * n, m * n, 1)
    together = max(1, _SIDE * _SIDE // longest)
    for g in range(0, batch, together):
        for j in range(0, n, _SIDE):
            for i in range(0, m, _SIDE):
                yield slice(g, g + together), slice(i, i + _SIDE), slice(j, j + _SIDE)


def _multiply(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None, out: NDArray[Any], tile: Tile, panels: Panels,
    out_format: FloatFormat,
) -> None:  # fmt: skip
    """One tile, K panel by panel."""
    g, i, j = tile
    total = out if out_format == FP32 else panels.total[: out.size].reshape(out.shape)
    for first in range(0, max(a.shape[2], 1), _SIDE):
        k = slice(first, first + _SIDE)
        left, right = _panel(a[g, i, k], panels.left), _panel(b[g, k, j], panels.right)
        if first:
            np.add(total, np.matmul(left, right, out=panels.part[: out.size].reshape(out.shape)), out=total)
        else:
            np.matmul(left, right, out=total)
    if c is not None:
        np.add(total, c, out=total)
    if total is not out:
        stored(total, out_format, out)


def _panel(x: NDArray[Any], memory: NDArray[np.float32]) -> NDArray[np.float32]:
    """A part of a factor in float32."""
    if x.dtype == np.float32:
        return x
    panel = memory[: x.size].reshape(x.shape)
    widen_into(x, panel)
    return panel


def stored(total: NDArray[np.float32], out_format: FloatFormat, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Round float32 numbers once into a format's dtype; ml_dtypes rounds to bf16 as exactly, and sooner.

    Args:
        total: float32.
        out_format: the format.
        out: where to write, unless a new array is wanted (``total`` itself for fp32).

    Returns:
        Array of ``out_format.dtype``, the same shape.

    Source: contract "round once".

    >>> stored(np.float32([1.0, 1e-9]), FP16)
    array([1., 0.], dtype=float16)
    """
    if out is not None and out_format == FP16 and total.flags.c_contiguous and out.flags.c_contiguous:
        encode_into(total, FP16, out.view(np.uint16))
        return out
    if out_format not in (FP32, BF16):
        total = cast(total, out_format)
    if out is None:
        with np.errstate(all="ignore"):
            return total.astype(out_format.dtype, copy=False)
    np.copyto(out, total, casting="unsafe")
    return out
