"""Which modules travel together and in which dtype when a model is sharded: a plan, made without touching the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

__all__ = ["LOWERED", "LOWERED_OPS", "Unit", "default_blocks", "plan"]

LOWERED = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd)  # noqa: SLF001  # no public base class
"""Modules all of whose parameters autocast casts before each use."""

LOWERED_OPS = ("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
               "conv_transpose3d", "multi_head_attention_forward", "scaled_dot_product_attention")  # fmt: skip
"""What these modules call; an op rule of the user's for one of them takes its modules out of the 16-bit traffic."""

_WHOLE = (nn.MultiheadAttention, nn.RNNBase)  # their children's parameters are used without calling the children


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules whose parameters are gathered together.

    Args:
        name: of the module that is wrapped; "" is the model itself.
        dtype: in which parameters travel and are used; ``None`` as they are stored.
    """

    name: str
    dtype: torch.dtype | None


def default_blocks(model: nn.Module) -> set[str]:
    """The layers of the model: members of a ``ModuleList`` or ``Sequential`` that have modules of their own.

    >>> layer = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> default_blocks(nn.Sequential(layer, nn.Linear(2, 2)))
    {'0'}
    """
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            names |= {f"{name}.{key}".lstrip(".") for key, child in module.named_children() if _composite(child)}
    return names


def plan(
    model: nn.Module, *, lower: torch.dtype | None, kept: Collection[str] = (), blocks: Collection[str] = ()
) -> list[Unit]:
    """The units, the innermost first and the model last.

    A unit's parameters have one dtype. A module that gathers otherwise than the layer it stands in is a unit of its
    own: norms and embeddings, which compute in fp32, beside linears in 16 bits.

    Args:
        model: not sharded yet.
        lower: dtype in which ``LOWERED`` modules travel; ``None``: everything travels as stored.
        kept: modules that compute in fp32 by the engine's rules, with all below them.
        blocks: layers to gather as one.

    >>> import torch
    >>> layer = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    >>> plan(nn.Sequential(layer), lower=torch.bfloat16, blocks={"0"})
    [Unit(name='0.0', dtype=torch.float32), Unit(name='0', dtype=torch.bfloat16), Unit(name='', dtype=torch.bfloat16)]
    """
    owners = _owners(model)
    dtypes = {name: _gathered(name, module, lower, kept) for name, module in owners.items()}
    composite = {name for name, module in owners.items() if _composite(module) and not isinstance(module, _WHOLE)}
    wholes = [name for name, _ in model.named_modules() if not name or name in blocks or name in composite]
    units: list[Unit] = []
    taken: set[str] = set()
    for name in sorted(wholes, key=lambda name: -name.count(".") - bool(name)):
        inside = [owner for owner in owners if _within(owner, name) and owner not in taken]
        dtype = dtypes[name] if name in owners else (lower or _common(dtypes, inside))
        alone = [owner for owner in inside if owner != name and dtypes[owner] != dtype]
        units += [Unit(owner, dtypes[owner]) for owner in alone] + [Unit(name, dtype)]
        taken |= set(inside)
    return units


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold parameters themselves; one whose children are used behind their backs owns theirs too."""
    owners: dict[str, nn.Module] = {}
    closed: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{one}.") for one in closed):
            continue
        if isinstance(module, _WHOLE):
            closed.append(name)
        if isinstance(module, _WHOLE) or next(module.parameters(recurse=False), None) is not None:
            owners[name] = module
    return owners


def _gathered(name: str, module: nn.Module, lower: torch.dtype | None, kept: Collection[str]) -> torch.dtype | None:
    stored = next(module.parameters()).dtype
    low = lower is not None and isinstance(module, LOWERED) and not any(_within(name, one) for one in kept)
    return lower if low else stored


def _common(dtypes: dict[str, torch.dtype | None], inside: list[str]) -> torch.dtype | None:
    found = [dtypes[owner] for owner in inside]
    return max(found, key=found.count) if found else None


def _within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
