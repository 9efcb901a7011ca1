"""A numerics report as dictionaries, a table, a figure and JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_torch.emulate.magnitudes import LOWEST, Magnitudes
from mp_torch.errors import AmpStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mp_reference import FloatFormat
    from mp_torch.emulate.advice import Advice
    from mp_torch.emulate.numerics_report import Row

__all__ = ["as_dictionaries", "as_figure", "as_json", "as_table"]

_SHOWN = 24  # panels of a figure


def as_dictionaries(rows: Iterable[Row], fmt: FloatFormat) -> list[dict[str, Any]]:
    """One flat dictionary a row."""
    return [
        {
            "module": row.module,
            "op": row.op,
            "phase": row.phase,
            "calls": row.calls,
            "values": row.counts.values,
            "overflows": row.counts.overflows,
            "underflows": row.counts.underflows,
            "subnormals": row.counts.subnormals,
            "nans": row.counts.nans,
            "zeros": row.counts.zeros,
            "max_abs": row.counts.max_abs,
            "headroom_bits": row.counts.headroom(fmt),
            "flushed_share": row.counts.flushed_share,
        }
        for row in rows
    ]


def _by_module(rows: Iterable[Row]) -> dict[tuple[str, str], Magnitudes]:
    found: dict[tuple[str, str], Magnitudes] = {}
    for row in rows:
        found.setdefault((row.module, row.phase), Magnitudes()).add(row.counts)
    return found


def as_table(rows: Iterable[Row], fmt: FloatFormat, advice: Advice) -> Any:
    """Modules and phases as a ``rich`` table, losses in colour; the safe loss scales beside the gradients."""
    rich_table = _optional("rich.table", "rich")
    table = rich_table.Table(title=f"What {fmt.name} loses")
    for heading in ("module", "phase"):
        table.add_column(heading, overflow="fold")
    for heading in ("values", "overflows", "flushed", "subnormal", "NaN", "max |x|", "headroom", "safe loss scale"):
        table.add_column(heading, justify="right")
    scales = {one.module: one.safe_scales for one in advice.modules}
    for (module, phase), counts in _by_module(rows).items():
        lost = counts.overflows or counts.nans or counts.flushed_share > 1e-3
        headroom = counts.headroom(fmt)
        table.add_row(
            module, phase, f"{counts.values:,}", f"{counts.overflows:,}", f"{counts.flushed_share:.2%}",
            f"{counts.subnormals / max(counts.values, 1):.2%}", f"{counts.nans:,}", f"{counts.max_abs:.3g}",
            "" if math.isinf(headroom) else f"{headroom:+.1f} bits", scales[module] if phase == "backward" else "",
            style="red" if lost else None,
        )  # fmt: skip
    return table


def as_figure(rows: Sequence[Row], fmt: FloatFormat, path: str | Path | None) -> Any:
    """One panel a module: log2 of forward and backward magnitudes, the format's normal and subnormal range shaded."""
    if not rows:
        raise AmpStateError("NumericsReport has seen no 16-bit result; run a step inside `with report:` under autocast")
    figures = _optional("matplotlib.figure", "matplotlib")
    modules = list(dict.fromkeys(row.module for row in rows))[:_SHOWN]
    figure = figures.Figure(figsize=(9, 1.2 + 1.1 * len(modules)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(modules), 1, sharex=True))
    counted = _by_module(rows)
    top, normal, small = (math.log2(x) for x in (fmt.max, fmt.min_normal, fmt.min_subnormal))
    for axis, module in zip(axes, modules, strict=True):
        axis.axvspan(normal, top, color="tab:green", alpha=0.12, label=f"{fmt.name} normal")
        axis.axvspan(small, normal, color="tab:orange", alpha=0.15, label=f"{fmt.name} subnormal")
        for phase, colour in (("forward", "tab:blue"), ("backward", "tab:red")):
            counts = counted.get((module, phase))
            if counts is not None and counts.histogram.any():
                places = np.arange(LOWEST, LOWEST + counts.histogram.size + 1)
                axis.stairs(counts.histogram / counts.histogram.sum(), places, color=colour, label=phase)
        axis.set_ylabel(module, rotation=0, ha="right", fontsize="small")
        axis.set_yticks([])
    axes[-1].set_xlim(-60, 20)
    axes[-1].set_xlabel("log2 |x| (gradients divided by the loss scale)")
    axes[0].legend(loc="upper left", fontsize="x-small", ncols=4)
    if path is not None:
        figure.savefig(path)
    return figure


def as_json(rows: Sequence[Row], fmt: FloatFormat, advice: Advice, path: str | Path | None) -> str:
    """Everything as JSON text; infinite headroom is null."""
    listed = []
    for row, flat in zip(rows, as_dictionaries(rows, fmt), strict=True):
        filled = np.flatnonzero(row.counts.histogram)
        histogram = {str(int(place) + LOWEST): int(row.counts.histogram[place]) for place in filled}
        listed.append({key: _finite(value) for key, value in flat.items()} | {"log2_histogram": histogram})
    text = json.dumps(
        {
            "format": fmt.name,
            "trains": advice.trains,
            "loss_scale": None if advice.loss_scale is None else 2.0**advice.loss_scale,
            "keep_fp32": list(advice.keep_fp32),
            "advice": str(advice),
            "modules": [
                {
                    "module": one.module,
                    "lowest_safe_loss_scale": _power(one.lowest),
                    "highest_safe_loss_scale": _power(one.highest),
                    "flushed_share": one.flushed_share,
                    "needs_fp32": one.needs_fp32,
                }
                for one in advice.modules
            ],
            "rows": listed,
        },
        indent=1,
    )
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _power(exponent: float) -> float | None:
    return None if math.isinf(exponent) else 2.0**exponent


def _optional(module: str, package: str) -> Any:
    """A module of the extra ``report``."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise AmpStateError(f"this view needs {package}; pip install 'mp-torch[report]'") from error
