"""Names that a caller got almost right."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["meant"]


def meant(asked: object, known: Iterable[str]) -> str:
    """The known name that an unknown one resembles, for an error message.

    Args:
        asked: what was asked for.
        known: the names that exist.

    Returns:
        `` (did you mean 'hopper'?)``, or nothing where none is near.

    Source: Ratcliff and Metzener, Pattern matching: the gestalt approach, Dr. Dobb's Journal (1988).

    >>> meant("Hoper", ["ampere", "hopper"])
    " (did you mean 'hopper'?)"
    """
    near = get_close_matches(str(asked).lower(), list(known), n=1, cutoff=0.7)
    return f" (did you mean {near[0]!r}?)" if near else ""
