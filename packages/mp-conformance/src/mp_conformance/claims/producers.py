"""Claims about what each library's casts do where the format leaves it open: the rows of ``spec.casts``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from mp_conformance import values
from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Tally, assert_same_bits
from mp_reference.numerics.casting import cast_as
from mp_reference.spec.casts import CASTS
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject
    from mp_reference.spec.casts import CastRule

__all__ = ["CLAIMS"]

Array = np.ndarray[Any, np.dtype[Any]]

_SUBJECTS = {"numpy": "ml_dtypes", "ml_dtypes": "ml_dtypes", "torch-cpu": "torch"}


def _as_declared(row: CastRule) -> Check:
    fmt = FORMATS[row.target]
    anything = st.one_of(
        values.floats_near(fmt, np.float32), values.floats_near(fmt, np.float64), values.integers_near(fmt)
    )

    def check(subject: Subject, run: Run) -> None:
        def one(x: Array) -> Tally:
            actual = subject.perform("cast", x, to=fmt.name, source=x.dtype.name)
            return assert_same_bits(actual, cast_as(x, fmt, row.producer), inputs=(x,))

        run.draw(anything, one)

    return check


CLAIMS: tuple[Claim, ...] = tuple(
    Claim(
        id=f"producer.{row.producer}.{row.target}",
        sentence=f"{row.producer} casts to {row.target} as its row of spec.casts says: NaN, infinity, overflow, zero, "
        "and once or twice rounded from float64 and integers",
        source=row.source,
        agreement=Bits(),
        operation="cast",
        options={"to": row.target},
        check=_as_declared(row),
        format=row.target,
        devices=("cpu",),
        producers=(_SUBJECTS[row.producer],),
    )
    for row in CASTS
    if row.producer in _SUBJECTS
)
