"""Checkpoints of many ranks: every rank writes its own parts, and any number of ranks reads them back."""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mp_torch.errors import CheckpointError
from mp_torch.ranks.group import GroupRanks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from mp_torch.ranks.base import Ranks

__all__ = ["read_", "saved_tensors", "write"]

POINTER = "latest"
"""File that names the folder of the last checkpoint that is whole."""


def write(tensors: dict[str, Tensor], folder: Path, name: str, ranks: Ranks) -> None:
    """Write a checkpoint whole or not at all; one that is whole stays until the next is. Collective.

    Each goes into a folder of its own, under another name until every rank has written its part; then a pointer is
    replaced, which the file system does at once.

    Args:
        tensors: this rank's, plain or DTensor, by name; the same plain tensor on several ranks is written once.
        folder: of all checkpoints of the run.
        name: of this one.
        ranks: who writes.
    """
    partial = folder / f"{name}.partial"
    group = _group(ranks)
    first = group is None or group.rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    _wait(group)
    with _alone_on_purpose():
        save(tensors, checkpoint_id=partial, process_group=group, no_dist=group is None)
    _wait(group)
    if first:
        _publish(folder, partial, name)
    _wait(group)


def _publish(folder: Path, partial: Path, name: str) -> None:
    final = folder / name
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    pointer = folder / f"{POINTER}.partial"
    pointer.write_text(name)
    os.replace(pointer, folder / POINTER)
    for old in folder.iterdir():
        if old.is_dir() and old != final:
            shutil.rmtree(old, ignore_errors=True)


def saved_tensors(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name, dtype and whole shape of every tensor of the last checkpoint.

    Args:
        folder: as for ``write``.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        metadata = FileSystemReader(_last(folder)).read_metadata()
    except (OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no whole checkpoint of many ranks ({error}); save one first") from error
    return {
        name: (one.properties.dtype, tuple(one.size))
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }


def read_(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fill tensors, however they are laid out now, from the last checkpoint. Collective where there are several ranks.

    Args:
        tensors: by name, of the whole shapes and dtypes that were saved.
        folder: as for ``write``.
        ranks: who reads.
    """
    group = _group(ranks)
    with _alone_on_purpose():
        load(tensors, checkpoint_id=_last(folder), process_group=group, no_dist=group is None)


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """Torch warns that one process saves or loads alone, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _group(ranks: Ranks) -> ProcessGroup | None:
    return ranks.group if isinstance(ranks, GroupRanks) else None


def _wait(group: ProcessGroup | None) -> None:
    if group is not None:
        distributed.barrier(group)


def _last(folder: Path) -> Path:
    return folder / (folder / POINTER).read_text()
