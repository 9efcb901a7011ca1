"""Claims about the golden files: what they hold is right, and every subject gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mp_conformance import oracle
from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Tally, assert_same_bits
from mp_conformance.vectors import described, names, read
from mp_reference.spec import sources
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject

__all__ = ["CLAIMS"]


def _gives(name: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        held = read(name)
        options: dict[str, Any] = {} if held.rounding == "nearest-even" else {"rounding": held.rounding}
        if held.operation == "cast":
            options |= {"to": held.target}
        actual = subject.perform(held.operation, *held.operands, **options)
        run.record(assert_same_bits(actual, held.results, inputs=held.operands))

    return check


def _right(name: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        held, fmt = read(name), FORMATS[read(name).target]
        if held.operation == "cast":
            expected = oracle.cast(held.operands[0], fmt, held.rounding)
        else:
            expected = oracle.arithmetic(held.operation, held.operands, fmt, held.rounding)
        actual = subject.perform("vectors", *held.operands, name=name)
        run.record(assert_same_bits(actual, expected, inputs=held.operands))
        run.record(Tally())

    return check


def _asked(name: str) -> tuple[str, dict[str, Any]]:
    operation, _, target, rounding = described(name)
    options: dict[str, Any] = {} if rounding == "nearest-even" else {"rounding": rounding}
    if operation == "cast":
        return "cast", options | {"to": target, "source": "float32"}
    return operation, options | {"format": target}


CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            id=f"vectors.held.{name}",
            sentence=f"the golden file {name}.txt holds what the exact oracle gives",
            source=f"{sources.IEEE_754}, 5.4",
            agreement=Bits(),
            operation="vectors",
            options={"name": name},
            check=_right(name),
            format=described(name)[2],
            exhaustive=True,
        )
        for name in names()
    ),
    *(
        Claim(
            id=f"vectors.given.{name}",
            sentence=f"every line of the golden file {name}.txt comes out",
            source=f"mp_conformance/vectors/{name}.txt",
            agreement=Bits(),
            operation=_asked(name)[0],
            options=_asked(name)[1],
            check=_gives(name),
            format=described(name)[2],
            exhaustive=True,
        )
        for name in names()
    ),
)
