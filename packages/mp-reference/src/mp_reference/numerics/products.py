"""The operands of a product: their formats and float32 values, the result's format, and how K is dealt out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.bits import codes_of, format_of, native
from mp_reference.numerics.codec import decode, decoder_for
from mp_reference.numerics.workspace import CHUNK
from mp_reference.spec.accumulators import (
    Accumulator,
    Blocked,
    Kahan,
    Pairwise,
    Sequential,
    SplitK,
)  # fmt: skip
from mp_reference.spec.formats import BF16, FP32, TF32, FloatFormat, require_format
from mp_reference.spec.tensor_cores import TensorCore

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Problem",
    "cut",
    "format_on",
    "own_format",
    "parts_of",
    "prepared",
    "result_format",
    "widen_into",
    "widened",
]


class Problem:
    """The operands of one product: as stored, their formats, and the axes that 1-d operands lack."""

    def __init__(
        self, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any] | None = None,
        scales: tuple[ArrayLike, ArrayLike] | None = None,
    ) -> None:  # fmt: skip
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
        try:
            alike = a.shape[:-2] == b.shape[:-2]
            batch = a.shape[:-2] if alike else np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            raise ValueError(
                f"matmul of {a.shape} by {b.shape}: the leading axes {a.shape[:-2]} and {b.shape[:-2]} do not "
                "broadcast; give one of them length 1"
            ) from None
        self.formats = (format_of(a.dtype), format_of(b.dtype))
        self.left, self.right = native(a), native(b)
        self.shape = (*batch, a.shape[-2], b.shape[-1])
        self.c_format = None if c is None else format_of(c.dtype)
        self.c = None if c is None else self._placed(widened(c))
        self.scales = scales

    @property
    def a(self) -> NDArray[np.float32]:
        """The first factor in float32."""
        return widened(self.left)

    @property
    def b(self) -> NDArray[np.float32]:
        """The second factor in float32."""
        return widened(self.right)

    @property
    def length(self) -> int:
        """Number of products an output, K."""
        return int(self.left.shape[-1])

    def matrices(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32] | None]:
        """Factors as stored and addend, their leading axes broadcast and flattened to one."""
        *lead, m, n = self.shape
        batch, k = math.prod(lead), self.length
        a, b = self.left, self.right
        if lead:
            a, b = np.broadcast_to(a, (*lead, m, k)), np.broadcast_to(b, (*lead, k, n))
        a, b = a.reshape(batch, m, k), b.reshape(batch, k, n)
        return a, b, None if self.c is None else self.c.reshape(batch, m, n)

    def _placed(self, c: NDArray[np.float32]) -> NDArray[np.float32]:
        """The addend in the shape of the result."""
        visible = self.shape[:-2]
        visible += () if self.vectors[0] else self.shape[-2:-1]
        visible += () if self.vectors[1] else self.shape[-1:]
        try:
            return np.broadcast_to(c, visible).reshape(self.shape)
        except ValueError:
            raise ValueError(
                f"c has shape {c.shape}, which does not broadcast to the result's {visible}; reshape it"
            ) from None

    def shaped(self, out: NDArray[Any]) -> NDArray[Any]:
        """The result without the axes that the operands lacked."""
        if self.vectors[0]:
            out = out[..., 0, :]
        return out[..., 0] if self.vectors[1] else out

    def replaced(self, **attributes: Any) -> Problem:
        """A copy with some attributes replaced."""
        copy = object.__new__(Problem)
        copy.__dict__.update(self.__dict__ | attributes)
        return copy

    def part(self, k: Any) -> Problem:
        """The product over some of K, without the addend."""
        return self.replaced(left=self.left[..., k], right=self.right[..., k, :], c=None, c_format=None)


def widened(x: NDArray[Any]) -> NDArray[np.float32]:
    """Values of a named format's dtype as float32, exactly.

    Args:
        x: of a dtype that stores a named format.

    Returns:
        float32 in the machine's byte order, the same shape; ``x`` itself if it is that already.

    Raises:
        TypeError: the dtype stores no named format.

    Source: every named format is a subset of fp32.

    >>> widened(np.array([1.5], np.float16))
    array([1.5], dtype=float32)
    """
    x = native(x)
    if x.dtype == np.float32:
        return x
    fmt = format_of(x.dtype)
    if fmt == BF16:  # ml_dtypes has the fastest way
        return x.astype(np.float32)
    return decode(codes_of(x), fmt)


def widen_into(x: NDArray[Any], out: NDArray[np.float32]) -> None:
    """The same into given memory, with none besides.

    Args:
        x: (batch, rows, columns), of a dtype that stores a named format.
        out: of that shape, contiguous; written.

    Source: as ``widened``.

    >>> out = np.empty((1, 1, 2), np.float32)
    >>> widen_into(np.float16([[[1.5, -2.0]]]), out)
    >>> out
    array([[[ 1.5, -2. ]]], dtype=float32)
    """
    fmt = format_of(x.dtype)
    if fmt in (BF16, FP32):
        np.copyto(out, x)
        return
    read, codes = decoder_for(fmt), codes_of(x)
    assert read is not None
    whole = codes.flags.c_contiguous
    rows = 2 * CHUNK if whole else max(1, 2 * CHUNK // max(codes.shape[2], 1))
    flat: Any = ([codes.reshape(-1)], [out.reshape(-1)]) if whole else (codes, out)
    for matrix, target in zip(*flat, strict=True):
        for i in range(0, len(matrix), rows):
            read(matrix[i : i + rows], target[i : i + rows])


def result_format(row: Accumulator, problem: Problem, out_format: FloatFormat | None) -> FloatFormat:
    """The format of a product's result.

    Args:
        row: the accumulator.
        problem: the operands.
        out_format: what the caller asked for, if anything.

    Returns:
        The format, as ``matmul`` documents.

    Raises:
        TypeError: the factors have two formats of 16 bits or more and nothing else decides, or ``out_format`` is none.

    Source: this module.

    >>> from mp_reference.spec.accumulators import FP32_FAST
    >>> half = np.ones((2, 2), np.float16)
    >>> result_format(FP32_FAST, Problem(half, half), None).name
    'fp16'
    """
    if out_format is not None:
        return require_format(out_format, "out_format")
    if isinstance(row, TensorCore):
        return row.result_format
    if problem.c_format is not None:
        return problem.c_format
    wide = [fmt for fmt in problem.formats if fmt.bits >= 16]
    if len(wide) == 2 and wide[0] != wide[1]:
        raise TypeError(
            f"factors are {wide[0].name} and {wide[1].name}, and nothing says what the result is; give out_format="
        )
    return wide[0] if len(wide) == 2 else FP32


def own_format(row: Accumulator) -> FloatFormat:
    """The format of an accumulator's own numbers, in which it starts and ends.

    Args:
        row: the accumulator; "exact" has none, and answers fp32.

    Returns:
        The format.

    Source: the row.

    >>> from mp_reference import BF16, sequential
    >>> own_format(sequential(BF16)).name
    'bf16'
    """
    if isinstance(row, Sequential | Pairwise | Kahan):
        return row.format
    if isinstance(row, Blocked | SplitK):
        return row.outer
    return row.result_format if isinstance(row, TensorCore) else FP32


def parts_of(row: Blocked | SplitK, length: int) -> list[Any]:
    """The indices of K that each partial sum adds, in order.

    Args:
        row: the accumulator.
        length: K.

    Returns:
        Slices or index arrays; workers without terms have empty ones.

    Source: the row's ``source``.

    >>> from mp_reference import split_k
    >>> parts_of(split_k(2), 5)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    if isinstance(row, Blocked):
        return [slice(i, i + row.block) for i in range(0, length, row.block)]
    tiles = -(-length // row.tile)
    run = -(-tiles // row.splits) * row.tile
    if row.layout == "contiguous":
        return [slice(min(i * run, length), min((i + 1) * run, length)) for i in range(row.splits)]
    owner = np.arange(length) // row.tile % row.splits
    return [np.flatnonzero(owner == i) for i in range(row.splits)]


def format_on(row: TensorCore, fmt: FloatFormat) -> FloatFormat:
    """What a unit takes numbers of a format for: fp32 for tf32 where it multiplies no fp32.

    Args:
        row: the unit.
        fmt: the format of a factor's dtype.

    Returns:
        The format that the unit sees.

    Source: NVIDIA A100 Tensor Core GPU Architecture, v1.0 (2020).

    >>> from mp_reference import tensor_core
    >>> format_on(tensor_core("ampere"), FP32).name
    'tf32'
    """
    known = {name for unit in row.rows for name in unit.inputs}
    return TF32 if fmt == FP32 and "fp32" not in known and "tf32" in known else fmt


def prepared(row: TensorCore, problem: Problem) -> Problem:
    """The operands as a unit reads them: factors it takes for tf32 lose their 13 low bits.

    Args:
        row: the unit.
        problem: the operands.

    Returns:
        The operands, with the formats that the unit sees.

    Source: NVIDIA A100 Tensor Core GPU Architecture, v1.0 (2020); MMA-Sim, arXiv 2511.10909.

    >>> from mp_reference import tensor_core
    >>> x = np.array([[1 + 2.0**-11]], np.float32)
    >>> prepared(tensor_core("ampere"), Problem(x, x)).a
    array([[1.]], dtype=float32)
    """
    formats = tuple(format_on(row, fmt) for fmt in problem.formats)
    values = [cut(x, fmt) for x, fmt in zip((problem.left, problem.right), formats, strict=True)]
    return problem.replaced(formats=formats, left=values[0], right=values[1])


def cut(x: NDArray[Any], fmt: FloatFormat) -> NDArray[Any]:
    """float32 as a unit reads it for tf32, without its 13 low bits; any other format as it is.

    Args:
        x: a factor.
        fmt: the format that the unit sees.

    Returns:
        The factor, a copy where it was cut.

    Source: NVIDIA A100 Tensor Core GPU Architecture, v1.0 (2020).

    >>> cut(np.float32([1 + 2.0**-11]), TF32)
    array([1.], dtype=float32)
    """
    if fmt != TF32:
        return x
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
