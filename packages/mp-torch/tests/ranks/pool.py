"""Worker processes that are started once: a test sends them a function, each runs it as one rank of a fresh group."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import ModuleType

WORLD = 4  # workers; a job takes the first ``world`` of them
PRELOADED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint",
             "torch.distributed.pipelining", "mp_torch")  # fmt: skip


class RankFailedError(AssertionError):
    """What the ranks of a job raised, or which of them did not answer in time."""


class Pool:
    """``pool.run(job, world, *arguments)`` gives the list of what ``job(*arguments)`` returned on each rank.

    The process group is made for the job and destroyed after it, so one test cannot poison the next; where a job does
    not come back, or a group could not be made, all processes are killed and the next job gets new ones.
    """

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def run(self, job: Callable[..., Any], world: int, *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """Run a function of a test module on ``world`` ranks at once."""
        answers = self.answers(job, world, *arguments, timeout=timeout)
        failures = [f"rank {rank}:\n{answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if failures:
            raise RankFailedError("\n".join(failures))
        return [answer for _, answer in answers]

    def answers(self, job: Callable[..., Any], world: int, *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """Like ``run``, but ``(True, result)`` or ``(False, traceback)`` of each rank."""
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank, end in enumerate(self._ends[:world]):
                store = self._store(folder, rank)
                end.send((job.__code__.co_filename, job.__name__, store, rank, world, arguments, timeout))
            deadline = time.monotonic() + timeout
            waiting = [end.poll(max(deadline - time.monotonic(), 0)) for end in self._ends[:world]]
            if not all(waiting):
                self.close(kill=True)
                late = [rank for rank, came in enumerate(waiting) if not came]
                raise RankFailedError(f"ranks {late} did not answer within {timeout} s")
            answers = [received(end) for end in self._ends[:world]]
        if not all(stays for *_, stays in answers):
            self.close(kill=True)
        return [(good, answer) for good, answer, _ in answers]

    def _store(self, folder: str, rank: int) -> str:
        """Where a rank looks for the others: the same file for all."""
        del rank
        return f"file://{folder}/store"

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.close(kill=True)
        for _ in range(WORLD):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)
        for end in self._ends:
            assert end.poll(120), "a worker did not start"
            end.recv()

    def close(self, *, kill: bool = False) -> None:
        """Let the workers go; those that do not, are killed. One that leaves by itself says what it covered."""
        for end in self._ends:
            with contextlib.suppress(OSError):  # a dead one hears nothing
                end.send(None)
        for process, end in zip(self._processes, self._ends, strict=True):
            process.join(3 if kill else 20)
            if process.is_alive():
                process.kill()
                process.join()
            end.close()
        self._processes, self._ends = [], []


def received(end: Connection) -> tuple[bool, Any, bool]:
    """Whether a worker's job was done, what it says of it, and whether it can do another; or that it died."""
    try:
        answer: tuple[bool, Any, bool] = end.recv()
    except EOFError:
        return False, "the process died", False
    return answer


def work(end: Connection) -> None:
    """The life of a worker: import once, then one job after another."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # a linear of a 3-d input does
    for name in PRELOADED:
        importlib.import_module(name)
    modules: dict[str, ModuleType] = {}
    end.send("ready")
    while (message := end.recv()) is not None:
        path, name, store, rank, world, arguments, timeout = message
        faulthandler.dump_traceback_later(max(timeout - 2, 1), file=sys.__stderr__)
        grouped = False
        try:
            if path not in modules:
                modules[path] = load(path)
            make_group(store, rank, world, timeout)
            grouped = True
            end.send((True, one_job(getattr(modules[path], name), arguments), True))
        except BaseException:  # whatever it is, the test must see it
            end.send((False, traceback.format_exc(), grouped))
        faulthandler.cancel_dump_traceback_later()


def make_group(store: str, rank: int, world: int, timeout: float) -> None:
    """Meet the other ranks, and leave together: one that failed at once would cut off a slower one's connection.

    A process in which this failed is of no more use: torch counts the groups that it tried to make, and would look for
    the next one under another number than the others.
    """
    from datetime import timedelta

    from torch import distributed

    wait = timedelta(seconds=max(timeout - 5, 1))
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=wait)
    distributed.barrier()


def one_job(job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run, then destroy the group."""
    import torch
    from torch import distributed

    torch.manual_seed(0)
    try:
        return job(*arguments)
    finally:
        if distributed.is_initialized():  # a rank that raised the alarm has no group any more
            distributed.destroy_process_group()


def load(path: str) -> ModuleType:
    """A test module by its path, since tests are not installed."""
    name = f"job_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
