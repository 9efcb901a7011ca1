"""Every knob of the engine, validated when it is built, and written to and read from dict, JSON and TOML."""

from __future__ import annotations

import json
import math
import numbers
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from mp_reference.spec.loss_scale import LossScalePolicy
from mp_torch.dtypes import PRECISIONS, nearest
from mp_torch.errors import AmpConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["AmpConfig", "AmpSettings"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "skip": ("all", "each"),
    "nonfinite": ("skip", "raise"),
    "update": ("auto", "fused", "exact"),
    "master_weights": ("fp32", "remainder", "none"),
    "accumulate": ("fp32", "parameter"),
    "reduce_dtype": ("fp32", "fp16", "bf16"),
    "divide": ("before", "after", "split"),
}
_OP_RULES = ("fp32", "lower_precision_fp", "promote")


class AmpSettings(TypedDict, total=False):
    """The fields of ``AmpConfig`` as keywords; there each is documented."""

    loss_scale: LossScalePolicy | None
    max_grad_norm: float | None
    norm_type: float
    clip_value: float | None
    accumulate_steps: int
    skip: Literal["all", "each"]
    nonfinite: Literal["skip", "raise"]
    restore_buffers: bool
    keep_fp32: Sequence[Any]
    lower: Sequence[Any]
    op_rules: Mapping[str, str]
    update: Literal["auto", "fused", "exact"]
    seed: int
    master_weights: Literal["fp32", "remainder", "none"]
    accumulate: Literal["fp32", "parameter"]
    reduce_dtype: Literal["fp32", "fp16", "bf16"]
    divide: Literal["before", "after", "split"]
    safe_ops: bool


@dataclass(frozen=True, kw_only=True)
class AmpConfig:
    """What an ``AmpEngine`` is asked to do.

    Args:
        precision: a key of ``mp_torch.dtypes.PRECISIONS``, or "auto" to choose by the device.
        loss_scale: the policy; ``None`` is ``LossScale()`` for fp16 and ``LossScale.off()`` for the others.
        max_grad_norm: gradients of a larger norm are scaled down to it; ``None`` is off. A parameter group's own
            ``max_grad_norm`` clips that group by its own norm.
        norm_type: 2.0, infinity or another p from 1 to 7; ``update="exact"`` takes 2.0 and infinity.
        clip_value: gradients are clamped to ``[-clip_value, clip_value]``, before the norm; ``None`` is off.
        accumulate_steps: micro-steps in one window; ``backward(boundary=...)`` decides by hand.
        skip: with several optimizers, one non-finite gradient skips "all" of them or "each" decides for itself; the
            scale backs off once in both.
        nonfinite: "skip" the step, or "raise" wherever no smaller loss scale could have helped.
        restore_buffers: a skipped step gives BatchNorm statistics and other buffers back what they were before the
            window.
        keep_fp32: modules that compute in fp32 and keep fp32 parameters: glob patterns over names, classes, or
            compiled regular expressions.
        lower: modules that compute in the lower precision although a default rule keeps them in fp32.
        op_rules: ``{"softmax": "fp32"}``: how a function of torch runs, by its name: "fp32", "lower_precision_fp",
            "promote".
        update: "exact" (separately rounded IEEE operations, the same bits on every device), "fused" (torch's fused
            kernels), "auto" (the fastest that the device and the optimizer offer).
        seed: of the stochastic rounding, and of nothing else.
        master_weights: of the ``-true`` precisions: "fp32", "remainder" (bf16 weight and 16 further bits, half the
            memory), or "none".
        accumulate: gradients of 16-bit parameters are summed over a window in "fp32" or in the "parameter"'s dtype.
        reduce_dtype: what gradients are averaged between ranks in: "fp32", "fp16" or "bf16".
        divide: whether the average divides "before" or "after" the sum, or "split" takes the root of it on each side.
        safe_ops: norms, softmax, cross entropy and position encodings compute in fp32 without being named.

    Raises:
        AmpConfigError: a value outside its range; the message says which, why and what to write instead.

    >>> AmpConfig(precision="bf16-mixed", max_grad_norm=None).update
    'auto'
    >>> AmpConfig(max_grad_norm=-1.0)
    Traceback (most recent call last):
    mp_torch.errors.AmpConfigError: max_grad_norm=-1.0 must be a finite number above 0; None switches clipping off
    """

    precision: str = "fp16-mixed"
    loss_scale: LossScalePolicy | None = None
    max_grad_norm: float | None = 1.0
    norm_type: float = 2.0
    clip_value: float | None = None
    accumulate_steps: int = 1
    skip: Literal["all", "each"] = "all"
    nonfinite: Literal["skip", "raise"] = "skip"
    restore_buffers: bool = True
    keep_fp32: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    op_rules: Mapping[str, str] = field(default_factory=dict)
    update: Literal["auto", "fused", "exact"] = "auto"
    seed: int = 0
    master_weights: Literal["fp32", "remainder", "none"] = "fp32"
    accumulate: Literal["fp32", "parameter"] = "fp32"
    reduce_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    divide: Literal["before", "after", "split"] = "before"
    safe_ops: bool = True

    def __post_init__(self) -> None:
        """Refuse what no step could honour, and bring patterns to their written form."""
        for name in ("keep_fp32", "lower"):
            object.__setattr__(self, name, tuple(_pattern(one, name) for one in _sequence(getattr(self, name), name)))
        for name in ("max_grad_norm", "norm_type", "clip_value"):
            object.__setattr__(self, name, _plain(getattr(self, name), numbers.Real, float))
        for name in ("accumulate_steps", "seed"):
            object.__setattr__(self, name, _plain(getattr(self, name), numbers.Integral, int))
        self._check_choices()
        self._check_numbers()
        object.__setattr__(self, "op_rules", _checked_rules(self.op_rules))
        if self.loss_scale is not None:  # its values alone, so that a config equals what was read back
            values = {one.name: getattr(self.loss_scale, one.name) for one in fields(LossScalePolicy)}
            object.__setattr__(self, "loss_scale", LossScalePolicy(**values))

    def _check_choices(self) -> None:
        if self.precision not in (*PRECISIONS, "auto"):
            raise AmpConfigError(
                f"precision={self.precision!r} is not a precision{nearest(str(self.precision), PRECISIONS)}; it must "
                f"be one of {', '.join(PRECISIONS)} or auto"
            )
        for name, legal in _CHOICES.items():
            value = getattr(self, name)
            if value not in legal:
                raise AmpConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, legal))}")
        for name in ("restore_buffers", "safe_ops"):
            if not isinstance(getattr(self, name), bool):
                raise AmpConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.master_weights == "remainder" and self.precision != "bf16-true":
            raise AmpConfigError(
                f"master_weights='remainder' completes bf16 weights, precision={self.precision!r} has none; use "
                "precision='bf16-true', or master_weights='fp32'"
            )
        if self.master_weights == "none" and not self.precision.endswith("-true"):
            raise AmpConfigError(
                f"master_weights='none' concerns the -true precisions, precision={self.precision!r} decides for "
                "itself; leave master_weights out"
            )

    def _check_numbers(self) -> None:
        for name in ("max_grad_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise AmpConfigError(f"{name}={value!r} must be a finite number above 0; None switches clipping off")
        if not (_is_number(self.norm_type) and (1 <= self.norm_type <= 7 or self.norm_type == math.inf)):
            raise AmpConfigError(
                f"norm_type={self.norm_type!r} must be a number from 1.0 to 7.0, whose powers of fp32 gradients "
                "float64 holds, or math.inf; 2.0 is usual"
            )
        if self.update == "exact" and self.norm_type not in (2.0, math.inf):
            raise AmpConfigError(
                f"norm_type={self.norm_type!r} has no correctly rounded form; with update='exact' use 2.0 or math.inf"
            )
        if not _is_whole(self.accumulate_steps) or self.accumulate_steps < 1:
            raise AmpConfigError(f"accumulate_steps={self.accumulate_steps!r} must be a whole number from 1 up")
        if not _is_whole(self.seed) or not 0 <= self.seed < 2**64:
            raise AmpConfigError(f"seed={self.seed!r} must be a whole number in [0, 2**64)")
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScalePolicy):
            raise AmpConfigError(
                f"loss_scale={self.loss_scale!r} must be a LossScale; write LossScale.static(1024.0) for a fixed one, "
                "LossScale.off() for none"
            )

    def __hash__(self) -> int:
        """Equal configs have equal hashes."""
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON; ``from_dict`` gives an equal config.

        >>> AmpConfig.from_dict(AmpConfig(seed=7).to_dict()) == AmpConfig(seed=7)
        True
        """
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        plain["loss_scale"] = None if self.loss_scale is None else asdict(self.loss_scale)
        return plain | {"keep_fp32": list(self.keep_fp32), "lower": list(self.lower), "op_rules": dict(self.op_rules)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> AmpConfig:
        """The config that ``to_dict`` wrote; keys that are left out have their defaults.

        Raises:
            AmpConfigError: an unknown key, whose nearest known one is suggested; a value outside its range.

        >>> AmpConfig.from_dict({"presicion": "fp32"})
        Traceback (most recent call last):
        mp_torch.errors.AmpConfigError: unknown key 'presicion' in the config, did you mean 'precision'?; known: ...
        """
        if not isinstance(plain, Mapping):
            raise AmpConfigError(f"the config is {plain!r}, which must be a mapping of names to values")
        _known(plain, [one.name for one in fields(cls)], "the config")
        values = dict(plain)
        policy = values.get("loss_scale")
        if isinstance(policy, Mapping):
            _known(policy, [one.name for one in fields(LossScalePolicy)], "loss_scale")
            try:
                values["loss_scale"] = LossScalePolicy(**policy)
            except (TypeError, ValueError) as error:
                raise AmpConfigError(f"loss_scale: {error}") from error
        return cls(**values)

    def to_json(self) -> str:
        """The config as JSON text.

        >>> AmpConfig.from_json(AmpConfig().to_json()) == AmpConfig()
        True
        """
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> AmpConfig:
        """The config that ``to_json`` wrote."""
        try:
            plain = json.loads(text)
        except ValueError as error:
            raise AmpConfigError(f"the config is no JSON: {error}") from error
        return cls.from_dict(plain)

    def to_toml(self) -> str:
        """The config as TOML text; what is off is written ``"none"``, which TOML has no word for.

        >>> AmpConfig.from_toml(AmpConfig(max_grad_norm=None).to_toml()).max_grad_norm is None
        True
        """
        plain = self.to_dict()
        tables = {name: plain.pop(name) for name in ("loss_scale", "op_rules") if isinstance(plain[name], dict)}
        lines = [f"{key} = {_toml(value)}" for key, value in plain.items()]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{json.dumps(key)} = {_toml(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> AmpConfig:
        """The config that ``to_toml`` wrote, or a person."""

        def off(table: Mapping[str, Any]) -> dict[str, Any]:
            return {
                key: off(value)
                if isinstance(value, dict)
                else _OFF.get((key, value), value)
                if value == "none"
                else value
                for key, value in table.items()
            }

        try:
            plain = tomllib.loads(text)
        except ValueError as error:
            raise AmpConfigError(f"the config is no TOML: {error}") from error
        return cls.from_dict(off(plain))


_OFF: dict[tuple[str, str], str | None] = {
    (name, "none"): None for name in ("loss_scale", "max_grad_norm", "clip_value", "skip_limit")
}


def _toml(value: object) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _known(given: Iterable[str], known: list[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise AmpConfigError(f"unknown key {key!r} in {where}{nearest(str(key), known)}; known: {', '.join(known)}")


def _sequence(value: Any, name: str) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(value)
    example = f"such as [{value!r}]" if isinstance(value, str | type | re.Pattern) else "or a tuple"
    raise AmpConfigError(f"{name}={value!r} must be a list of patterns, {example}")


def _pattern(one: Any, name: str) -> str:
    """A class becomes ``class:module.Name``, a regular expression ``re:...``; a string is taken as it is."""
    if isinstance(one, str):
        if one.startswith("re:"):
            _compiled(one, name)
        return one
    if isinstance(one, type):
        return f"class:{one.__module__}.{one.__qualname__}"
    if isinstance(one, re.Pattern) and isinstance(one.pattern, str):
        flags = "".join(letter for letter, flag in _FLAGS.items() if one.flags & flag)
        return f"re:(?{flags}){one.pattern}" if flags else f"re:{one.pattern}"
    raise AmpConfigError(f"{name} has {one!r}, which must be a name pattern, a module class or a compiled regex")


_FLAGS = {"a": re.A, "i": re.I, "m": re.M, "s": re.S, "x": re.X}
"""What ``re.compile`` may have been given, as the pattern itself can say it."""


def _checked_rules(rules: Any) -> dict[str, str]:
    if not isinstance(rules, Mapping):
        raise AmpConfigError(f"op_rules={rules!r} must map names of functions to rules, such as {{'softmax': 'fp32'}}")
    for op, rule in rules.items():
        if not isinstance(op, str):
            raise AmpConfigError(f"op_rules[{op!r}]: a function is named by a string, such as 'softmax'")
        if rule not in _OP_RULES:
            raise AmpConfigError(f"op_rules[{op!r}]={rule!r} must be one of {', '.join(map(repr, _OP_RULES))}")
    return _Rules(rules)


class _Rules(dict[str, str]):
    """A dict that stays as it is, since a config does; copied and pickled as its contents."""

    def __reduce__(self) -> Any:
        return _Rules, (dict(self),)

    def _stays(self, *_: Any, **__: Any) -> Any:
        raise AmpConfigError("op_rules of a config cannot be changed; dataclasses.replace(config, op_rules=...) does")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _stays


def _plain(value: Any, kind: type, python: Callable[[Any], Any]) -> Any:
    """A number of this kind, such as NumPy's, as Python's own; anything else as it is."""
    return python(value) if isinstance(value, kind) and not isinstance(value, bool) else value


def _compiled(one: str, name: str) -> None:
    try:
        re.compile(one.removeprefix("re:"))
    except re.error as error:
        raise AmpConfigError(f"{name} has {one!r}, which is no regular expression: {error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
