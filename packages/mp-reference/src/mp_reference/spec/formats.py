"""Floating-point formats: one row each, everything else derived from the row."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from mp_reference.spec import sources
from mp_reference.spec.names import meant

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "BF16", "E2M1FN", "E2M3FN", "E3M2FN", "E4M3FN", "E4M3FNUZ", "E5M2", "E5M2FNUZ", "E8M0FNU", "FORMATS", "FP16",
    "FP32", "TF32", "FloatFormat", "format_named", "format_table", "require_format",
]  # fmt: skip

Specials = Literal["ieee", "fn", "fnuz", "finite", "exponent-only"]
"""How the extreme codes are spent.

``ieee``: the top exponent holds infinities and NaNs. ``fn``: no infinity, NaN is the all-ones magnitude. ``fnuz``: no
infinity, no negative zero, NaN is the code of negative zero. ``finite``: every code is a number. ``exponent-only``:
unsigned powers of two without zero, NaN is the all-ones code.
"""

_DERIVED = -(2**31)  # no bias that float32 has room for
_NATIVE_DTYPES = {
    "fp32": "float32",
    "tf32": "float32",  # 19 significant bits, always held in 32
    "fp16": "float16",
    "bf16": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """One row of a standard's format table; everything else is derived from it.

    Args:
        name: the name in ml_dtypes' grammar, or your own.
        exponent_bits: width of the exponent field, 1 to 8 (0 is no floating-point format).
        mantissa_bits: stored fraction bits, without the hidden one, 0 to 23.
        bias: what the exponent field exceeds the exponent by; ``2**(exponent_bits - 1) - 1`` unless given.
        specials: how the extreme codes are spent, see ``Specials``.
        max: the largest finite value as the source prints it; derived unless given, and checked if given.
        source: the document that fixes these numbers.

    Raises:
        TypeError: a width or a bias that is no integer.
        ValueError: a width outside its range, or a ``max`` that contradicts the widths.

    Source: the row's own ``source`` field.

    >>> FloatFormat(name="e5m4", exponent_bits=5, mantissa_bits=4).max
    63488.0
    """

    name: str
    _: KW_ONLY
    exponent_bits: int
    mantissa_bits: int
    bias: int = _DERIVED
    specials: Specials = "ieee"
    max: float = 0.0
    source: str = field(default="the caller", compare=False)

    def __post_init__(self) -> None:
        """Derive what was not given and check what was."""
        self._require_integers()
        if not (1 <= self.exponent_bits <= 8 and 0 <= self.mantissa_bits <= 23):
            raise ValueError(
                f"{self.name}: exponent_bits={self.exponent_bits}, mantissa_bits={self.mantissa_bits} must lie in 1..8 "
                "and 0..23, so that every value fits float32; emulate wider formats in float64 directly"
            )
        if self.specials not in ("ieee", "fn", "fnuz", "finite", "exponent-only"):
            raise ValueError(
                f"{self.name}: specials={self.specials!r} must be one of 'ieee', 'fn', 'fnuz', 'finite', "
                "'exponent-only'; use 'ieee' for infinities and NaNs as in IEEE 754"
            )
        if self.specials == "exponent-only" and self.mantissa_bits != 0:
            raise ValueError(
                f"{self.name}: mantissa_bits={self.mantissa_bits} must be 0 where only exponents are stored; "
                "use specials='ieee' or 'fn' for a format with a fraction"
            )
        spent = self.specials == "ieee" or (self.specials == "fn" and self.mantissa_bits == 0)
        if self.exponent_bits == 1 and spent:
            raise ValueError(
                f"{self.name}: exponent_bits=1 leaves specials={self.specials!r} no normal number, the only field "
                "but 0 being spent on infinity and NaN; use 2 exponent bits or specials='finite'"
            )
        if self.bias == _DERIVED:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        derived = self._derived_max()
        if self.max == 0.0:
            object.__setattr__(self, "max", derived)
        elif self.max != derived:
            raise ValueError(
                f"{self.name}: max={self.max!r} contradicts the widths, which give {derived!r}; leave max out"
            )
        if not (self.max_exponent <= 127 and self.min_exponent - self.mantissa_bits >= -149):
            raise ValueError(
                f"{self.name}: bias={self.bias} puts values outside float32 (exponents "
                f"{self.min_exponent - self.mantissa_bits}..{self.max_exponent}, allowed -149..127); choose a bias "
                f"near {2 ** (self.exponent_bits - 1) - 1}"
            )

    def _require_integers(self) -> None:
        """Of any kind: NumPy's become Python's."""
        for width in ("exponent_bits", "mantissa_bits", "bias"):
            given = getattr(self, width)
            if not isinstance(given, Integral):
                raise TypeError(f"{self.name}: {width}={given!r} must be an integer; use int({given!r})")
            object.__setattr__(self, width, int(given))

    def _derived_max(self) -> float:
        top = 2**self.exponent_bits - 1 - self.bias  # exponent of the all-ones field, were it an ordinary one
        if self.specials == "ieee":
            return math.ldexp(2 - 2.0**-self.mantissa_bits, top - 1)
        if self.specials == "exponent-only":
            return math.ldexp(1.0, top - 1)
        if self.specials == "fn":  # the last code of the top binade is NaN
            if self.mantissa_bits == 0:
                return math.ldexp(1.0, top - 1)
            return math.ldexp(2 - 2.0 ** (1 - self.mantissa_bits), top)
        return math.ldexp(2 - 2.0**-self.mantissa_bits, top)

    @property
    def bits(self) -> int:
        """Width of a code: sign (if any), exponent and fraction."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def signed(self) -> bool:
        """Whether the format has negative values."""
        return self.specials != "exponent-only"

    @property
    def has_inf(self) -> bool:
        """Whether the format has infinities."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether the format has a NaN."""
        return self.specials != "finite" and not (self.specials == "ieee" and self.mantissa_bits == 0)

    @property
    def has_zero(self) -> bool:
        """Whether the format represents zero."""
        return self.specials != "exponent-only"

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero keeps its sign."""
        return self.specials in ("ieee", "fn", "finite")

    @property
    def max_exponent(self) -> int:
        """Exponent of the binade that holds ``max``."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return -self.bias if self.specials == "exponent-only" else 1 - self.bias

    @property
    def min_normal(self) -> float:
        """The smallest positive normal number."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number; ``min_normal`` where there are no subnormals."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of this name, or float32, which holds every value of a format that has none."""
        return _dtype_of(self)

    def __repr__(self) -> str:
        """What a person wants to know of a format, in one line."""
        return (
            f"FloatFormat({self.name}: {self.bits} bits = {int(self.signed)} sign + {self.exponent_bits} exponent + "
            f"{self.mantissa_bits} mantissa, range {self.min_subnormal:.3g} to {self.max:.6g}, "
            f"epsilon {self.epsilon:g})"
        )


@lru_cache(maxsize=256)
def _dtype_of(fmt: FloatFormat) -> np.dtype[Any]:
    import ml_dtypes
    import numpy as np

    name = _NATIVE_DTYPES.get(fmt.name, fmt.name)
    if FORMATS.get(fmt.name) != fmt:
        return np.dtype("float32")
    return np.dtype(getattr(ml_dtypes, name, name))


FP32 = FloatFormat(
    "fp32", exponent_bits=8, mantissa_bits=23, bias=127, max=3.4028234663852886e38, source=sources.IEEE_754_TABLE
)
TF32 = FloatFormat(
    "tf32", exponent_bits=8, mantissa_bits=10, bias=127, max=3.4011621342146535e38, source=sources.NVIDIA_A100
)
FP16 = FloatFormat("fp16", exponent_bits=5, mantissa_bits=10, bias=15, max=65504.0, source=sources.IEEE_754_TABLE)
BF16 = FloatFormat(
    "bf16", exponent_bits=8, mantissa_bits=7, bias=127, max=3.3895313892515355e38, source=sources.BF16_WHITE_PAPER
)
E4M3FN = FloatFormat(
    "float8_e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, specials="fn", max=448.0, source=sources.OCP_OFP8
)
E5M2 = FloatFormat("float8_e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, source=sources.OCP_OFP8)
E4M3FNUZ = FloatFormat(
    "float8_e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, specials="fnuz", max=240.0, source=sources.FNUZ_PAPER
)
E5M2FNUZ = FloatFormat(
    "float8_e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, specials="fnuz", max=57344.0,
    source=sources.FNUZ_PAPER,
)  # fmt: skip
E8M0FNU = FloatFormat(
    "float8_e8m0fnu", exponent_bits=8, mantissa_bits=0, bias=127, specials="exponent-only", max=2.0**127,
    source=sources.OCP_MX,
)  # fmt: skip
E2M3FN = FloatFormat(
    "float6_e2m3fn", exponent_bits=2, mantissa_bits=3, bias=1, specials="finite", max=7.5, source=sources.OCP_MX
)
E3M2FN = FloatFormat(
    "float6_e3m2fn", exponent_bits=3, mantissa_bits=2, bias=3, specials="finite", max=28.0, source=sources.OCP_MX
)
E2M1FN = FloatFormat(
    "float4_e2m1fn", exponent_bits=2, mantissa_bits=1, bias=1, specials="finite", max=6.0, source=sources.OCP_MX
)

FORMATS: dict[str, FloatFormat] = {
    row.name: row for row in (FP32, TF32, FP16, BF16, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0FNU, E2M3FN, E3M2FN, E2M1FN)
}
"""Every named format, by name."""


def format_named(name: str) -> FloatFormat:
    """Look a format up by its name.

    Args:
        name: a key of ``FORMATS``.

    Returns:
        The row.

    Raises:
        ValueError: no format has this name; the message lists those that exist.

    Source: the names are ml_dtypes' grammar.

    >>> format_named("bf16").epsilon
    0.0078125
    """
    if name not in FORMATS:
        raise ValueError(
            f"format {name!r} is not one of {', '.join(FORMATS)}{meant(name, FORMATS)}; for another one write "
            "FloatFormat(name=..., exponent_bits=..., mantissa_bits=...)"
        )
    return FORMATS[name]


def require_format(fmt: object, argument: str = "fmt") -> FloatFormat:
    """Refuse what is no format, such as the name of one.

    Args:
        fmt: what a caller passed.
        argument: what the parameter is called.

    Returns:
        The format.

    Raises:
        TypeError: it is no ``FloatFormat``; the message says where formats come from.

    Source: this project's contract: an error tells the way out.

    >>> require_format(FP16).name
    'fp16'
    """
    if isinstance(fmt, FloatFormat):
        return fmt
    way_out = f"use format_named({fmt!r})" if fmt in FORMATS else "use one of FORMATS, such as FP16, or build one"
    raise TypeError(f"{argument}={fmt!r} must be a FloatFormat; {way_out}")


def format_table() -> str:
    """The rows as text: bits, exponent, mantissa, range, smallest normal and subnormal, epsilon, bytes.

    Returns:
        One line a format below a heading, columns aligned; bytes are bits / 8.

    Source: the rows.

    >>> print(format_table().splitlines()[3][:80])
    fp16              16    5     10    65504        6.10352e-05  5.96046e-08  0.000
    """
    head = ("format", "bits", "exp", "mant", "max", "min normal", "min subnorm.", "epsilon", "bytes", "source")
    widths = (17, 5, 5, 5, 12, 12, 12, 12, 6, 0)
    rows = [head] + [
        (
            row.name, f"{row.bits}", f"{row.exponent_bits}", f"{row.mantissa_bits}", f"{row.max:.6g}",
            f"{row.min_normal:.6g}", f"{row.min_subnormal:.6g}", f"{row.epsilon:.6g}", f"{row.bits / 8:g}", row.source,
        )
        for row in FORMATS.values()
    ]  # fmt: skip
    return "\n".join(" ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
