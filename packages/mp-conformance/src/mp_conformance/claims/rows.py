"""The shape of a claim: one sentence that can be false, where it comes from, and how closely the sides must agree."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hypothesis import HealthCheck, Phase, given, seed, settings

from mp_conformance.compare import Bits, Bound, Tally, Ulp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hypothesis.strategies import SearchStrategy

    from mp_conformance.implementations import Subject

__all__ = ["DEVICES", "Check", "Claim", "Run"]

ROUND = 200
"""Draws between two looks at the clock."""

PATIENCE = 10.0
"""Seconds after which a claim draws no further round where it is one of all in a deep run, which takes an hour."""

DEVICES = ("cpu", "cuda", "npu", "xpu", "mps")
"""Every device type that a claim may speak about."""


@dataclass
class Run:
    """What a check gets besides the subject: the budget, the seed, and where its evidence goes.

    Args:
        examples: how many inputs a drawn claim draws.
        seed: makes every draw repeatable.
        deep: exhaustive claims widen from their default table to all 2**32 float32 inputs.
        shrink: whether a failing input is made small before it is shown.
        drawn: how many inputs were drawn.
        tally: what was compared.
        notes: what the report says about the evidence.
        remarks: what the summary says, too, although the claim is kept.

    >>> Run(examples=50).deep
    False
    """

    examples: int = 200
    seed: int = 0
    deep: bool = False
    shrink: bool = True
    drawn: int = 0
    tally: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def record(self, tally: Tally) -> None:
        """Count compared values in."""
        self.tally.add(tally)

    def draw(self, strategy: SearchStrategy[Any], check: Callable[[Any], Tally | None], share: int = 1) -> None:
        """Draw ``examples / share`` inputs and check each, in rounds; a deep run stops after ``PATIENCE`` seconds.

        Args:
            strategy: where the inputs come from.
            check: raises ``DisagreementError`` where the claim is false, else returns what it compared.
            share: how many draws the claim makes in all, so that their sum keeps to the budget.

        Raises:
            DisagreementError: for the smallest input found.
        """
        wanted, patience = max(1, -(-self.examples // share)), PATIENCE / share if self.deep else math.inf
        begun = time.monotonic()
        for start in range(0, wanted, ROUND):
            if start and time.monotonic() - begun > patience:
                self.notes.append(
                    f"{start:,} of {wanted:,} draws, then its {patience:g} s of a deep run were over; "
                    f"--max-examples {self.examples} without --deep draws all"
                )
                return
            self._draw_round(strategy, check, start=start, count=min(ROUND, wanted - start))

    def _draw_round(
        self, strategy: SearchStrategy[Any], check: Callable[[Any], Tally | None], *, start: int, count: int
    ) -> None:
        phases = (Phase.explicit, Phase.generate, Phase.shrink) if self.shrink else (Phase.explicit, Phase.generate)

        def body(value: Any) -> None:
            self.drawn += 1
            tally = check(value)
            if tally is not None:
                self.record(tally)

        quiet = settings(
            max_examples=count, database=None, deadline=None, phases=phases,
            suppress_health_check=list(HealthCheck), print_blob=False, report_multiple_bugs=False, derandomize=False,
        )  # fmt: skip
        seed(self.seed + start)(quiet(given(strategy)(body)))()


class Check(Protocol):
    """A claim's own test: asks the subject, compares, raises ``DisagreementError`` where the claim is false."""

    def __call__(self, subject: Subject, run: Run) -> None:
        """Ask ``subject`` and compare."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row: README's guarantees, the pytest ids and the report are all made from it.

    Args:
        id: dotted, from the general to the particular; ``--claims`` takes globs of it.
        sentence: what is claimed, so that it can be false.
        source: the document or the trace that fixes the expected value.
        agreement: ``Bits``, ``Ulp(n, reason)`` or ``Bound(derivation)``.
        operation: what the subject is asked for, see ``implementations.OPERATIONS``.
        options: the options it is asked with; a subject that cannot honour them is not asked.
        check: the test.
        format: the format it speaks about, the report's column.
        devices: the device types it speaks about.
        producers: the subjects it speaks about; empty means every one.
        exhaustive: whether it enumerates all inputs instead of drawing some.

    >>> from mp_conformance import select
    >>> select("format.fp16.facts")[0].family
    'format.facts'
    """

    id: str
    sentence: str
    source: str
    agreement: Bits | Ulp | Bound
    operation: str
    check: Check
    options: Mapping[str, Any] = field(default_factory=dict)
    format: str = "-"
    devices: tuple[str, ...] = DEVICES
    producers: tuple[str, ...] = ()
    exhaustive: bool = False

    @property
    def family(self) -> str:
        """The id without its format: the report's row."""
        return ".".join(part for part in self.id.split(".") if part != self.format)

    def concerns(self, subject: Subject) -> bool:
        """Whether the claim speaks about ``subject`` and the subject offers what it asks for."""
        if subject.device not in self.devices or (self.producers and subject.name not in self.producers):
            return False
        return subject.offers(self.operation, self.options)
