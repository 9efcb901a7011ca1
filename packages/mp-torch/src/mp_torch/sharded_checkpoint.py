"""An engine's state as tensors that any layout over ranks can save and any other can load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.checkpoint import checked_state, engine_state, restore_
from mp_torch.errors import CheckpointError
from mp_torch.ranks import like, local

if TYPE_CHECKING:
    from pathlib import Path

    from mp_torch.engine import AmpEngine

__all__ = ["load_", "save"]

_PLAIN = "plain"
"""Name of the tensor of bytes that holds everything that is no tensor."""


def save(engine: AmpEngine, folder: Path) -> None:
    """Write model and engine. Collective.

    Args:
        engine: of any layout, one process included.
        folder: of the run's checkpoints; the last whole one is kept.
    """
    from mp_torch.ranks.checkpoint import write  # slow to import

    tensors, plain = _flattened(engine)
    tensors[_PLAIN] = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    prefix = engine.ranks.prefix
    named = {prefix + path: one for path, one in tensors.items()}
    write(named, folder, f"update-{engine.update_index}", engine.ranks)


def load_(engine: AmpEngine, folder: Path) -> None:
    """Read model and engine, saved by any number of ranks. Collective where there are several.

    Args:
        engine: built as the saved one was, laid out as it likes.
        folder: as for ``save``.

    Raises:
        CheckpointError: there is no whole checkpoint, or it is of another run; the engine is as it was.
    """
    from mp_torch.ranks.checkpoint import read_, saved_tensors

    prefix = engine.ranks.prefix
    every = saved_tensors(folder)
    saved = {path.removeprefix(prefix): one for path, one in every.items() if path.startswith(prefix)}
    model = engine.model.state_dict()
    odd = sorted({f"model/{name}" for name in model} ^ {path for path in saved if path.startswith("model/")})
    if odd:
        raise CheckpointError(
            f"{odd[0]!r} is in the checkpoint or in the model, not in both; build the model that was saved"
        )
    parameters = engine.assembly.named
    tensors = {path: _room(path, dtype, shape, parameters, model) for path, (dtype, shape) in saved.items()}
    read_({prefix + path: one for path, one in tensors.items()}, folder, engine.ranks)
    plain = json.loads(bytes(tensors.pop(_PLAIN).tolist()))
    state = checked_state(engine, _unflattened({path: local(one) for path, one in tensors.items()}, plain))
    engine.model.load_state_dict({name: tensors[f"model/{name}"] for name in model})
    restore_(engine, state)


def _flattened(engine: AmpEngine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by path, laid out as their parameters are, and the rest."""
    state = engine_state(engine, copy=False)
    parameters = engine.assembly.named
    tensors = {f"model/{name}": one for name, one in engine.model.state_dict().items()}

    def put(path: str, name: str, one: torch.Tensor) -> None:
        parameter = parameters[name]
        spread = one.shape == local(parameter.detach()).shape and one.dim() > 0
        tensors[path] = like(parameter, one) if spread else one

    for name, values in state.pop("weights").items():
        for slot, one in values.items():
            put(f"weights/{name}/{slot}", name, one)
    for place, optimizer in enumerate(state["optimizers"]):
        for name, values in optimizer.pop("state").items():
            for slot, one in values.items():
                put(f"optimizers/{place}/{name}/{slot}", name, one)
    for kind in ("gradients", "accumulated"):
        for name, one in state.pop(kind).items():
            put(f"{kind}/{name}", name, one)
    for place, one in enumerate(state["buffers"] or ()):
        tensors[f"buffers/{place}"] = one
    state["buffers"] = None if state["buffers"] is None else len(state["buffers"])
    return tensors, state


def _unflattened(tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    state = dict(plain) | {"weights": {}, "gradients": {}, "accumulated": {}}
    for optimizer in state["optimizers"]:
        optimizer["state"] = {}
    if state["buffers"] is not None:
        state["buffers"] = [tensors[f"buffers/{place}"] for place in range(state["buffers"])]
    for path, one in tensors.items():
        kind, *rest = path.split("/")
        if kind == "weights":
            state["weights"].setdefault(rest[0], {})[rest[1]] = one
        elif kind == "optimizers":
            state["optimizers"][int(rest[0])]["state"].setdefault(rest[1], {})[rest[2]] = one
        elif kind in ("gradients", "accumulated"):
            state[kind][rest[0]] = one
    return state


def _room(
    path: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parameters: dict[str, torch.Tensor],
    model: dict[str, torch.Tensor],
) -> torch.Tensor:
    """A tensor to read into: of the saved shape, laid out as its parameter is here."""
    kind, *rest = path.split("/")
    beside = model.get(rest[0]) if kind == "model" else None
    if kind in ("weights", "gradients", "accumulated"):
        beside = parameters.get(rest[0])
    elif kind == "optimizers":
        beside = parameters.get(rest[1])
    if beside is None or not shape or tuple(beside.shape) != shape:
        return torch.empty(shape, dtype=dtype)
    part = local(beside.detach())
    return like(beside, torch.empty(part.shape, dtype=dtype, device=part.device))
