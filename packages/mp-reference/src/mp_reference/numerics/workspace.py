"""Scratch memory of the chunked kernels, kept by each thread so that a call need not ask the system for pages."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BUFFER_BYTES", "CHUNK", "Panels", "Workspace", "borrowed"]

CHUNK = 32768
"""Elements a chunk: six buffers of them fit the second-level cache, and a ufunc call costs little against them."""

BUFFER_BYTES = 3 * 2**16
"""Bytes of a buffer where a kernel seldom needs more than three: longer than CHUNK in float32, for fewer calls."""

_LINE = 64
"""Bytes of a cache line: a vector of a buffer that starts on one never lies across two, which halves the time of a
ufunc with three buffers."""


class Workspace:
    """The scratch buffers of one call, each ``size`` elements; pages that no kernel touches cost nothing."""

    __slots__ = ("carried", "index", "mask", "part", "power", "scale", "scaled", "second_mask", "wide")

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self.power, self.scale, self.scaled, self.carried = (_aligned(size, dtype) for _ in range(4))
        self.mask, self.second_mask = _aligned(size, np.dtype(np.bool_)), _aligned(size, np.dtype(np.bool_))
        self.wide = _aligned(size, np.dtype(np.float64))
        self.index = self.wide.view(np.intp)[:size]  # no kernel uses both
        self.part: Workspace | None = None

    def first(self, size: int) -> Workspace:
        """The same buffers cut to ``size`` elements; the last cut is kept, as calls of one size come in rows."""
        if size == self.mask.size:
            return self
        if self.part is None or self.part.mask.size != size:
            part = object.__new__(Workspace)
            for name in ("carried", "index", "mask", "power", "scale", "scaled", "second_mask", "wide"):
                setattr(part, name, getattr(self, name)[:size])
            part.part = None
            self.part = part
        return self.part


class Panels:
    """The scratch buffers of one product: a panel of each factor, the sums, and those over a further part of K."""

    __slots__ = ("left", "part", "right", "total")

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self.left, self.right, self.total, self.part = (_aligned(size, dtype) for _ in range(4))


def _aligned(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array that starts on a cache line."""
    memory = np.empty(size * dtype.itemsize + _LINE, np.uint8)
    start = -memory.__array_interface__["data"][0] % _LINE
    return memory[start : start + size * dtype.itemsize].view(dtype)


class _Idle(threading.local):
    """The workspaces that no call of this thread is using; what they hold is of no meaning."""

    def __init__(self) -> None:
        self.of: dict[Any, list[Any]] = {}


_idle = _Idle()


class borrowed:  # noqa: N801  # reads as what it is in a with statement, and costs half of a generator
    """A workspace, given back afterwards; calls inside calls get one of their own.

    Args:
        dtype: float32 or float64.
        size: elements of each buffer.
        kind: ``Workspace`` or ``Panels``.

    Enters as the workspace, its contents undefined.

    Source: this module.

    >>> with borrowed(np.float32) as first, borrowed(np.float32) as second:
    ...     first is second
    False
    """

    __slots__ = ("idle", "kind", "make", "work")

    def __init__(self, dtype: Any, size: int = CHUNK, kind: Any = Workspace) -> None:
        self.kind = kind
        self.make = (size, np.dtype(dtype))
        self.idle: list[Any] = _idle.of.setdefault((kind, self.make), [])

    def __enter__(self) -> Any:
        self.work = self.idle.pop() if self.idle else self.kind(*self.make)
        return self.work

    def __exit__(self, *_: object) -> None:
        self.idle.append(self.work)
