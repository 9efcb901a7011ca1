"""Berkeley SoftFloat as a subject: an independent third opinion, with exception flags, one operation at a time.

Needs the package softfloatpy (extra ``softfloat``). It computes fp16 and fp32, and casts to bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import softfloatpy as sf

from mp_conformance.implementations import NotOfferedError
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["SoftFloatSubject"]

Array = np.ndarray[Any, np.dtype[Any]]

_ROUNDINGS = {
    "nearest-even": sf.RoundingMode.NEAR_EVEN,
    "nearest-away": sf.RoundingMode.NEAR_MAX_MAG,
    "toward-zero": sf.RoundingMode.MIN_MAG,
    "toward-positive": sf.RoundingMode.MAX,
    "toward-negative": sf.RoundingMode.MIN,
}
_TYPES = {"fp16": (sf.Float16, "f16", 2), "fp32": (sf.Float32, "f32", 4), "bf16": (sf.BFloat16, "bf16", 2)}
_ARITHMETIC = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "sqrt": "sqrt", "fma": "mul_add"}
_COMPARE = {"less": "lt_quiet", "less_equal": "le_quiet", "equal": "eq"}
_BY_DTYPE = {FORMATS[name].dtype: name for name in _TYPES}
_FLAGS = (
    ("inexact", sf.ExceptionFlag.INEXACT), ("underflow", sf.ExceptionFlag.UNDERFLOW),
    ("overflow", sf.ExceptionFlag.OVERFLOW), ("infinite", sf.ExceptionFlag.INFINITE),
    ("invalid", sf.ExceptionFlag.INVALID),
)  # fmt: skip


class SoftFloatSubject:
    """One scalar call an element, in the rounding mode asked for; the mode is set for the call and put back."""

    name = "softfloat"
    device = "cpu"

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """fp16 and fp32 arithmetic and comparison in every mode but stochastic; casts from float32 and float64."""
        if options.get("rounding", "nearest-even") not in _ROUNDINGS or not options.get("subnormals", True):
            return False
        if operation == "cast":
            to, source = options["to"], options.get("source", "float32")
            known = to in ("fp16", "bf16") if source == "float32" else to == "fp16" and source == "float64"
            return known and options.get("overflow", "ieee") == "ieee"
        return operation in (*_ARITHMETIC, *_COMPARE, "flags") and options.get("format") in ("fp16", "fp32")

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it; ``flags`` takes the name of the arithmetic operation and gives the flags that it raised."""
        before = sf.get_rounding_mode()
        sf.set_rounding_mode(_ROUNDINGS[options.get("rounding", "nearest-even")])
        try:
            if operation == "cast":
                return _cast(operands[0], options["to"])
            if operation == "flags":
                return _flags(options["of"], operands)
            if operation in _ARITHMETIC:
                values = [result for result, _ in _calls(_ARITHMETIC[operation], operands)]
                return _packed(values, operands[0].dtype).reshape(operands[0].shape)
            if operation in _COMPARE:
                return np.array([bool(r) for r, _ in _calls(_COMPARE[operation], operands)]).reshape(operands[0].shape)
        finally:
            sf.set_rounding_mode(before)
        raise NotOfferedError(f"SoftFloat has no {operation}")


def _unpacked(x: Array) -> list[Any]:
    kind: Any = sf.Float64 if x.dtype == np.float64 else _TYPES[_BY_DTYPE[x.dtype]][0]
    width = x.dtype.itemsize
    data = x.reshape(-1).view(f"u{width}").astype(f">u{width}").tobytes()
    return [kind.from_bytes(data[i : i + width]) for i in range(0, len(data), width)]


def _packed(values: Iterable[Any], dtype: np.dtype[Any]) -> Array:
    data = b"".join(value.to_bytes() for value in values)
    return np.frombuffer(data, f">u{dtype.itemsize}").astype(f"u{dtype.itemsize}").view(dtype)


def _calls(name: str, operands: tuple[Array, ...]) -> Iterable[tuple[Any, set[str]]]:
    function = getattr(sf, f"{_TYPES[_BY_DTYPE[operands[0].dtype]][1]}_{name}")
    for row in zip(*(_unpacked(x) for x in operands), strict=True):
        sf.set_exception_flags(0)
        result = function(*row)
        raised = int(sf.get_exception_flags())
        yield result, {flag for flag, mask in _FLAGS if raised & int(mask)}


def _flags(operation: str, operands: tuple[Array, ...]) -> list[frozenset[str]]:
    return [frozenset(raised) for _, raised in _calls(_ARITHMETIC[operation], operands)]


def _cast(x: Array, to: str) -> Array:
    kind, short, _ = _TYPES[to]
    convert = getattr(sf, f"{'f64' if x.dtype == np.float64 else 'f32'}_to_{short}")
    del kind
    return _packed((convert(value) for value in _unpacked(x)), FORMATS[to].dtype).reshape(x.shape)
