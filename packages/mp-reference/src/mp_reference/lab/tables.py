"""Results as a plain table: one line a cell, its settings and the numbers that compare it with others."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from mp_reference.lab.cells import Row

__all__ = ["SETTINGS", "by_label", "summary", "write_csv"]

SETTINGS = (
    "label", "seed", "format", "storage", "masters", "loss_scale", "accumulator", "rounding", "device", "overrides",
)  # fmt: skip


def _last_tenth(values: Sequence[float]) -> float:
    tail = values[-max(1, len(values) // 10) :]
    return math.fsum(tail) / len(tail) if all(math.isfinite(one) for one in tail) else math.nan


def summary(row: Row) -> dict[str, Any]:
    """A cell in one line.

    Args:
        row: as ``run_cell`` returns it.

    Returns:
        Settings, then numbers: for training the mean loss of the last tenth, the held-out loss, steps applied and
        skipped, the mean share of elements that a step left as they were, zeros among the gradients, the last loss
        scale; for dot products the mean error at each length; then seconds and the key.

    Source: none.

    >>> summary({"label": "fp32", "seed": 0, "lengths": [4], "errors": [0.5], "worst": [1.0], "seconds": 1.0,
    ...          "key": "k"})["error at 4"]
    0.5
    """
    said = {name: row[name] for name in SETTINGS if name in row}
    if "lengths" in row:
        said |= {f"error at {length}": error for length, error in zip(row["lengths"], row["errors"], strict=True)}
    else:
        seen = row["histogram"]
        total = sum(seen["counts"]) + seen["zeros"] + seen["infinite"]
        said |= {
            "loss": _last_tenth(row["losses"]), "held-out": row["held_out"], "applied": row["applied"],
            "skipped": row["skipped"], "away": math.fsum(row["rounded_away"]) / len(row["rounded_away"]),
            "zeros": seen["zeros"] / max(total, 1), "scale": row["scales"][-1],
        }  # fmt: skip
    return said | {"seconds": row["seconds"], "key": row["key"]}


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Summaries as a CSV file.

    Args:
        rows: the cells.
        path: where to.

    Source: none.
    """
    lines = [summary(row) for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]) if lines else ["key"])
        writer.writeheader()
        writer.writerows(lines)


def by_label(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of one policy together, its seeds in order.

    >>> by_label([{"label": "a", "seed": 1}, {"label": "a", "seed": 0}])
    {'a': [{'label': 'a', 'seed': 0}, {'label': 'a', 'seed': 1}]}
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["label"], []).append(row)
    return {label: sorted(group, key=lambda row: int(row["seed"])) for label, group in groups.items()}
