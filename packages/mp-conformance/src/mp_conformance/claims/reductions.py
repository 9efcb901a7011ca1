"""Claims about sums and matrix products: derived bounds, exact inputs, and declared accumulators bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from mp_conformance import oracle, values
from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Bound, Tally, assert_same_bits, assert_within_bound
from mp_reference.numerics import exact
from mp_reference.spec.formats import FORMATS, FP32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject
    from mp_reference.spec.formats import FloatFormat

__all__ = ["CLAIMS"]

Array = np.ndarray[Any, np.dtype[Any]]

_DERIVATION = (
    "n terms added in fp32 in any order: every term is rounded in at most n additions, so the error is at most "
    "g * sum|terms| with g = n u / (1 - n u), u = 2**-24; then half an ulp of the result's format, or half its "
    "smallest subnormal (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1 and 4.2)"
)
_LENGTHS = (1, 7, 64, 513, 2048)


@st.composite
def _problem(draw: st.DrawFn, fmt: FloatFormat) -> tuple[Array, Array]:
    """A (3 x n) and b (n x 2) of mixed magnitude and sign, cancelling pairs among them."""
    n = draw(st.sampled_from(_LENGTHS))
    rng = np.random.Generator(np.random.PCG64(draw(st.integers(0, 2**24 - 1))))
    spread = draw(st.sampled_from((0, 2, 5)))
    a, b = (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape) for shape in ((3, n), (n, 2)))
    if draw(st.booleans()) and n > 1:
        a[:, n // 2 :] = -a[:, : n - n // 2]
    return a.astype(np.float32).astype(fmt.dtype), b.astype(np.float32).astype(fmt.dtype)


def _bound(terms: int, magnitude: Array, result: Array, fmt: FloatFormat) -> Array:
    growth = terms * 2.0**-24 / (1 - terms * 2.0**-24)
    rounding = np.maximum(np.abs(result) * 2.0 ** -(fmt.mantissa_bits + 1), fmt.min_subnormal / 2)
    total = growth * magnitude
    return np.asarray(total + rounding + total * 2.0 ** -(fmt.mantissa_bits + 1))


def _product(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def one(problem: tuple[Array, Array]) -> Tally:
            a, b = (x.astype(np.float64) for x in problem)
            result = a @ b  # float64: its own error is 2**-29 of the bound
            bound = _bound(a.shape[1], np.abs(a) @ np.abs(b), result, fmt) * (1 + 2.0**-20)
            return assert_within_bound(subject.perform("matmul", *problem), result, bound, inputs=problem)

        run.draw(_problem(fmt), one)

    return check


def _sum(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def one(problem: tuple[Array, Array]) -> Tally:
            x = problem[0].reshape(-1)
            wide = x.astype(np.float64)
            result = np.asarray(wide.sum())
            bound = _bound(x.size, np.abs(wide).sum(), result, fmt) * (1 + 2.0**-20)
            return assert_within_bound(subject.perform("sum", x), result, np.asarray(bound), inputs=(x,))

        run.draw(_problem(fmt), one)

    return check


@st.composite
def _whole(draw: st.DrawFn, fmt: FloatFormat) -> tuple[Array, Array]:
    """Small integers whose every partial sum, in any order, has at most 8 significant bits."""
    n = draw(st.integers(1, 60))
    rng = np.random.Generator(np.random.PCG64(draw(st.integers(0, 2**24 - 1))))
    a, b = (rng.integers(-2, 3, shape).astype(np.float32).astype(fmt.dtype) for shape in ((3, n), (n, 2)))
    return a, b


def _order_free(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def one(problem: tuple[Array, Array]) -> Tally:
            a, b = (x.astype(np.int64) for x in problem)
            expected = oracle.encode([float(v) for v in (a @ b).reshape(-1)], fmt).reshape(3, 2)
            actual = subject.perform("matmul", *problem) + np.zeros(1, fmt.dtype)  # the sign of a zero sum is open
            return assert_same_bits(actual, expected, inputs=problem)

        run.draw(_whole(fmt), one)

    return check


def _sequential(fmt: FloatFormat, fused: bool) -> Check:
    """Term after term, every step rounded to the format by the exact oracle."""

    def row_of(a: list[float], b: list[float]) -> float:
        total = 0.0
        for x, y in zip(a, b, strict=True):
            if fused:
                total = exact.round_exact(exact.fma(x, y, total), fmt)
            else:
                total = exact.round_exact(exact.add(total, exact.round_exact(exact.mul(x, y), fmt)), fmt)
        return total

    def check(subject: Subject, run: Run) -> None:
        from mp_reference.spec.accumulators import sequential

        def one(operands: tuple[Array, Array]) -> Tally:
            a, b = operands[0].reshape(2, 8), operands[1].reshape(8, 2)
            expected = [
                row_of(oracle.values_of(a[i]), oracle.values_of(np.ascontiguousarray(b[:, j])))
                for i in range(2) for j in range(2)
            ]  # fmt: skip
            actual = subject.perform("emulated_matmul", a, b, accumulator=sequential(fmt, fused=fused))
            return assert_same_bits(actual, oracle.encode(expected, fmt).reshape(2, 2), inputs=(a, b))

        for operands in _middles(fmt):
            run.record(one(operands))
        run.draw(values.operands(fmt, 2, size=16), one)

    return check


def _middles(fmt: FloatFormat) -> Iterator[tuple[Array, Array]]:
    """After the smallest number of either sign, a product in the middle of two others: the sum is beside the middle."""
    for odd in (1, 3):
        a, b = np.zeros((2, 8)), np.zeros((8, 2))
        a[:, 0], a[:, 1] = (fmt.min_subnormal, -fmt.min_subnormal), 2.0**fmt.mantissa_bits + odd
        b[0], b[1] = 1, 3
        yield a.astype(fmt.dtype), b.astype(fmt.dtype)


def _norm(subject: Subject, run: Run) -> None:
    from mp_reference.numerics.reductions import norm
    from mp_reference.spec.accumulators import lanes

    def one(x: Array) -> Tally:
        return assert_same_bits(subject.perform("norm", x), np.asarray(norm(x, lanes())), inputs=(x,))

    strategy = st.tuples(st.integers(1, 200), st.integers(0, 2**24 - 1)).map(
        lambda p: np.random.Generator(np.random.PCG64(p[1])).standard_normal(p[0]).astype(np.float32)
    )
    run.draw(strategy, one)


_FORMATS = tuple(FORMATS[name] for name in ("fp16", "bf16", "fp32"))

CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            id=f"{name}.bound.{fmt.name}",
            sentence=f"{what} of {fmt.name} stays within the bound of fp32 accumulation in any order, rounded once",
            source="Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. (2002)",
            agreement=Bound(_DERIVATION),
            operation=operation,
            options={"format": fmt.name},
            check=check(fmt),
            format=fmt.name,
            producers=("torch", "reference", "jax"),
        )
        for name, what, operation, check in (
            ("sum", "a sum", "sum", _sum),
            ("matmul", "a matrix product", "matmul", _product),
        )
        for fmt in _FORMATS
    ),
    *(
        Claim(
            id=f"matmul.order-free.{fmt.name}",
            sentence=f"a matrix product of {fmt.name} whose partial sums are all representable is exact",
            source="no order of exact additions changes their sum",
            agreement=Bits(),
            operation="matmul",
            options={"format": fmt.name},
            check=_order_free(fmt),
            format=fmt.name,
            producers=("torch", "reference", "jax"),
        )
        for fmt in _FORMATS
    ),
    *(
        Claim(
            id=f"matmul.sequential{'-fused' if fused else ''}.{fmt.name}",
            sentence=f"the accumulator sequential({fmt.name}, fused={fused}) rounds every step to {fmt.name}",
            source="mp_reference.spec.accumulators.sequential",
            agreement=Bits(),
            operation="emulated_matmul",
            options={"format": fmt.name},
            check=_sequential(fmt, fused),
            format=fmt.name,
        )
        for fmt in (*_FORMATS[:2], FP32)
        for fused in (False, True)
    ),
    Claim(
        id="sum.norm-order.fp32",
        sentence="torch's vector norm adds eight lanes as spec.accumulators.lanes() says",
        source="mp_reference.spec.accumulators.lanes",
        agreement=Bits(),
        operation="norm",
        check=_norm,
        format="fp32",
        devices=("cpu",),
        producers=("torch",),
    ),
)
