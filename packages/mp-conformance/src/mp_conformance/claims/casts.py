"""Claims about casts: every source into every format, every rounding, saturation, subnormals, producers' rows."""

from __future__ import annotations

import time
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance import oracle, values
from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Tally, assert_same_bits
from mp_reference.spec import sources
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject
    from mp_reference.spec.formats import FloatFormat

__all__ = ["CLAIMS"]

Array = np.ndarray[Any, np.dtype[Any]]

_MODES = ("nearest-away", "toward-zero", "toward-positive", "toward-negative", "to-odd")
_CARRIERS = {"float32": np.float32, "float64": np.float64}


def _without_nan(x: Array, fmt: FloatFormat) -> Array:
    """A format without NaN has no rule for one; what each producer makes of it is a row of ``spec.casts``."""
    return x if fmt.has_nan or x.dtype.kind in "iu" else np.where(np.isnan(x), x.dtype.type(1), x)


def _drawn(source: str, fmt: FloatFormat) -> Check:
    strategy = values.integers_near(fmt) if source == "int64" else values.floats_near(fmt, _CARRIERS[source])

    def check(subject: Subject, run: Run) -> None:
        def one(x: Array) -> Tally:
            x = _without_nan(x, fmt)
            expected = oracle.cast(x, fmt)
            return assert_same_bits(subject.perform("cast", x, to=fmt.name, source=source), expected, inputs=(x,))

        run.draw(strategy, one)

    return check


def _directed(fmt: FloatFormat, **options: Any) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def one(x: Array) -> Tally:
            x = _without_nan(x, fmt)
            expected = oracle.cast(x, fmt, **options)
            return assert_same_bits(subject.perform("cast", x, to=fmt.name, **options), expected, inputs=(x,))

        for source, carrier in _CARRIERS.items():
            if subject.offers("cast", {"to": fmt.name, "source": source, **options}):
                run.draw(values.floats_near(fmt, carrier), one)

    return check


@cache
def _every_code(source: FloatFormat) -> Array:
    unsigned = {1: np.uint8, 2: np.uint16}[source.dtype.itemsize]
    return np.arange(1 << source.bits).astype(unsigned).view(source.dtype)


@cache
def _pair_inputs(source: FloatFormat, target: FloatFormat) -> Array:
    return _without_nan(_every_code(source), target)


@cache
def _expected_pair(source: FloatFormat, target: FloatFormat) -> Array:
    if source.bits == 16 and target.bits <= 16 and target.signed:  # 65,536 fractions would take seconds
        return oracle.cast_by_midpoints(_pair_inputs(source, target), target)
    return oracle.cast(_pair_inputs(source, target), target)


def _pair(source: FloatFormat, target: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        x = _pair_inputs(source, target)
        actual = subject.perform("cast", x, to=target.name, source=source.name)
        run.record(assert_same_bits(actual, _expected_pair(source, target), inputs=(x,)))

    return check


_SAMPLE, _STEP = 1 << 14, 1 << 16
"""Inputs asked at once, without and with --deep: what they need stays in memory that the process has."""

_ALL_WITHIN = 600.0
"""Seconds that all 2**32 inputs may take; a subject that needs longer, as a call an element does, gets a part."""


def _every_float32(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def asked(start: int, count: int) -> float:
            begun = time.monotonic()
            x = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32).view(np.float32)
            actual = subject.perform("cast", x, to=fmt.name, source="float32")
            run.record(assert_same_bits(actual, oracle.cast_float32_patterns(start, count, fmt), inputs=(x,)))
            return time.monotonic() - begun

        needed = median(asked(binade << 23, _SAMPLE) for binade in range(0, 512, 37)) * (1 << 32) / _SAMPLE
        if not run.deep:
            run.notes.append(f"{_SAMPLE:,} inputs in every 37th binade; all 2**32 with --deep")
            return
        everything = needed <= _ALL_WITHIN
        for start in range(0, 1 << 32, _STEP if everything else 1 << 23):
            asked(start, _STEP)
        some = f"{_STEP:,} inputs in every binade; all 2**32 would take it {needed / 60:.0f} minutes"
        run.notes.append("all 2**32 inputs" if everything else some)

    return check


def _sentence(source: str, fmt: FloatFormat) -> str:
    return f"casting {source} to {fmt.name} rounds once, to nearest, ties to even"


_NARROW = tuple(fmt for fmt in FORMATS.values() if fmt.bits <= 16)
_RULE = f"{sources.IEEE_754}, 4.3.1 and 7.4"

CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            id=f"cast.{source}.{fmt.name}",
            sentence=_sentence(source, fmt),
            source=_RULE,
            agreement=Bits(),
            operation="cast",
            options={"to": fmt.name, "source": source},
            check=_drawn(source, fmt),
            format=fmt.name,
        )
        for source in ("float32", "float64", "int64")
        for fmt in FORMATS.values()
        if (source, fmt.name) != ("float32", "fp32")
    ),
    *(
        Claim(
            id=f"cast.{source.name}-to.{target.name}",
            sentence=f"casting each of the {1 << source.bits} codes of {source.name} to {target.name} rounds once",
            source=_RULE,
            agreement=Bits(),
            operation="cast",
            options={"to": target.name, "source": source.name},
            check=_pair(source, target),
            format=target.name,
            exhaustive=True,
        )
        for source in _NARROW
        for target in FORMATS.values()
        if source != target and target.name != "fp32"
    ),
    *(
        Claim(
            id=f"rounding.{mode}.{fmt.name}",
            sentence=f"rounding {mode} into {fmt.name} gives what the exact oracle gives, overflow included",
            source=f"{sources.IEEE_754}, 4.3 and 7.4",
            agreement=Bits(),
            operation="cast",
            options={"to": fmt.name, "rounding": mode},
            check=_directed(fmt, rounding=mode),
            format=fmt.name,
        )
        for mode in _MODES
        for fmt in FORMATS.values()
    ),
    *(
        Claim(
            id=f"rounding.saturate.{fmt.name}",
            sentence=f"with overflow='saturate' everything beyond the largest number of {fmt.name} becomes that number",
            source=fmt.source,
            agreement=Bits(),
            operation="cast",
            options={"to": fmt.name, "overflow": "saturate"},
            check=_directed(fmt, overflow="saturate"),
            format=fmt.name,
        )
        for fmt in FORMATS.values()
    ),
    *(
        Claim(
            id=f"rounding.flush.{fmt.name}",
            sentence=f"with subnormals=False no subnormal of {fmt.name} comes out, and nothing else changes",
            source=f"{sources.IEEE_754}, 7.5",
            agreement=Bits(),
            operation="cast",
            options={"to": fmt.name, "subnormals": False},
            check=_directed(fmt, subnormals=False),
            format=fmt.name,
        )
        for fmt in FORMATS.values()
    ),
    *(
        Claim(
            id=f"cast.every-float32.{fmt.name}",
            sentence=f"casting float32 to {fmt.name} rounds at the midpoints that the oracle computes, code by code",
            source=_RULE,
            agreement=Bits(),
            operation="cast",
            options={"to": fmt.name, "source": "float32"},
            check=_every_float32(fmt),
            format=fmt.name,
            exhaustive=True,
        )
        for fmt in (FORMATS["fp16"], FORMATS["bf16"])
    ),
)
