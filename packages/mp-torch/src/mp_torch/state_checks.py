"""What of a saved state is checked before anything is changed: keys, kinds, shapes, dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.config import AmpConfig
from mp_torch.dtypes import nearest
from mp_torch.errors import AmpConfigError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mp_torch.engine import AmpEngine

__all__ = ["KEYS", "check_fit", "check_keys", "check_mapping", "check_tensor"]

KEYS = (
    "format", "version", "config", "loss_scale", "update_index", "phase", "weights", "optimizers", "gradients",
    "accumulated", "buffers", "schedulers",
)  # fmt: skip
"""Of an engine's state."""


def check_keys(given: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Refuse a mapping with other keys than it should have.

    Raises:
        CheckpointError: one is missing or unknown; it is named.

    >>> check_keys(["a", "b"], ["a", "b"], "it")
    """
    given, wanted = list(given), list(wanted)
    missing = [key for key in wanted if key not in given]
    unknown = [key for key in given if key not in wanted]
    if missing:
        raise CheckpointError(f"{where} lacks the key {missing[0]!r}; it was not written whole by engine.state_dict()")
    if unknown:
        raise CheckpointError(f"{where} has an unknown key {unknown[0]!r}{nearest(unknown[0], wanted)}")


def check_fit(engine: AmpEngine, state: Mapping[str, Any]) -> None:
    """Refuse a state that this engine could not take back whole.

    Args:
        engine: built as the saved one was.
        state: in this version's form.

    Raises:
        CheckpointError: a key is missing or unknown, a value is of another kind, shape or dtype; the first is named.
    """
    check_keys(state, KEYS, "the engine state")
    _check_config(engine, state["config"])
    present: dict[str, Any] = {
        "loss_scale": asdict(engine.scale.state),
        "phase": engine.phase.state(),
        "update_index": 0,
    }
    for key, here in present.items():
        _check_plain(state[key], here, key)
    if not 0.0 < state["loss_scale"]["scale"] < math.inf:
        raise CheckpointError(
            f"loss_scale={state['loss_scale']['scale']!r} was saved, which must be above 0 and finite"
        )
    _check_weights(engine, state)
    for key in ("optimizers", "schedulers"):
        if not isinstance(state[key], list | tuple) or len(state[key]) != len(getattr(engine, key)):
            count = len(state[key]) if isinstance(state[key], list | tuple) else repr(state[key])
            raise CheckpointError(f"{count} {key} were saved, {len(getattr(engine, key))} run; build as many")
    _check_optimizers(engine, state)
    for scheduler, saved in zip(engine.schedulers, state["schedulers"], strict=True):
        check_mapping(saved, "a scheduler's state")
        check_keys(saved, scheduler.state_dict(), "a scheduler's state")
    _check_buffers(engine, state["buffers"])


def _check_weights(engine: AmpEngine, state: Mapping[str, Any]) -> None:
    carried = {part.weight.name: part.weight.state() for part in engine.assembly.parts if part.weight.state()}
    check_mapping(state["weights"], "weights")
    check_keys(state["weights"], carried, "weights")
    for name, values in state["weights"].items():
        check_mapping(values, f"weights[{name!r}]")
        check_keys(values, carried[name], f"weights[{name!r}]")
        for key, one in values.items():
            check_tensor(one, carried[name][key], f"{key} of {name!r}")
    parameters = {part.weight.name: part.weight.held for part in engine.assembly.parts}
    for key in ("gradients", "accumulated"):
        check_mapping(state[key], key)
        for name, one in state[key].items():
            if name not in parameters:
                raise CheckpointError(f"{key}[{name!r}] fits no parameter of this model")
            wanted = parameters[name]
            check_tensor(one, wanted if key == "gradients" else wanted.float(), f"{key}[{name!r}]")


def _check_config(engine: AmpEngine, saved: Any) -> None:
    check_mapping(saved, "config")
    check_keys(saved, engine.config.to_dict(), "config")
    try:
        AmpConfig.from_dict(saved)
    except (AmpConfigError, ValueError, TypeError) as error:
        raise CheckpointError(f"the saved config is none: {error}") from error
    for key in ("precision", "master_weights"):
        here, there = getattr(engine.config, key), saved[key]
        if here != there:
            raise CheckpointError(
                f"{key}={there!r} was saved, {key}={here!r} runs; build the engine as the saved one, or load the "
                "model's weights alone, from which masters are rebuilt"
            )


def _check_buffers(engine: AmpEngine, saved: Any) -> None:
    if saved is None:
        return
    copies = engine.buffers.copies
    if not isinstance(saved, list | tuple) or len(saved) != len(copies):
        raise CheckpointError(f"the saved snapshot holds no {len(copies)} buffers, which the model has")
    for place, (one, here) in enumerate(zip(saved, copies, strict=True)):
        check_tensor(one, here, f"buffer {place}")


def check_mapping(value: Any, what: str) -> None:
    """Refuse what is no dict.

    Raises:
        CheckpointError: it is something else.

    >>> check_mapping({}, "it")
    """
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{what} is {value!r}, which must be a dict; it was not written by engine.state_dict()")


def _check_plain(given: Any, wanted: Any, what: str) -> None:
    """Refuse a plain value of another kind, a negative counter, and a number that is not finite."""
    if isinstance(wanted, dict):
        check_mapping(given, what)
        check_keys(given, wanted, what)
        for key, one in wanted.items():
            _check_plain(given[key], one, f"{what}[{key!r}]")
        return
    kinds = {bool: (bool,), int: (int,), float: (int, float)}.get(type(wanted), (str, type(None)))
    if not isinstance(given, kinds) or (isinstance(given, bool) and bool not in kinds):
        raise CheckpointError(f"{what}={given!r} was saved, which must be a {kinds[0].__name__}")
    if isinstance(given, int | float) and not _FLOORS.get(what, 0) <= given < math.inf:
        raise CheckpointError(f"{what}={given!r} was saved, which must be finite and not below {_FLOORS.get(what, 0)}")


_FLOORS = {"loss_scale['growth_tracker']": -1, "loss_scale['hysteresis_tracker']": -math.inf}
"""Counters that may be below 0: one that starts one short of 0, and one that goes on counting past it."""


def check_tensor(given: Any, wanted: torch.Tensor, what: str) -> None:
    """Refuse a tensor of another shape or dtype: nothing is cast on the way in.

    Raises:
        CheckpointError: it differs, or is no tensor.
    """
    if not isinstance(given, torch.Tensor):
        raise CheckpointError(f"{what} was saved as {given!r}, which must be a tensor")
    if given.shape != wanted.shape or given.dtype != wanted.dtype:
        raise CheckpointError(
            f"{what} was saved as {given.dtype} {tuple(given.shape)}, here it is {wanted.dtype} {tuple(wanted.shape)}; "
            "build the engine as the saved one"
        )


def _check_optimizers(engine: AmpEngine, state: Mapping[str, Any]) -> None:
    shapes = {part.weight.name: part.weight.held.shape for part in engine.assembly.parts}
    names = {part.weight.trained: part.weight.name for part in engine.assembly.parts}
    for optimizer, saved in zip(engine.optimizers, state["optimizers"], strict=True):
        check_mapping(saved, "an optimizer's state")
        check_keys(saved, ("kind", "state", "groups"), "an optimizer's state")
        if saved["kind"] != type(optimizer).__name__:
            raise CheckpointError(f"{saved['kind']} was saved, {type(optimizer).__name__} runs; build the saved one")
        _check_groups(optimizer, saved["groups"], [[names[one] for one in g["params"]] for g in optimizer.param_groups])
        check_mapping(saved["state"], f"the state of {saved['kind']}")
        for name, values in saved["state"].items():
            if name not in shapes:
                raise CheckpointError(f"{saved['kind']} has state of {name!r}, which is no parameter that trains here")
            check_mapping(values, f"the state of {name!r}")
            _check_slots(type(optimizer), name, values, shapes[name])


def _check_groups(optimizer: torch.optim.Optimizer, saved: Any, here: list[list[str]]) -> None:
    kind = type(optimizer).__name__
    if not isinstance(saved, list | tuple) or len(saved) != len(here):
        raise CheckpointError(f"{kind} was not saved with its {len(here)} parameter groups")
    for group, values, members in zip(optimizer.param_groups, saved, here, strict=True):
        check_mapping(values, f"a parameter group of {kind}")
        check_keys(values, group, f"a parameter group of {kind}")
        if values["params"] != members:
            raise CheckpointError(f"{kind} was saved with the parameters {values['params']}, it runs with {members}")
        signed = type(optimizer) not in _SLOTS
        for key, one in group.items():
            if not _fits_setting(key, values[key], one, signed=signed):
                raise CheckpointError(
                    f"{key}={values[key]!r} was saved for a parameter group of {kind}, where {one!r} is"
                )


_SWITCHES = ("foreach", "fused")


def _fits_setting(key: str, given: Any, here: Any, *, signed: bool) -> bool:
    """Whether a saved setting is of the kind of the one that runs.

    Args:
        key: its name.
        given: the saved one.
        here: the one that runs.
        signed: numbers may be negative; no setting of SGD and Adam may.
    """
    if key in _SWITCHES:
        return given is None or isinstance(given, bool)
    if isinstance(here, bool | str):
        return type(given) is type(here)
    if isinstance(here, int | float):
        return _is_number(given, signed=signed)
    if isinstance(here, list | tuple):
        pairs = zip(given, here, strict=False) if isinstance(given, list | tuple) and len(given) == len(here) else None
        return pairs is not None and all(_fits_setting("", one, other, signed=signed) for one, other in pairs)
    return True


def _is_number(value: Any, *, signed: bool = False) -> bool:
    if isinstance(value, bool) or not (isinstance(value, int | float) or _is_scalar(value)):
        return False
    return (-math.inf if signed else 0) < float(value) < math.inf or float(value) == 0


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype == torch.float32


_SLOTS: dict[type, tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
"""What torch's own optimizers keep; of others every key is taken as it is."""


def _check_slots(kind: type, name: str, values: Mapping[str, Any], shape: torch.Size) -> None:
    legal = _SLOTS.get(kind)
    if legal is None:
        return  # another optimizer's: only it knows
    adam = "step" in legal
    missing = [key for key in legal[:3] if key not in values] if adam and values else []
    unknown = [key for key in values if key not in legal]
    if missing or unknown:
        raise CheckpointError(
            f"{kind.__name__} keeps {', '.join(legal)}; the state of {name!r} has {', '.join(values)}"
        )
    for key, one in values.items():
        if key == "step":
            if not _is_number(one):
                raise CheckpointError(f"step of {name!r} is {one!r}, which must be a number of updates")
        elif one is not None or adam:
            check_tensor(one, torch.empty(shape, device="meta"), f"{key} of {name!r}")
