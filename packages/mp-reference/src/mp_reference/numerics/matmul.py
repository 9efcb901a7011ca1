"""Matrix products under a named accumulator, batched, with an addend, rounded once into the result's format."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mp_reference.numerics.bits import format_of
from mp_reference.numerics.chains import Factors, run_chain
from mp_reference.numerics.codec import cast, decode
from mp_reference.numerics.rounding import round_to
from mp_reference.numerics.superaccumulator import digits_of_products, special_products
from mp_reference.numerics.tensor_core import run_unit
from mp_reference.spec.accumulators import (
    Accumulator,
    Blocked,
    Exact,
    Fast,
    Kahan,
    Lanes,
    Pairwise,
    Sequential,
    SplitK,
    accumulator_named,
)  # fmt: skip
from mp_reference.spec.formats import FP32, TF32, FloatFormat
from mp_reference.spec.tensor_cores import MatrixUnit, TensorCore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Problem", "accumulate", "matmul", "result_format", "widened"]

_TILE = 131072  # outputs a tile: buffers of it stay in the second-level cache
_ROW = 512
Scales = tuple[ArrayLike, ArrayLike]


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    accumulator: str | FloatFormat | Accumulator = "fp32",
    *,
    out_format: FloatFormat | None = None,
    scales: Scales | None = None,
    threads: int = 1,
) -> NDArray[Any]:
    """Multiply matrices as a named accumulator does, add ``c``, and round the result once.

    Args:
        a: (..., m, k) or (k,), of a named format's dtype: float32, float16, bfloat16, fp8, fp6, fp4.
        b: (..., k, n) or (k,), likewise; the two may differ. Leading axes broadcast.
        c: addend, broadcasts to the result; where the accumulator starts. Its format must fit the accumulator's.
        accumulator: a row of ``spec.accumulators`` or ``spec.tensor_cores``, "exact", "fp32", or a format, which means
            ``sequential(format)``. "fp32" is the machine's own single-precision product, fast, in no promised order.
        out_format: the result's format. Unless given: a tensor core's own; else that of ``c``; else that of ``a`` and
            ``b``, where they agree and have 16 bits or more; else fp32 (8-bit products have no room for themselves).
        scales: block scales of ``a`` (..., m, k / block) and ``b`` (..., k / block, n), for units that take them.
        threads: tiles computed at once; worth it from some 500 x 500 outputs.

    Returns:
        Array of ``out_format.dtype``. Infinities and NaN as IEEE arithmetic has them; an exact zero is +0.

    Raises:
        TypeError: a dtype that stores no named format, or factors of two formats without ``out_format``.
        ValueError: shapes that do not fit, a unit that does not multiply these formats, an addend that would have to
            be rounded first, or scales that nothing takes.

    Source: the accumulator's ``source``.

    >>> from mp_reference import FP16, tensor_core
    >>> a, b = np.array([[2048, 1, -2048]], np.float16), np.ones((3, 1), np.float16)
    >>> [float(matmul(a, b, accumulator=row)[0, 0]) for row in ("exact", FP16, tensor_core("hopper"))]
    [1.0, 0.0, 1.0]
    """
    row = accumulator_named(accumulator)
    problem = Problem(np.asarray(a), np.asarray(b), None if c is None else np.asarray(c), scales)
    out = result_format(row, problem, out_format)
    total = accumulate(row, problem, threads)
    return problem.shaped(_rounded_out(total, out))


class Problem:
    """The operands of one product: float32 values, their formats, and the axes that 1-d operands lack."""

    def __init__(
        self, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None = None, scales: Scales | None = None
    ) -> None:
        if a.ndim == 0 or b.ndim == 0:
            raise ValueError(f"matmul takes arrays of one axis or more, got shapes {a.shape} and {b.shape}; use mul")
        self.vectors = (a.ndim == 1, b.ndim == 1)
        a = a[np.newaxis] if a.ndim == 1 else a
        b = b[:, np.newaxis] if b.ndim == 1 else b
        if a.shape[-1] != b.shape[-2]:
            raise ValueError(
                f"matmul of {a.shape} by {b.shape}: the last axis of a ({a.shape[-1]}) must equal the last but one "
                f"of b ({b.shape[-2]}); transpose one of them"
            )
        self.formats = (format_of(a.dtype), format_of(b.dtype))
        self.a, self.b = widened(a), widened(b)
        self.shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        self.c_format = None if c is None else format_of(c.dtype)
        self.c = None if c is None else self._placed(widened(c))
        self.scales = scales

    def _placed(self, c: NDArray[np.float32]) -> NDArray[np.float32]:
        """The addend in the shape of the result."""
        if self.vectors[0] and c.ndim:
            c = c[..., np.newaxis, :] if not self.vectors[1] else c[..., np.newaxis]
        if self.vectors[1] and c.ndim:
            c = c[..., np.newaxis]
        try:
            return np.broadcast_to(c, self.shape)
        except ValueError:
            raise ValueError(f"c has shape {c.shape}, which does not broadcast to the result's {self.shape}") from None

    def shaped(self, out: NDArray[Any]) -> NDArray[Any]:
        """The result without the axes that the operands lacked."""
        if self.vectors[0]:
            out = out[..., 0, :]
        return out[..., 0] if self.vectors[1] else out

    def part(self, k: Any) -> Problem:
        """The product over some of K, without the addend."""
        part = object.__new__(Problem)
        part.__dict__.update(self.__dict__)
        part.a, part.b, part.c, part.c_format = self.a[..., k], self.b[..., k, :], None, None
        return part


def widened(x: NDArray[Any]) -> NDArray[np.float32]:
    """Values of a named format's dtype as float32, exactly.

    Args:
        x: of a dtype that stores a named format.

    Returns:
        float32, the same shape; ``x`` itself if it is that already.

    Source: every named format is a subset of fp32.

    >>> widened(np.array([1.5], np.float16))
    array([1.5], dtype=float32)
    """
    if x.dtype == np.float32:
        return x
    if x.dtype.itemsize <= 2 and x.dtype.name != "bfloat16":
        codes = x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint8)
        return decode(codes, format_of(x.dtype))
    return x.astype(np.float32)


def result_format(row: Accumulator, problem: Problem, out_format: FloatFormat | None) -> FloatFormat:
    """The format of a product's result.

    Args:
        row: the accumulator.
        problem: the operands.
        out_format: what the caller asked for, if anything.

    Returns:
        The format, as ``matmul`` documents.

    Raises:
        TypeError: the factors have two formats of 16 bits or more and nothing else decides.

    Source: this module.

    >>> half = np.ones((2, 2), np.float16)
    >>> result_format(accumulator_named("fp32"), Problem(half, half), None).name
    'fp16'
    """
    if out_format is not None:
        return out_format
    if isinstance(row, TensorCore):
        return row.result_format
    if problem.c_format is not None:
        return problem.c_format
    wide = [fmt for fmt in problem.formats if fmt.bits >= 16]
    if len(wide) == 2 and wide[0] != wide[1]:
        raise TypeError(f"factors are {wide[0].name} and {wide[1].name}: say which with out_format=")
    return wide[0] if len(wide) == 2 else FP32


def _rounded_out(total: NDArray[Any], out: FloatFormat) -> NDArray[Any]:
    if out == FP32 and total.dtype == np.float32:
        return total
    return cast(total, out)


def accumulate(row: Accumulator, problem: Problem, threads: int = 1) -> NDArray[Any]:
    """The product before its last rounding.

    Args:
        row: the accumulator.
        problem: the operands.
        threads: tiles computed at once.

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
    if isinstance(row, Blocked):
        starts = range(0, problem.a.shape[-1], row.block)
        return _combined(row.inner, row.outer, problem, [slice(i, i + row.block) for i in starts], "serial", threads)
    if isinstance(row, SplitK):
        return _combined(row.inner, row.outer, problem, _dealt(row, problem.a.shape[-1]), row.combine, threads)
    if isinstance(row, Fast):
        return _fast(problem)
    if isinstance(row, TensorCore):
        return _on_unit(row, problem, threads)
    if isinstance(row, Exact):
        return _tiled(problem, _exact_tile, threads, np.float64)
    _require_addend(row, problem, _format_of_row(row))
    return _tiled(problem, lambda a, b, c: _chain_tile(row, problem, a, b, c), threads, np.float32)


def _fast(problem: Problem) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        total = np.matmul(problem.a, problem.b)
        return total if problem.c is None else np.add(total, problem.c)


def _combined(
    inner: Accumulator, outer: FloatFormat, problem: Problem, parts: list[Any], combine: str, threads: int
) -> NDArray[Any]:
    """Partial products of the parts of K, added in the outer format."""

    def partial(k: Any) -> NDArray[Any]:
        return round_to(accumulate(inner, problem.part(k), threads), outer).astype(np.float64)

    def add(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
        return round_to(left + right, outer)

    with np.errstate(all="ignore"):
        sums = _in_halves([partial(k) for k in parts], add) if combine == "halves" else map(partial, parts)
        if problem.c is None:
            total = np.zeros(problem.shape)
        else:
            _require_addend(inner, problem, outer)
            total = problem.c.astype(np.float64)
        for part in sums:
            total = add(total, part)
    return total.astype(np.float32)


def _in_halves(parts: list[Any], add: Callable[[Any, Any], Any]) -> list[Any]:
    """The partial sums in the order that "halves" adds them."""
    if len(parts) < 2:
        return parts
    half = (len(parts) + 1) // 2
    paired = [add(parts[i], parts[i + half]) if i + half < len(parts) - 1 else parts[i] for i in range(half)]
    return [parts[-1], *paired]


def _dealt(row: SplitK, length: int) -> list[Any]:
    """The indices of K that each worker adds, in order."""
    tiles = -(-length // row.tile)
    run = -(-tiles // row.splits)
    if row.layout == "contiguous":
        return [slice(i * run * row.tile, min((i + 1) * run * row.tile, length)) for i in range(row.splits)]
    owner = np.arange(length) // row.tile % row.splits
    return [np.flatnonzero(owner == i) for i in range(row.splits)]


def _format_of_row(row: Accumulator) -> FloatFormat:
    assert isinstance(row, Sequential | Pairwise | Kahan | Lanes)
    return FP32 if isinstance(row, Lanes) else row.format


def _require_addend(row: Accumulator, problem: Problem, fmt: FloatFormat) -> None:
    """The accumulator starts at the addend, so the addend must be one of its numbers."""
    if problem.c is None or problem.c_format == fmt:
        return
    rounded = round_to(problem.c, fmt)
    if not ((rounded == problem.c) | np.isnan(problem.c)).all():
        raise ValueError(
            f"c is {problem.c_format.name if problem.c_format else '?'} and holds values that {fmt.name}, where "
            f"{row.name} starts, does not have; round it first: c=mp.cast(c, mp.{fmt.name.upper()})"
        )


def _on_unit(row: TensorCore, problem: Problem, threads: int) -> NDArray[Any]:
    """A matrix unit on the formats at hand; float32 factors are cut to tf32 where the unit has no fp32."""
    a, b = (_for_unit(row, fmt) for fmt in problem.formats)
    scale, scale_block, scales = "", 0, None
    if problem.scales is not None:
        scale_a, scale_b = (np.asarray(x) for x in problem.scales)
        blocks = scale_a.shape[-1]
        length = problem.a.shape[-1]
        if not blocks or length % blocks or scale_b.shape[-2:] != (blocks, problem.b.shape[-1]):
            raise ValueError(
                f"scales of shapes {scale_a.shape} and {scale_b.shape} do not fit factors of {problem.a.shape} and "
                f"{problem.b.shape}: they must be (..., m, k / block) and (..., k / block, n)"
            )
        scale, scale_block = format_of(scale_a.dtype).name, length // blocks
        scales = (widened(scale_a), widened(scale_b))
    unit = row.row_for(a, b, scale, scale_block)
    _require_addend(row, problem, unit.result_format)
    if scales is not None:
        return _tiled_scaled(unit, (a, b), problem, scales)
    if TF32 in (a, b):
        problem = problem.part(slice(None)) if problem.c is None else _with_addend(problem)
        problem.a, problem.b = (_cut_to_tf32(x) for x in (problem.a, problem.b))
    return _tiled(problem, lambda x, y, c: run_unit(unit, (a, b), x, y, c), threads, np.float32)


def _with_addend(problem: Problem) -> Problem:
    part = problem.part(slice(None))
    part.c, part.c_format = problem.c, problem.c_format
    return part


def _for_unit(row: TensorCore, fmt: FloatFormat) -> FloatFormat:
    known = {name for unit in row.rows for name in unit.inputs}
    return TF32 if fmt == FP32 and "fp32" not in known and "tf32" in known else fmt


def _cut_to_tf32(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _tiled_scaled(
    unit: MatrixUnit, formats: tuple[FloatFormat, FloatFormat], problem: Problem, scales: tuple[Any, Any]
) -> NDArray[Any]:
    """Block-scaled products, one matrix at a time."""
    out = np.empty(problem.shape, np.float32)
    lead = problem.shape[:-2]
    operands = [np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (problem.a, problem.b, *scales)]
    for index in np.ndindex(lead):
        a, b, scale_a, scale_b = (x[index] for x in operands)
        c = None if problem.c is None else problem.c[index][np.newaxis]
        placed = (scale_a.T[:, np.newaxis, :, np.newaxis], scale_b[:, np.newaxis, np.newaxis, :])
        out[index] = run_unit(unit, formats, a[np.newaxis], b[np.newaxis], c, placed)[0]
    return out


def _chain_tile(
    row: Accumulator, problem: Problem, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None
) -> NDArray[Any]:
    bits = max(_significant_bits(fmt, x) for fmt, x in zip(problem.formats, (problem.a, problem.b), strict=True))
    left = np.ascontiguousarray(np.moveaxis(a, -1, 0))[..., np.newaxis]
    right = np.ascontiguousarray(np.moveaxis(b, -2, 0))[..., np.newaxis, :]
    return run_chain(row, Factors(left, right, bits), c)


def _significant_bits(fmt: FloatFormat, x: NDArray[np.float32]) -> int:
    """Significant bits of a format; of float32 arrays 12 if they hold no more, as tf32 and custom formats do."""
    if fmt != FP32:
        return fmt.mantissa_bits + 1
    return 24 if (x.view(np.uint32) & np.uint32(0xFFF)).any() else 12


def _exact_tile(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None) -> NDArray[Any]:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    wide_c = None if c is None else c.astype(np.float64)
    special = special_products(wide_a, wide_b, wide_c)
    if special is None:
        return digits_of_products(wide_a, wide_b, wide_c).to_odd()
    addend = None if wide_c is None else _finite(wide_c)
    return np.where(special == 0, digits_of_products(_finite(wide_a), _finite(wide_b), addend).to_odd(), special)


def _finite(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(x), x, 0.0)


def _tiled(
    problem: Problem, kernel: Callable[..., NDArray[Any]], threads: int, dtype: type[np.floating[Any]]
) -> NDArray[Any]:
    """Call ``kernel(a, b, c)`` on tiles (batch, m, k), (batch, k, n), (batch, m, n) of a flattened batch."""
    *lead, m, n = problem.shape
    out = np.empty(problem.shape, dtype)
    if out.size == 0:
        return out
    batch = int(np.prod(lead))
    length = problem.a.shape[-1]
    a = np.broadcast_to(problem.a, (*lead, m, length)).reshape(batch, m, length)
    b = np.broadcast_to(problem.b, (*lead, length, n)).reshape(batch, length, n)
    c = None if problem.c is None else problem.c.reshape(batch, m, n)
    flat = out.reshape(batch, m, n)

    def work(tile: tuple[slice, slice, slice]) -> None:
        g, i, j = tile
        addend = None if c is None else c[g, i, j]
        flat[g, i, j] = kernel(a[g, i], b[g, :, j], addend)

    tiles = _tiles(batch, m, n, _TILE * min(threads, 2))
    if threads == 1:
        for tile in tiles:
            work(tile)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, tiles))
    return out


def _tiles(batch: int, m: int, n: int, size: int) -> Iterator[tuple[slice, slice, slice]]:
    columns = min(n, max(_ROW, size // max(m, 1)))
    rows = min(m, max(1, size // columns))
    together = max(1, size // (rows * columns)) if rows == m and columns == n else 1
    for g in range(0, batch, together):
        for i in range(0, m, rows):
            for j in range(0, n, columns):
                yield slice(g, g + together), slice(i, i + rows), slice(j, j + columns)
