"""Real text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

MIN_BYTES = 4096  # less text than this has no held-out part worth the name


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to judge by, which training never sees."""

    name: str
    train: torch.Tensor
    held_out: torch.Tensor

    def batch(self, generator: torch.Generator, batch_size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows of the training text, and the same windows one byte on: int64 ``[batch_size, context]``."""
        return _windows(
            self.train, torch.randint(len(self.train) - context, (batch_size,), generator=generator), context
        )

    def held_out_batches(self, count: int, batch_size: int, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``count`` batches spread evenly over the held-out text, always the same ones."""
        starts = torch.linspace(0, len(self.held_out) - context - 1, count * batch_size).long()
        return [_windows(self.held_out, chunk, context) for chunk in starts.view(count, batch_size)]


def load(path: Path | None, max_bytes: int = 4_000_000) -> Corpus:
    """The text of a file, or of the standard library's modules in alphabetical order.

    Args:
        path: a file of the user's; ``None`` for the standard library.
        max_bytes: stop reading there.

    Raises:
        ValueError: the text is too short to train on.

    >>> load(None).name
    'Python standard library'
    """
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        name, text = "Python standard library", b"".join(file.read_bytes() for file in files)
    else:
        name, text = path.name, path.read_bytes()
    if len(text) < MIN_BYTES:
        raise ValueError(f"{name} has {len(text)} bytes, training needs at least {MIN_BYTES}; name a longer text file")
    data = torch.frombuffer(bytearray(text[:max_bytes]), dtype=torch.uint8)
    split = len(data) - max(len(data) // 10, MIN_BYTES // 4)
    return Corpus(name, data[:split], data[split:])


def _windows(data: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = starts[:, None] + torch.arange(context + 1)
    window = data[index].long()
    return window[:, :-1], window[:, 1:]
