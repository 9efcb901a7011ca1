"""Data that is on the machine already: Python's own source text, scikit-learn's digits, and a sampled wave."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

__all__ = ["bytes_of_python", "digits", "increments"]

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def bytes_of_python(steps: int, *, length: int = 64, batch: int = 16) -> Batches:
    """Windows of the text of Python's argparse module, each with the bytes that follow."""
    text = torch.tensor(list(Path(str(argparse.__file__)).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - length - 1, (batch,), generator=generator)
        windows = torch.stack([text[start : start + length + 1] for start in starts])
        batches.append((windows[:, :-1], windows[:, 1:].flatten()))
    return batches


def digits(steps: int, *, batch: int = 64) -> Batches:
    """The 1,797 handwritten digits that scikit-learn ships, 8 x 8 grey values from 0 to 1."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
    targets = torch.tensor(labels, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    picks = [torch.randint(0, len(targets), (batch,), generator=generator) for _ in range(steps)]
    return [(pixels[pick], targets[pick]) for pick in picks]


def increments(steps: int, *, length: int = 16, batch: int = 32) -> Batches:
    """A wave of random phase and its next increments."""
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(length + 1) * 0.4
    batches = []
    for _ in range(steps):
        wave = torch.sin(places + torch.rand(batch, 1, generator=generator) * 2 * math.pi)
        batches.append((wave[:, :-1, None], (wave[:, 1:] - wave[:, :-1]).unsqueeze(-1)))
    return batches
