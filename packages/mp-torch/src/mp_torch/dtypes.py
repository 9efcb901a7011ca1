"""Precisions as rows: what is stored, what is computed in, and what carries the update."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mp_torch.errors import AmpConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PRECISIONS", "Precision", "precision_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One precision: its name says storage and compute.

    Args:
        name: the word that users write.
        parameter: dtype of the model's parameters; only a module kept in fp32 differs.
        compute: dtype that matmuls and convolutions run in; ``None`` leaves every op in its operands' dtype.
        carrier: what holds the bits that a 16-bit parameter cannot: "parameter" (it is fp32), "master" (fp32 master
            weights), "stochastic" (nothing; the write-back is rounded at random), "compensation" (a 16-bit remainder
            of each write-back).
        scaled: whether gradients would underflow without a loss scale.
        tf32: whether fp32 matmuls may use tensor cores with 10 stored mantissa bits.

    Source: the words of this project; fp16 and bf16 as in ``mp_reference.spec.formats``.

    >>> PRECISIONS["bf16-true"].parameter, PRECISIONS["bf16-mixed"].parameter
    (torch.bfloat16, torch.float32)
    """

    name: str
    parameter: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    carrier: str = "parameter"
    scaled: bool = False
    tf32: bool = False


_ROWS = (
    Precision(name="fp32"),
    Precision(name="tf32", tf32=True),
    Precision(name="fp16-mixed", compute=torch.float16, scaled=True),
    Precision(name="bf16-mixed", compute=torch.bfloat16),
    Precision(name="fp16-true", parameter=torch.float16, compute=torch.float16, carrier="master", scaled=True),
    Precision(name="bf16-true", parameter=torch.bfloat16, compute=torch.bfloat16, carrier="master"),
    Precision(name="bf16-sr", parameter=torch.bfloat16, compute=torch.bfloat16, carrier="stochastic"),
    Precision(name="bf16-kahan", parameter=torch.bfloat16, compute=torch.bfloat16, carrier="compensation"),
)

PRECISIONS: dict[str, Precision] = {row.name: row for row in _ROWS}
"""Every precision an engine can run in, by name; ``auto`` chooses one of them."""


def precision_named(name: str) -> Precision:
    """The row of this name.

    Args:
        name: a key of ``PRECISIONS``.

    Returns:
        The row.

    Raises:
        AmpConfigError: no precision has this name; the nearest one is suggested and all are listed.

    >>> precision_named("fp16-mixed").scaled
    True
    """
    if name not in PRECISIONS:
        raise AmpConfigError(
            f"precision={name!r} is not a precision{nearest(str(name), PRECISIONS)}; it must be one of "
            f"{', '.join(PRECISIONS)} or auto"
        )
    return PRECISIONS[name]


def nearest(word: str, known: Iterable[object]) -> str:
    """A suggestion for a misspelt word, to be put into an error message.

    Args:
        word: what was written.
        known: the legal words, any iterable of them.

    Returns:
        ``", did you mean '...'?"``, or nothing if no legal word is near.

    >>> nearest("bf16_mixed", ["bf16-mixed", "fp32"]), nearest("bf16", ["fp32", "bf16-mixed", "bf16-sr"])
    (", did you mean 'bf16-mixed'?", ", did you mean 'bf16-mixed'?")
    """
    words = [str(one) for one in known]
    begun = [one for one in words if word and one.startswith(word)]
    close = begun or difflib.get_close_matches(word, words, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
