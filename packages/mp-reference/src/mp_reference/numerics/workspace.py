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


class _Buffer:
    """A buffer of a workspace, made when first used; found in the instance from then on."""

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtype and np.dtype(dtype)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, work: Any, owner: type | None = None) -> NDArray[Any]:
        if work.whole is None:
            buffer = _aligned(work.size, self.dtype or work.dtype)
        else:
            buffer = getattr(work.whole, self.name)[: work.size]
        setattr(work, self.name, buffer)
        return buffer


class Workspace:
    """The scratch buffers of one call, each ``size`` elements."""

    power, scale, scaled, carried = _Buffer(), _Buffer(), _Buffer(), _Buffer()
    mask, second_mask = _Buffer(np.bool_), _Buffer(np.bool_)
    wide, index = _Buffer(np.float64), _Buffer(np.intp)

    def __init__(self, size: int, dtype: np.dtype[Any], whole: Workspace | None = None) -> None:
        self.size, self.dtype, self.whole = size, dtype, whole
        self.part: Workspace | None = None

    def first(self, size: int) -> Workspace:
        """The same buffers cut to ``size`` elements; the last cut is kept, as calls of one size come in rows."""
        if size == self.size:
            return self
        if self.part is None or self.part.size != size:
            self.part = Workspace(size, self.dtype, self)
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
