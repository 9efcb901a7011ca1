"""Every update of a run once more, in NumPy, from the same gradients: the two must agree to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from ml_dtypes import bfloat16

import mp_reference as mp
from examples.quickstart import train
from mp_reference.amp.optimizers import AdamW
from mp_reference.amp.step import StepPolicy, StepState, initial_state, step
from mp_torch import LossScale

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from examples.quickstart.train import Run, Tensors

FORMATS = {torch.float32: mp.FP32, torch.float16: mp.FP16, torch.bfloat16: mp.BF16}


@dataclass(frozen=True)
class Verdict:
    """How much was compared and how much of it differs."""

    steps: int
    numbers: int  # parameters and masters, over all steps
    differing_bits: int
    differing_reports: int


def array(tensor: torch.Tensor) -> NDArray[Any]:
    """The same bits as a NumPy array."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()


def differing_bits(ours: NDArray[Any], theirs: NDArray[Any]) -> int:
    """Number of bits in which two arrays of one dtype differ.

    >>> import numpy as np
    >>> differing_bits(np.float32([1.0, 0.0]), np.float32([1.0, -0.0]))
    1
    """
    codes = f"u{ours.dtype.itemsize}"
    unequal = ours.view(codes) != theirs.view(codes)
    pairs = zip(ours.view(codes)[unequal].tolist(), theirs.view(codes)[unequal].tolist(), strict=True)
    return sum((one ^ other).bit_count() for one, other in pairs)


def policy_of(run: Run) -> StepPolicy:
    """What the reference is told, from the run's own recipe."""
    scaled = run.recipe.precision.startswith("fp16")
    loss_scale = run.recipe.options.get("loss_scale", LossScale.off()) if scaled else LossScale.off()
    fields = {name: getattr(loss_scale, name) for name in ("init_scale", "growth_interval", "dynamic", "skip_limit")}
    optimizer = AdamW(lr=train.LEARNING_RATE, betas=train.BETAS, eps=train.EPSILON, weight_decay=train.WEIGHT_DECAY)
    return StepPolicy(
        optimizer=optimizer,
        loss_scale=mp.LossScale(**fields),
        max_grad_norm=train.MAX_GRAD_NORM,
        master_weights=run.recipe.options.get("master_weights", "fp32"),
    )


def replay(run: Run, tick: Callable[[], None]) -> Verdict:
    """Step through the run in NumPy, compare after each step, and drop what the comparison needed.

    Args:
        run: what ``train`` kept.
        tick: told after each step.
    """
    policy = policy_of(run)
    formats = [FORMATS[run.updates[0].parameters[name].dtype] for name in run.initial]
    state = initial_state(policy, [array(tensor) for tensor in run.initial.values()], formats)
    bits = reports = numbers = 0
    for update, done in zip(run.updates, run.reports, strict=True):
        gradients = [array(update.gradients[name]) if name in update.gradients else None for name in run.initial]
        state, report = step(policy, state, gradients)
        bits += _differing(state.parameters, update.parameters, run.initial) + _differing(
            state.masters, update.masters, run.initial
        )
        reports += not _agree(report, done)
        numbers += _count(state)
        tick()
    run.updates.clear()
    return Verdict(len(run.reports), numbers, bits, reports)


def _differing(ours: tuple[NDArray[Any], ...], theirs: Tensors, names: Tensors) -> int:
    return sum(differing_bits(one, array(theirs[name])) for one, name in zip(ours, names, strict=True))


def _agree(ours: Any, theirs: Any) -> bool:
    fields = ("applied", "grad_norm", "clip_coef", "loss_scale", "next_loss_scale", "update_index")
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in fields]
    return all(one == other or (math.isnan(one) and math.isnan(other)) for one, other in pairs)


def _count(state: StepState) -> int:
    return sum(array.size for array in (*state.parameters, *state.masters))
