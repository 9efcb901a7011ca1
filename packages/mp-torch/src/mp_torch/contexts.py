"""What stands around the engine's code: contexts that are entered again and again, and torch's compiler."""

from __future__ import annotations

import functools
import threading
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["Depth", "Reentrant", "uncompiled"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Reentrant(ContextDecorator):
    """A context that is opened when it is entered: again and again, nested, or around a function.

    Args:
        open_: makes a fresh context.
        depth: counts how many are open, over all threads and all contexts that share it.

    >>> again = Reentrant(lambda: torch.autocast("cpu", torch.bfloat16))
    >>> torch.is_autocast_enabled("cpu")
    False
    >>> with again, again:
    ...     torch.is_autocast_enabled("cpu")
    True
    """

    def __init__(self, open_: Callable[[], AbstractContextManager[Any]], depth: Depth | None = None) -> None:
        self._open, self._depth = open_, Depth() if depth is None else depth

    def __enter__(self) -> None:
        """Open a fresh one."""
        fresh = self._open()
        fresh.__enter__()
        self._depth.here.contexts.append(fresh)
        self._depth.value += 1

    def __exit__(self, *problem: Any) -> bool | None:
        """Close the innermost one that this thread opened."""
        self._depth.value -= 1
        return self._depth.here.contexts.pop().__exit__(*problem)


class _Opened(threading.local):
    """What a thread has open: autocast and rules belong to their thread."""

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []


class Depth:
    """How many contexts are open, and which of them in this thread. A copy starts with none."""

    def __init__(self) -> None:
        self.value, self.here = 0, _Opened()

    def __reduce__(self) -> Any:
        return Depth, ()


def uncompiled(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let ``torch.compile`` call a function as it is instead of tracing into it, and leave any inference mode for it.

    As ``torch.compiler.disable``, which imports the whole compiler; here that waits for the first call.

    Args:
        method: what runs fused kernels, which the compiler can neither trace nor speed up.

    >>> uncompiled(abs)(-2)
    2
    """
    kept: list[Callable[_P, _T]] = []

    @functools.wraps(method)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not kept:
            kept.append(torch.compiler.disable(outside))  # type: ignore[no-untyped-call]  # torch's own
        return kept[0](*args, **kwargs)

    return call
