"""NumPy with ml_dtypes as a subject: the producer of narrow arrays on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mp_conformance.implementations import NotOfferedError
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NumpySubject"]

_ARITHMETIC: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt,
    "minimum": np.minimum, "maximum": np.maximum, "less": np.less, "less_equal": np.less_equal, "equal": np.equal,
}  # fmt: skip
_DIRECTIONS = ("add", "sub", "mul", "div", "sqrt")
_NO_DTYPE = ("tf32",)
_BYTES = {fmt.name for fmt in FORMATS.values() if fmt.bits <= 8}


class NumpySubject:
    """``astype`` and the ufuncs; nearest-even alone, overflow as each dtype has it."""

    name = "ml_dtypes"
    device = "cpu"

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Casts to formats with a dtype, facts, and the elementwise operations of ml_dtypes' own dtypes."""
        if options.get("rounding", "nearest-even") != "nearest-even" or not options.get("subnormals", True):
            return False
        if operation == "cast":
            pair = {options["to"], options.get("source", "float32")}
            if "float8_e8m0fnu" in pair and len(pair & _BYTES) == 2:
                return False  # ml_dtypes refuses to cast between it and the other narrow formats
            return options["to"] not in _NO_DTYPE and options.get("overflow", "ieee") == "ieee"
        if operation == "facts":
            return options["format"] not in _NO_DTYPE
        return operation in _ARITHMETIC and options.get("format") not in (*_NO_DTYPE, "float8_e8m0fnu")

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it, with NumPy's floating-point warnings off: special values are data here."""
        with np.errstate(all="ignore"):
            if operation == "cast":
                return operands[0].astype(FORMATS[options["to"]].dtype)
            if operation == "facts":
                return _facts(options["format"])
            if operation in _ARITHMETIC:
                return np.asarray(_ARITHMETIC[operation](*operands))
        raise NotOfferedError(f"ml_dtypes has no {operation}")


def _facts(name: str) -> dict[str, float]:
    finfo: Any = ml_dtypes.finfo  # ships without annotations
    info = finfo(FORMATS[name].dtype)
    return {
        "bits": float(info.bits),
        "max": float(info.max),
        "min_normal": float(info.smallest_normal),
        "min_subnormal": float(info.smallest_subnormal),
        "epsilon": float(info.eps),
    }
