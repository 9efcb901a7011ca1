"""The engine on several ranks as a subject: one process each, talking through gloo."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.spawn import start_processes

from mp_conformance.implementations import NotOfferedError
from mp_conformance.implementations.engine import training_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mp_conformance.histories import History, StepTrace

__all__ = ["ReplicaSubject"]

WORLD = 2


class ReplicaSubject:
    """``AmpEngine.replicate()`` on two ranks; micro-step r of every window goes to rank r."""

    name = "replicas"
    device = "cpu"

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Training on ranks, where torch was built with gloo."""
        del options
        return operation == "ranks" and torch.distributed.is_available() and torch.distributed.is_gloo_available()

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """For every rank, for every history, what each step left behind."""
        del options
        if operation != "ranks":
            raise NotOfferedError(f"replicas have no {operation}")
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            torch.save(list(operands[0]), place / "histories")
            launch: Any = start_processes
            launch(_work, args=(str(place),), nprocs=WORLD, join=True, daemon=True, start_method="spawn")
            return [torch.load(place / f"rank{rank}", weights_only=False) for rank in range(WORLD)]


def _work(rank: int, folder: str) -> None:
    """One rank: every history, then the traces into a file."""
    torch.set_num_threads(1)
    logging.getLogger("mp_torch").setLevel(logging.ERROR)  # every skip is drawn on purpose
    place = Path(folder)
    meeting = f"file://{place / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    try:
        histories: Sequence[History] = torch.load(place / "histories", weights_only=False)
        torch.save([_train(history, rank) for history in histories], place / f"rank{rank}")
    finally:
        torch.distributed.destroy_process_group()


def _train(history: History, rank: int) -> list[StepTrace]:
    training = training_of(history, "cpu", accumulate=1)
    model = training.engine.replicate()
    trace = []
    for window in history.windows:
        with training.engine.autocast():
            loss = model(window[rank])
        training.engine.backward(loss)
        trace.append(training.entry(training.engine.step()))
    return trace
