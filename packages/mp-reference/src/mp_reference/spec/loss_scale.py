"""The loss scale's policy: every rule that the field keeps reversing as one validated knob; the real ones as rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from mp_reference.spec import sources
from mp_reference.spec.formats import FP32

__all__ = ["PRESETS", "LossScalePolicy"]

_CHOICES = {
    "hysteresis_refill": ("on-growth", "on-good-step"),
    "on_floor": ("keep", "raise"),
    "counting": ("n-good", "n-plus-one-at-first", "n-plus-one"),
    "at_ceiling": ("clamp", "drop"),
    "carried": ("fp32", "float64"),
    "factors": ("fp32", "float64"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePolicy:
    """How the loss scale starts, shrinks, grows and stops; says nothing of where the state lives.

    One transition for all: an overflow restarts the counter of good steps and uses up one unit of hysteresis; when
    none is left the scale shrinks, never below the floor. A good step counts; ``growth_interval`` of them let the scale
    grow, never above the ceiling. The counter is compared with ``>=``, so that an interval lowered on resume acts at
    the next good step.

    Args:
        init_scale: the scale before the first step; a power of two keeps scaling exact.
        growth_factor: what growth multiplies by, > 1.
        backoff_factor: what an overflow multiplies by, inside (0, 1).
        growth_interval: good steps before growth, >= 1.
        hysteresis: overflows before the scale shrinks, >= 1.
        hysteresis_refill: when the hysteresis is full again: "on-growth", or "on-good-step" (then only overflows in a
            row count).
        min_scale: the floor; 0.0 is no floor.
        max_scale: the ceiling; infinity is no ceiling.
        on_floor: an overflow at the floor either keeps the scale there ("keep") or is an error ("raise").
        skip_limit: at most so many skipped steps in a row, the next one is an error; None is no limit.
        dynamic: False fixes the scale; steps that overflow are skipped all the same.
        counting: what ``growth_interval`` N counts: "n-good" grows with the N-th good step; "n-plus-one-at-first" needs
            one more after the start and after an overflow; "n-plus-one" needs one more always.
        at_ceiling: a growth past the ceiling either stops at it ("clamp") or does not happen ("drop").
        clamp_init: lower an ``init_scale`` above the ceiling to the ceiling instead of refusing it.
        carried: the format that holds the scale between steps, "fp32" or "float64" (a Python number).
        factors: the format of the two factors where they meet the scale; the product is rounded once to ``carried``.
        source: the code that these rules were read from.

    Raises:
        ValueError: a knob outside its range; the message says which, why and what to write instead.
        TypeError: a knob of another type.

    Source: the rows of ``PRESETS``.

    >>> LossScalePolicy.preset("megatron").hysteresis
    2
    >>> LossScalePolicy(growth_interval=0)
    Traceback (most recent call last):
    ValueError: growth_interval=0 must be at least 1; for a fixed loss scale use dynamic=False
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    hysteresis_refill: Literal["on-growth", "on-good-step"] = "on-growth"
    min_scale: float = 1.0
    max_scale: float = 2.0**127
    on_floor: Literal["keep", "raise"] = "keep"
    skip_limit: int | None = 100
    dynamic: bool = True
    counting: Literal["n-good", "n-plus-one-at-first", "n-plus-one"] = "n-good"
    at_ceiling: Literal["clamp", "drop"] = "clamp"
    clamp_init: bool = False
    carried: Literal["fp32", "float64"] = "fp32"
    factors: Literal["fp32", "float64"] = "float64"
    source: str = field(default="the caller", compare=False)

    def __post_init__(self) -> None:
        """Refuse nonsense before any step is taken with it."""
        self._check_types()
        for name, legal in _CHOICES.items():
            if getattr(self, name) not in legal:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, legal))}")
        self._check_factors()
        self._check_counts()
        self._check_range()

    def _check_factors(self) -> None:
        _require(
            math.isfinite(self.init_scale) and self.init_scale > 0,
            f"init_scale={self.init_scale!r} must be finite and above 0; 65536.0 is the usual start",
        )
        _require(
            self.carried == "float64" or FP32.min_subnormal <= self.init_scale <= FP32.max,
            f"init_scale={self.init_scale!r} must lie within fp32, {FP32.min_subnormal!r} to {FP32.max!r}; choose one "
            "inside, or carried='float64'",
        )
        _require(
            math.isfinite(self.growth_factor) and self.growth_factor > 1,
            f"growth_factor={self.growth_factor!r} must be finite and above 1; for a fixed loss scale use "
            "dynamic=False",
        )
        _require(
            0 < self.backoff_factor < 1,
            f"backoff_factor={self.backoff_factor!r} must lie between 0 and 1; the cure for an overflow is a smaller "
            "scale, 0.5 is usual",
        )

    def _check_counts(self) -> None:
        _require(
            self.growth_interval >= 1,
            f"growth_interval={self.growth_interval!r} must be at least 1; for a fixed loss scale use dynamic=False",
        )
        _require(
            self.hysteresis >= 1,
            f"hysteresis={self.hysteresis!r} must be at least 1; 1 shrinks the scale at every overflow",
        )
        _require(
            self.skip_limit is None or self.skip_limit >= 1,
            f"skip_limit={self.skip_limit!r} must be at least 1; for no limit use skip_limit=None",
        )

    def _check_types(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}={value!r} must be a number, got {type(value).__name__}; write 65536.0")
            object.__setattr__(self, name, float(value))
        for name in ("growth_interval", "hysteresis", "skip_limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int) or (name == "skip_limit" and value is None)):
                raise TypeError(f"{name}={value!r} must be a whole number, got {type(value).__name__}; write 2000")
        for name in ("dynamic", "clamp_init"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")

    def _check_range(self) -> None:
        _require(
            self.min_scale >= 0 and math.isfinite(self.min_scale),
            f"min_scale={self.min_scale!r} must be finite and at least 0; 0.0 is no floor",
        )
        _require(self.max_scale > 0, f"max_scale={self.max_scale!r} must be above 0; math.inf is no ceiling")
        _require(
            self.min_scale <= self.max_scale,
            f"min_scale={self.min_scale!r} must not exceed max_scale={self.max_scale!r}; swap them",
        )
        if self.clamp_init:
            object.__setattr__(self, "init_scale", min(self.init_scale, self.max_scale))
        _require(
            self.min_scale <= self.init_scale <= self.max_scale,
            f"init_scale={self.init_scale!r} must lie between min_scale={self.min_scale!r} and "
            f"max_scale={self.max_scale!r}; choose one inside, or move the bound",
        )

    @property
    def first_count(self) -> int:
        """The counter of good steps at the start and after an overflow."""
        return -1 if self.counting == "n-plus-one-at-first" else 0

    @property
    def growth_count(self) -> int:
        """The counter of good steps at which the scale grows."""
        return self.growth_interval + (self.counting == "n-plus-one")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The policy of a real loss scaler, with some knobs turned.

        Args:
            name: a key of ``PRESETS``.
            overrides: any field of this class.

        Returns:
            A new policy of the class it is called on.

        Raises:
            ValueError: no preset has this name; or a knob is outside its range.
            TypeError: no field has an override's name.

        Source: the row's own ``source`` field.

        >>> LossScalePolicy.preset("torch", init_scale=16.0).growth_interval
        2000
        """
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is not one of {', '.join(PRESETS)}; for other rules give the fields")
        row = PRESETS[name]
        return cls(**{one.name: getattr(row, one.name) for one in fields(LossScalePolicy)} | overrides)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


_NO_FLOOR = 0.0
_TORCH = {"min_scale": _NO_FLOOR, "max_scale": FP32.max, "at_ceiling": "drop", "skip_limit": None}
_DEEPSPEED = {
    "growth_interval": 1000, "max_scale": math.inf, "skip_limit": None, "counting": "n-plus-one-at-first",
    "carried": "float64", "source": sources.DEEPSPEED,
}  # fmt: skip


def _row(*parts: dict[str, Any], **knobs: Any) -> LossScalePolicy:
    """One preset: shared knobs first, its own on top."""
    return LossScalePolicy(**{key: value for part in (*parts, knobs) for key, value in part.items()})


PRESETS: dict[str, LossScalePolicy] = {
    "torch": _row(_TORCH, source=sources.TORCH_AMP),
    "sharded": _row(_TORCH, max_scale=math.inf, factors="fp32", source=sources.TORCH_SHARDED),
    "megatron": _row(
        init_scale=2.0**32, growth_interval=1000, hysteresis=2, max_scale=math.inf, skip_limit=None, factors="fp32",
        source=sources.MEGATRON,
    ),
    "apex": _row(
        min_scale=_NO_FLOOR, max_scale=2.0**24, clamp_init=True, skip_limit=None, carried="float64",
        source=sources.APEX_AMP,
    ),
    "apex-fp16-utils": _row(
        init_scale=2.0**32, growth_interval=1000, max_scale=math.inf, skip_limit=None, carried="float64",
        source=sources.APEX_FP16_UTILS,
    ),
    "apex-hysteresis": _row(_TORCH, hysteresis=2, hysteresis_refill="on-good-step", source=sources.APEX_KERNEL),
    "jmp": _row(
        init_scale=2.0**15, max_scale=FP32.max, at_ceiling="drop", skip_limit=None, factors="fp32", source=sources.JMP
    ),
    "flax": _row(
        min_scale=FP32.min_normal, max_scale=FP32.max, skip_limit=None, counting="n-plus-one", factors="fp32",
        source=sources.FLAX,
    ),
    "torch_npu": _row(_TORCH, factors="fp32", source=sources.TORCH_NPU),
    "torch_npu-static": _row(_TORCH, dynamic=False, factors="fp32", source=sources.TORCH_NPU),
    "deepspeed": _row(_DEEPSPEED, hysteresis=2, on_floor="raise"),
    "deepspeed-consecutive": _row(_DEEPSPEED, hysteresis=2, hysteresis_refill="on-good-step", on_floor="raise"),
    "deepspeed-fused": _row(_DEEPSPEED),
}  # fmt: skip
"""The loss scalers of the field, by name. ``apex-hysteresis`` is a kernel without defaults; its start is ours."""
