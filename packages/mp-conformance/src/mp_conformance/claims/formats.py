"""Claims about the numbers of the formats: the rows against ml_dtypes, torch and the code tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, DisagreementError, Tally, assert_same_bits
from mp_conformance.oracle import encode, value_of_code
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject
    from mp_reference.spec.formats import FloatFormat

__all__ = ["CLAIMS"]


def _derived(fmt: FloatFormat) -> dict[str, float]:
    """The numbers of a format from what its codes stand for, without looking at the row's own properties."""
    values = {value_of_code(code, fmt) for code in range(1 << fmt.bits)} if fmt.bits <= 16 else _fp32_extremes(fmt)
    finite = sorted(v for v in values if np.isfinite(v) and v > 0)
    above_one = min(v for v in finite if v > 1)
    normal = [v for v in finite if v >= 2.0 ** (1 - fmt.bias)] if fmt.has_zero else finite
    return {
        "bits": float(fmt.bits), "max": finite[-1], "min_normal": normal[0], "min_subnormal": finite[0],
        "epsilon": above_one - 1,
    }  # fmt: skip


def _fp32_extremes(fmt: FloatFormat) -> set[float]:
    step = 1 << fmt.mantissa_bits
    one = fmt.bias << fmt.mantissa_bits
    top = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    return {value_of_code(code, fmt) for code in (1, step - 1, step, step + 1, one, one + 1, top - 1, top)}


def _facts(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        told = subject.perform("facts", format=fmt.name)
        for name, value in _derived(fmt).items():
            if name in told and told[name] != value:
                raise DisagreementError(f"{name} of {fmt.name} is {told[name]!r}, its codes give {value!r}")
        run.record(Tally(len(told)))

    return check


def _codes(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[fmt.dtype.itemsize]
        codes = np.arange(1 << fmt.bits).astype(unsigned).view(fmt.dtype)
        expected = encode([value_of_code(code, fmt) for code in range(1 << fmt.bits)], FORMATS["fp32"])
        run.record(
            assert_same_bits(subject.perform("cast", codes, to="fp32", source=fmt.name), expected, inputs=(codes,))
        )

    return check


_NARROW = tuple(fmt for fmt in FORMATS.values() if fmt.bits <= 16)

CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            id=f"format.{fmt.name}.facts",
            sentence=f"the largest, smallest normal and smallest subnormal value and the epsilon of {fmt.name} are "
            "those that its codes give",
            source=fmt.source,
            agreement=Bits(),
            operation="facts",
            options={"format": fmt.name},
            check=_facts(fmt),
            format=fmt.name,
            devices=("cpu", "cuda", "npu", "xpu", "mps"),
            exhaustive=True,
        )
        for fmt in FORMATS.values()
        if fmt.name != "tf32"
    ),
    *(
        Claim(
            id=f"format.{fmt.name}.codes",
            sentence=f"every code of {fmt.name} widens to the fp32 value that the format's row gives it",
            source=fmt.source,
            agreement=Bits(),
            operation="cast",
            options={"to": "fp32", "source": fmt.name},
            check=_codes(fmt),
            format=fmt.name,
            exhaustive=True,
        )
        for fmt in _NARROW
    ),
)
