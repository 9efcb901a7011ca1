"""From stored gradients to one decision: their norm, whether they are finite, and what clipping multiplies by.

Where values can be read without waiting (the CPU) the scalars are Python numbers; elsewhere they stay tensors on the
device, and the same formulas run there. Sums are agreed on between ranks before anything is concluded from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mp_torch import clipping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from mp_torch.assembly import Part
    from mp_torch.devices import Device
    from mp_torch.ranks import Ranks

__all__ = ["ClipSet", "Decision", "Gradient", "decide"]


@dataclass(slots=True)
class Gradient:
    """One parameter's gradient on its way through a step.

    Args:
        part: whose it is, and its places.
        value: fp32; of a sparse gradient its values.
        scaled: still multiplied by the divisor; the fused kernels divide.
        sparse: the coalesced gradient that ``value`` belongs to.
    """

    part: Part
    value: Tensor
    scaled: bool
    sparse: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ClipSet:
    """Gradients that are clipped together.

    Args:
        max_norm: their limit; ``None`` does not clip them.
    """

    max_norm: float | None


@dataclass(slots=True)
class Decision:
    """What was found and what follows; numbers where values are free to read, tensors on the device elsewhere.

    Args:
        found: one for each optimizer, whether it must not step.
        norm: of all unscaled gradients, before clipping.
        coefficients: one for each clip set.
        finite: one for each gradient.
        sums: one for each gradient: sum of powers, or largest magnitude, unscaled.
        active: one for each optimizer, whether any rank has a gradient for it.
        first: where ranks hold different parameters, reads what they agreed on as the first that is not finite.
    """

    found: Any
    norm: Any
    coefficients: list[Any]
    finite: Tensor | list[bool]
    sums: Tensor | list[float]
    active: list[bool] = field(default_factory=list)
    first: Callable[[], tuple[str | None, str | None]] | None = None

    def first_nonfinite(self, names: Sequence[str]) -> tuple[str | None, str | None]:
        """The first of these parameters whose gradient is not finite, and what it holds; reads from the device."""
        if self.first is not None:
            return self.first()
        finite = self.finite if isinstance(self.finite, list) else self.finite.tolist()
        if all(finite):
            return None, None
        place = finite.index(False)
        return names[place], "NaN" if math.isnan(float(self.sums[place])) else "Inf"


def decide(
    gradients: Sequence[Gradient],
    sets: Sequence[ClipSet],
    *,
    divisor: float,
    norm_type: float,
    exact: bool,
    together: bool,
    optimizers: int,
    device: Device,
    ranks: Ranks,
) -> Decision:
    """Measure the unscaled gradients and conclude, once for all ranks.

    Args:
        gradients: of this rank, in the optimizers' order.
        sets: what is clipped together.
        divisor: fp32 number, the loss scale times the window's weight.
        norm_type: 2.0, infinity or another p >= 1.
        exact: add squares in float64 in a fixed order.
        together: one non-finite gradient stops every optimizer.
        optimizers: how many there are.
        device: where the gradients are.
        ranks: who else has gradients.

    Returns:
        The decision.
    """
    flag = device.overflow()  # before the norms, whose own kernels may saturate and raise it
    if device.reads_are_free and ranks.count == 1 and norm_type == 2.0 and divisor >= 1 and flag is None:
        return _decide_here(gradients, sets, divisor, exact, together, optimizers)
    sums = _sums(gradients, divisor, norm_type, exact, device)
    parameters = [one.part.weight.parameter for one in gradients]
    peak = norm_type == math.inf
    sums = (ranks.tensor_maxima if peak else ranks.tensor_sums)(sums, parameters)
    finite = torch.isfinite(sums)
    if divisor < 1 and (ranks.count > 1 or any(one.scaled for one in gradients)):
        finite &= _survives(gradients, divisor, ranks).to(finite.device)
    found = _by_optimizer(gradients, finite, optimizers, device)
    if flag is not None:
        found = torch.maximum(found, flag.to(found.device))
    here = {one.part.optimizer for one in gradients}
    active = [place in here for place in range(optimizers)]
    if ranks.count > 1 and not (ranks.sums_tell_all and flag is None):
        found, active = _agreed(found, active, device, ranks)
    if together:
        found = found.amax().expand(optimizers)
    stepping = sums if together or optimizers == 1 else _of_stepping(gradients, sums, found)
    totals = _totals(gradients, sums, stepping, len(sets), peak)
    totals = (ranks.total_maxima if peak else ranks.totals)(totals)
    conclude = _conclude_here if device.reads_are_free else _conclude_there
    decision = conclude(found, totals, sets, norm_type, finite, sums)
    decision.active, decision.first = active, ranks.first_nonfinite(finite, sums, parameters)
    return decision


def _decide_here(
    gradients: Sequence[Gradient],
    sets: Sequence[ClipSet],
    divisor: float,
    exact: bool,
    together: bool,
    optimizers: int,
) -> Decision:
    """The usual case, one process on the CPU: the same numbers in the same order, without a tensor for each."""
    measured = clipping.host_squares([one.value for one in gradients], exact=exact)
    unit = divisor * divisor
    sums = [one / unit if gradient.scaled else one for one, gradient in zip(measured, gradients, strict=True)]
    finite = [math.isfinite(one) for one in sums]
    found, active = [False] * optimizers, [False] * optimizers
    for gradient, fine in zip(gradients, finite, strict=True):
        active[gradient.part.optimizer] = True
        found[gradient.part.optimizer] |= not fine
    if together:
        found = [any(found)] * optimizers
    stepping = [0.0 if found[one.part.optimizer] else total for one, total in zip(gradients, sums, strict=True)]
    coefficients = []
    for place, one in enumerate(sets):
        members = [
            total for gradient, total in zip(gradients, stepping, strict=True) if gradient.part.clip_set == place
        ]
        norm = clipping.host_norm(clipping.host_fold(members), 2.0)
        coefficients.append(1.0 if one.max_norm is None else clipping.host_coefficient(norm, one.max_norm))
    whole = clipping.host_norm(clipping.host_fold(sums), 2.0)
    return Decision(found=found, norm=whole, coefficients=coefficients, finite=finite, sums=sums, active=active)


def _agreed(found: Tensor, active: list[bool], device: Device, ranks: Ranks) -> tuple[Tensor, list[bool]]:
    """One decision for all ranks, and which optimizers have a gradient anywhere; where reading waits, have one here."""
    count = len(active)
    flags = ranks.any(torch.cat((found, _there([float(one) for one in active], torch.float32, found))))
    return flags[:count], [flag != 0 for flag in flags[count:].tolist()] if device.reads_are_free else active


def _sums(gradients: Sequence[Gradient], divisor: float, norm_type: float, exact: bool, device: Device) -> Tensor:
    """Per gradient and unscaled: sum of squares, of powers, or the largest magnitude."""
    values = [one.value for one in gradients]
    scaled = [one.scaled for one in gradients]
    if norm_type == math.inf:
        sums = clipping.magnitudes(values)
        unit = sums.new_full((), divisor)
    elif norm_type != 2.0:
        sums = clipping.power_sums(values, norm_type)
        unit = sums.new_full((), divisor) ** norm_type
    else:
        if exact:
            sums = clipping.exact_squares(values)
        else:
            sums = clipping.fast_squares(values, reads_are_free=device.reads_are_free, float64=device.supports_float64)
        unit = sums.new_full((), divisor * divisor)
    if not any(scaled) or divisor == 1.0:
        return sums
    return sums / unit if all(scaled) else torch.where(_there(scaled, torch.bool, sums), sums / unit, sums)


def _survives(gradients: Sequence[Gradient], divisor: float, ranks: Ranks) -> Tensor:
    """Whether dividing by a divisor below 1 leaves every element finite."""
    peaks = clipping.magnitudes([one.value for one in gradients])
    peaks = ranks.tensor_maxima(peaks, [one.part.weight.parameter for one in gradients])
    divided = peaks / peaks.new_full((), divisor)
    return torch.where(_there([one.scaled for one in gradients], torch.bool, peaks), divided, peaks).isfinite()


def _there(values: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Numbers of the host beside a tensor, without waiting for its device."""
    return torch.tensor(values, dtype=dtype).to(like.device, non_blocking=True)


def _by_optimizer(gradients: Sequence[Gradient], finite: Tensor, optimizers: int, device: Device) -> Tensor:
    """fp32 flag for each optimizer: one of its gradients is not finite."""
    bad = (~finite).float()
    if optimizers == 1:
        return bad.amax().reshape(1) if len(gradients) else torch.zeros(1, device=device.device)
    flags = torch.zeros(optimizers, device=bad.device)
    places = _there([one.part.optimizer for one in gradients], torch.int64, bad)
    return flags.scatter_reduce(0, places, bad, "amax")


def _of_stepping(gradients: Sequence[Gradient], sums: Tensor, found: Tensor) -> Tensor:
    """Sums without those of optimizers that must not step: what they hold clips nobody else."""
    places = _there([one.part.optimizer for one in gradients], torch.int64, sums)
    return torch.where(found.to(sums.device)[places] != 0, 0.0, sums)


def _totals(gradients: Sequence[Gradient], sums: Tensor, stepping: Tensor, sets: int, peak: bool) -> Tensor:
    """One total for each clip set, of what steps, and one for all gradients at the end."""
    whole = _total(sums, peak)
    if sets == 1:
        return torch.stack((whole if stepping is sums else _total(stepping, peak), whole))
    places = [[at for at, one in enumerate(gradients) if one.part.clip_set == place] for place in range(sets)]
    return torch.stack([*(_total(stepping[some], peak) for some in places), whole])


def _total(sums: Tensor, peak: bool) -> Tensor:
    if peak:
        return sums.amax() if sums.numel() else sums.new_zeros(())
    return clipping.fold(sums)


def _conclude_here(
    found: Tensor, totals: Tensor, sets: Sequence[ClipSet], norm_type: float, finite: Tensor, sums: Tensor
) -> Decision:
    """With Python numbers."""
    norms = [clipping.host_norm(total, norm_type) for total in totals.tolist()]
    coefficients = [
        1.0 if one.max_norm is None else clipping.host_coefficient(norm, one.max_norm)
        for one, norm in zip(sets, norms[:-1], strict=True)
    ]
    flags = [flag != 0 for flag in found.tolist()]
    return Decision(found=flags, norm=norms[-1], coefficients=coefficients, finite=finite, sums=sums)


def _conclude_there(
    found: Tensor, totals: Tensor, sets: Sequence[ClipSet], norm_type: float, finite: Tensor, sums: Tensor
) -> Decision:
    """With tensors on the device."""
    norms = clipping.device_norm(totals, norm_type)
    coefficients = [
        None if one.max_norm is None else clipping.clip_coefficient(norm, one.max_norm)
        for one, norm in zip(sets, norms[:-1].unbind(), strict=True)
    ]
    return Decision(found=found, norm=norms[-1], coefficients=coefficients, finite=finite, sums=sums)
