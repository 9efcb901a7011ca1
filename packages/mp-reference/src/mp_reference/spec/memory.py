"""What training keeps for each parameter, by role, and which of it a way of sharding divides among the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_reference.spec import sources
from mp_reference.spec.formats import format_named
from mp_reference.spec.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CARRIERS", "ROLES", "SHARDING", "STORAGE", "Storage", "bytes_per_parameter", "moment_count"]

ROLES = ("weights", "masters", "gradients", "moments")
"""What a trained parameter occupies memory as: the model's parameter, what carries the bits that it cannot hold (fp32
master weights, or a 16-bit remainder), its gradient, and the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The formats of one precision.

    Args:
        precision: its name.
        weights: format of the model's parameters and of their gradients.
        masters: format of what carries the bits that a 16-bit parameter cannot; ``None`` where there is nothing.
        moments: format of the optimizer's state.
        source: the document that describes this way of training.

    >>> STORAGE["bf16-true"].masters
    'fp32'
    """

    precision: str
    weights: str
    masters: str | None
    moments: str = "fp32"
    source: str


_ROWS = (
    Storage(precision="fp32", weights="fp32", masters=None, source=sources.IEEE_754),
    Storage(precision="tf32", weights="fp32", masters=None, source=sources.NVIDIA_A100),
    Storage(precision="fp16-mixed", weights="fp32", masters=None, source=sources.MIXED_PRECISION),
    Storage(precision="bf16-mixed", weights="fp32", masters=None, source=sources.BF16_STUDY),
    Storage(precision="fp16-true", weights="fp16", masters="fp32", source=sources.MIXED_PRECISION),
    Storage(precision="bf16-true", weights="bf16", masters="fp32", source=sources.BF16_STUDY),
    Storage(precision="bf16-sr", weights="bf16", masters=None, source=sources.BF16_REVISITED),
    Storage(precision="bf16-kahan", weights="bf16", masters="bf16", source=sources.BF16_REVISITED),
)

STORAGE: dict[str, Storage] = {row.precision: row for row in _ROWS}
"""Every precision's formats, by its name."""

CARRIERS: dict[str, str | None] = {"fp32": "fp32", "remainder": "bf16", "none": None}
"""What the ``-true`` precisions may keep beside their weights; a remainder is the 16 bits that bf16 lacks of fp32."""

SHARDING: dict[str, tuple[str, ...]] = {
    "none": (),
    "zero1": ("masters", "moments"),
    "zero2": ("masters", "moments", "gradients"),
    "zero3": ("masters", "moments", "gradients", "weights"),
    "fsdp": ("masters", "moments", "gradients", "weights"),
}
"""Which roles each way of sharding divides among the ranks (ZeRO: P_os, P_os+g, P_os+g+p); FSDP2 divides each tensor
along its first dimension, ZeRO the flattened whole."""


def moment_count(optimizer: str, *, momentum: float = 0.0, amsgrad: bool = False) -> int:
    """How many tensors of state an optimizer keeps for each parameter.

    Args:
        optimizer: a key of ``spec.optimizers.OPTIMIZERS``.
        momentum: of SGD; without it there is no buffer.
        amsgrad: of Adam and AdamW; one more tensor, the largest second moment so far.

    Returns:
        The count.

    Raises:
        ValueError: no optimizer has this name; those that exist are listed.

    Source: ``spec.optimizers``.

    >>> moment_count("adamw"), moment_count("sgd"), moment_count("sgd", momentum=0.9)
    (2, 0, 1)
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {optimizer!r} is not one of {', '.join(OPTIMIZERS)}; "
            "name the one that keeps as many tensors of state"
        )
    slots = len(OPTIMIZERS[optimizer].slots)
    if optimizer == "sgd":
        return slots if momentum else 0
    return slots + int(amsgrad)


def bytes_per_parameter(precision: str, moments: int = 2, master_weights: str = "fp32") -> Mapping[str, float]:
    """Bytes that one trained parameter occupies, by role.

    Args:
        precision: a key of ``STORAGE``.
        moments: tensors of optimizer state, see ``moment_count``.
        master_weights: of the ``-true`` precisions, a key of ``CARRIERS``; the others decide for themselves.

    Returns:
        Role -> bytes, for each of ``ROLES``.

    Raises:
        ValueError: no precision or no kind of master weights has this name.

    Source: widths of the formats; 16 bytes for Adam and fp32 masters are section 3.1 of the ZeRO paper.

    >>> sum(bytes_per_parameter("bf16-true").values())
    16.0
    """
    if precision not in STORAGE:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(STORAGE)}; choose one of these")
    if master_weights not in CARRIERS:
        raise ValueError(f"master_weights={master_weights!r} is not one of {', '.join(CARRIERS)}; choose one of these")
    row = STORAGE[precision]
    masters = CARRIERS[master_weights] if row.masters == "fp32" else row.masters
    return {
        "weights": _width(row.weights),
        "masters": _width(masters),
        "gradients": _width(row.weights),
        "moments": moments * _width(row.moments),
    }


def _width(format_name: str | None) -> float:
    return 0.0 if format_name is None else format_named(format_name).bits / 8
