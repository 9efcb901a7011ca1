"""An engine's state as tensors that any layout over ranks can save and any other can load.

A tensor goes by its parameter's name in the whole model, so that any number of ranks, shards or stages reads it. Stages
of a pipeline whose parameters have the same names put their stage before them, and resume on as many stages.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.checkpoint import checked_state, engine_state, restore_
from mp_torch.errors import CheckpointError
from mp_torch.ranks import like, local
from mp_torch.stages import PLAIN, merged, names_of, prefix_of, repeated

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mp_torch.engine import AmpEngine

__all__ = ["load_", "save"]

_KINDS = ("model", "weights", "optimizers", "gradients", "accumulated")
"""Tensors that belong to a name of the model's."""

_Saved = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def save(engine: AmpEngine, folder: Path) -> None:
    """Write model and engine. Collective.

    Args:
        engine: of any layout, one process included.
        folder: of the run's checkpoints; the last whole one is kept.
    """
    from mp_torch.ranks.checkpoint import write  # slow to import

    tensors, plain = _flattened(engine)
    stage = engine.ranks.prefix
    prefix = stage if repeated(names_of(engine)) else ""
    named = {(prefix if _kind(path) in _KINDS else stage) + path: one for path, one in tensors.items()}
    named[stage + PLAIN] = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
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

    every = saved_tensors(folder)
    ranks = names_of(engine)
    prefix = prefix_of(list(every), ranks)
    _check_model(every, prefix, {name for one in ranks for name in one.model if not prefix or one is ranks[0]})
    mine = {*ranks[0].model, *ranks[0].trained}
    elsewhere = {name for one in ranks for name in (*one.model, *one.trained)} - mine
    tensors = _rooms(engine, every, prefix, elsewhere)
    others = {path: torch.empty(shape, dtype=dtype) for path, (dtype, shape) in every.items() if not _named(path)}
    read_({prefix + path: one for path, one in tensors.items()} | others, folder, engine.ranks)
    said = {
        path.removesuffix(PLAIN): json.loads(bytes(one.tolist()))
        for path, one in sorted(others.items())
        if path.endswith(PLAIN)
    }
    plain, stage = merged(engine, {prefix: said[prefix]} if prefix else said, elsewhere)
    found = {path.removeprefix(stage): one for path, one in others.items() if path.startswith(stage)}
    found |= {path: local(one) for path, one in tensors.items()}
    state = checked_state(engine, _unflattened(found, plain))
    engine.model.load_state_dict({name: tensors[f"model/{name}"] for name in ranks[0].model})
    restore_(engine, state)


def _kind(path: str) -> str:
    return path.split("/", 1)[0]


def _named(path: str) -> bool:
    """Whether a path, of whatever stage, leads to a tensor that belongs to a name of the model's."""
    return any(kind in _KINDS for kind in path.split("/")[:2])


def _check_model(every: _Saved, prefix: str, names: set[str]) -> None:
    start = f"{prefix}model/"
    saved = {path.removeprefix(start) for path in every if path.startswith(start)}
    odd = sorted(saved ^ names)
    if odd:
        raise CheckpointError(
            f"{'model/' + odd[0]!r} is in the checkpoint or in the model, not in both; build the model that was saved"
        )


def _rooms(engine: AmpEngine, every: _Saved, prefix: str, elsewhere: set[str]) -> dict[str, torch.Tensor]:
    """Tensors to read into: all that belong to names that no other rank alone holds."""
    model, parameters = engine.model.state_dict(), engine.assembly.named
    rooms = {}
    for path, (dtype, shape) in every.items():
        short = path.removeprefix(prefix)
        if not path.startswith(prefix) or _kind(short) not in _KINDS:
            continue
        if short.split("/")[2 if _kind(short) == "optimizers" else 1] not in elsewhere:
            rooms[short] = _room(short, dtype, shape, parameters, model)
    return rooms


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
    parameters: Mapping[str, torch.Tensor],
    model: Mapping[str, torch.Tensor],
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
