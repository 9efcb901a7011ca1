"""Seeded faults: the suite's own test. Each is caught by a named claim, or the claim is worth nothing."""

from __future__ import annotations

from functools import cache

from mp_conformance.claims import registered
from mp_conformance.claims.rows import Run
from mp_conformance.mutants import numbers, others, policies, ranks, steps, updates
from mp_conformance.mutants.rows import Mutant, MutantSubject
from mp_conformance.runner import ask

__all__ = ["Mutant", "MutantSubject", "catch", "catchers", "seeded"]


@cache
def seeded() -> tuple[Mutant, ...]:
    """Every seeded fault, in order.

    Source: faults seen in the field, and their neighbours.

    >>> len(seeded()) >= 60
    True
    """
    return (
        *numbers.MUTANTS, *policies.MUTANTS, *updates.MUTANTS, *steps.MUTANTS, *ranks.MUTANTS, *others.MUTANTS,
    )  # fmt: skip


def catch(mutant: Mutant, examples: int = 200, seed: int = 0) -> str:
    """What the named claim says about a mutant.

    Args:
        mutant: the fault.
        examples: draws of the claim.
        seed: of the draws.

    Returns:
        The claim's complaint; empty where the mutant survives.

    Source: this project.
    """
    claim = next(row for row in registered() if row.id == mutant.caught_by)
    result = ask(claim, MutantSubject(mutant), Run(examples, seed, shrink=False))
    return result.message if result.status == "broken" else ""


def catchers(mutant: Mutant, examples: int = 200, seed: int = 0) -> list[str]:
    """The ids of all claims that find a mutant.

    Args:
        mutant: the fault.
        examples: draws of each claim.
        seed: of the draws.

    Returns:
        Ids in the order of the claims.

    Source: this project.
    """
    subject = MutantSubject(mutant)
    return [
        claim.id
        for claim in registered()
        if claim.concerns(subject) and ask(claim, subject, Run(examples, seed, shrink=False)).status == "broken"
    ]
