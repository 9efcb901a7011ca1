"""mp_reference as a subject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import mp_reference as mp
from mp_conformance.implementations import NotOfferedError, reference_training
from mp_reference.numerics import elementary, ordering
from mp_reference.numerics.arithmetic import rsqrt
from mp_reference.numerics.exceptions import ExceptionFlag, exception_flags
from mp_reference.numerics.rounding import ROUNDINGS
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mp_reference.spec.formats import FloatFormat

__all__ = ["ReferenceSubject"]

Array = np.ndarray[Any, np.dtype[Any]]

_ARITHMETIC = ("add", "sub", "mul", "div", "sqrt", "fma")
_ORDERING = ("minimum", "maximum", "less", "less_equal", "equal")
_FLAGS = {
    "INVALID": "invalid", "DIVIDE_BY_ZERO": "infinite", "OVERFLOW": "overflow", "UNDERFLOW": "underflow",
    "INEXACT": "inexact",
}  # fmt: skip


class ReferenceSubject:
    """The public functions of ``mp_reference``, on NumPy arrays, every rounding and overflow rule."""

    name = "reference"
    device = "cpu"

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Arithmetic in every format with a dtype of its own, and all that ``reference_training`` lists."""
        if options.get("rounding", "nearest-even") not in ROUNDINGS:
            return False
        if operation in _ARITHMETIC:
            return options.get("format") not in ("tf32", "float8_e8m0fnu")
        if operation == "elementary":
            return options["function"] == "rsqrt" or hasattr(elementary, options["function"])
        others = ("cast", "facts", "sum", "matmul", "emulated_matmul", "stochastic", "flags", *_ORDERING)
        return operation in others or operation in reference_training.OPERATIONS

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it."""
        if operation in reference_training.OPERATIONS:
            return reference_training.OPERATIONS[operation](*operands, **options)
        method = getattr(self, f"_{operation}", None)
        if operation in _ARITHMETIC:
            options.pop("format", None)
            return np.asarray(getattr(mp, operation)(*operands, **options))
        if operation in _ORDERING:
            return _ordered(operation, *operands)
        if method is None:
            raise NotOfferedError(f"mp_reference has no {operation}")
        return method(*operands, **options)

    def _facts(self, format: str) -> dict[str, float]:  # noqa: A002  # the operation's own option
        row = FORMATS[format]
        names = ("bits", "max", "min_normal", "min_subnormal", "epsilon")
        return {name: float(getattr(row, name)) for name in names}

    def _cast(self, x: Array, to: str, rounding: str = "nearest-even", overflow: str = "ieee",
              subnormals: bool = True, source: str = "") -> Array:  # fmt: skip
        del source
        fmt = FORMATS[to]
        if rounding == "nearest-even" and overflow == "ieee" and subnormals:
            return np.asarray(mp.cast(x, fmt))
        rules: Any = {"rounding": rounding, "overflow": overflow, "subnormals": subnormals}
        kept = mp.round_to(x, fmt, **rules)
        return np.asarray(mp.cast(kept, fmt))

    def _elementary(self, x: Array, function: str, layout: str = "contiguous") -> Array:
        del layout
        return np.asarray(rsqrt(x) if function == "rsqrt" else getattr(elementary, function)(x))

    def _sum(self, x: Array) -> Array:
        return np.asarray(mp.sum(x))

    def _matmul(self, a: Array, b: Array) -> Array:
        return np.asarray(mp.matmul(a, b))

    def _emulated_matmul(self, a: Array, b: Array, accumulator: Any) -> Array:
        return np.asarray(mp.matmul(a, b, accumulator=accumulator))

    def _flags(self, *operands: Array, of: str, rounding: Any = "nearest-even") -> list[frozenset[str]]:
        raised = exception_flags(of, *operands, rounding=rounding)
        return [frozenset(text for name, text in _FLAGS.items() if ExceptionFlag[name] & int(bits)) for bits in raised]

    def _stochastic(self, x: Array, to: str, seed: int) -> Array:
        return stochastic(x, FORMATS[to], seed)


def stochastic(x: Array, fmt: FloatFormat, seed: int) -> Array:
    """``x`` rounded stochastically with 32 random bits an element from a seeded generator."""
    bits = np.random.Generator(np.random.PCG64(seed)).integers(0, 2**32, x.shape, np.uint32)
    return np.asarray(mp.cast(mp.round_to(x, fmt, rounding="stochastic", random_bits=bits), fmt))


def _ordered(operation: str, a: Array, b: Array) -> Array:
    if operation in ("minimum", "maximum"):
        return np.asarray(getattr(ordering, operation)(a, b))
    order = ordering.compare(a, b)
    wanted = {"less": (-1,), "less_equal": (-1, 0), "equal": (0,)}[operation]
    return np.isin(order, wanted)
