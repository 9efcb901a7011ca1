"""Matrix products under a named accumulator, batched, with an addend, rounded once into the result's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.arguments import require_threads
from mp_reference.numerics.bits import codes_of
from mp_reference.numerics.chains import Factors, run_chain
from mp_reference.numerics.codec import cast
from mp_reference.numerics.crew import share
from mp_reference.numerics.fast_product import fast_product, stored
from mp_reference.numerics.products import Problem, cut, format_on, own_format, parts_of, result_format, widened
from mp_reference.numerics.rounding import round_to
from mp_reference.numerics.scaled import scaled_product, unpacked
from mp_reference.numerics.superaccumulator import exact_products
from mp_reference.numerics.tensor_core import run_unit
from mp_reference.spec.accumulators import (
    Accumulator,
    Blocked,
    Exact,
    Fast,
    Sequential,
    SplitK,
    accumulator_named,
)
from mp_reference.spec.formats import FP32, FloatFormat
from mp_reference.spec.tensor_cores import TensorCore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import ArrayLike, NDArray

    from mp_reference.numerics.blocks import BlockArray

__all__ = ["accumulate", "matmul"]

_TILE = 65536  # outputs a tile: the buffers of a step stay in the second-level cache
_COLUMNS = 512
_DEPTH = 2048  # a multiple of every unit's instruction: where sums are chained, K comes in multiples of it
_WIDENED = 2**20  # numbers of the factors that are then in float32 at a time, if K can be cut so short


def matmul(
    a: ArrayLike | BlockArray,
    b: ArrayLike | BlockArray,
    c: ArrayLike | None = None,
    accumulator: str | FloatFormat | Accumulator = "fp32",
    *,
    out_format: FloatFormat | None = None,
    scales: tuple[ArrayLike, ArrayLike] | None = None,
    threads: int = 1,
) -> NDArray[Any]:
    """Multiply matrices as a named accumulator does, add ``c``, and round the result once.

    Args:
        a: (..., m, k) or (k,), of a named format's dtype: float32, float16, bfloat16, fp8, fp6, fp4. Both factors may
            be ``BlockArray`` with blocks along k; the product of their tensor scales, in fp32, multiplies the sum.
        b: (..., k, n) or (k,), likewise; the two may differ. Leading axes broadcast.
        c: addend, broadcasts to the result; where the accumulator starts, so its values must be in its format.
        accumulator: a row of ``spec.accumulators`` or ``spec.tensor_cores``, "exact", "fp32", or a format, which means
            ``sequential(format)``. "fp32" is the machine's own single-precision product, fast, in no promised order,
            with ``c`` added after it.
        out_format: the result's format. Unless given: a tensor core's own; else that of ``c``; else that of ``a`` and
            ``b``, where they agree and have 16 bits or more; else fp32 (8-bit products have no room for themselves).
        scales: block scales of ``a`` (..., m, k / block) and ``b`` (..., k / block, n), for units that take them.
        threads: tiles that "fp32" and "exact" compute at once. The other accumulators take one whatever is asked: they
            need the interpreter at every step, and threads that wait for it would be slower.

    Returns:
        Array of ``out_format.dtype``. Infinities, NaN and signs of zeros as IEEE arithmetic has them. NVIDIA's units
        answer every zero with +0 and NaN with the code 0x7FFFFFFF or 0x7FFF.

    Raises:
        TypeError: a dtype that stores no named format, factors of two formats without ``out_format``, or one block
            array.
        ValueError: no threads, shapes that do not fit, a unit that does not multiply these formats, an addend that
            would have to be rounded first, or scales that nothing takes.

    Source: the accumulator's ``source``.

    >>> from mp_reference import FP16, tensor_core
    >>> a, b = np.array([[2048, 1, -2048]], np.float16), np.ones((3, 1), np.float16)
    >>> [float(matmul(a, b, accumulator=row)[0, 0]) for row in ("exact", FP16, tensor_core("hopper"))]
    [1.0, 0.0, 1.0]
    """
    row = accumulator_named(accumulator)
    require_threads(threads)
    a, b, scales, factor = unpacked(a, b, scales)
    if factor != 1 and c is not None:
        raise ValueError(f"c cannot join a sum that tensor scales multiply by {factor}; add it to the result")
    problem = Problem(np.asarray(a), np.asarray(b), None if c is None else np.asarray(c), scales)
    out = result_format(row, problem, out_format)
    if isinstance(row, Fast) and problem.scales is None:
        return problem.shaped(fast_product(problem, out, threads))
    total = accumulate(row, problem, threads)
    total = total if factor == 1 else total * np.float64(factor)  # 24 bits by 24 are exact
    total = stored(total, out) if total.dtype == np.float32 else cast(total, out)
    if isinstance(row, TensorCore) and out == row.result_format and row.rows[0].family != "mfma":
        _set_unit_nan(total)
    return problem.shaped(total)


def _set_unit_nan(total: NDArray[Any]) -> None:
    """NVIDIA's units answer NaN with one code, all ones below the sign (Fasi et al. 2021)."""
    nan = np.isnan(total)
    if nan.any():
        codes = codes_of(total)
        codes[nan] = np.iinfo(codes.dtype).max >> 1


def accumulate(row: Accumulator, problem: Problem, threads: int = 1) -> NDArray[Any]:
    """The product before its last rounding.

    Args:
        row: the accumulator.
        problem: the operands.
        threads: as ``matmul``.

    Returns:
        float32 numbers of the accumulator's format; "exact" gives float64 rounded to odd.

    Raises:
        ValueError: scales that the accumulator does not take, or an addend that does not fit its format.

    Source: the row's ``source``.

    >>> half = np.ones((1, 3), np.float16)
    >>> accumulate(accumulator_named("exact"), Problem(half, half.T))
    array([[3.]])
    """
    if problem.scales is not None and not isinstance(row, TensorCore):
        raise ValueError(f"{row.name} takes no scales; use tensor_core('blackwell'), or multiply them in first")
    if isinstance(row, Fast):
        return fast_product(problem, FP32, threads)
    if isinstance(row, Exact):
        return _tiled(problem, exact_products, np.float64, threads=threads)
    _require_addend(row, problem)
    if isinstance(row, Blocked | SplitK):
        return _combined(row, problem, threads)
    if isinstance(row, TensorCore):
        return _on_unit(row, problem)
    bits = _significant_bits(problem)
    chained = isinstance(row, Sequential)
    return _tiled(problem, lambda a, b, c: _chain_tile(row, bits, a, b, c), np.float32, chained=chained)


def _require_addend(row: Accumulator, problem: Problem) -> None:
    """The accumulator starts at the addend, so the addend must be one of its numbers."""
    fmt = own_format(row)
    if problem.c is None or problem.c_format is None or problem.c_format == fmt:
        return
    rounded = round_to(problem.c, fmt)
    if not ((rounded == problem.c) | np.isnan(problem.c)).all():
        raise ValueError(
            f"c is {problem.c_format.name} and holds values that {fmt.name}, in which {row.name} starts, does not "
            f"have; round it first, with cast(c, {fmt.name.upper()})"
        )


def _combined(row: Blocked | SplitK, problem: Problem, threads: int) -> NDArray[Any]:
    """Partial products over the parts of K, added in the outer format."""

    def partial(k: Any) -> NDArray[Any]:
        return round_to(accumulate(row.inner, problem.part(k), threads), row.outer).astype(np.float64)

    def add(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
        return round_to(left + right, row.outer)  # 53 bits are enough for the sum of two numbers of 24

    parts: Any = map(partial, parts_of(row, problem.length))
    total: NDArray[Any] = np.zeros(problem.shape) if problem.c is None else problem.c.astype(np.float64)
    with np.errstate(all="ignore"):
        if isinstance(row, SplitK) and row.combine == "halves":
            parts = _in_halves(list(parts), add)
        for part in parts:
            total = add(total, part)
    return total.astype(np.float32)


def _in_halves(parts: list[Any], add: Callable[[Any, Any], Any]) -> list[Any]:
    """The last part, then each of the first half with its partner in the second, where it has one."""
    *rest, last = parts
    half = (len(parts) + 1) // 2
    return [
        last,
        *(add(rest[i], rest[i + half]) if i + half < len(rest) else rest[i] for i in range(min(half, len(rest)))),
    ]


def _on_unit(row: TensorCore, problem: Problem) -> NDArray[Any]:
    """A matrix unit on the formats at hand."""
    formats = (format_on(row, problem.formats[0]), format_on(row, problem.formats[1]))
    if problem.scales is not None:
        return scaled_product(row, problem)
    unit = row.row_for(*formats)

    def run(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None) -> NDArray[Any]:
        return run_unit(unit, formats, cut(a, formats[0]), cut(b, formats[1]), c)

    return _tiled(problem, run, np.float32, chained=True)


def _chain_tile(row: Accumulator, bits: int, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None) -> NDArray[Any]:
    left = np.ascontiguousarray(np.moveaxis(a, -1, 0))[..., np.newaxis]
    right = np.ascontiguousarray(np.moveaxis(b, -2, 0))[..., np.newaxis, :]
    return run_chain(row, Factors(left, right, bits), c)


def _significant_bits(problem: Problem) -> int:
    """Significant bits of the factors; of float32 arrays 12 if they hold no more, as tf32 and custom formats do."""
    bits = [fmt.mantissa_bits + 1 for fmt in problem.formats if fmt != FP32]
    for fmt, x in zip(problem.formats, (problem.left, problem.right), strict=True):
        if fmt == FP32:
            used = np.bitwise_or.reduce(x.view(np.uint32), axis=None) if x.size else 0
            bits.append(24 if used & 0xFFF else 12)
    return max(bits)


def _tiled(
    problem: Problem, kernel: Callable[..., NDArray[Any]], dtype: Any, *, threads: int = 1, chained: bool = False
) -> NDArray[Any]:
    """Call ``kernel(a, b, c)`` on tiles (batch, m, k), (batch, k, n), (batch, m, n) of a flattened batch.

    Tiles are as large as a step's buffers should be. Where sums are chained, K comes in parts, each starting at the sum
    of those before, so that few factors need be widened at once.
    """
    out = np.empty(problem.shape, dtype)
    if out.size == 0:
        return out
    a, b, c = problem.matrices()
    flat = out.reshape(len(a), *problem.shape[-2:])

    def work(tiles: Iterator[tuple[slice, slice, slice]]) -> None:
        for g, i, j in tiles:
            total, here = None if c is None else c[g, i, j], flat[g, i, j].shape
            lines = here[0] * (here[1] + here[2])
            depth = max(_WIDENED // lines // _DEPTH, 1) * _DEPTH if chained else max(problem.length, 1)
            for first in range(0, max(problem.length, 1), depth):
                k = slice(first, first + depth)
                total = kernel(widened(a[g, i, k]), widened(b[g, k, j]), total)
            flat[g, i, j] = total

    tiles = list(_tiles(len(flat), flat.shape[1], flat.shape[2], _TILE * min(threads, 2), _COLUMNS))
    share(tiles, work, threads)
    return out


def _tiles(batch: int, m: int, n: int, size: int, least: int) -> Iterator[tuple[slice, slice, slice]]:
    """Tiles of about ``size`` outputs, ``least`` columns or more: rows of a matrix, or several small matrices."""
    columns = min(n, max(least, size // m))
    rows = min(m, max(1, size // columns))
    together = max(1, size // (rows * columns)) if (rows, columns) == (m, n) else 1
    for g in range(0, batch, together):
        for i in range(0, m, rows):
            for j in range(0, n, columns):
                yield slice(g, g + together), slice(i, i + rows), slice(j, j + columns)
