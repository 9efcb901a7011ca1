"""What a run must keep to go on as if it had never stopped, and how it is checked before anything is changed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.errors import CheckpointError
from mp_torch.phase import phase_from_state
from mp_torch.ranks import like
from mp_torch.scaling import ScaleState
from mp_torch.state_checks import check_fit, check_mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mp_torch.engine import AmpEngine

__all__ = [
    "FORMAT",
    "MIGRATIONS",
    "VERSION",
    "checked_state",
    "engine_state",
    "load_engine_state_",
    "restore_",
]

FORMAT = "mp_torch.engine"
VERSION = 1
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From version n to n + 1; applied one after the other."""

_LOSS_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def engine_state(engine: AmpEngine, *, copy: bool = True) -> dict[str, Any]:
    """Everything but the model's own weights and buffers: plain values and tensors.

    Args:
        engine: at any micro-step boundary.
        copy: clone the tensors, so that training on does not change the state.

    Returns:
        A dict that ``load_engine_state_`` takes.
    """
    engine.settle()
    take = _cloned if copy else _detached
    parts = engine.assembly.parts
    names = {part.weight.trained: part.weight.name for part in parts}
    stored = {part.weight.name: part.weight.stored() for part in parts}
    accumulated = {part.weight.name: part.weight.accumulated for part in parts}
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": engine.config.to_dict(),
        "loss_scale": asdict(engine.scale.state),
        "update_index": engine.update_index,
        "phase": engine.phase.state(),
        "weights": {part.weight.name: _mapped(part.weight.state(), take) for part in parts if part.weight.state()},
        "optimizers": [_optimizer_state(one, names, take) for one in engine.optimizers],
        "gradients": {name: take(one) for name, one in stored.items() if one is not None},
        "accumulated": {name: take(one) for name, one in accumulated.items() if one is not None},
        "buffers": [take(one) for one in engine.buffers.copies] if engine.buffers.taken else None,
        "schedulers": [one.state_dict() for one in engine.schedulers],
    }


def load_engine_state_(engine: AmpEngine, state: Mapping[str, Any]) -> None:
    """Take back what ``engine_state`` gave. Everything is checked before anything is changed.

    Args:
        engine: built as the saved one was; the model's own weights are loaded by the caller.
        state: of this version or an older one.

    Raises:
        CheckpointError: it is of another format, precision or model, or a key is missing, unknown or misshapen; the
            engine is as it was.
    """
    restore_(engine, checked_state(engine, state))


def checked_state(engine: AmpEngine, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state in this version, once it is sure that the engine can take it back.

    Raises:
        CheckpointError: as ``load_engine_state_``.
    """
    engine.settle()
    check_mapping(state, "the engine state")
    state = _migrated(dict(state))
    check_fit(engine, state)
    return state


def restore_(engine: AmpEngine, state: Mapping[str, Any]) -> None:
    """Take back a state that ``checked_state`` gave."""
    phase = phase_from_state(state["phase"], engine.config.accumulate_steps, _LOSS_DTYPES)
    scale = ScaleState(**state["loss_scale"])
    for part in engine.assembly.parts:
        weight, name = part.weight, part.weight.name
        if name in state["weights"]:
            weight.load_state(state["weights"][name])
        else:
            weight.touch()
        gradient = _copy(state["gradients"].get(name), weight.held)
        weight.parameter.grad = None if gradient is None else like(weight.parameter, gradient)
        weight.accumulated = _copy(state["accumulated"].get(name), weight.held)
    for optimizer, saved in zip(engine.optimizers, state["optimizers"], strict=True):
        _load_optimizer_(engine, optimizer, saved)
    engine.buffers.taken = False  # a snapshot of the window that was open here is of another run
    if state["buffers"] is not None:
        engine.buffers.load_(state["buffers"])
    for scheduler, saved in zip(engine.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    engine.scale.resume_(scale)
    engine.phase, engine.update_index = phase, int(state["update_index"])


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _mapped(values: Mapping[str, Any], take: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {key: take(one) if isinstance(one, torch.Tensor) else one for key, one in values.items()}


def _optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str], take: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key != "params"})
        groups[-1]["params"] = [names[one] for one in group["params"]]
    return {
        "kind": type(optimizer).__name__,
        "state": {names[one]: _mapped(values, take) for one, values in optimizer.state.items()},
        "groups": [_mapped(group, take) for group in groups],
    }


def _load_optimizer_(engine: AmpEngine, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """No cast to the parameter's dtype and no dummy step: state is put where it was."""
    trained = {part.weight.name: part.weight.trained for part in engine.assembly.parts}
    optimizer.state.clear()
    for name, values in saved["state"].items():
        weight = trained[name]
        optimizer.state[weight] = {
            key: one.detach().clone().to(one.device if key == "step" else weight.device)
            if isinstance(one, torch.Tensor)
            else one
            for key, one in values.items()
        }
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in values.items():
            if key != "params":
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _migrated(state: dict[str, Any]) -> dict[str, Any]:
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"format={state.get('format')!r} is not {FORMAT!r}; states of other scalers come in through import_scaler"
        )
    version = state.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"version={version!r} of the engine state is not known here, {VERSION} is; upgrade mp-torch"
        )
    while version < VERSION:
        if version not in MIGRATIONS:
            raise CheckpointError(f"version={version!r} of the engine state is too old: no migration from it exists")
        state = MIGRATIONS[version](state)
        version += 1
    return state


def _copy(value: torch.Tensor | None, beside: torch.Tensor) -> torch.Tensor | None:
    """A copy on the device of ``beside`` and, dense, in its memory layout."""
    if value is None or value.is_sparse:
        return None if value is None else value.detach().clone().to(beside.device)
    return torch.empty_like(beside, dtype=value.dtype).copy_(value.detach())
