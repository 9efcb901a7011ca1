"""What elementwise operations share: codes of one dtype in, chunks through float32 or float64, codes out."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.bits import codes_of, format_of, native
from mp_reference.numerics.codec import decoder_for, encoder_for, refuse_nan
from mp_reference.numerics.odd import ODD
from mp_reference.numerics.rounding import check_rounding
from mp_reference.numerics.rounding_kernels import kernel_for
from mp_reference.numerics.workspace import CHUNK, borrowed
from mp_reference.spec.formats import BF16, FP16, FP32

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.numerics.rounding import Rounding
    from mp_reference.numerics.workspace import Workspace
    from mp_reference.spec.formats import FloatFormat

__all__ = ["chunks_of", "once", "operands_of"]

_UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt}


def operands_of(name: str, *arrays: ArrayLike) -> tuple[FloatFormat, list[NDArray[Any]]]:
    """Check that all operands store one format.

    Args:
        name: the operation, for the message.
        arrays: the operands, broadcastable.

    Returns:
        The format and the operands as arrays.

    Raises:
        TypeError: the dtypes differ, or store no named format.

    Source: this project's contract: no operand is converted silently.

    >>> operands_of("add", np.float16(1), np.float16(2))[0].name
    'fp16'
    """
    values = [native(array) for array in arrays]
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1:
        raise TypeError(
            f"{name} needs operands of one dtype, got {' and '.join(str(value.dtype) for value in values)}; widen the "
            "narrower with .astype, which is exact, or cast the wider with mp.cast"
        )
    if values[0].dtype == np.float64:
        raise TypeError(f"{name} computes in the formats of mp.FORMATS, got float64; cast it with mp.cast(x, mp.FP32)")
    return format_of(values[0].dtype), values


def once(name: str, rounding: Rounding, *arrays: ArrayLike) -> NDArray[Any]:
    """An operation rounded once: through float32 where that is innocuous, else through a carrier rounded to odd.

    That is float32 for formats of fp16's range and fewer, else float64. NumPy and ml_dtypes go through float32 too;
    where they are sooner, they do it.

    Args:
        name: a key of ``odd.ODD``.
        rounding: any of ``ROUNDINGS`` but ``stochastic``.
        arrays: the operands, of one dtype, broadcastable.

    Returns:
        The same dtype, the broadcast shape.

    Raises:
        TypeError: the dtypes differ or store no named format.
        ValueError: an unknown rounding, or a NaN result in a format that has none.

    Source: Figueroa, When is double rounding innocuous?, SIGNUM 30 (1995).

    >>> once("mul", "nearest-even", np.float16(3), np.float16(5))
    array(15., dtype=float16)
    """
    if rounding == "stochastic":
        raise ValueError(f"{name} has no random bits; compute in float32 and use mp.round_to(..., 'stochastic')")
    check_rounding(rounding)
    fmt, values = operands_of(name, *arrays)
    shape = np.broadcast_shapes(*(value.shape for value in values))
    in_library = fmt in (FP32, BF16) or (fmt == FP16 and math.prod(shape) < CHUNK)  # later, ours is sooner
    if in_library and rounding == "nearest-even" and name in _UFUNCS:
        with np.errstate(all="ignore"):
            return np.asarray(_UFUNCS[name](*values))
    out = np.empty(shape, fmt.dtype)
    if rounding == "nearest-even" and name in _UFUNCS and fmt.has_zero:  # else what vanishes is not the smallest
        _through_float32(partial(_into_first, _UFUNCS[name]), fmt, rounding, values, out)
        return out
    odd = partial(
        ODD[name], downward=rounding == "toward-negative", precision=fmt.mantissa_bits + 1, unit=fmt.min_subnormal,
        overwrite=True,
    )  # fmt: skip
    narrow = fmt.mantissa_bits <= FP16.mantissa_bits and fmt.exponent_bits <= FP16.exponent_bits
    run = _through_float32 if narrow else _through_float64
    run(odd, fmt, rounding, values, out)
    return out


def _into_first(ufunc: np.ufunc, *operands: NDArray[Any]) -> NDArray[Any]:
    """A ufunc that needs its first operand no more."""
    return np.asarray(ufunc(*operands, out=operands[0]))


def chunks_of(values: list[NDArray[Any]], out: NDArray[Any], size: int) -> Any:
    """Walk over operands and output together, as codes, in contiguous chunks.

    Args:
        values: operands, broadcastable to the shape of ``out``.
        out: the output.
        size: elements a chunk.

    Returns:
        A context manager that yields lists of one-dimensional code arrays, the output's last.

    Source: ``np.nditer``, which copies only what is not contiguous.

    >>> with chunks_of([np.zeros(3, np.float16)], np.ones(3, np.float16), 2) as walk:
    ...     [[codes.tolist() for codes in chunk] for chunk in walk]
    [[[0, 0], [15360, 15360]], [[0], [15360]]]
    """
    operands = [codes_of(value) for value in (*values, out)]
    kinds: Any = [["readonly"]] * len(values) + [["readwrite"]]
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    contiguous: Any = [["contig", *kind] for kind in kinds]
    return np.nditer(operands, flags, contiguous, order="C", buffersize=size)


def _through_float32(
    compute: Any, fmt: FloatFormat, rounding: Rounding, values: list[NDArray[Any]], out: NDArray[Any]
) -> None:
    """One float32 operation: its own rounding does not show, be it for its 24 bits or because it is to odd."""
    size = min(CHUNK, max(out.size, 1))
    carriers = [np.empty(size, np.float32) for _ in values]
    read, write = decoder_for(fmt), encoder_for(fmt, rounding)
    assert read is not None
    assert write is not None
    with chunks_of(values, out, size) as walk, np.errstate(all="ignore"), borrowed(np.float32) as work:
        for *operands, target in walk:
            here = [carrier[: target.size] for carrier in carriers]
            for codes, carrier in zip(operands, here, strict=True):
                read(codes, carrier)
            result = compute(*here)
            refuse_nan(result, fmt)
            write(result, target, work.first(target.size))


def _through_float64(
    compute: Any, fmt: FloatFormat, rounding: Rounding, values: list[NDArray[Any]], out: NDArray[Any]
) -> None:
    """The operation in float64 to odd, then the one rounding; every format so wide has NaN."""
    size = min(CHUNK // 2, max(out.size, 1))
    carriers = [np.empty(size) for _ in values]
    with (
        chunks_of(values, out, size) as walk,
        np.errstate(all="ignore"),
        borrowed(np.float32) as work,
        borrowed(np.float64) as wide_work,
    ):
        read, finish = _widener(fmt, size), _finisher(fmt, rounding, size, work, wide_work)
        for *operands, target in walk:
            here = carriers if target.size == size else [wide[: target.size] for wide in carriers]
            for codes, wide in zip(operands, here, strict=True):
                read(codes, wide)
            finish(compute(*here), target)


def _widener(fmt: FloatFormat, size: int) -> Any:
    """What makes float64 numbers of ``size`` codes or fewer."""
    if fmt == FP32:
        return lambda codes, wide: np.copyto(wide, codes.view(np.float32))
    read, carrier = decoder_for(fmt), np.empty(size, np.float32)
    assert read is not None

    def by_float32(codes: NDArray[Any], wide: NDArray[Any]) -> None:
        narrow = carrier[: codes.size]
        read(codes, narrow)
        np.copyto(wide, narrow)

    return by_float32


def _finisher(fmt: FloatFormat, rounding: Rounding, size: int, work: Workspace, wide_work: Workspace) -> Any:
    """What rounds float64 results into codes: by way of float32, to odd where it matters; for fp32 itself at once."""
    if fmt == FP32:
        round_wide = None if rounding == "nearest-even" else kernel_for(fmt, rounding, "ieee", "", "float64")

        def at_once(odd: NDArray[Any], target: NDArray[Any]) -> None:
            if round_wide is not None:
                round_wide(odd, odd, wide_work, None, 0)
            np.copyto(target.view(np.float32), odd, casting="same_kind")  # to nearest even on every machine

        return at_once
    write, carrier = encoder_for(fmt, rounding), np.empty(size, np.float32)
    assert write is not None
    low = np.uint32((1 << (22 - fmt.mantissa_bits)) - 1)  # zero in the numbers of the format and their midpoints

    def by_float32(odd: NDArray[Any], target: NDArray[Any]) -> None:
        narrow = carrier[: odd.size]
        np.copyto(narrow, odd, casting="same_kind")
        _step_to_odd(narrow, odd, low)
        write(narrow, target, work.first(odd.size))

    return by_float32


def _step_to_odd(narrow: NDArray[np.float32], wide: NDArray[np.float64], low: np.uint32) -> None:
    """Where float32 rounded to a number with no low bits, move it one unit back towards the float64 one."""
    short = np.bitwise_and(narrow.view(np.uint32), low) == 0
    if short.any():
        short &= narrow != wide
        if short.any():
            exact, rounded = wide[short], narrow[short]
            step = np.where(np.isnan(exact), 0, np.where(np.abs(exact) > np.abs(rounded), 1, -1)).astype(np.int32)
            narrow[short] = (rounded.view(np.int32) + step).view(np.float32)  # from infinity, to the largest
