"""Accumulators: how the terms of a sum or of a matrix product are added, one row each.

A row is data; ``mp_reference.numerics`` computes with it. Software accumulators are described here, the units of
accelerators in ``spec.tensor_cores``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from mp_reference.spec import sources
from mp_reference.spec.formats import FORMATS, FP32, FloatFormat, require_format

__all__ = [
    "EXACT", "FP32_FAST", "NAMED", "Accumulator", "Blocked", "Exact", "Fast", "Kahan", "Lanes", "Pairwise",
    "Sequential", "SplitK", "accumulator_named", "blocked", "kahan", "lanes", "pairwise", "sequential", "split_k",
]  # fmt: skip

Layout = Literal["contiguous", "interleaved"]
Combine = Literal["serial", "halves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """What every row has: a name, and the document that fixes the arithmetic."""

    name: str
    source: str = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact(Accumulator):
    """The exact sum, rounded once: the result depends on no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fast(Accumulator):
    """Single precision in whatever order the machine's library likes best; only a bound is promised, no bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential(Accumulator):
    """From the first term to the last, every step rounded to ``format``.

    ``fused`` steps round ``acc + a * b`` once; others round the product, then the sum. The accumulator starts at the
    addend, or at +0.
    """

    format: FloatFormat
    fused: bool
    rounding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairwise(Accumulator):
    """A balanced tree: more than ``base`` terms are cut into a first half (the longer one) and a second half.

    Products and sums are each rounded to ``format``; runs of at most ``base`` terms are added in order.
    """

    format: FloatFormat
    base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked(Accumulator):
    """Every run of ``block`` terms by ``inner`` from +0; the partial sums in order in ``outer``, to nearest even."""

    inner: Accumulator
    block: int
    outer: FloatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitK(Accumulator):
    """Terms dealt out to ``splits`` workers in tiles of ``tile``; each adds by ``inner``, partial sums go in ``outer``.

    ``layout``: "contiguous" gives each worker one run of tiles, "interleaved" gives tile t to worker t mod splits.
    ``combine``: "serial" adds the partial sums in order; "halves" first adds each of the first half to its partner in
    the second, then starts from the last one left over, as cuBLASLt's second scheme does.
    """

    inner: Accumulator
    splits: int
    outer: FloatFormat
    tile: int
    layout: Layout
    combine: Combine


@dataclass(frozen=True, slots=True, kw_only=True)
class Kahan(Accumulator):
    """Compensated: the rounding error of every sum is carried along in a second variable of the same format."""

    format: FloatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes(Accumulator):
    """``width`` fp32 lanes filled in turn, then added left to right; what is left over follows in order.

    Squares are rounded before they are added, but the last ``len % tail`` terms are fused: the order of torch's
    vector_norm on a CPU.
    """

    width: int
    tail: int


EXACT = Exact(name="exact", source=sources.KULISCH)
FP32_FAST = Fast(name="fp32", source=sources.BLAS)
NAMED: dict[str, Accumulator] = {"exact": EXACT, "fp32": FP32_FAST}
"""Accumulators that a plain string names."""

_ROUNDINGS = ("nearest-even", "nearest-away", "toward-zero", "toward-positive", "toward-negative", "to-odd")


def accumulator_named(accumulator: str | FloatFormat | Accumulator) -> Accumulator:
    """Turn what a caller passes as ``accumulator=`` into a row.

    Args:
        accumulator: a row, "exact" or "fp32", or a format, which means ``sequential(format)``.

    Returns:
        The row.

    Raises:
        ValueError: no accumulator has this name; the message lists the names and the factories.

    Source: the rows.

    >>> accumulator_named("exact").source
    'Kulisch, Computer Arithmetic and Validity, 2nd ed. (2013); IEEE 754-2019, 9.4'
    """
    if isinstance(accumulator, Accumulator):
        return accumulator
    if isinstance(accumulator, FloatFormat):
        return sequential(accumulator)
    if not isinstance(accumulator, str) or accumulator not in NAMED:
        named = isinstance(accumulator, str) and accumulator in FORMATS
        itself = f"pass the format itself, format_named({accumulator!r}), or " if named else ""
        raise ValueError(
            f"accumulator={accumulator!r} is none of {', '.join(map(repr, NAMED))}; {itself}build others with "
            "sequential(format), pairwise(format), blocked(...), split_k(n), kahan(format), lanes(width) or "
            'tensor_core("hopper")'
        )
    return NAMED[accumulator]


def sequential(fmt: FloatFormat, *, fused: bool = False, rounding: str = "nearest-even") -> Sequential:
    """Add from the first term to the last, rounding every step to one format.

    Args:
        fmt: the accumulator's format.
        fused: round ``acc + a * b`` once instead of product and sum each.
        rounding: one of the deterministic roundings.

    Returns:
        The row.

    Raises:
        TypeError: ``fmt`` is no format.
        ValueError: ``rounding`` is not one of them.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1.

    >>> from mp_reference.spec.formats import FP16
    >>> sequential(FP16, fused=True).name
    'sequential(fp16, fused)'
    """
    if rounding not in _ROUNDINGS:
        raise ValueError(
            f"rounding={rounding!r} must be one of {', '.join(_ROUNDINGS)}; stochastic accumulation needs random "
            "bits a step: call round_to yourself"
        )
    words = [require_format(fmt).name] + ["fused"] * bool(fused) + [rounding] * (rounding != "nearest-even")
    return Sequential(
        name=f"sequential({', '.join(words)})", source=sources.HIGHAM, format=fmt, fused=bool(fused), rounding=rounding
    )


def pairwise(fmt: FloatFormat = FP32, base: int = 1) -> Pairwise:
    """Add in a balanced tree.

    Args:
        fmt: the format every product and sum is rounded to.
        base: runs of at most this many terms are added in order, at least 1.

    Returns:
        The row.

    Raises:
        TypeError: ``fmt`` is no format.
        ValueError: ``base`` is no whole number of at least 1.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 4.1.

    >>> pairwise(base=8).name
    'pairwise(fp32, 8)'
    """
    _require_positive("base", base, "base=1 adds every pair")
    return Pairwise(name=f"pairwise({require_format(fmt).name}, {base})", source=sources.HIGHAM, format=fmt, base=base)


def blocked(inner: str | FloatFormat | Accumulator, block: int, outer: FloatFormat = FP32) -> Blocked:
    """Add runs of ``block`` terms by one accumulator and the partial sums in another format.

    ``blocked(tensor_core("hopper"), 128)`` is what cuBLAS does for FP8 without fast accumulation.

    Args:
        inner: the accumulator of a run, or a format for ``sequential(format)``.
        block: terms a run, at least 1; the last run may be shorter.
        outer: the format that the partial sums are added in, to nearest even.

    Returns:
        The row.

    Raises:
        TypeError: ``outer`` is no format.
        ValueError: ``block`` is no whole number of at least 1, or ``inner`` names no accumulator.

    Source: Blanchard et al., Mixed precision block fused multiply-add, SISC 42 (2020).

    >>> from mp_reference.spec.formats import FP16
    >>> blocked(FP16, 64).name
    'blocked(sequential(fp16), 64, fp32)'
    """
    _require_positive("block", block, "a run has at least one term")
    row = accumulator_named(inner)
    name = f"blocked({row.name}, {block}, {require_format(outer, 'outer').name})"
    return Blocked(name=name, source=sources.BLANCHARD, inner=row, block=block, outer=outer)


def split_k(
    splits: int,
    inner: str | FloatFormat | Accumulator = FP32,
    *,
    outer: FloatFormat = FP32,
    tile: int = 1,
    layout: Layout = "contiguous",
    combine: Combine = "serial",
) -> SplitK:
    """Deal the terms out to workers and add their partial sums.

    Args:
        splits: number of workers, at least 1.
        inner: each worker's accumulator, or a format for ``sequential(format)``.
        outer: the format that the partial sums are added in, to nearest even.
        tile: terms dealt out together.
        layout: "contiguous" or "interleaved".
        combine: "serial" or "halves".

    Returns:
        The row.

    Raises:
        TypeError: ``outer`` is no format.
        ValueError: no whole number of at least 1, or a word that is not offered.

    Source: mmaemu 0.1.0, FP8 matrix products recorded on an H100 PCIe and an RTX 4060.

    >>> split_k(4).name
    'split_k(4, sequential(fp32))'
    """
    _require_positive("splits", splits, "one worker is splits=1")
    _require_positive("tile", tile, "tile=1 deals out single terms")
    for name, word, offered in (
        ("layout", layout, ("contiguous", "interleaved")),
        ("combine", combine, ("serial", "halves")),
    ):
        if word not in offered:
            raise ValueError(f"{name}={word!r} must be one of {', '.join(map(repr, offered))}")
    row, outer = accumulator_named(inner), require_format(outer, "outer")
    extra = [f"tile={tile}"] * (tile != 1) + [layout] * (layout != "contiguous") + [combine] * (combine != "serial")
    return SplitK(
        name=f"split_k({', '.join([str(splits), row.name, *extra])})", source=sources.MMAEMU, inner=row,
        splits=splits, outer=outer, tile=tile, layout=layout, combine=combine,
    )  # fmt: skip


def kahan(fmt: FloatFormat = FP32) -> Kahan:
    """Add in order with a compensation term, every operation rounded to one format.

    Args:
        fmt: the format.

    Returns:
        The row.

    Raises:
        TypeError: ``fmt`` is no format.

    Source: Kahan, Further remarks on reducing truncation errors, CACM 8 (1965).

    >>> kahan().name
    'kahan(fp32)'
    """
    return Kahan(name=f"kahan({require_format(fmt).name})", source=sources.KAHAN, format=fmt)


def lanes(width: int = 8, tail: int = 4) -> Lanes:
    """Add squares as torch's vector_norm does on a CPU.

    torch 2.13 has 8 lanes and a tail of 4 under AVX2 and AVX-512 alike, and 8 lanes and a tail of 1, which fuses
    nothing, with ``ATEN_CPU_CAPABILITY=default``.

    Args:
        width: lanes.
        tail: terms of the unrolled remainder loop, after which single terms are fused.

    Returns:
        The row.

    Raises:
        ValueError: no whole number of at least 1.

    Source: torch 2.13, vector_norm on the CPU, as measured.

    >>> lanes().name
    'lanes(8)'
    """
    _require_positive("width", width, "a scalar machine has width=1")
    _require_positive("tail", tail, "tail=1 fuses nothing")
    name = f"lanes({width})" if tail == 4 else f"lanes({width}, {tail})"
    return Lanes(name=name, source=sources.TORCH_VECTOR_NORM, width=width, tail=tail)


def _require_positive(name: str, value: Any, way_out: str) -> None:
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}={value} must be a whole number of at least 1; {way_out}")
