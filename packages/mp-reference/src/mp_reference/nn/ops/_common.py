"""What the operations share: checking that inputs fit, single roundings, products under the tape's accumulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mp_reference.nn.tensor import Tape, Tensor
from mp_reference.numerics.matmul import accumulate, matmul
from mp_reference.numerics.odd import ODD
from mp_reference.numerics.products import Problem
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.accumulators import Exact, Fast
from mp_reference.spec.formats import FP32, TF32, FloatFormat
from mp_reference.spec.tensor_cores import TensorCore

__all__ = ["Array", "Number", "Tape", "Tensor", "basic", "operands", "product", "require"]

Array = NDArray[Any]
Number = float | int

_UFUNCS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt,
}  # fmt: skip


def require(holds: bool, op: str, problem: str, way_out: str) -> None:
    """Refuse inputs that do not fit, with shapes and names."""
    if not holds:
        raise ValueError(f"{op}: {problem}; {way_out}")


def operands(op: str, *values: Tensor | Number) -> tuple[Tape, tuple[Tensor, ...]]:
    """The common tape, and numbers as tensors in the format of the first tensor (fp32 values, not rounded to it)."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        raise TypeError(f"{op} needs a Tensor among its inputs, got {', '.join(type(v).__name__ for v in values)}; "
                        "put arrays on a tape with tape.leaf")  # fmt: skip
    first = tensors[0]
    if any(one.tape is not first.tape for one in tensors):
        raise ValueError(f"{op}: the inputs lie on different tapes; make all of them with one tape.leaf")
    return first.tape, tuple(
        value if isinstance(value, Tensor)
        else Tensor(first.tape, np.asarray(value, first.carrier.dtype), first.format, False)
        for value in values
    )  # fmt: skip


def basic(tape: Tape, name: str, fmt: FloatFormat | None, *carriers: Array) -> Array:
    """One of + - * / sqrt so that the rounding that follows is the only one that shows.

    Through fp32 where a second rounding to nearest is innocuous (up to 11 significant bits, and fp32 itself), else
    through float64 rounded to odd.

    Source: Figueroa, When is double rounding innocuous?, SIGNUM 30 (1995).
    """
    rounding = tape.arithmetic.rounding
    with np.errstate(all="ignore"):
        if fmt is None or (rounding == "nearest-even" and (fmt.mantissa_bits <= 10 or fmt == FP32)):
            return np.asarray(_UFUNCS[name](*carriers))
        wide = np.broadcast_arrays(*(carrier.astype(np.float64) for carrier in carriers))
        odd: Array = ODD[name](*wide, downward=rounding == "toward-negative")
        return odd


def product(
    tape: Tape,
    a: Array,
    a_format: FloatFormat | None,
    b: Array,
    b_format: FloatFormat | None,
    addend: Array | None = None,
) -> Array:
    """A matrix product under the tape's accumulator plus an addend, not yet rounded to a format.

    The accumulator starts at zero, its result is an fp32 number, and the addend is added to it in fp32, as a device's
    epilogue does. "exact" takes the addend into its sum and gives float64 rounded to odd, so that the one rounding to
    follow is the only one. A tensor core multiplies operands of at most 16 bits; fp32 operands go through the machine's
    own product, as they do on a device that is not told to use TF32. float64 stays float64.
    """
    row = tape.arithmetic.accumulator
    if tape.arithmetic.tf32:
        a, b = (round_to(x, TF32) if fmt == FP32 else x for x, fmt in ((a, a_format), (b, b_format)))
    with np.errstate(all="ignore"):
        if isinstance(row, Exact) and a_format is not None and b_format is not None:
            problem = Problem(a, b, addend)
            return problem.shaped(accumulate(row, problem))
        if isinstance(row, Fast) or a_format is None or b_format is None or _beyond(row, a_format, b_format):
            found = np.asarray(np.matmul(a, b))
        else:
            narrow = (a.astype(a_format.dtype, copy=False), b.astype(b_format.dtype, copy=False))
            found = matmul(*narrow, accumulator=row, out_format=FP32)
        return found if addend is None else np.asarray(found + addend)


def _beyond(row: object, *formats: FloatFormat) -> bool:
    """Whether a unit does not multiply these operands."""
    return isinstance(row, TensorCore) and FP32 in formats
