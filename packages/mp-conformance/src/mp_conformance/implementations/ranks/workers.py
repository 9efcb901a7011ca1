"""Worker processes, one a rank: started at the first question, asked again and again, gone with the process."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import tempfile
import time
import traceback
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from mp_conformance.histories import History, StepTrace
    from mp_conformance.layouts import Layout

__all__ = ["RankError", "Workers", "workers"]

_WORLD = 4
_PRELOADED = ["mp_conformance.implementations.ranks.training"]


class RankError(RuntimeError):
    """A rank raised, died, or did not answer in time; the message has every rank's words."""


class Workers:
    """Four processes that each run one rank of a layout.

    Every question makes a process group of its own, so that what one layout leaves behind cannot reach the next.
    After a failure all processes are ended, and the next question starts new ones.

    Args:
        start: how long the processes may take to start, in seconds.
    """

    def __init__(self, start: float = 120.0) -> None:
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            self._context.set_forkserver_preload(_PRELOADED)  # torch is imported once, not once a rank
        self._start = start
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def train(
        self, layout: Layout, device: str, backend: str, histories: Sequence[History], seconds: float | None = None
    ) -> list[list[list[StepTrace]]]:
        """Run histories on the ranks of a layout.

        Args:
            layout: which uses the first of the processes.
            device: type of the devices.
            backend: what the ranks talk through.
            histories: all of them in one go.
            seconds: how long that may take; two minutes and a second a window unless given.

        Returns:
            For every rank, for every history, what each step left behind, of what the rank holds.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        limit = 120.0 + sum(len(history.windows) for history in histories) if seconds is None else seconds
        try:
            self._require_alive()
            with tempfile.TemporaryDirectory() as folder:
                store = (Path(folder) / "store").as_uri()
                for rank in range(layout.world):
                    self._ends[rank].send((layout.name, rank, device, backend, store, list(histories)))
                return self._answers(layout.world, limit)
        except BaseException:  # also the one that ends a claim whose time is over
            self.close(kill=True)
            raise

    def _answers(self, world: int, limit: float) -> list[list[list[StepTrace]]]:
        deadline = time.monotonic() + limit
        answers: dict[int, Any] = {}
        while len(answers) < world:
            waiting = {rank: self._ends[rank] for rank in range(world) if rank not in answers}
            ready = wait(list(waiting.values()), 0.2)
            answers |= {rank: self._answer(rank) for rank, end in waiting.items() if end in ready}
            if time.monotonic() > deadline and len(answers) < world:
                late = sorted(set(range(world)) - set(answers))
                raise RankError(f"ranks {late} of {world} did not answer within {limit:g} s")
        return [answers[rank] for rank in range(world)]

    def _answer(self, rank: int) -> Any:
        try:
            good, answer = self._ends[rank].recv()
        except EOFError:
            good, answer = False, "the process died"
        if not good:
            raise RankError(f"rank {rank}: {answer}")
        return answer

    def _require_alive(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.close(kill=True)
        for _ in range(_WORLD):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)
        deadline = time.monotonic() + self._start
        for end in self._ends:
            if not end.poll(max(deadline - time.monotonic(), 0.0)):
                raise RankError(f"the processes of the ranks did not start within {self._start:g} s")
            end.recv()

    def close(self, *, kill: bool = False) -> None:
        """Let the processes go; those that do not, are ended.

        Args:
            kill: do not wait for what they are doing.
        """
        for process, end in zip(self._processes, self._ends, strict=True):
            if kill:
                process.kill()
            else:
                end.send(None)
        for process, end in zip(self._processes, self._ends, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            end.close()
        self._processes, self._ends = [], []


@cache
def workers() -> Workers:
    """The workers of this process, which leave with it."""
    made = Workers()
    atexit.register(made.close)
    return made


def _work(end: Connection) -> None:
    """The life of a worker: import once, then one question after another."""
    from mp_conformance.implementations.ranks.training import train

    logging.getLogger("mp_torch").setLevel(logging.ERROR)  # every skip is drawn on purpose
    end.send("ready")
    while (question := end.recv()) is not None:
        try:
            end.send((True, train(*question)))
        except BaseException:  # whatever it is, the claim must say it
            end.send((False, traceback.format_exc()))
