"""Block formats: an element format, so many of them under one scale, and how the scale is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

from mp_reference.spec import sources
from mp_reference.spec.formats import FORMATS, FloatFormat, format_named
from mp_reference.spec.names import meant

__all__ = [
    "BLOCK_FORMATS", "MXFP4", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP8_E4M3", "MXFP8_E5M2", "NVFP4", "SCALE_RULES",
    "BlockFormat", "ScaleRule", "block_format_named",
]  # fmt: skip

ScaleRule = Literal["ocp", "round-up", "amax"]
"""How the scale of a block follows from ``amax``, its largest magnitude.

``ocp``: the largest power of two not above amax, divided by the largest power of two of the element format; elements
past the largest number saturate. ``round-up``: the smallest power of two that lets amax through without saturation.
``amax``: ``amax / element.max``, rounded to nearest in the scale format.
"""
SCALE_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """One block format.

    Args:
        name: how it is called.
        element: the element format's name.
        block_size: how many elements share a scale.
        scale: the scale format's name.
        scale_rule: how the scale is chosen unless the caller says otherwise.
        tensor_scale: whether a further fp32 scale of the whole tensor belongs to the format.
        source: the document that fixes these numbers.

    Raises:
        ValueError: an unknown format or rule, elements without sign or zero, scales without NaN, or no elements in a
            block.

    Source: the row's own ``source`` field.

    >>> MXFP4.bits_per_value
    4.25
    """

    name: str
    element: str
    block_size: int
    scale: str
    scale_rule: ScaleRule
    tensor_scale: bool = False
    source: str = "the caller"

    def __post_init__(self) -> None:
        """Check what was given."""
        for named in (self.element, self.scale):
            if named not in FORMATS:
                raise ValueError(f"{self.name}: format {named!r} is not one of {', '.join(FORMATS)}")
        if self.scale_rule not in SCALE_RULES:
            raise ValueError(f"{self.name}: scale_rule={self.scale_rule!r} must be one of {', '.join(SCALE_RULES)}")
        if self.scale_rule != "amax" and self.scale_format.specials != "exponent-only":
            raise ValueError(
                f"{self.name}: scale_rule={self.scale_rule!r} makes powers of two, for float8_e8m0fnu; with "
                f"{self.scale} use scale_rule='amax'"
            )
        if not self.element_format.has_zero:
            raise ValueError(f"{self.name}: element={self.element!r} has no zero and no sign; it can only be the scale")
        if not self.scale_format.has_nan:
            raise ValueError(
                f"{self.name}: scale={self.scale!r} has no NaN to mark a block that holds one; use float8_e8m0fnu or "
                "float8_e4m3fn"
            )
        size: Any = self.block_size
        if not (isinstance(size, Integral) and int(size) >= 1):
            raise ValueError(
                f"{self.name}: block_size={self.block_size} must be a whole number of at least 1; MX formats have 32"
            )

    def __repr__(self) -> str:
        """What a person wants to know of a block format, in one line."""
        return (
            f"BlockFormat({self.name}: {self.bits_per_value:g} bits a value = {self.element} elements, "
            f"{self.block_size} to a scale in {self.scale} chosen by {self.scale_rule}"
            f"{', and an fp32 scale of the whole tensor' * self.tensor_scale})"
        )

    @property
    def element_format(self) -> FloatFormat:
        """The row of the element format."""
        return format_named(self.element)

    @property
    def scale_format(self) -> FloatFormat:
        """The row of the scale format."""
        return format_named(self.scale)

    @property
    def bits_per_value(self) -> float:
        """Bits stored for each value, its share of the scale included."""
        return self.element_format.bits + self.scale_format.bits / self.block_size


def _mx(name: str, element: str) -> BlockFormat:
    return BlockFormat(
        name=name, element=element, block_size=32, scale="float8_e8m0fnu", scale_rule="ocp", source=sources.OCP_MX
    )


MXFP8_E4M3 = _mx("mxfp8_e4m3", "float8_e4m3fn")
MXFP8_E5M2 = _mx("mxfp8_e5m2", "float8_e5m2")
MXFP6_E2M3 = _mx("mxfp6_e2m3", "float6_e2m3fn")
MXFP6_E3M2 = _mx("mxfp6_e3m2", "float6_e3m2fn")
MXFP4 = _mx("mxfp4", "float4_e2m1fn")
NVFP4 = BlockFormat(
    name="nvfp4", element="float4_e2m1fn", block_size=16, scale="float8_e4m3fn", scale_rule="amax", tensor_scale=True,
    source=sources.NVFP4,
)  # fmt: skip

BLOCK_FORMATS: dict[str, BlockFormat] = {
    row.name: row for row in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4, NVFP4)
}
"""Every block format, by name."""


def block_format_named(name: str) -> BlockFormat:
    """Look a block format up by its name.

    Args:
        name: a key of ``BLOCK_FORMATS``.

    Returns:
        The row.

    Raises:
        ValueError: no block format has this name; the message lists those that exist.

    Source: the rows.

    >>> block_format_named("nvfp4").block_size
    16
    """
    if name not in BLOCK_FORMATS:
        raise ValueError(
            f"block format {name!r} is not one of {', '.join(BLOCK_FORMATS)}{meant(name, BLOCK_FORMATS)}; for another "
            "one write BlockFormat(...)"
        )
    return BLOCK_FORMATS[name]
