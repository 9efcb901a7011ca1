"""What a reader takes away: one table on the terminal and one picture for a paper."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from examples.quickstart.replay import Verdict
    from examples.quickstart.train import Run

ROLES = ("weights", "masters", "gradients", "moments")
COLOURS = ("#000000", "#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7")  # distinct also to the colour-blind
DASHES = ("-", "-", "-", (0, (4, 1.5)), "-", (0, (4, 1.5)))
SMOOTHING = 0.9  # of the exponential moving average in the picture; the table's numbers are not smoothed
FINAL_STEPS = 10  # the final loss is the mean over so many last steps


def final_loss(run: Run) -> float:
    """Mean training loss of the last steps."""
    last = run.losses[-FINAL_STEPS:]
    return sum(last) / len(last)


def table(runs: list[Run], tokens_per_step: int) -> Table:
    """One row a precision."""
    drawn = Table(title="The same model, data and seed in each precision", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    drawn.add_column("precision", no_wrap=True)
    headings = ("loss", "held-out\nloss", "applied", "skipped", "loss\nscale", "zeros in\ngradients", "tokens/s")
    for heading in (*headings, "bytes a\nparameter"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        skipped = ", ".join(f"{count} {kind}" for kind, count in run.skips.items()) or "0"
        drawn.add_row(
            run.recipe.name,
            f"{final_loss(run):.3f}",
            f"{run.held_out:.3f}",
            str(sum(step.applied for step in run.reports)),
            skipped,
            f"2^{math.log2(run.reports[-1].next_loss_scale):g}",
            f"{100 * run.zeros / run.numbers:.2f} %",
            f"{len(run.losses) * tokens_per_step / run.seconds:,.0f}",
            "+".join(f"{run.bytes_per_parameter[role]:g}" for role in ROLES),
        )
    drawn.caption = f"losses in nats per byte; skipped: steps and what their gradients held; bytes: {' + '.join(ROLES)}"
    return drawn


def verdict_line(verdicts: list[Verdict]) -> str:
    """What was compared and what differs, in one sentence."""
    numbers, steps = sum(verdict.numbers for verdict in verdicts), sum(verdict.steps for verdict in verdicts)
    bits, reports = sum(v.differing_bits for v in verdicts), sum(v.differing_reports for v in verdicts)
    return (
        f"replayed in NumPy: {steps:,} steps, {numbers:,} parameters and masters compared bit by bit: "
        f"{bits} bits differ; {reports} reports differ"
    )


def smooth(losses: list[float]) -> list[float]:
    """Exponential moving average that starts at the first value.

    >>> smooth([1.0, 1.0])
    [1.0, 1.0]
    """
    return list(accumulate(losses, lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss))


def picture(runs: list[Run], text: str, path: Path) -> None:
    """Loss curves, their distance from the first run (fp32), and the loss scale of the dynamic run, as a PNG."""
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with mpl.rc_context(style):  # type: ignore[arg-type]  # the stub lists every legal key
        figure = Figure(figsize=(5.5, 5.6), layout="constrained")
        losses, differences, scale = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.4, 1.2])
        reference = smooth(runs[0].losses)
        for run, colour, dash in zip(runs, COLOURS, DASHES, strict=True):
            steps = range(1, len(run.losses) + 1)
            label = f"{run.recipe.name} ({run.held_out:.3f})"
            curve = smooth(run.losses)
            losses.plot(steps, curve, color=colour, linestyle=dash, linewidth=1.1, label=label)
            difference = [ours - theirs for ours, theirs in zip(curve, reference, strict=True)]
            differences.plot(steps, difference, color=colour, linestyle=dash, linewidth=1.1)
        losses.set_ylabel("training loss (nats per byte)")
        differences.set_ylabel("loss minus\nthat of fp32")
        losses.legend(title="precision (held-out loss)", alignment="left", handlelength=2.4)
        losses.set_title(f"Byte-level GPT on the {text}", loc="left", fontsize=9)
        _draw_scale(scale, max(runs, key=lambda run: len(set(run.loss_scales))))
        figure.savefig(path, dpi=220)


def _draw_scale(axes: mpl.axes.Axes, run: Run) -> None:
    colour = COLOURS[2]
    steps = range(1, len(run.reports) + 1)
    axes.step(steps, run.loss_scales, where="post", color=colour, linewidth=1.1)
    skipped = [step for step, report in zip(steps, run.reports, strict=True) if report.skipped]
    axes.plot(
        skipped, [run.loss_scales[step - 1] for step in skipped], "x", color="#000000", markersize=4, label="skipped"
    )
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.set_xlabel("step")
    if skipped:
        axes.legend(loc="lower right", handletextpad=0.2)
