"""Claims about arithmetic: add sub mul div sqrt fma in every rounding, comparisons, minimum and maximum, flags."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from mp_conformance import oracle, values
from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, DisagreementError, Tally, assert_same_bits
from mp_reference.spec import sources
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject
    from mp_reference.spec.formats import FloatFormat

__all__ = ["CLAIMS"]

Array = np.ndarray[Any, np.dtype[Any]]

_ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "sqrt": 1, "fma": 3, "minimum": 2, "maximum": 2}
_ARITY |= {"less": 2, "less_equal": 2, "equal": 2}
_SYMBOLS = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b", "sqrt": "sqrt(a)", "fma": "a * b + c"}
_IEEE_MODES = ("nearest-even", "nearest-away", "toward-zero", "toward-positive", "toward-negative")
_MODES = (*_IEEE_MODES, "to-odd")
_WIDE = tuple(FORMATS[name] for name in ("fp16", "bf16", "fp32"))
_BYTES = tuple(FORMATS[name] for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"))


def _drawn(operation: str, fmt: FloatFormat, rounding: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        extra = {} if rounding == "nearest-even" else {"rounding": rounding}

        def one(inputs: tuple[Array, ...]) -> Tally:
            if operation in ("minimum", "maximum"):
                inputs = _without_zero_pairs(*inputs)
            expected = oracle.arithmetic(operation, inputs, fmt, rounding)
            return assert_same_bits(subject.perform(operation, *inputs, **extra), expected, inputs=inputs)

        rare = operation == "sqrt" and rounding == "nearest-even"  # roots that two roundings, or torch's own, spoil
        run.draw(values.operands(fmt, _ARITY[operation], size=256 if rare else 16), one)

    return check


@cache
def _byte_pairs(fmt: FloatFormat) -> tuple[Array, Array]:
    codes = np.arange(256, dtype=np.uint8)
    return np.repeat(codes, 256).view(fmt.dtype), np.tile(codes, 256).view(fmt.dtype)


@cache
def _expected_bytes(operation: str, fmt: FloatFormat) -> Array:
    return oracle.arithmetic(operation, _byte_pairs(fmt)[: _ARITY[operation]], fmt)


def _every_byte(operation: str, fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        inputs = _byte_pairs(fmt)[: _ARITY[operation]]
        run.record(
            assert_same_bits(subject.perform(operation, *inputs), _expected_bytes(operation, fmt), inputs=inputs)
        )

    return check


def _flags(operation: str, fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def one(drawn: tuple[str, tuple[Array, ...]]) -> Tally:
            mode, inputs = drawn
            raised = subject.perform("flags", *inputs, of=operation, rounding=mode)
            expected = oracle.flags(operation, inputs, fmt, mode)
            for index, (actual, wanted) in enumerate(zip(raised, expected, strict=True)):
                if actual != wanted:
                    shown = ", ".join(f"0x{int(oracle.code_of(x)[index]):x}" for x in inputs)
                    raise DisagreementError(
                        f"{operation} of {shown}, {mode}, raises {sorted(actual)}, the exact oracle says "
                        f"{sorted(wanted)}"
                    )
            return Tally(len(expected))

        run.draw(st.tuples(st.sampled_from(_IEEE_MODES), values.operands(fmt, _ARITY[operation])), one)

    return check


def _row(operation: str, fmt: FloatFormat, rounding: str = "nearest-even") -> Claim:
    plain = rounding == "nearest-even"
    options: dict[str, Any] = {"format": fmt.name}
    return Claim(
        id=f"arithmetic.{operation}.{fmt.name}" if plain else f"arithmetic.{operation}.{rounding}.{fmt.name}",
        sentence=f"{_SYMBOLS[operation]} in {fmt.name} is the exact result rounded once, {rounding}",
        source=f"{sources.IEEE_754}, 5.4.1",
        agreement=Bits(),
        operation=operation,
        options=options if plain else {**options, "rounding": rounding},
        check=_drawn(operation, fmt, rounding),
        format=fmt.name,
    )


def _without_zero_pairs(a: Array, b: Array) -> tuple[Array, ...]:
    """Two zeros become the same one: which of them is the smaller is a claim of its own."""
    zero = np.asarray((a == 0) & (b == 0))
    return np.where(zero, np.zeros_like(a), a), np.where(zero, np.zeros_like(b), b)


def _zeros(operation: str, fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        inputs = (
            np.array([0.0, -0.0], np.float32).astype(fmt.dtype),
            np.array([-0.0, 0.0], np.float32).astype(fmt.dtype),
        )
        expected = oracle.arithmetic(operation, inputs, fmt)
        run.record(assert_same_bits(subject.perform(operation, *inputs), expected, inputs=inputs))

    return check


_SELECTING = {
    "minimum": "the minimum is NaN where an operand is, else the smaller value",
    "maximum": "the maximum is NaN where an operand is, else the larger value",
    "less": "a < b compares values, and NaN is below nothing",
    "less_equal": "a <= b compares values, and NaN is ordered with nothing",
    "equal": "a == b compares values: -0 equals +0, NaN equals nothing",
}

CLAIMS: tuple[Claim, ...] = (
    *(_row(operation, fmt, mode) for operation in _SYMBOLS for fmt in _WIDE for mode in _MODES),
    *(
        Claim(
            id=f"arithmetic.{operation}.every-pair.{fmt.name}",
            sentence=f"{_SYMBOLS[operation]} in {fmt.name} is the exact result rounded once, for all 65,536 pairs",
            source=fmt.source,
            agreement=Bits(),
            operation=operation,
            options={"format": fmt.name},
            check=_every_byte(operation, fmt),
            format=fmt.name,
            exhaustive=True,
        )
        for operation in ("add", "mul", "div")
        for fmt in _BYTES
    ),
    *(
        Claim(
            id=f"comparison.{operation}.{fmt.name}",
            sentence=f"in {fmt.name} {sentence}",
            source=f"{sources.IEEE_754}, 5.11 and 9.6",
            agreement=Bits(),
            operation=operation,
            options={"format": fmt.name},
            check=_drawn(operation, fmt, "nearest-even"),
            format=fmt.name,
        )
        for operation, sentence in _SELECTING.items()
        for fmt in _WIDE
    ),
    *(
        Claim(
            id=f"comparison.{operation}-zero.{fmt.name}",
            sentence=f"the {operation} of both zeros in {fmt.name} is {sign}0, in either order",
            source=f"{sources.IEEE_754}, 9.6",
            agreement=Bits(),
            operation=operation,
            options={"format": fmt.name},
            check=_zeros(operation, fmt),
            format=fmt.name,
            exhaustive=True,
        )
        for operation, sign in (("minimum", "-"), ("maximum", "+"))
        for fmt in _WIDE
    ),
    *(
        Claim(
            id=f"flags.{operation}.{fmt.name}",
            sentence=f"{_SYMBOLS[operation]} in {fmt.name} raises the exception flags that the exact result calls for, "
            "in every rounding of IEEE 754",
            source=f"{sources.IEEE_754}, 7",
            agreement=Bits(),
            operation="flags",
            options={"format": fmt.name, "of": operation},
            check=_flags(operation, fmt),
            format=fmt.name,
        )
        for operation in _SYMBOLS
        for fmt in (FORMATS["fp16"], FORMATS["fp32"])
    ),
)
