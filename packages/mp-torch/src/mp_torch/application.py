"""From a decision to changed parameters: unscale, clip, update fp32 values, write the parameters from them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.decision import Gradient, decide
from mp_torch.master import WriteBack
from mp_torch.scaling import fp32
from mp_torch.update import Entry

if TYPE_CHECKING:
    from torch import Tensor

    from mp_torch.assembly import Assembly
    from mp_torch.decision import Decision
    from mp_torch.outcome import Step
    from mp_torch.ranks import Ranks

__all__ = ["apply_", "decision_on", "stored_gradients"]


def stored_gradients(assembly: Assembly, divisor: float) -> list[Gradient]:
    """Every gradient of the window in fp32: as stored for the fused kernels, which divide; unscaled for the others.

    Args:
        assembly: whose parameters.
        divisor: fp32 number, the loss scale times the window's weight.

    Returns:
        One for each parameter that has any, in the optimizers' order; of a sparse one the coalesced values.
    """
    folded = [one.folds_scale and assembly.config.clip_value is None for one in assembly.updaters]
    unit = None if all(folded) else torch.full((), divisor, dtype=torch.float32, device=assembly.device.device)
    gradients = []
    for part in assembly.parts:
        stored = part.weight.gradient()
        if stored is None:
            continue
        sparse = stored.coalesce() if stored.is_sparse else None
        value = (stored if sparse is None else sparse.values()).float()
        scaled = folded[part.optimizer]
        gradients.append(Gradient(part, value if scaled or unit is None else value / unit, scaled, sparse))
    return gradients


def decision_on(assembly: Assembly, ranks: Ranks, gradients: list[Gradient], divisor: float) -> Decision:
    """``decide`` under this engine's settings."""
    return decide(
        gradients,
        assembly.clip_sets,
        divisor=divisor,
        norm_type=assembly.config.norm_type,
        exact=assembly.config.update == "exact",
        together=assembly.config.skip == "all",
        optimizers=len(assembly.optimizers),
        device=assembly.device,
        ranks=ranks,
    )


def apply_(
    assembly: Assembly, ranks: Ranks, gradients: list[Gradient], step: Step, *, divisor: float, update_index: int
) -> None:
    """Clip, update, write back, for every optimizer that may step.

    Args:
        assembly: optimizers, weights, updaters.
        ranks: who else clips the same gradients.
        gradients: what the decision was made on.
        step: with its decision; learns the clipped norm, and what rounding lost.
        divisor: as for ``stored_gradients``.
        update_index: updates before this one.
    """
    groups: dict[tuple[int, int], list[tuple[Gradient, Entry]]] = {}
    for one in _clipped(assembly, ranks, gradients, step, divisor):
        if step.found is None or not step.found[one.part.optimizer]:
            takes_sparse = assembly.updaters[one.part.optimizer].takes_sparse
            entry = Entry(one.part.weight.trained, one.part.weight.load(), _whole(one, takes_sparse))
            groups.setdefault((one.part.optimizer, one.part.group), []).append((one, entry))
    for (place, at), members in groups.items():
        skipped = None if step.found is not None else step.decision.found[place]
        scale = _folded_scale(step.decision, members[0][0], divisor)
        group = assembly.optimizers[place].param_groups[at]
        assembly.updaters[place].update_(group, [entry for _, entry in members], scale, skipped)
    if step.found is not None:
        assembly.conclude_updaters_(step.found, step.active)
    for (place, _), members in groups.items():
        skipped = None if step.found is not None else step.decision.found[place] != 0
        for one, entry in members:
            _store_(step, one, entry, WriteBack(update_index=update_index, key=one.part.key, skipped=skipped))


def _clipped(assembly: Assembly, ranks: Ranks, gradients: list[Gradient], step: Step, divisor: float) -> list[Gradient]:
    """Gradients that no kernel divides later are clipped here, by norm and then by value."""
    if step.found is not None and all(step.found):
        return gradients
    limit = assembly.config.clip_value
    clipped = []
    for one in gradients:
        coefficient = step.decision.coefficients[one.part.clip_set]
        scaled = one.scaled and _folds(coefficient, divisor)
        value = one.value if scaled == one.scaled else one.value / one.value.new_full((), divisor)
        value = value if scaled or _is_one(coefficient) else value * coefficient
        value = value if limit is None else value.clamp(-limit, limit)
        clipped.append(one if value is one.value else replace(one, value=value, scaled=scaled))
    if _is_measured_again(assembly, ranks, step, clipped, gradients):
        step.clipped_norm = decision_on(assembly, ranks, clipped, divisor).norm
    return clipped


def _is_measured_again(
    assembly: Assembly, ranks: Ranks, step: Step, clipped: list[Gradient], gradients: list[Gradient]
) -> bool:
    """Whether clipping changed gradients; where measuring is collective, what no rank can see differently."""
    if ranks.count == 1:
        return any(new is not old for new, old in zip(clipped, gradients, strict=True))
    limited = assembly.config.clip_value is not None
    if not limited and all(one.folds_scale for one in assembly.updaters):
        return False
    return limited or not all(_is_one(one) for one in step.decision.coefficients)


def _folded_scale(decision: Decision, one: Gradient, divisor: float) -> Tensor | None:
    """What a fused kernel divides by: the divisor and the clip coefficient in one number; ``None`` is 1."""
    if not one.scaled:
        return None
    coefficient = decision.coefficients[one.part.clip_set]
    if isinstance(coefficient, torch.Tensor):
        return (torch.full_like(coefficient, divisor) / coefficient).clamp(max=torch.finfo(torch.float32).max)
    folded = divisor if coefficient is None else fp32(divisor / coefficient)
    return None if folded == 1.0 else torch.full((), folded, dtype=torch.float32, device=one.value.device)


def _store_(step: Step, one: Gradient, entry: Entry, how: WriteBack) -> None:
    weight = one.part.weight
    if weight.keeps_every_bit:
        weight.store_(entry.value, how)
        return
    before = weight.held.clone()
    weight.store_(entry.value, how)
    asked = entry.value != before.float()
    if one.sparse is None:
        asked |= one.value != 0
    step.lost.append(torch.stack(((asked & (before == weight.held)).sum(), asked.sum())))


def _whole(gradient: Gradient, takes_sparse: bool) -> Tensor:
    """The gradient of the whole parameter: as it came in, or dense."""
    if gradient.sparse is None:
        return gradient.value
    sparse = gradient.sparse
    whole = torch.sparse_coo_tensor(
        sparse.indices(), gradient.value, sparse.shape, is_coalesced=True, check_invariants=False
    )
    return whole if takes_sparse else whole.to_dense()


def _folds(coefficient: Any, divisor: float) -> bool:
    """Whether divisor and clip coefficient fit into one fp32 number."""
    if coefficient is None or isinstance(coefficient, torch.Tensor):
        return True
    return coefficient > 0 and not math.isinf(fp32(divisor / coefficient))


def _is_one(coefficient: Any) -> bool:
    return coefficient is None or (not isinstance(coefficient, torch.Tensor) and coefficient >= 1.0)
