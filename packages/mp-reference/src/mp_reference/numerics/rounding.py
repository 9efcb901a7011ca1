"""Rounding into a format: the only place that rounds.

``round_to`` keeps the carrier (float32 or float64) and makes every element representable; the work is done in chunks
by the kernels of ``rounding_kernels``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from mp_reference.numerics.arguments import RandomBits, carried, output_for, random_bits_for, require_threads
from mp_reference.numerics.crew import relay, share
from mp_reference.numerics.rounding_kernels import kernel_for
from mp_reference.numerics.workspace import BUFFER_BYTES, CHUNK, borrowed
from mp_reference.spec.formats import require_format

if TYPE_CHECKING:
    from collections.abc import Iterable
    from fractions import Fraction

    from numpy.typing import ArrayLike, NDArray

    from mp_reference.numerics.rounding_kernels import Kernel
    from mp_reference.spec.formats import FloatFormat

__all__ = ["OVERFLOWS", "ROUNDINGS", "Overflow", "Rounding", "Subnormals", "check_rounding", "round_to"]

Rounding = Literal[
    "nearest-even", "nearest-away", "toward-zero", "toward-positive", "toward-negative", "to-odd", "stochastic"
]
Overflow = Literal["ieee", "saturate"]
Subnormals = bool | Literal["flush-before", "flush-after"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)

_WORTH_SHARING = 2**23
_SHARED = 2**20  # elements of a part: what a cache misses costs less than waiting for the interpreter
_RELAYED = 24  # chunks of a part
_CARRIERS = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"}  # ``name`` takes two microseconds


def round_to(
    x: ArrayLike | Fraction,
    fmt: FloatFormat,
    rounding: Rounding = "nearest-even",
    overflow: Overflow = "ieee",
    subnormals: Subnormals = True,
    random_bits: RandomBits | None = None,
    *,
    random_width: int | None = None,
    out: NDArray[Any] | None = None,
    threads: int = 1,
) -> NDArray[Any]:
    """Round each value once to one that ``fmt`` represents, and keep the carrier.

    Args:
        x: float32, float64, integers of up to 64 bits, float16 or an ml_dtypes dtype (widened exactly), or ``Fraction``
            (one, or an object array of them and of Python's numbers); any shape, strides and byte order. NaN,
            infinities and signed zeros are legal.
        fmt: the target format.
        rounding: one of ``ROUNDINGS``. ``stochastic`` rounds the magnitude up where the discarded fraction f of an ulp
            and the random bits R, k of them, satisfy ``f + (R + 1/2) / 2**k >= 1``: the chance is f to k bits.
        overflow: ``ieee`` gives infinity (NaN where ``fmt`` has none, the largest number where it has neither) or the
            largest number, as the direction asks; ``saturate`` gives the largest number, also for infinities.
        subnormals: ``True`` keeps them; ``False`` or ``flush-after`` makes results below ``fmt.min_normal`` zero;
            ``flush-before`` makes values below it zero even where rounding would have brought them up to it.
        random_bits: for ``stochastic``: unsigned integers that broadcast against ``x``, or a ``Generator``.
        random_width: how many low bits of ``random_bits`` count; unless given, all of the dtype's, 23 of a generator's.
        out: where to write; may be ``x`` itself.
        threads: how many threads share the work of a large contiguous array; random bits of a generator are drawn by
            one, so that they do not depend on it.

    Returns:
        The shape of ``x``: float32 for float32 and narrower floats, float64 for float64, integers and ``Fraction``.
        Signs of zeros are kept (``fnuz`` formats have only +0); NaN stays NaN in every format.

    Raises:
        TypeError: a dtype that cannot be rounded once, no format, or random bits that are not unsigned integers.
        ValueError: an unknown name, random bits missing or given without need, or an ``out`` that does not fit.

    Source: IEEE 754-2019, 4.3 and 7.4; overflow of 8-bit formats as in ``fmt.source``.

    >>> from mp_reference import BF16, E4M3FN
    >>> round_to(np.float64(1 + 2**-8 + 2**-40), BF16)  # through float32 it would be 1.0
    array(1.0078125)
    >>> round_to(np.array([464.0, 465.0]), E4M3FN, overflow="saturate")
    array([448., 448.])
    """
    check_rounding(rounding, overflow, subnormals)
    require_threads(threads)
    values = carried(x)
    bits, width = random_bits_for(random_bits, random_width, rounding, values.shape)
    target = output_for(values, out)
    kernel = kernel_for(require_format(fmt), rounding, overflow, flush_of(subnormals), _CARRIERS[target.dtype])
    if _alike(values, target, bits) and (out is None or not _overlap(values, target, bits)):
        _run_flat(kernel, values, target, bits, width, threads)
    else:
        _run_strided(kernel, values, target, bits, width)
    return target


def check_rounding(rounding: str, overflow: str = "ieee", subnormals: object = True) -> None:
    """Refuse unknown names, with the list of known ones.

    Args:
        rounding: must be in ``ROUNDINGS``.
        overflow: must be in ``OVERFLOWS``.
        subnormals: must be a bool, ``flush-before`` or ``flush-after``.

    Raises:
        ValueError: one of them is unknown.

    Source: the names are this project's own.

    >>> check_rounding("up")
    Traceback (most recent call last):
    ...
    ValueError: rounding='up' must be one of 'nearest-even', 'nearest-away', 'toward-zero', 'toward-positive',
    'toward-negative', 'to-odd', 'stochastic'
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} must be one of {', '.join(map(repr, ROUNDINGS))}")
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow={overflow!r} must be one of {', '.join(map(repr, OVERFLOWS))}")
    if subnormals not in (True, False, "flush-before", "flush-after"):
        raise ValueError(f"subnormals={subnormals!r} must be True, False, 'flush-before' or 'flush-after'")


def flush_of(subnormals: Subnormals) -> Literal["", "before", "after"]:
    """The kernels' word for what happens to subnormals.

    Args:
        subnormals: the public choice.

    Returns:
        Nothing for keeping them, else when they are flushed.

    Source: this module.

    >>> flush_of(False)
    'after'
    """
    if isinstance(subnormals, str):
        return "before" if subnormals == "flush-before" else "after"
    return "" if subnormals else "after"


def _alike(x: NDArray[Any], out: NDArray[Any], bits: NDArray[Any] | np.random.Generator | None) -> bool:
    """Whether the arrays are walked over alike from end to end."""
    if isinstance(bits, np.ndarray) and not (bits.flags.c_contiguous and bits.shape == x.shape):
        return False
    return x.dtype == out.dtype and x.flags.c_contiguous and out.flags.c_contiguous


def _overlap(x: NDArray[Any], out: NDArray[Any], bits: NDArray[Any] | np.random.Generator | None) -> bool:
    """Whether what is written may be read again."""
    if isinstance(bits, np.ndarray) and np.may_share_memory(out, bits):
        return True
    return x is not out and np.may_share_memory(x, out)


def _run_flat(
    kernel: Kernel, x: NDArray[Any], out: NDArray[Any], bits: NDArray[Any] | np.random.Generator | None, width: int,
    threads: int,
) -> None:  # fmt: skip
    """Chunk by chunk, by several threads where that pays; they cannot share a generator."""
    in_place = x is out
    if x.ndim != 1:
        out = out.reshape(-1)
        x = out if in_place else x.reshape(-1)
        bits = bits.reshape(-1) if isinstance(bits, np.ndarray) else bits
    several = threads > 1 and x.size >= _WORTH_SHARING and not isinstance(bits, np.random.Generator)
    chunk = BUFFER_BYTES // out.itemsize
    if several and kernel.long_calls:
        share(range(0, x.size, _SHARED), partial(_run_chunks, kernel, x, out, bits, width, _SHARED), threads)
    elif several and not in_place:
        _run_relayed(kernel, x, out, bits, width, chunk, threads)
    else:
        _run_chunks(kernel, x, out, bits, width, chunk, range(0, x.size, chunk))


def _run_relayed(
    kernel: Kernel, x: NDArray[Any], out: NDArray[Any], bits: NDArray[Any] | np.random.Generator | None, width: int,
    chunk: int, threads: int,
) -> None:  # fmt: skip
    """Chunk by chunk on this thread, in the result, while helpers copy there what comes next."""
    length = _RELAYED * chunk

    def copy(start: int) -> None:
        np.copyto(out[start : start + length], x[start : start + length])

    def finish(start: int) -> None:
        stop = min(start + length, out.size)
        _run_chunks(kernel, out, out, bits, width, chunk, range(start, stop, chunk))

    relay(range(0, out.size, length), copy, finish, threads)


@np.errstate(all="ignore")
def _run_chunks(
    kernel: Kernel, x: NDArray[Any], out: NDArray[Any], bits: NDArray[Any] | np.random.Generator | None, width: int,
    chunk: int, starts: Iterable[int],
) -> None:  # fmt: skip
    """The chunks that start where ``starts`` says."""
    copies = kernel.in_place and x is not out and x.size > chunk
    with borrowed(out.dtype, chunk) as work:
        for start in starts:
            here = slice(start, start + chunk)
            part, target = x[here], out[here]
            if copies:
                np.copyto(target, part)
                part = target
            random = bits[here] if isinstance(bits, np.ndarray) else _drawn(bits, part.size)
            kernel(part, target, work, random, width)


def _run_strided(
    kernel: Kernel, x: NDArray[Any], out: NDArray[Any], bits: NDArray[Any] | np.random.Generator | None, width: int
) -> None:
    """The same whatever the strides and dtypes, by way of buffers."""
    operands, dtypes = [x, out], [out.dtype, out.dtype]
    kinds: Any = [["readonly", "overlap_assume_elementwise"], ["writeonly", "overlap_assume_elementwise"]]
    if isinstance(bits, np.ndarray):
        operands.append(np.broadcast_to(bits, x.shape))
        kinds.append(["readonly"])
        dtypes.append(bits.dtype)
    flags: Any = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    walk = np.nditer(operands, flags, kinds, dtypes, order="K", casting="same_kind", buffersize=CHUNK)
    with walk, np.errstate(all="ignore"), borrowed(out.dtype) as work:
        for chunks in walk:
            part, target, *drawn = chunks
            kernel(part, target, work, drawn[0] if drawn else _drawn(bits, part.size), width)


def _drawn(bits: NDArray[Any] | np.random.Generator | None, size: int) -> NDArray[np.uint32] | None:
    """Bits from a generator, if that is what there is."""
    return np.frombuffer(bits.bytes(4 * size), np.uint32) if isinstance(bits, np.random.Generator) else None
