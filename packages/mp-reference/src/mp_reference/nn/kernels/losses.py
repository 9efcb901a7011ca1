"""Kernels of the losses, and the sums of an embedding's gradient."""

from __future__ import annotations

import numpy as np

from mp_reference.nn.kernels._common import Array, narrow, sigmoid64, wide

__all__ = [
    "bce_with_logits",
    "bce_with_logits_backward",
    "embedding_backward",
    "mse_loss",
    "mse_loss_backward",
    "nll_loss",
    "nll_loss_backward",
]


def nll_loss(
    x: Array, target: Array, weight: Array | None = None, reduction: int = 1, ignore_index: int = -100
) -> tuple[Array, Array]:
    """Minus x at each row's target, weighted by class; reduction 0 none, 1 mean, 2 sum; with the total weight."""
    kept = target != ignore_index
    safe = np.where(kept, target, 0)
    share = np.where(kept, 1.0 if weight is None else wide(weight)[safe], 0.0)
    terms = -share * np.where(kept, np.take_along_axis(wide(x), safe[:, None], 1)[:, 0], 0.0)
    total_weight = share.sum()
    with np.errstate(invalid="ignore"):  # no row kept: 0 / 0, as torch has it
        result = terms if reduction == 0 else terms.sum() / total_weight if reduction == 1 else terms.sum()
    return narrow(result, x), narrow(total_weight, x)


def nll_loss_backward(
    gradient: Array,
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: Array,
) -> Array:
    """Minus gradient (over the total weight for a mean) at each row's target."""
    kept = target != ignore_index
    safe = np.where(kept, target, 0)
    share = np.where(kept, 1.0 if weight is None else wide(weight)[safe], 0.0)
    with np.errstate(all="ignore"):
        outer = wide(gradient) / wide(total_weight) if reduction == 1 else wide(gradient)
        result = np.zeros(x.shape)
        np.put_along_axis(result, safe[:, None], np.where(kept, -share * outer, 0.0)[:, None], 1)
    return narrow(result, x)


def mse_loss(x: Array, target: Array, reduction: int = 1) -> Array:
    """(x - target)**2; reduction 0 none, 1 mean, 2 sum."""
    with np.errstate(all="ignore"):
        square = (wide(x) - wide(target)) ** 2
        return narrow(square if reduction == 0 else square.mean() if reduction == 1 else square.sum(), x)


def mse_loss_backward(gradient: Array, x: Array, target: Array, reduction: int = 1) -> Array:
    """2 (x - target) gradient, over the number of elements for a mean."""
    with np.errstate(all="ignore"):
        norm = 2.0 / x.size if reduction == 1 else 2.0
        return narrow(norm * (wide(x) - wide(target)) * wide(gradient), x)


def bce_with_logits(x: Array, target: Array, reduction: int = 1) -> Array:
    """Cross entropy of sigmoid(x): (1 - target) x + log(1 + e**-x), without overflow."""
    with np.errstate(all="ignore"):
        z = wide(x)
        terms = (1 - wide(target)) * z + np.maximum(-z, 0) + np.log1p(np.exp(-np.abs(z)))
        return narrow(terms if reduction == 0 else terms.mean() if reduction == 1 else terms.sum(), x)


def bce_with_logits_backward(gradient: Array, x: Array, target: Array, reduction: int = 1) -> Array:
    """(sigmoid(x) - target) gradient, over the number of elements for a mean."""
    with np.errstate(all="ignore"):
        outer = wide(gradient) / x.size if reduction == 1 else wide(gradient)
        return narrow((sigmoid64(x) - wide(target)) * outer, x)


def embedding_backward(
    gradient: Array, indices: Array, num_weights: int, padding_idx: int = -1, scale_grad_by_freq: bool = False
) -> Array:
    """Rows of gradient added up at their indices; the row of ``padding_idx`` stays 0."""
    if scale_grad_by_freq:
        raise ValueError("scale_grad_by_freq=True is not offered; divide the gradient by the counts yourself")
    flat, rows = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    order = np.argsort(flat, kind="stable")
    found, starts = np.unique(flat[order], return_index=True)
    result = np.zeros((num_weights, rows.shape[1]), gradient.dtype)
    with np.errstate(all="ignore"):
        if flat.size:
            result[found] = narrow(np.add.reduceat(wide(rows)[order], starts, axis=0), gradient)
    if padding_idx >= 0:
        result[padding_idx] = 0
    return result
