"""The shape of a seeded fault: the reference with one thing done wrong, and the claim that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_conformance.implementations.reference import ReferenceSubject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Mutant", "MutantSubject"]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One seeded fault.

    Args:
        id: area and fault.
        sentence: what is done wrong.
        operation: the operation that does it.
        fault: called like ``perform`` without the operation's name.
        caught_by: the id of the claim that must find it.
    """

    id: str
    sentence: str
    operation: str
    fault: Callable[..., Any]
    caught_by: str


_NOT_OF_THE_REFERENCE = ("ranks", "op_rules", "fused_updates")


class MutantSubject:
    """A faithful reference, but for one operation.

    Args:
        mutant: the fault.
    """

    name = "mutant"
    device = "cpu"

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self._honest = ReferenceSubject()

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """The faulty operation alone, also one that the reference lacks."""
        faulty = operation == self.mutant.operation
        return faulty and (operation in _NOT_OF_THE_REFERENCE or self._honest.offers(operation, options))

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it wrong."""
        if operation != self.mutant.operation:
            return self._honest.perform(operation, *operands, **options)
        if operation != "facts":
            options.pop("format", None)
        return self.mutant.fault(*operands, **options)
