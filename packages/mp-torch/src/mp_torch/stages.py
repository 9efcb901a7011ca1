"""A checkpoint whose parts several pipeline stages saved, read by an engine that holds other parts of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_torch.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mp_torch.engine import AmpEngine

__all__ = ["PLAIN", "Names", "merged", "names_of", "prefix_of", "repeated"]

PLAIN = "plain"
"""Name of the tensor of bytes that holds everything that is no tensor; a stage of a pipeline has one of its own."""

_AGREED = ("format", "version", "config", "loss_scale", "update_index", "phase", "schedulers")
"""What all stages have in common: one decision moves it everywhere."""


@dataclass(frozen=True, slots=True)
class Names:
    """What one rank holds.

    Args:
        stage: "" or what stands before the names of its stage.
        model: names of its model's state.
        trained: names of the parameters that its engine trains.
    """

    stage: str
    model: tuple[str, ...]
    trained: tuple[str, ...]


def names_of(engine: AmpEngine) -> list[Names]:
    """What every rank holds, this one first. Collective."""
    mine = Names(engine.ranks.prefix, tuple(engine.model.state_dict()), tuple(engine.assembly.named))
    return [mine, *engine.ranks.everybody(mine)]


def repeated(ranks: Sequence[Names]) -> str | None:
    """A name that two stages have, so that it does not tell which of them is meant.

    >>> repeated([Names("stage 0/", ("up",), ("up",)), Names("stage 1/", ("up",), ("up",))])
    'up'
    """
    owner: dict[str, str] = {}
    for one in ranks:
        for name in one.model:
            if owner.setdefault(name, one.stage) != one.stage:
                return name
    return None


def prefix_of(paths: Sequence[str], ranks: Sequence[Names]) -> str:
    """What stands before this rank's tensors in a checkpoint.

    Args:
        paths: of all that was saved.
        ranks: as ``names_of``.

    Raises:
        CheckpointError: stages put themselves before their names, and these here are other ones.
    """
    saved = {path.removesuffix(PLAIN) for path in paths if path.endswith(f"/{PLAIN}")}
    apart = {stage for stage in saved if any(path.startswith(f"{stage}model/") for path in paths)}
    here = {one.stage for one in ranks}
    if apart and apart != here:
        raise CheckpointError(
            f"{len(apart)} stages of a pipeline saved parameters of the same names, and {len(here)} read: which is "
            "which cannot be told; resume on as many stages, or let stages keep the whole model's names before saving, "
            "as nn.ModuleDict({'layers': nn.ModuleDict({'2': layer})}) keeps 'layers.2'"
        )
    return ranks[0].stage if apart else ""


def merged(engine: AmpEngine, said: Mapping[str, dict[str, Any]], elsewhere: set[str]) -> tuple[dict[str, Any], str]:
    """Everything that is no tensor, for the parameters that this engine trains.

    Args:
        engine: reads.
        said: by stage, what it saved.
        elsewhere: names that other ranks hold and this one does not.

    Returns:
        The state without its tensors, and the stage whose snapshot of the buffers fits.

    Raises:
        CheckpointError: stages disagree on what is one here, or the snapshot fits no more.
    """
    trained = set(engine.assembly.named)
    ordered = sorted(said.items(), key=lambda one: (len(one[0]), one[0]))  # stage 10 comes after stage 9
    own = {stage: one for stage, one in ordered if trained & _trained(one)} or dict(ordered)
    (stage, first), *others = own.items()
    for other, state in others:
        for key in _AGREED:
            if state[key] != first[key]:
                raise _disagreement(key, first[key], state[key], stage, other)
    if any(one["buffers"] for one in own.values()) and not (len(own) == 1 and _trained(first) == trained):
        raise CheckpointError(
            f"the checkpoint was saved within a window by {len(said)} stages, each with a snapshot of its own buffers, "
            "and here the model is cut elsewhere; resume on the same stages, or save after step()"
        )
    optimizers = [
        _merged_optimizer(engine, place, {stage: one["optimizers"] for stage, one in own.items()}, elsewhere)
        for place in range(len(first["optimizers"]))
    ]
    return first | {"optimizers": optimizers}, stage


def _merged_optimizer(
    engine: AmpEngine, place: int, said: Mapping[str, list[dict[str, Any]]], elsewhere: set[str]
) -> dict[str, Any]:
    """One optimizer, each of whose groups has this engine's parameters from whichever stages had them."""
    saved = {stage: optimizers[place] for stage, optimizers in said.items() if place < len(optimizers)}
    stage, first = next(iter(saved.items()))
    if place >= len(engine.optimizers):
        return first  # one too many, which is refused later
    here = [
        {part.weight.name for part in engine.assembly.parts if (part.optimizer, part.group) == (place, at)}
        for at in range(len(engine.optimizers[place].param_groups))
    ]
    groups = []
    for at, group in enumerate(first["groups"]):
        members = here[at] if at < len(here) else set()
        parts = [(name, one) for name, each in saved.items() for one in each["groups"] if members & {*one["params"]}]
        groups.append(_merged_group(parts or [(stage, group)], elsewhere))
    return first | {"groups": groups}


def _merged_group(parts: Sequence[tuple[str, dict[str, Any]]], elsewhere: set[str]) -> dict[str, Any]:
    (stage, first), *others = parts
    for other, group in others:
        for key, value in group.items():
            if key != "params" and first.get(key) != value:
                raise _disagreement(key, first.get(key), value, stage, other)
    return first | {"params": [name for _, one in parts for name in one["params"] if name not in elsewhere]}


def _trained(state: Mapping[str, Any]) -> set[str]:
    return {name for optimizer in state["optimizers"] for group in optimizer["groups"] for name in group["params"]}


def _disagreement(key: str, value: Any, other: Any, stage: str, beside: str) -> CheckpointError:
    return CheckpointError(
        f"{stage.rstrip('/')} saved {key}={value!r} and {beside.rstrip('/')} {key}={other!r}, which here must be one; "
        "resume on as many stages as saved"
    )
