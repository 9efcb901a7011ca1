"""The laboratory's command line: run, plot, compare."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mp_reference.lab.cells import steps_of
from mp_reference.lab.experiment import ExperimentError, load, shipped
from mp_reference.lab.grid import RESULTS, read_rows, run_grid
from mp_reference.lab.plots import draw
from mp_reference.lab.tables import SETTINGS, by_label, summary, write_csv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_reference.lab.cells import Row

__all__ = ["main"]

_WIDE = 7  # columns of numbers that a terminal of 80 columns holds

_UNSHOWN = (*SETTINGS, "seconds", "key")
_SHARES = ("away", "zeros")


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command.

    Args:
        arguments: as on the command line; those of the process unless given.

    Returns:
        0, or 1 with one line on standard error where the experiment or its results cannot be used; 130 after an
        interrupt, with every finished cell kept.
    """
    parsed = _parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        return {"run": _run, "plot": _plot, "compare": _compare}[parsed.command](parsed)
    except (ExperimentError, ValueError) as error:
        console.print(f"[red]mp_reference.lab:[/red] {error}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; finished cells are kept, the same command goes on with the rest")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mp_reference.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the cells of an experiment that have no result yet")
    run.add_argument("experiment", help=f"a TOML file, or one of {', '.join(sorted(shipped()))}")
    run.add_argument("--results", type=Path, help="folder of the results; runs/NAME unless given")
    run.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; all processors unless given")
    plot = commands.add_parser("plot", help="draw the plots of a results folder into it")
    plot.add_argument("results", type=Path, help="a folder that run wrote")
    compare = commands.add_parser("compare", help="print the cells of one or more results folders as a table")
    compare.add_argument("results", type=Path, nargs="+", help="folders that run wrote")
    return parser


def _run(parsed: argparse.Namespace) -> int:
    experiment = load(parsed.experiment)
    folder = parsed.results or Path("runs") / experiment.name
    console = Console()
    console.print(f"[bold]{experiment.name}[/bold]: {experiment.question}", highlight=False)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{len(experiment.cells)} cells", total=sum(map(steps_of, experiment.cells)))
        rows = run_grid(experiment, folder, parsed.workers, lambda steps: bar.advance(task, steps))
    write_csv(rows, folder / "table.csv")
    console.print(_table(rows))
    _say(console, [folder / RESULTS, folder / "table.csv"])
    return 0


def _plot(parsed: argparse.Namespace) -> int:
    _say(Console(), draw(_rows(parsed.results), parsed.results))
    return 0


def _compare(parsed: argparse.Namespace) -> int:
    rows = [row for folder in parsed.results for row in _rows(folder)]
    Console().print(_table(rows))
    return 0


def _rows(folder: Path) -> list[Row]:
    rows = read_rows(folder / RESULTS)
    if not rows:
        raise ValueError(f"{folder} holds no finished cell; give a folder that `run` wrote, such as runs/loss-scaling")
    return rows


def _say(console: Console, paths: Sequence[Path]) -> None:
    for path in paths:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    """One line a policy: the mean over its seeds of every number that its cells have."""
    table = Table(caption="means over the seeds", box=SIMPLE, pad_edge=False, collapse_padding=True)
    lines = {label: [summary(row) for row in group] for label, group in by_label(rows).items()}
    names = [
        name for name in dict.fromkeys(key for group in lines.values() for key in group[0]) if name not in _UNSHOWN
    ]
    if len(names) > _WIDE:  # dot products: some of the lengths
        names = list(dict.fromkeys([*names[:: len(names) // _WIDE + 1], names[-1]]))
    table.add_column("policy", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for label, group in lines.items():
        table.add_row(label, *(_mean(name, [line[name] for line in group if name in line]) for name in names))
    return table


def _mean(name: str, values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = math.fsum(values) / len(values)
    if name in _SHARES:
        return f"{100 * mean:.1f} %"
    return f"2^{math.log2(mean):.1f}" if name.startswith("error") and mean > 0 else f"{mean:.3g}"


def entry() -> None:
    """What ``python -m mp_reference.lab`` does."""
    sys.exit(main())
