"""Scratch memory of the chunked kernels, kept by each thread so that a call need not ask the system for pages."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CHUNK", "Workspace", "borrowed"]

CHUNK = 32768
"""Elements a chunk: six buffers of them fit the second-level cache, and a ufunc call costs little against them."""


class Workspace:
    """The scratch buffers of one call, each ``size`` elements; pages that no kernel touches cost nothing."""

    __slots__ = ("carried", "index", "mask", "power", "scale", "scaled", "second_mask")

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self.power, self.scale, self.scaled, self.carried = (np.empty(size, dtype) for _ in range(4))
        self.mask, self.second_mask = np.empty(size, np.bool_), np.empty(size, np.bool_)
        self.index = np.empty(size, np.intp)

    def first(self, size: int) -> Workspace:
        """The same buffers cut to ``size`` elements."""
        if size == self.mask.size:
            return self
        part = object.__new__(Workspace)
        for name in self.__slots__:
            setattr(part, name, getattr(self, name)[:size])
        return part


class _Idle(threading.local):
    """The workspaces that no call of this thread is using; what they hold is of no meaning."""

    def __init__(self) -> None:
        self.of: dict[Any, list[Workspace]] = {}


_idle = _Idle()


@contextmanager
def borrowed(dtype: Any) -> Iterator[Workspace]:
    """A workspace of ``CHUNK`` elements, given back afterwards; calls inside calls get one of their own.

    Args:
        dtype: float32 or float64.

    Yields:
        The workspace, its contents undefined.

    Source: this module.

    >>> with borrowed(np.float32) as first, borrowed(np.float32) as second:
    ...     first is second
    False
    """
    dtype = np.dtype(dtype)
    idle = _idle.of.setdefault(dtype, [])
    work = idle.pop() if idle else Workspace(CHUNK, dtype)
    try:
        yield work
    finally:
        idle.append(work)
