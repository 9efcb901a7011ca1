"""The engine on several ranks as a subject: one process each, started once and asked again and again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed

from mp_conformance.histories import StepTrace
from mp_conformance.implementations import NotOfferedError, NotReachedError
from mp_conformance.implementations.ranks.workers import workers
from mp_conformance.layouts import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mp_conformance.histories import History
    from mp_conformance.layouts import Layout

__all__ = ["BACKENDS", "RanksSubject", "whole"]

Array = np.ndarray[Any, np.dtype[Any]]
Traces = list[list[list[StepTrace]]]

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What ranks talk through, by the type of their devices."""


class RanksSubject:
    """``AmpEngine`` in every layout of ``mp_conformance.layouts``, a process a rank.

    Args:
        device: a type of ``BACKENDS``; rank r has the r-th device.
    """

    name = "ranks"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device.split(":")[0]

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Training on ranks; whether this machine can is said when it is asked for."""
        del options
        return operation == "ranks" and self.device in BACKENDS

    def perform(self, operation: str, *operands: Any, **options: Any) -> Traces:
        """For every rank, for every history, what each step left behind.

        Raises:
            NotOfferedError: this torch has no such backend.
            NotReachedError: this machine has too few devices.
        """
        if operation != "ranks":
            raise NotOfferedError(f"ranks have no {operation}")
        layout, histories = LAYOUTS[options["layout"]], list(operands[0])
        self._require(layout)
        parts = workers().train(layout, self.device, BACKENDS[self.device], histories)
        return [
            [
                [whole(layout, history, rank, [one[place][step] for one in parts])
                 for step in range(len(history.windows))]
                for place, history in enumerate(histories)
            ]
            for rank in range(layout.world)
        ]  # fmt: skip

    def _require(self, layout: Layout) -> None:
        backend = BACKENDS[self.device]
        if not (distributed.is_available() and getattr(distributed, f"is_{backend}_available")()):
            raise NotOfferedError(f"this torch was built without torch.distributed's {backend}, so it has no ranks")
        found = layout.world if self.device == "cpu" else getattr(torch, self.device).device_count()
        if found < layout.world:
            raise NotReachedError(f"{layout.name} needs {layout.world} {self.device} devices, this machine has {found}")


def whole(layout: Layout, history: History, rank: int, parts: Sequence[StepTrace]) -> StepTrace:
    """What a rank knows after a step, its parts of the parameters put together with those of the others.

    Args:
        layout: who holds what.
        history: whose parameters tell the shapes.
        rank: whose report, scale and copies are shown.
        parts: what each rank left behind, of the parameters that it trains.

    Returns:
        An entry whose arrays are whole and flat.

    Source: this project.
    """
    places = range(len(history.parameters))
    where = [{place: index for index, place in enumerate(layout.trains(one, len(places)))} for one in range(len(parts))]
    order = [one for one in range(len(parts)) if one != rank] + [rank]

    def joined(place: int, arrays: Mapping[int, Array]) -> Array:
        shape = history.parameters[place].shape
        together = np.zeros(shape, next(iter(arrays.values())).dtype)
        for one in (one for one in order if one in arrays):
            together[layout.held(one, place, shape)] = arrays[one]
        return together.reshape(-1)

    def of_all(field: str, place: int) -> dict[int, Any]:
        holders = (one for one in range(len(parts)) if place in where[one])
        return {one: getattr(parts[one], field)[where[one][place]] for one in holders}

    slots = []
    for place in places:
        kept = of_all("slots", place)
        names = {name for one in kept.values() for name in one}
        slots.append({
            name: joined(place, {one: held[name] for one, held in kept.items() if name in held}) for name in names
        })  # fmt: skip
    return replace(
        parts[rank],
        parameters=tuple(joined(place, of_all("parameters", place)) for place in places),
        masters=tuple(joined(place, of_all("masters", place)) for place in places),
        slots=tuple(slots),
    )
