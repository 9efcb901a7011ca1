"""The six ways in which the same model is trained: one row each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mp_torch import LossScale

# A start that the first steps must halve a few times and an interval short enough to watch the scale grow again.
DYNAMIC = LossScale(init_scale=2.0**19, growth_interval=40)


@dataclass(frozen=True)
class Recipe:
    """One precision: the name in the table, and what ``AmpEngine`` is told."""

    name: str
    precision: str
    options: dict[str, Any] = field(default_factory=dict)


RECIPES = (
    Recipe("fp32", "fp32"),
    Recipe("bf16-mixed", "bf16-mixed"),
    Recipe("fp16-mixed, scaled", "fp16-mixed", {"loss_scale": DYNAMIC}),
    Recipe("fp16-mixed, unscaled", "fp16-mixed", {"loss_scale": LossScale.off()}),
    Recipe("bf16-true, masters", "bf16-true"),
    Recipe("bf16-true, no masters", "bf16-true", {"master_weights": "none"}),
)
