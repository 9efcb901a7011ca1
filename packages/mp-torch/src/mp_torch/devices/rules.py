"""Whose op rules the process's dispatcher follows on each kind of device: its own, unless another is emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["follow_rules", "rules_followed"]

_followed: dict[str, str] = {}  # beside the dispatcher's own table, which is the process's as well


def rules_followed(kind: str) -> str:
    """The kind of device whose op rules hold on this kind.

    Args:
        kind: as torch names it.

    >>> rules_followed("cpu")
    'cpu'
    """
    return _followed.get(kind, kind)


def follow_rules(kind: str, other: str) -> Callable[[], None]:
    """Say that a kind of device follows the op rules of another one from now on.

    Args:
        kind: whose kernels were replaced.
        other: whose rules they follow.

    Returns:
        What to call when the kernels are gone.

    >>> undo = follow_rules("cpu", "cuda")
    >>> rules_followed("cpu")
    'cuda'
    >>> undo()
    """
    _followed[kind] = other
    return lambda: _followed.__delitem__(kind)
