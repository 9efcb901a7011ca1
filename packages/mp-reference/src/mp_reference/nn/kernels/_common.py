"""Carriers: widened to float64 inside a kernel, narrowed once at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Array", "kept_dims", "narrow", "sigmoid64", "wide"]

Array = NDArray[Any]


def wide(x: Array) -> NDArray[np.float64]:
    """A carrier in float64."""
    return x.astype(np.float64)


def narrow(result: Any, like: Array) -> Array:
    """A float64 intermediate as the carrier of ``like``: one rounding to fp32, none for float64."""
    with np.errstate(all="ignore"):
        return np.asarray(result).astype(like.dtype, copy=False)


def kept_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Dimensions as non-negative numbers in order; None or an empty sequence is all of them.

    >>> kept_dims((-1, 0), 3), kept_dims(None, 2)
    ((0, 2), (0, 1))
    """
    if dims is None or dims == () or dims == []:
        return tuple(range(ndim))
    listed = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(dim % ndim for dim in listed))


def sigmoid64(x: Array) -> NDArray[np.float64]:
    """1 / (1 + e**-x) in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-wide(x))))
