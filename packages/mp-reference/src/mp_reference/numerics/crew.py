"""Threads that share the parts of one array: made when first asked for, kept with their scratch memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Part = TypeVar("Part")

__all__ = ["relay", "share"]


def share(parts: Sequence[Part], run: Callable[[Iterator[Part]], None], threads: int) -> None:
    """Deal parts out to the calling thread and to helpers, each taking the next when it is done with one.

    A helper that has not begun when nothing is left is not waited for.

    Args:
        parts: what is to be done, in any order.
        run: what does it; called once a thread with one iterator that all of them share.
        threads: how many, the calling one among them.

    Source: this module.

    >>> done = []
    >>> share(range(5), done.extend, 2)
    >>> sorted(done)
    [0, 1, 2, 3, 4]
    """
    rest = iter(parts)
    helpers = min(threads, len(parts)) - 1
    others = [_pool(threads - 1, os.getpid()).submit(run, rest) for _ in range(helpers)]
    try:
        run(rest)
    finally:
        for other in others:
            if not other.cancel():
                other.result()


def relay(parts: Sequence[Part], prepare: Callable[[Part], None], finish: Callable[[Part], None], threads: int) -> None:
    """Finish parts one after the other on the calling thread, while helpers prepare those to come.

    For work in many short steps, which threads cannot do at once, behind one long step, which they can. The calling
    thread prepares what no helper has begun, and waits for what one has.

    Args:
        parts: what is to be done; finished in this order.
        prepare: what comes before, for each part once.
        finish: what comes after it.
        threads: how many, the calling one among them.

    Source: this module.

    >>> done = []
    >>> relay(["a", "b"], lambda part: None, done.append, 2)
    >>> done
    ['a', 'b']
    """
    pool = _pool(threads - 1, os.getpid())
    prepared = [pool.submit(prepare, part) for part in parts]
    try:
        for part, begun in zip(parts, prepared, strict=True):
            if begun.cancel():
                prepare(part)
            else:
                begun.result()
            finish(part)
    finally:
        for running in [begun for begun in prepared if not begun.cancel()]:  # all cancelled before any is waited for
            running.exception()


@lru_cache(maxsize=8)
def _pool(helpers: int, process: int) -> ThreadPoolExecutor:
    """The helpers of this process; a forked child has none of its parent's and gets its own."""
    del process
    return ThreadPoolExecutor(helpers, thread_name_prefix="mp_reference")
