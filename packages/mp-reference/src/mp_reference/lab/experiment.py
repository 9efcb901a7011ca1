"""An experiment file: what is trained, and the grid of policies it is trained under."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import tomllib
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mp_reference.lab.policies import Policy, PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Cell", "DotProducts", "Experiment", "ExperimentError", "Task", "load", "shipped"]


class ExperimentError(ValueError):
    """An experiment file says something that cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, and how long.

    Args:
        data: "text" (bytes of Python's own library, a transformer), "stripes" (images, a CNN), "spirals" (points, an
            MLP).
        steps: updates.
        batch: examples a step.
        width: of the model's layers.
        layers: of the transformer or the MLP.
        context: tokens of text an example.
        optimizer: "adamw", "adam" or "sgd".
        lr: learning rate.
        momentum: of "sgd".
        weight_decay: as the optimizer has it.
        max_grad_norm: clip to this norm; 0 does not.
        loss_factor: multiply the loss (and so every gradient) by this, to move gradients down the range on purpose.
    """

    data: Literal["text", "stripes", "spirals"] = "text"
    steps: int = 100
    batch: int = 8
    width: int = 64
    layers: int = 2
    context: int = 64
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    loss_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DotProducts:
    """Long dot products, for an experiment without training.

    Args:
        lengths: how many terms.
        columns: dot products of each length.
        values: "normal" around 0, or "uniform" in [0, 1) so that the sum grows.
    """

    lengths: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    columns: int = 64
    values: Literal["normal", "uniform"] = "uniform"


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy with one seed; its key is a digest of everything that decides its result."""

    policy: Policy
    seed: int
    work: Task | DotProducts

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits."""
        said = json.dumps([type(self.work).__name__, asdict(self.work), asdict(self.policy), self.seed], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A question, the work, and the cells that answer it.

    Args:
        name: what results are called.
        question: one sentence.
        work: what each cell does.
        policies: without the seed.
        seeds: each policy is run with each.
        source: where the question comes from.
    """

    name: str
    question: str
    work: Task | DotProducts
    policies: tuple[Policy, ...]
    seeds: tuple[int, ...] = (0,)
    source: str = field(default="this file")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every policy with every seed."""
        return tuple(Cell(policy, seed, self.work) for policy in self.policies for seed in self.seeds)


def shipped() -> dict[str, str]:
    """The text of the experiment files that come with the package, by name.

    >>> sorted(shipped())
    ['accumulator-width', 'loss-scaling', 'masters']
    """
    folder = files("mp_reference.lab").joinpath("experiments")
    return {one.name.removesuffix(".toml"): one.read_text() for one in folder.iterdir() if one.name.endswith(".toml")}


def load(source: str | Path) -> Experiment:
    """Read an experiment.

    Args:
        source: the name of a shipped experiment, or the path of a TOML file.

    Returns:
        The experiment, checked as a whole: nothing is left to fail after the first cell.

    Raises:
        ExperimentError: no such file, no TOML, an unknown key (with the nearest known one), or a value out of range.

    Source: the dataclasses of this module and ``lab.policies`` name every key.

    >>> len(load("loss-scaling").cells) > 4
    True
    """
    texts = shipped()
    if str(source) in texts:
        return _parsed(texts[str(source)], str(source))
    try:
        text = Path(source).read_text()
    except OSError as error:
        raise ExperimentError(
            f"{source}: {error.strerror}; give a TOML file or one of the shipped {', '.join(sorted(texts))}"
        ) from error
    return _parsed(text, str(source))


def _parsed(text: str, name: str) -> Experiment:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{name} is no TOML: {error}") from error
    known = ("name", "question", "source", "seeds", "task", "dot_products", "policy", "grid", "also")
    _only(data, known, name)
    missing = [key for key in ("name", "question") if key not in data]
    if missing or ("task" in data) == ("dot_products" in data):
        raise ExperimentError(f"{name} needs name, question, and either [task] or [dot_products]; see a shipped file")
    work: Task | DotProducts = (
        _made(Task, data["task"], f"{name} [task]") if "task" in data
        else _made(DotProducts, data["dot_products"], f"{name} [dot_products]")
    )  # fmt: skip
    _checked(work, name)
    seeds = data.get("seeds", [0])
    if not (seeds and isinstance(seeds, list) and all(isinstance(seed, int) for seed in seeds)):
        raise ExperimentError(f"{name}: seeds={seeds!r} must be a list of whole numbers, such as [0, 1, 2]")
    policies = tuple(_policies(data, name))
    if len(set(policies)) < len(policies):
        raise ExperimentError(f"{name}: a policy comes twice; [grid] and [[also]] must not repeat each other")
    return Experiment(
        name=data["name"], question=data["question"], source=data.get("source", "this file"), work=work,
        policies=policies, seeds=tuple(seeds),
    )  # fmt: skip


def _policies(data: Mapping[str, Any], name: str) -> Iterable[Policy]:
    """The grid's product over the shared policy, then the rows of [[also]]."""
    shared, grid, also = data.get("policy", {}), data.get("grid", {}), data.get("also", [])
    names = [one.name for one in fields(Policy)]
    for part, where in [(shared, "[policy]"), (grid, "[grid]"), *((row, "[[also]]") for row in also)]:
        _only(part, names, f"{name} {where}")
    for key, values in grid.items():
        if not (isinstance(values, list) and values):
            raise ExperimentError(f"{name} [grid]: {key}={values!r} must be a list of the values to try")
    rows = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    for row in [*rows, *also]:
        try:
            yield Policy.of(**{**shared, **row})
        except (PolicyError, TypeError) as error:
            raise ExperimentError(f"{name}: policy {row or shared}: {error}") from error
    if not rows and not also:
        raise ExperimentError(f"{name} has no cells; add a [grid] with lists of values, or [[also]] rows")


def _only(part: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse a key that nobody reads, and say which one was probably meant."""
    names = list(known)
    for key in part:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1, cutoff=0.0)
            raise ExperimentError(f"{where}: unknown key {key!r}; did you mean {near[0]!r}? Known: {', '.join(names)}")


def _made(kind: type[Any], part: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a table, its types checked against the defaults."""
    defaults = {one.name: one.default for one in fields(kind)}
    _only(part, defaults, where)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in part.items()}
    for key, value in values.items():
        wanted = type(defaults[key])
        fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not fits or isinstance(value, bool):
            raise ExperimentError(f"{where}: {key}={value!r} must be of type {wanted.__name__}")
    return kind(**values)


def _checked(work: Task | DotProducts, name: str) -> None:
    choices = {
        "data": ("text", "stripes", "spirals"),
        "optimizer": ("adamw", "adam", "sgd"),
        "values": ("normal", "uniform"),
    }
    for key, legal in choices.items():
        value = getattr(work, key, legal[0])
        if value not in legal:
            raise ExperimentError(f"{name}: {key}={value!r} must be one of {', '.join(legal)}")
    positive = ("steps", "batch", "width", "layers", "context", "lr", "loss_factor", "columns")
    low = [key for key in positive if hasattr(work, key) and not getattr(work, key) > 0]
    if isinstance(work, DotProducts) and not (work.lengths and all(one > 0 for one in work.lengths)):
        low.append("lengths")
    if low:
        raise ExperimentError(f"{name}: {low[0]}={getattr(work, low[0])!r} must be above 0")
