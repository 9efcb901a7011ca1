"""From counted magnitudes to a decision: does fp16 serve, from which loss scale, and what needs fp32."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mp_torch.config import AmpConfig
from mp_torch.emulate.magnitudes import Magnitudes
from mp_torch.emulate.places import OUTSIDE
from mp_torch.scaling import LossScale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_reference import FloatFormat
    from mp_torch.emulate.numerics_report import Row

__all__ = ["Advice", "ModuleAdvice", "judge"]

_HEADROOM = 1  # doublings kept free below the format's limit: gradients grow between two looks
_LARGEST = 24  # a larger loss scale is of no use: 2**-24 is the smallest fp16 number


@dataclass(frozen=True, kw_only=True)
class ModuleAdvice:
    """What one module needs.

    Args:
        module: its name in the model.
        overflows: results of its forward beyond the format.
        nans: NaNs that it made.
        flushed_share: the part of its gradients that became zero in the run.
        lowest: log2 of the smallest loss scale that keeps its gradients, within the tolerance.
        highest: log2 of the largest one that keeps them finite with one doubling to spare; infinite without gradients.
    """

    module: str
    overflows: int
    nans: int
    flushed_share: float
    lowest: float
    highest: float

    @property
    def safe_scales(self) -> str:
        """The loss scales that serve it, as text."""
        if self.lowest > self.highest:
            return "none"
        low = "" if math.isinf(self.lowest) else f"2**{self.lowest:g}"
        high = "" if math.isinf(self.highest) else f"2**{self.highest:g}"
        return "any" if not low and not high else f"{low} .. {high}".strip()

    @property
    def needs_fp32(self) -> bool:
        """No loss scale serves it, or its forward overflows."""
        return self.overflows > 0 or self.nans > 0 or self.lowest > self.highest


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Whether a model will train in a precision; ``str`` of it is a paragraph.

    Args:
        precision: the precision that was judged.
        modules: one verdict a module, in the order of the model.
        scaled: whether gradients need a loss scale at all; formats with the range of fp32 do not.
        loss_scale: log2 of the loss scale to start with; None where none serves all modules.
    """

    precision: str
    modules: tuple[ModuleAdvice, ...]
    scaled: bool
    loss_scale: int | None
    _names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def keep_fp32(self) -> tuple[str, ...]:
        """Names of the modules that need fp32."""
        return tuple(one.module for one in self.modules if one.needs_fp32 and one.module != OUTSIDE)

    @property
    def trains(self) -> bool:
        """Whether it will train in this precision, with ``keep_fp32`` and the loss scale."""
        return self.loss_scale is not None or not self.scaled

    def config(self, **settings: Any) -> AmpConfig:
        """The advice as a configuration; further fields may be given."""
        if not self.trains:
            return AmpConfig(precision="bf16-mixed", keep_fp32=self.keep_fp32, **settings)
        scale = LossScale(init_scale=2.0**self.loss_scale) if self.scaled and self.loss_scale is not None else None
        return AmpConfig(precision=self.precision, loss_scale=scale, keep_fp32=self.keep_fp32, **settings)

    def __str__(self) -> str:
        """The verdict in words."""
        start, judged = f"loss scale 2**{self.loss_scale}", self.precision
        if not self.trains:
            first = f"Will not train in {judged}: no loss scale keeps the gradients of all modules; take bf16-mixed."
        elif not self.scaled:
            first = f"Will train in {judged} without loss scaling."
        elif max((one.lowest for one in self.modules), default=-math.inf) <= 0:
            first = f"Will train in {judged}, even without loss scaling; start from {start}."
        else:
            first = f"Will train in {judged} from {start}; without one some gradients vanish."
        lines = [first]
        for one in self.modules:
            if one.overflows or one.nans:
                lines.append(f"{one.module} needs fp32: {one.overflows} overflows and {one.nans} NaNs in its forward.")
            elif one.lowest > one.highest:
                lines.append(
                    f"{one.module} needs fp32: its gradients want a loss scale of at least 2**{one.lowest:g} and at "
                    f"most 2**{one.highest:g}."
                )
        return "\n".join(lines)


def judge(rows: Sequence[Row], fmt: FloatFormat, precision: str, tolerance: float) -> Advice:
    """Turn counts into advice.

    Args:
        rows: what was counted; gradients unscaled.
        fmt: the judged format.
        precision: its precision name.
        tolerance: the share of a module's gradients that may become zero.

    Returns:
        The advice.

    Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2: choose the scale so that the
    largest gradient stays below the limit, and look at the share that becomes zero.
    """
    names = list(dict.fromkeys(row.module for row in rows))
    modules = tuple(_of_module(name, rows, fmt, tolerance) for name in names)
    scaled = fmt.exponent_bits < 8
    served = [one for one in modules if one.lowest <= one.highest]
    lowest = max((one.lowest for one in served), default=0.0)
    highest = min((one.highest for one in served), default=math.inf)
    start = int(min(highest, _LARGEST)) if served and lowest <= highest else None
    return Advice(precision=precision, modules=modules, scaled=scaled, loss_scale=start)


def _of_module(name: str, rows: Sequence[Row], fmt: FloatFormat, tolerance: float) -> ModuleAdvice:
    forward, backward = Magnitudes(), Magnitudes()
    for row in rows:
        if row.module == name:
            (backward if row.phase == "backward" else forward).add(row.counts)
    lowest, highest = -math.inf, math.inf
    if backward.max_abs:
        highest = math.floor(math.log2(fmt.max / backward.max_abs)) - _HEADROOM
        doublings = range(-_LARGEST, _LARGEST + 1)
        lowest = next((float(d) for d in doublings if backward.flushed_at(fmt, d) <= tolerance), math.inf)
    return ModuleAdvice(
        module=name,
        overflows=forward.overflows,
        nans=forward.nans,
        flushed_share=backward.flushed_share,
        lowest=lowest,
        highest=highest,
    )
