"""Every claim, as rows; one file per subject area, each with a tuple ``CLAIMS``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module

from mp_conformance.claims.rows import DEVICES, Claim, Run

__all__ = ["DEVICES", "Claim", "Run", "UnknownClaimError", "areas", "registered", "select"]

_AREAS: tuple[str, ...] = (
    "formats",
    "casts",
    "arithmetic",
    "loss_scale",
    "training",
    "ranks",
    "elementary",
    "producers",
    "reductions",
    "stochastic",
    "vectors",
    "op_rules",
    "emulation",
    "two_trainings",
    "op_gradients",
    "saturation",
)


class UnknownClaimError(ValueError):
    """A pattern names no claim."""


def areas() -> tuple[str, ...]:
    """The subject areas, in the order in which the report shows them.

    Source: this project.

    >>> areas()[0]
    'formats'
    """
    return _AREAS


@cache
def registered() -> tuple[Claim, ...]:
    """Every claim of every area, in order.

    Raises:
        ValueError: two claims have one id.

    Source: the files of this package.

    >>> len({claim.id for claim in registered()}) == len(registered())
    True
    """
    rows = tuple(row for area in _AREAS for row in import_module(f"{__name__}.{area}").CLAIMS)
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise ValueError(f"claim id {row.id!r} is taken twice; an id names one sentence, so choose another")
        seen.add(row.id)
    return rows


def select(pattern: str) -> tuple[Claim, ...]:
    """The claims whose id matches a glob, or any of several separated by commas.

    Args:
        pattern: such as ``cast.*`` or ``cast.*.fp16,arithmetic.*``.

    Returns:
        Matching rows in order.

    Raises:
        UnknownClaimError: a glob matches nothing; the message lists the families that exist.

    Source: this project.

    >>> [claim.id for claim in select("format.fp16.*")][:1]
    ['format.fp16.facts']
    """
    globs = [glob.strip() for glob in pattern.split(",") if glob.strip()]
    for glob in globs or [pattern]:
        if not any(fnmatchcase(row.id, glob) for row in registered()):
            heads = sorted({row.id.split(".", 1)[0] for row in registered()})
            raise UnknownClaimError(
                f"no claim matches {glob!r}; ids begin with one of {', '.join(heads)}, and "
                "`mp-conformance list` prints them all"
            )
    return tuple(row for row in registered() if any(fnmatchcase(row.id, glob) for glob in globs))
