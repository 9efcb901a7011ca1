"""One claim leaves no trace in the next: operands are handed out as copies, and what is global is put back."""

from __future__ import annotations

import random
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mp_conformance.implementations import Subject

__all__ = ["Apart", "undisturbed"]


_Global = tuple["Callable[[], Any]", "Callable[[Any], object]"]


def _settings() -> dict[str, _Global]:
    """What all threads share: how it is read and written. Error states, grad mode and devices belong to each thread."""
    import torch  # here, because a fake device must be installed before torch is imported, and lives in this package

    return {
        "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "torch's deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
    }


def _silent() -> list[_Global]:
    import torch

    return [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
        (torch.get_num_threads, torch.set_num_threads),  # what new threads begin with cannot be read from this one
    ]


@contextmanager
def undisturbed(notes: list[str]) -> Iterator[None]:
    """Put back whatever the body changes in Python's, NumPy's and torch's global state.

    Args:
        notes: gets a sentence for every setting that was left changed; random states and the number of threads are put
            back without a word.

    Source: this project.

    >>> import torch
    >>> said = []
    >>> with undisturbed(said):
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype(), said
    (torch.float32, ["torch's default dtype was left at torch.float64; it is torch.float32 again"])
    """
    shared, silent = _settings(), _silent()
    settings = {name: read() for name, (read, _) in shared.items()}
    states = [read() for read, _ in silent]
    try:
        yield
    finally:
        for name, (read, write) in shared.items():
            left = read()
            if left != settings[name]:
                write(settings[name])
                notes.append(f"{name} was left at {left}; it is {settings[name]} again")
        for (_, write), state in zip(silent, states, strict=True):
            write(state)


class Apart:
    """A subject whose operands are copies, so that writing into them changes no claim's inputs, nor the next subject's.

    Args:
        subject: who is asked.

    >>> from mp_conformance import subject_named
    >>> Apart(subject_named("reference")).name
    'reference'
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.name, self.device = subject.name, subject.device

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """What the subject offers."""
        return self._subject.offers(operation, options)

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it on copies; an error state that the subject leaves behind ends here."""
        with np.errstate(all="ignore"):
            return self._subject.perform(operation, *deepcopy(operands), **deepcopy(options))
