"""Claims about ``mp_torch.emulate``: another device's op rules and arithmetic on CPU tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from mp_conformance import oracle
from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Bound, DisagreementError, Tally, assert_same_bits, assert_within_bound
from mp_conformance.values import operands
from mp_reference.numerics import exact
from mp_reference.spec.formats import BF16, FP16, FloatFormat

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject

__all__ = ["CLAIMS", "assert_same_results"]

Array = np.ndarray[Any, np.dtype[Any]]

_DISPATCHER = "ATen's C++ autocast kernels for CUDA (aten/src/ATen/autocast_mode.cpp), run on CUDA tensors"
_OTHER_FORMULA = ("aten::prod ", "aten::prod.dim_int ", "aten::renorm ")
_OTHER_FORMULA_UNITS = 4


def assert_same_results(name: str, actual: list[Array] | str, expected: list[Array] | str) -> Tally:
    """One call gave the same results and gradients, dtype by dtype and bit by bit, or was refused on both sides.

    Args:
        name: the call, as ``autocast_cases.call_all`` names it.
        actual: the emulation's arrays, or the name of its exception.
        expected: the dispatcher's.

    Returns:
        The count of compared values.

    Raises:
        DisagreementError: naming the call and the array.

    Source: this project.
    """
    tally = Tally()
    if isinstance(actual, str) or isinstance(expected, str):
        if actual != expected:
            raise DisagreementError(f"{name}: {actual!r:.200}, expected {expected!r:.200}")
        return tally
    if [x.dtype for x in actual] != [x.dtype for x in expected]:
        raise DisagreementError(
            f"{name}: dtypes {[x.dtype.name for x in actual]}, expected {[x.dtype.name for x in expected]}"
        )
    for place, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        try:
            if place and name.startswith(_OTHER_FORMULA):
                unit = np.spacing(np.abs(wanted).max())
                tally.add(assert_within_bound(got, wanted, np.full(wanted.shape, _OTHER_FORMULA_UNITS * unit)))
            else:
                tally.add(assert_same_bits(got, wanted))
        except DisagreementError as difference:
            raise DisagreementError(f"{name}, array {place}: {difference}") from None
    return tally


def _calls(fmt: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        from mp_conformance.implementations.emulation import real_dispatcher

        expected = real_dispatcher(fmt)["calls"]
        found = subject.perform("autocast_calls", fmt=fmt)
        if found.keys() != expected.keys():
            raise DisagreementError(f"calls {sorted(found.keys() ^ expected.keys())} were made on one side only")
        for name, results in expected.items():
            run.drawn += 1
            run.record(assert_same_results(name, found[name], results))

    return check


def _training(kind: str, fmt: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        from mp_conformance.implementations.emulation import real_dispatcher

        expected = real_dispatcher(fmt)[kind]
        run.drawn += 1
        run.record(assert_same_results(kind, subject.perform("autocast_training", kind=kind, fmt=fmt), expected))

    return check


def _exact_product(fmt: FloatFormat) -> Check:
    strategy = st.tuples(operands(fmt, 2, 12), operands(fmt, 1, 4))

    def one(subject: Subject, drawn: tuple[tuple[Array, ...], tuple[Array, ...]]) -> Tally:
        (a, b), (c,) = drawn
        left, right, addend = a.reshape(2, 6), b.reshape(6, 2), c.reshape(2, 2)
        found = subject.perform("emulated_product", left, right, addend, arithmetic="exact")
        rows, columns, starts = (oracle.values_of(x) for x in (left.ravel(), right.T.ravel(), addend.ravel()))
        sums = [
            exact.dot(rows[6 * i : 6 * i + 6], columns[6 * j : 6 * j + 6], starts[2 * i + j])
            for i in range(2)
            for j in range(2)
        ]
        values = [exact.round_exact(total, fmt) if total else 0.0 for total in sums]  # an exact zero is +0
        return assert_same_bits(found, oracle.encode(values, fmt).reshape(2, 2), inputs=(left, right, addend))

    def check(subject: Subject, run: Run) -> None:
        run.draw(strategy, lambda drawn: one(subject, drawn))

    return check


CLAIMS = (
    *(
        Claim(
            id=f"emulation.calls.cuda.{fmt.name}",
            sentence=f"every op with a CUDA rule, called on CPU tensors under emulate and {fmt.name} autocast, gives "
            "the dtypes and bits, forward and backward, that the CUDA dispatcher gives on CUDA tensors",
            source=_DISPATCHER,
            agreement=Bound(
                f"bits; only gradients of prod and renorm may differ by {_OTHER_FORMULA_UNITS} ulp of their largest "
                "element: autograd differentiates them by another formula for a tensor subclass, and each of the two "
                "rounds some four times"
            ),
            operation="autocast_calls",
            check=_calls(fmt.name),
            format=fmt.name,
            devices=("cpu",),
            exhaustive=True,
        )
        for fmt in (FP16, BF16)
    ),
    *(
        Claim(
            id=f"emulation.training.{kind}.{fmt.name}",
            sentence=f"ten {fmt.name} steps of {article} {kind} network with AdamW, clipping and loss scaling on CPU "
            "tensors under emulate end in the bits of the same steps on CUDA tensors",
            source=_DISPATCHER,
            agreement=Bits(),
            operation="autocast_training",
            check=_training(kind, fmt.name),
            format=fmt.name,
            devices=("cpu",),
            exhaustive=True,
        )
        for kind, article in (("mlp", "an"), ("transformer", "a"), ("recurrent", "a"))
        for fmt in (FP16, BF16)
    ),
    *(
        Claim(
            id=f"emulation.product.exact.{fmt.name}",
            sentence=f"a {fmt.name} product with an addend under arithmetic='exact' is the correctly rounded sum",
            source="the exact oracle on rationals; IEEE 754-2019, 9.4",
            agreement=Bits(),
            operation="emulated_product",
            check=_exact_product(fmt),
            format=fmt.name,
            devices=("cpu",),
        )
        for fmt in (FP16, BF16)
    ),
)  # fmt: skip
