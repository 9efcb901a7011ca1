"""A file of golden vectors as a subject: it answers only what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance.implementations import NotOfferedError
from mp_conformance.vectors import names, read

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GoldenSubject"]


class GoldenSubject:
    """The package's vector files, as data that can be asked."""

    name = "vectors"
    device = "cpu"

    def __init__(self) -> None:
        self._held = set(names())

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Reading the files, and nothing computed."""
        return operation == "vectors" and options["name"] in self._held

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """(operands, results, flags) of one file; the given operands must be those of the file."""
        if operation != "vectors":
            raise NotOfferedError("golden vectors hold results, they compute none")
        held = read(options["name"])
        for given, kept in zip(operands, held.operands, strict=True):
            if not np.array_equal(given.view(np.uint8), kept.view(np.uint8)):
                raise NotOfferedError(f"{held.name} holds other operands")
        return held.results
