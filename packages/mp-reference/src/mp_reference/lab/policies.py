"""A precision policy in words that a file can hold, and the objects it stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args

import numpy as np

from mp_reference.amp.loss_scale import LossScale
from mp_reference.nn.arithmetic import Arithmetic, Rules
from mp_reference.nn.training import Precision
from mp_reference.numerics.rounding import ROUNDINGS, Rounding
from mp_reference.spec.accumulators import Accumulator, accumulator_named, pairwise, sequential
from mp_reference.spec.formats import FORMATS, FP32, FloatFormat
from mp_reference.spec.loss_scale import PRESETS
from mp_reference.spec.op_rules import DEVICES, RULES
from mp_reference.spec.tensor_cores import tensor_core

__all__ = ["Policy", "PolicyError", "accumulator_of", "format_of_name", "loss_scale_of"]

_CUSTOM = re.compile(r"e([1-8])m(\d{1,2})")
_MASTERS = ("fp32", "none", "stochastic", "kahan")


class PolicyError(ValueError):
    """A policy that means nothing, or contradicts itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way to train or to add, in words.

    Args:
        format: what operations compute in: a format's name, or a custom one such as "e5m4".
        storage: what parameters are stored in: "fp32" (mixed precision) or "same".
        masters: "fp32", or with storage "same" also "none", "stochastic" or "kahan".
        loss_scale: "off", "static:1024", or a preset, which may be followed by its start and its growth interval:
            "torch:65536:100".
        accumulator: "fp32", "exact", a format's name, "sequential:fp32", "pairwise:fp32", or a tensor core: "hopper".
        rounding: of every result into its format.
        device: whose op rules cast the inputs.
        overrides: "op=rule" pairs that change single rules, separated by spaces.

    Raises:
        PolicyError: as the message says.

    Source: each word's own module.

    >>> Policy(format="fp16", loss_scale="static:1024").label
    'fp16, static:1024'
    """

    format: str = "fp32"
    storage: str = "fp32"
    masters: str = "fp32"
    loss_scale: str = "off"
    accumulator: str = "fp32"
    rounding: str = "nearest-even"
    device: str = "cuda"
    overrides: str = ""

    @classmethod
    def of(cls, **words: Any) -> Self:
        """A policy whose every word was tried."""
        if isinstance(words.get("overrides"), Mapping):
            words["overrides"] = " ".join(f"{op}={rule}" for op, rule in sorted(words["overrides"].items()))
        policy = cls(**words)
        policy.precision(np.random.default_rng(0))
        loss_scale_of(policy.loss_scale)
        return policy

    @property
    def label(self) -> str:
        """The words that differ from plain fp32 training, for a legend."""
        said = [self.format]
        if self.storage != "fp32":
            said.append({"fp32": "masters", "none": "no masters"}.get(self.masters, self.masters))
        said += [
            word
            for word, plain in (
                (self.loss_scale, "off"), (self.accumulator, "fp32"), (self.rounding, "nearest-even"),
                (self.overrides, ""),
            )
            if word != plain
        ]  # fmt: skip
        return ", ".join(said)

    def precision(self, random: np.random.Generator) -> Precision:
        """The precision that the words stand for; ``random`` serves stochastic rounding."""
        fmt = format_of_name(self.format)
        if self.storage not in ("fp32", "same"):
            raise PolicyError(f"storage={self.storage!r} must be 'fp32' or 'same'")
        if self.masters not in _MASTERS or (self.masters != "fp32" and self.storage != "same"):
            raise PolicyError(
                f"masters={self.masters!r} must be one of {', '.join(_MASTERS)}; all but fp32 need storage='same'"
            )
        if self.rounding not in ROUNDINGS:
            raise PolicyError(f"rounding={self.rounding!r} must be one of {', '.join(get_args(Rounding))}")
        if self.device not in DEVICES:
            raise PolicyError(f"device={self.device!r} must be one of {', '.join(DEVICES)}")
        stochastic = random if self.rounding == "stochastic" else None
        same = self.storage == "same"
        return Precision(
            name=self.label,
            storage=fmt if same else FP32,
            rules=None if same or fmt == FP32 else Rules(device=self.device, fmt=fmt, overrides=self._overrides()),
            arithmetic=Arithmetic(
                accumulator=accumulator_of(self.accumulator),
                rounding=self.rounding,
                random=stochastic,
            ),
            master_weights={"stochastic": "none"}.get(self.masters, self.masters),
            write_back="stochastic" if self.masters == "stochastic" else "nearest-even",
        )

    def _overrides(self) -> dict[str, str]:
        pairs = dict(one.partition("=")[::2] for one in self.overrides.split())
        for op, rule in pairs.items():
            if rule not in (*RULES, "none"):
                raise PolicyError(f"overrides: {op}={rule} must end in one of {', '.join(RULES)}, none")
        return pairs


def format_of_name(name: str) -> FloatFormat:
    """A format by name, or a custom one by its widths.

    >>> format_of_name("e5m4").max
    63488.0
    """
    if name in FORMATS:
        return FORMATS[name]
    custom = _CUSTOM.fullmatch(name)
    if custom is None:
        raise PolicyError(f"format {name!r} is not one of {', '.join(FORMATS)}, nor of the form 'e5m4'")
    try:
        return FloatFormat(name, exponent_bits=int(custom[1]), mantissa_bits=int(custom[2]))
    except ValueError as error:
        raise PolicyError(str(error)) from error


def loss_scale_of(words: str) -> LossScale:
    """A loss scale by its words.

    >>> loss_scale_of("megatron:1024:10").growth_interval
    10
    """
    kind, *numbers = words.split(":")
    readers: dict[str, Callable[[str], float]] = {"init_scale": float, "growth_interval": int}
    try:
        knobs: dict[str, Any] = {name: readers[name](number) for name, number in zip(readers, numbers, strict=False)}
        if kind == "off" and not numbers:
            return LossScale(init_scale=1.0, dynamic=False, skip_limit=None)
        if kind == "static" and len(numbers) == 1:
            return LossScale(min_scale=0.0, dynamic=False, skip_limit=None, **knobs)
        if kind in PRESETS and len(numbers) <= len(readers):
            return LossScale.preset(kind, skip_limit=None, **knobs)
    except ValueError as error:
        raise PolicyError(f"loss_scale={words!r}: {error}") from error
    raise PolicyError(
        f"loss_scale={words!r} must be 'off', 'static:SCALE' or 'PRESET[:START[:INTERVAL]]' with PRESET one of "
        f"{', '.join(PRESETS)}"
    )


def accumulator_of(words: str) -> Accumulator:
    """An accumulator by its words.

    >>> accumulator_of("sequential:fp16").name
    'sequential(fp16)'
    """
    kind, _, name = words.partition(":")
    if kind in ("sequential", "pairwise") and name:
        fmt = format_of_name(name)
        return sequential(fmt) if kind == "sequential" else pairwise(fmt)
    if words in ("fp32", "exact"):
        return accumulator_named(words)
    if words in FORMATS or _CUSTOM.fullmatch(words):
        return sequential(format_of_name(words))
    try:
        return tensor_core(words)
    except ValueError as error:
        raise PolicyError(
            f"accumulator={words!r} must be 'fp32', 'exact', a format, 'sequential:FORMAT', 'pairwise:FORMAT' or a "
            f"tensor core: {error}"
        ) from error
