"""Plots that a paper would use, from the rows of a results file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from mp_reference.lab.policies import format_of_name
from mp_reference.lab.statistics import HIGHEST, LOWEST
from mp_reference.lab.tables import by_label
from mp_reference.spec.formats import FP32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from mp_reference.lab.cells import Row

__all__ = ["PLOTS", "draw"]

_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "lines.linewidth": 1.4, "legend.frameon": False, "legend.fontsize": 8, "axes.titlesize": 10,
}  # fmt: skip
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
_DASHES: tuple[Any, ...] = ("--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 2)))
Groups = dict[str, list["Row"]]


def _look(number: int, label: str) -> dict[str, Any]:
    """Colour, dashes and width of a line: the first is wide and solid, so that those on top of it do not hide it."""
    return {
        "label": label,
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number % len(_DASHES)] if number else "-",
        "linewidth": 1.3 if number else 2.4,
    }


def _smooth(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean over the last ``width`` values; what is not finite leaves a gap."""
    padded = np.concatenate([np.repeat(values[:1], width - 1), values])
    smoothed: NDArray[np.float64] = np.lib.stride_tricks.sliding_window_view(padded, width).mean(axis=1)
    return smoothed


def _curves(axes: Axes, groups: Groups, name: str, smooth: bool = False, only: Sequence[str] | None = None) -> None:
    """One line a policy: the mean over its seeds, with a band from the lowest to the highest."""
    for number, (label, rows) in enumerate(groups.items()):
        if only is not None and label not in only:  # a policy looks the same in every plot
            continue
        lines = np.array([row[name] for row in rows], np.float64)
        lines[~np.isfinite(lines)] = np.nan
        if smooth:
            lines = np.array([_smooth(line, max(1, len(line) // 25)) for line in lines])
        steps = np.arange(1, lines.shape[1] + 1)
        look = _look(number, label)
        axes.plot(steps, lines.mean(axis=0), **look)
        if len(rows) > 1:
            axes.fill_between(steps, lines.min(axis=0), lines.max(axis=0), color=look["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel("step")


def _losses(axes: Axes, groups: Groups) -> None:
    _curves(axes, groups, "losses", smooth=True)
    axes.set_ylabel("training loss")
    axes.set_title("Loss")


def _scales(axes: Axes, groups: Groups) -> None:
    _curves(axes, groups, "scales", only=[label for label, rows in groups.items() if rows[0]["loss_scale"] != "off"])
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.set_title("Loss scale of each step")


def _rounded_away(axes: Axes, groups: Groups) -> None:
    _curves(axes, groups, "rounded_away", smooth=True)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("share of parameters")
    axes.set_title("Parameters that a step left as they were")


def _depths(axes: Axes, groups: Groups) -> None:
    for number, (label, rows) in enumerate(groups.items()):
        errors = np.array([row["depth"] for row in rows], np.float64).mean(axis=0)
        errors[~(errors > 0)] = np.nan
        axes.plot(
            np.arange(1, len(errors) + 1), errors, **_look(number, label))  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.set_xlabel("operation, in the order of the forward pass")
    axes.set_ylabel("relative error")
    axes.set_title("Error against float64 by depth")


def _histogram(axes: Axes, groups: Groups) -> None:
    exponents = np.arange(LOWEST, HIGHEST + 1)
    filled = np.zeros(len(exponents), bool)
    for number, (label, rows) in enumerate(groups.items()):
        counts = np.sum([row["histogram"]["counts"] for row in rows], axis=0)
        zeros = sum(row["histogram"]["zeros"] for row in rows)
        total = counts.sum() + zeros + sum(row["histogram"]["infinite"] for row in rows)
        filled |= counts > 0
        axes.step(
            exponents, 100 * counts / max(total, 1), where="mid",
            **_look(number, f"{label} ({100 * zeros / max(total, 1):.1f} % zeros)"),
        )  # fmt: skip
    seen = exponents[filled]
    if seen.size:
        axes.set_xlim(seen[0] - 2, max(seen[-1] + 3, 4))
    _ranges(axes, [rows[0]["format"] for rows in groups.values()])
    axes.set_xlabel("exponent of the gradient's magnitude, as it is stored")
    axes.set_ylabel("% of all gradients")
    axes.set_title("Gradients of every operation, by magnitude")


def _ranges(axes: Axes, names: Sequence[str]) -> None:
    """Where each narrow format ends, below and above."""
    low, high = axes.get_xlim()
    axes.set_ylim(0, 1.6 * axes.get_ylim()[1])  # room for the words
    top = axes.get_ylim()[1]
    for fmt in {format_of_name(name) for name in names} - {FP32}:
        marks = {
            "smallest subnormal": np.log2(fmt.min_subnormal), "smallest normal": np.log2(fmt.min_normal),
            "largest": np.log2(fmt.max),
        }  # fmt: skip
        for word, place in marks.items():
            if low < place < high:
                axes.axvline(place, color="grey", linewidth=0.8, linestyle=":")
                axes.text(
                    place, top, f" {fmt.name} {word}", rotation=90, ha="right", va="top", fontsize=6.5, color="dimgrey"
                )


def _dot_errors(axes: Axes, groups: Groups) -> None:
    for number, (label, rows) in enumerate(groups.items()):
        errors = np.array([row["errors"] for row in rows], np.float64).mean(axis=0)
        errors[~(errors > 0)] = np.nan
        axes.plot(
            rows[0]["lengths"], errors, marker="o", markersize=3, **_look(number, label),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("terms of the dot product")
    axes.set_ylabel("mean error / sum of magnitudes")
    axes.set_title("Error of long dot products by accumulator")


PLOTS: dict[str, Callable[[Any, Groups], None]] = {
    "loss": _losses, "loss-scale": _scales, "gradients": _histogram, "rounded-away": _rounded_away, "depth": _depths,
    "dot-products": _dot_errors,
}  # fmt: skip
"""Every plot by the name of its file."""


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every plot that the rows have data for.

    Args:
        rows: cells of one experiment, at least one.
        folder: where the PNG files go; 200 dots an inch, 16 cm wide.

    Returns:
        The files.

    Raises:
        ValueError: no rows.

    Source: none.
    """
    if not rows:
        raise ValueError("there is no finished cell to draw; run the experiment first")
    groups = by_label(rows)
    if "lengths" in rows[0]:
        names = ["dot-products"]
    else:
        scaled = any(row["loss_scale"] != "off" for row in rows)
        names = ["loss", *(["loss-scale"] if scaled else []), "gradients", "rounded-away", "depth"]
    folder.mkdir(parents=True, exist_ok=True)
    return [_drawn(name, groups, folder) for name in names]


def _drawn(name: str, groups: Groups, folder: Path) -> Path:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.3, 3.6), layout="constrained")
        axes = figure.add_subplot()
        PLOTS[name](axes, groups)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(labels) > 1 else 1)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=200)
    return path
