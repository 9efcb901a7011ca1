"""Operations that move elements: look-up, joining, indexing, reshaping, rotation of pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.nn import kernels
from mp_reference.nn.ops._common import Array, Tape, Tensor, operands, require  # noqa: F401  # the examples use Tape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cat", "embedding", "index", "permute", "reshape", "rotary", "stack", "transpose"]


def embedding(weight: Tensor, indices: Array) -> Tensor:
    """Rows of a table (V, E) at integer indices of any shape.

    Vjp: rows of g added up at their indices, in float64, to fp32, then once. Autocast: embedding, no rule.
    Rounding: none, it is exact.

    >>> embedding(Tape().leaf(np.float16([[1.0], [2.0]])), np.array([1, 0, 1])).data.ravel()
    array([2., 1., 2.], dtype=float16)
    """
    tape, (w,) = operands("embedding", weight)
    require(w.ndim == 2 and indices.dtype.kind in "iu", "embedding", f"weight {w.shape}, indices of {indices.dtype}",
            "give a table (V, E) and integers")  # fmt: skip
    require(indices.size == 0 or (indices.min() >= 0 and indices.max() < w.shape[0]), "embedding",
            f"an index outside 0..{w.shape[0] - 1}", "clip the indices or enlarge the table")  # fmt: skip
    return tape.record(
        w.carrier[indices],
        w.format,
        (w,),
        lambda g: (kernels.embedding_backward(g, indices, w.shape[0]),),
        rounded=True,
    )


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors along a dimension.

    Vjp: the parts of g. Autocast: cat, no rule on cuda, promote on cpu. Rounding: none but that of a promotion.

    >>> leaf = Tape().leaf
    >>> cat([leaf(np.float16([1.0])), leaf(np.float16([2.0]))]).data
    array([1., 2.], dtype=float16)
    """
    tape, parts = operands("cat", *tensors)
    axis = _axis("cat", parts[0].ndim, dim)
    others = {one.shape[:axis] + one.shape[axis + 1 :] for one in parts}
    require(len(others) == 1, "cat", f"shapes {', '.join(str(one.shape) for one in parts)} along dim {dim}",
            "all other dimensions must be equal")  # fmt: skip
    parts, fmt = tape.prepared("cat", *parts)
    cuts = np.cumsum([one.shape[axis] for one in parts])[:-1]
    joined = np.concatenate([one.carrier for one in parts], axis=axis)
    return tape.record(joined, fmt, parts, lambda g: np.split(g, cuts, axis=axis), rounded=True)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors along a new dimension.

    Vjp: the parts of g. Autocast: stack, no rule on cuda, promote on cpu. Rounding: none but that of a promotion.

    >>> leaf = Tape().leaf
    >>> stack([leaf(np.float16([1.0])), leaf(np.float16([2.0]))]).shape
    (2, 1)
    """
    tape, parts = operands("stack", *tensors)
    axis = _axis("stack", parts[0].ndim + 1, dim)
    shapes = {one.shape for one in parts}
    require(len(shapes) == 1, "stack", f"shapes {', '.join(map(str, sorted(shapes)))}", "make them equal")
    parts, fmt = tape.prepared("stack", *parts)
    joined = np.stack([one.carrier for one in parts], axis=axis)
    return tape.record(joined, fmt, parts, lambda g: list(np.moveaxis(g, axis, 0)), rounded=True)


def _axis(op: str, ndim: int, dim: int) -> int:
    require(-ndim <= dim < ndim, op, f"dim={dim} of {ndim} dimensions", f"use {-ndim} to {ndim - 1}")
    return dim % ndim


def index(x: Tensor, key: Any) -> Tensor:
    """x[key] for any NumPy key: slices, integers, integer or boolean arrays.

    Vjp: g added up at the places it came from, in float64, to fp32, then once. Autocast: index, no rule.
    Rounding: none, it is exact.

    >>> index(Tape().leaf(np.float16([1.0, 2.0, 3.0])), slice(1, None)).data
    array([2., 3.], dtype=float16)
    """
    tape, (a,) = operands("index", x)
    keys = key if isinstance(key, tuple) else (key,)
    basic = all(one is None or one is Ellipsis or isinstance(one, slice | int) for one in keys)

    def vjp(g: Array) -> tuple[Array]:
        if basic:  # no place comes twice
            placed = np.zeros_like(a.carrier)
            placed[key] = g
            return (placed,)
        places = np.zeros(a.shape)
        np.add.at(places, key, g)
        return (places.astype(a.carrier.dtype),)

    return tape.record(a.carrier[key], a.format, (a,), vjp, rounded=True, exact=basic)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape.

    Vjp: g in the shape before. Autocast: reshape, no rule. Rounding: none, it is exact.

    >>> reshape(Tape().leaf(np.float16([1.0, 2.0])), (2, 1)).shape
    (2, 1)
    """
    tape, (a,) = operands("reshape", x)
    try:
        reshaped = a.carrier.reshape(tuple(shape))
    except ValueError:
        require(False, "reshape", f"x {a.shape} to {tuple(shape)}", "keep the number of elements; one -1 is allowed")
    return tape.record(reshaped, a.format, (a,), lambda g: (g.reshape(a.shape),), exact=True)


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Dimensions in another order.

    Vjp: g in the order before. Autocast: permute, no rule. Rounding: none, it is exact.

    >>> permute(Tape().leaf(np.zeros((2, 3, 4), "f2")), (2, 0, 1)).shape
    (4, 2, 3)
    """
    tape, (a,) = operands("permute", x)
    order = [dim % max(a.ndim, 1) for dim in dims]
    require(sorted(order) == list(range(a.ndim)), "permute", f"dims={tuple(dims)} of x {a.shape}", "name each once")
    back = np.argsort(order)
    return tape.record(
        np.ascontiguousarray(a.carrier.transpose(order)), a.format, (a,),
        lambda g: (np.ascontiguousarray(g.transpose(back)),), exact=True,
    )  # fmt: skip


def transpose(x: Tensor, first: int, second: int) -> Tensor:
    """Two dimensions swapped.

    Vjp: g with the two swapped back. Autocast: transpose, no rule. Rounding: none, it is exact.

    >>> transpose(Tape().leaf(np.zeros((2, 3, 4), "f2")), -1, 0).shape
    (4, 3, 2)
    """
    order = list(range(x.ndim))
    one, two = _axis("transpose", x.ndim, first), _axis("transpose", x.ndim, second)
    order[one], order[two] = two, one
    return permute(x, order)


def rotary(x: Tensor, cos: Array, sin: Array) -> Tensor:
    """Rotate the pairs (x[..., i], x[..., i + E / 2]) by angles given as fp32 cosines and sines (L, E / 2).

    Vjp: the rotation back. Autocast: none, torch has no such op. Rounding: two products and a sum in fp32, then once.

    >>> rotary(Tape().leaf(np.float16([[1.0, 0.0]])), np.float32([[0.0]]), np.float32([[1.0]])).data
    array([[0., 1.]], dtype=float16)
    """
    tape, (a,) = operands("rotary", x)
    half = a.shape[-1] // 2 if a.ndim >= 2 else 0
    require(
        a.ndim >= 2 and a.shape[-1] == 2 * half and cos.shape == sin.shape == (a.shape[-2], half),
        "rotary",
        f"x {a.shape} with cos {cos.shape}, sin {sin.shape}",
        "x is (..., L, E), E even; cos, sin (L, E / 2)",
    )

    def rotated(z: Array, sine: Array) -> Array:
        one, two = z[..., :half], z[..., half:]
        with np.errstate(all="ignore"):
            return np.concatenate([one * cos - two * sine, two * cos + one * sine], axis=-1)

    return tape.record(rotated(a.carrier, sin), a.format, (a,), lambda g: (rotated(g, -sin),))
