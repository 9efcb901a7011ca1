"""Running a grid: cells in parallel processes, each finished one kept at once, so that nothing done is done again."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import queue
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mp_reference.lab.cells import Row, run_cell, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from mp_reference.lab.experiment import Cell, Experiment

__all__ = ["RESULTS", "read_rows", "run_grid"]

RESULTS = "results.jsonl"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_steps: Any = None  # in a worker: the queue that counts steps for the progress bar


def run_grid(
    experiment: Experiment, folder: Path, workers: int = 1, progress: Callable[[int], None] = lambda _: None
) -> list[Row]:
    """Run every cell that has no result yet.

    Args:
        experiment: what to run.
        folder: where ``results.jsonl`` is, or will be; one line a finished cell, written as soon as it is done.
        workers: processes; 1 runs in this one.
        progress: called with numbers of steps, those of cells found finished included.

    Returns:
        The rows of all cells of the experiment, in its order.

    Raises:
        ValueError: ``workers`` is below 1.

    Source: none.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1; 1 runs in this process")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS
    _mend(path)
    rows = {row["key"]: row for row in read_rows(path)}
    left = []
    for cell in experiment.cells:
        if cell.key in rows:
            progress(steps_of(cell))
        else:
            left.append(cell)
    for row in _here(left, progress) if workers == 1 else _in_processes(left, workers, progress):
        _append(path, row)
        rows[row["key"]] = row
    return [rows[cell.key] for cell in experiment.cells]


def _here(cells: Sequence[Cell], progress: Callable[[int], None]) -> Iterator[Row]:
    for cell in cells:
        yield run_cell(cell, progress)


def _in_processes(cells: Sequence[Cell], workers: int, progress: Callable[[int], None]) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    steps = context.Queue()
    others = set(multiprocessing.active_children())
    with _one_thread_each():
        pool = ProcessPoolExecutor(min(workers, max(len(cells), 1)), context, initializer=_start, initargs=(steps,))
        waiting: set[Future[Row]] = {pool.submit(_work, cell) for cell in cells}
    started = set(multiprocessing.active_children()) - others
    try:
        while waiting:
            done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            _drain(steps, progress)
            for one in done:
                yield one.result()
        _drain(steps, progress)
    finally:
        if waiting:  # an interrupt loses the cells under way, not those that are done
            for process in started:
                process.terminate()
        pool.shutdown(cancel_futures=True)
        steps.close()
        steps.cancel_join_thread()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started inside compute with one thread: two in each of two processes are slower than one."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start(steps: Any) -> None:
    """Remember the queue, in a new process; an interrupt at the terminal ends it without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    global _steps  # noqa: PLW0603  # an initializer has no other way to hand it to the work
    _steps = steps


def _work(cell: Cell) -> Row:
    return run_cell(cell, _steps.put)


def _drain(steps: Any, progress: Callable[[int], None]) -> None:
    while True:
        try:
            progress(steps.get_nowait())
        except queue.Empty:
            return


def _mend(path: Path) -> None:
    """Remove a last line that an interrupt cut short, before anything is written after it."""
    if path.exists():
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)


def _append(path: Path, row: Row) -> None:
    """One line, on the disk before the next cell is begun."""
    with path.open("a") as file:
        file.write(json.dumps(_plain(row), sort_keys=True, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """The finished cells of a results file; a last line that is not whole is left out, and the file left alone.

    Args:
        path: ``results.jsonl``; need not exist.

    Returns:
        One row a line.

    Raises:
        ValueError: a line before the last that is no JSON.

    Source: none.
    """
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]  # a run that is going on may just be writing the rest
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            rows.append(_numbers(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}, is no JSON: {error}; remove the line to run its cell again"
            ) from error
    return rows


def _plain(value: Any) -> Any:
    """Infinities and NaN, which JSON lacks, as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _numbers(value: Any) -> Any:
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value
