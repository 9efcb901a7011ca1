"""Claims about elementary functions: every input of fp16 and bf16, contiguous and strided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Ulp, assert_same_bits, assert_within_ulps
from mp_conformance.elementary_oracle import FUNCTIONS, every_input, expected, resolved_by_mpmath
from mp_reference.spec import sources
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject
    from mp_reference.spec.formats import FloatFormat

__all__ = ["CLAIMS"]

_WHY = (
    "the kernel computes in fp32 with an error of at most 4 fp32 ulps, which is at most 4 / 2**13 ulp of fp16 and "
    "4 / 2**16 ulp of bf16, and rounds once (1/2 ulp): less than 1 ulp in all, so at most a neighbour of the correctly "
    "rounded value"
)


def _within(function: str, fmt: FloatFormat, layout: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        x = every_input(fmt)
        actual = subject.perform("elementary", x, function=function, layout=layout)
        wanted = expected(function, fmt)
        run.notes.append(f"{resolved_by_mpmath(function, fmt)} inputs needed more than float64 to decide")
        run.record(assert_within_ulps(actual, wanted, 1, inputs=(x,)))

    return check


def _exactly(function: str, fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        x = every_input(fmt)
        actual = subject.perform("elementary", x, function=function, layout="contiguous")
        run.record(assert_same_bits(np.asarray(actual), expected(function, fmt), inputs=(x,)))

    return check


_FORMATS = (FORMATS["fp16"], FORMATS["bf16"])

CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            id=f"elementary.{function}.{layout}.{fmt.name}",
            sentence=f"{function} is within 1 ulp for all 65,536 inputs of {fmt.name}, {layout}",
            source=f"{sources.IEEE_754}, 9.2",
            agreement=Ulp(1, _WHY),
            operation="elementary",
            options={"function": function, "layout": layout, "format": fmt.name},
            check=_within(function, fmt, layout),
            format=fmt.name,
            producers=("torch", "jax"),
            exhaustive=True,
        )
        for function in FUNCTIONS
        for layout in ("contiguous", "strided")
        for fmt in _FORMATS
    ),
    *(
        Claim(
            id=f"elementary.{function}.exact.{fmt.name}",
            sentence=f"{function} is correctly rounded for all 65,536 inputs of {fmt.name}",
            source=f"{sources.IEEE_754}, 9.2",
            agreement=Bits(),
            operation="elementary",
            options={"function": function, "format": fmt.name},
            check=_exactly(function, fmt),
            format=fmt.name,
            producers=("reference",),
            exhaustive=True,
        )
        for function in FUNCTIONS
        if function != "log10"  # the reference has no decimal logarithm
        for fmt in _FORMATS
    ),
)
