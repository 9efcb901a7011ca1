"""Checkpoint files: one safetensors file, checked by a digest, replaced in one move, without any pickled code."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mp_torch.checkpoint import checked_state, engine_state, restore_
from mp_torch.errors import CheckpointError
from mp_torch.state_checks import check_keys, check_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mp_torch.engine import AmpEngine

__all__ = ["load_", "save"]

_FORMAT = "mp_torch.checkpoint/1"


def save(engine: AmpEngine, path: str | Path) -> None:
    """Write model and engine; a reader finds the old file or the new one, whole.

    Args:
        engine: at any micro-step boundary.
        path: of the file.

    Raises:
        CheckpointError: a state holds something that is neither a plain value nor a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = {"model": dict(engine.model.state_dict()), "engine": engine_state(engine, copy=False)}
    text = json.dumps(_packed(tree, "", tensors))
    metadata = {"format": _FORMAT, "state": text, "sha256": _digest(text, tensors)}
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=metadata)
        with Path(temporary).open("rb") as file:
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_(engine: AmpEngine, path: str | Path) -> None:
    """Read what ``save`` wrote. Everything is checked before anything is changed.

    Args:
        engine: built as the saved one was.
        path: of the file.

    Raises:
        CheckpointError: the file is truncated or altered, or does not fit this engine.
    """
    tree = _read(Path(path))
    present = engine.model.state_dict()
    check_keys(tree["model"], present, "the model's weights")
    for name, one in tree["model"].items():
        if isinstance(one, torch.Tensor):
            check_tensor(one, present[name], f"{name!r} of the model")
    state = checked_state(engine, tree["engine"])
    engine.model.load_state_dict(tree["model"])
    restore_(engine, state)


def _read(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} cannot be read ({error}); it is truncated or no checkpoint") from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path.name} has format {metadata.get('format')!r}, not {_FORMAT!r}; use engine.save()")
    text = metadata.get("state", "")
    if metadata.get("sha256") != _digest(text, tensors):
        raise CheckpointError(f"{path.name} is damaged: its contents do not match its checksum; use another copy")
    tree: dict[str, Any] = _unpacked(json.loads(text), tensors)
    return tree


def _digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        one = tensors[name]
        digest.update(f"{name} {one.dtype} {tuple(one.shape)}".encode())
        digest.update(one.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _packed(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Plain JSON, with tensors set aside under their path's name."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            whole = value.coalesce()
            parts = [whole.indices(), whole.values(), list(whole.shape)]
            return {"sparse": _packed(parts, name, tensors)}
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Counter):
        return {"counter": _packed(list(value.items()), name, tensors)}
    if isinstance(value, dict):
        return {"dict": [[key, _packed(one, f"{name}/{key}", tensors)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        items = [_packed(one, f"{name}/{place}", tensors) for place, one in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise CheckpointError(
        f"{name.lstrip('/')} is a {type(value).__name__}, which no file without pickled code can hold"
    )


def _unpacked(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "sparse":
        indices, values, shape = _unpacked(content, tensors)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=True)
    if kind == "counter":
        return Counter(dict(_unpacked(content, tensors)))
    if kind == "dict":
        return {key: _unpacked(one, tensors) for key, one in content}
    return tuple(_unpacked(content, tensors))
