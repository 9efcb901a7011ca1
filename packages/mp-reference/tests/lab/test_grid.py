"""Running: every cell's row, in parallel or not, kept when interrupted; then tables, plots and the command line."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_reference.lab import cli, grid
from mp_reference.lab.cells import run_cell, steps_of
from mp_reference.lab.experiment import Cell, DotProducts, Experiment, Task, load
from mp_reference.lab.grid import RESULTS, read_rows, run_grid
from mp_reference.lab.plots import draw
from mp_reference.lab.policies import Policy
from mp_reference.lab.statistics import HIGHEST, LOWEST, Magnitudes
from mp_reference.lab.tables import summary, write_csv

if TYPE_CHECKING:
    from pathlib import Path

TASK = Task(data="spirals", steps=4, width=8, max_grad_norm=0.0)
POLICIES = (Policy(), Policy(format="fp16", loss_scale="torch:65536:2"))


def experiment(task: Task | DotProducts = TASK, seeds: tuple[int, ...] = (0, 1)) -> Experiment:
    return Experiment(name="tiny", question="Does it run?", work=task, policies=POLICIES, seeds=seeds)


def stripped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("data", ["text", "stripes", "spirals"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_cell_trains_every_kind_of_data_with_every_optimizer(data: Any, optimizer: Any) -> None:
    task = Task(data=data, steps=3, batch=4, width=16, layers=1, context=8, optimizer=optimizer, loss_factor=0.5)
    row = run_cell(Cell(Policy(format="bf16"), 0, task))
    assert len(row["losses"]) == len(row["scales"]) == len(row["norms"]) == len(row["rounded_away"]) == 3
    assert row["applied"] == 3
    assert 0.3 < row["losses"][0] < 6  # the factor is taken out again
    assert 0 < max(row["depth"]) < 2.0**-4
    assert sum(row["histogram"]["counts"]) > 100
    json.dumps(row)


def test_the_same_cell_gives_the_same_numbers_again() -> None:
    cell = Cell(Policy(format="bf16", storage="same", masters="stochastic"), 3, TASK)
    assert stripped([run_cell(cell)]) == stripped([run_cell(cell)])


def test_without_a_loss_scale_small_gradients_are_lost_in_fp16_and_a_scale_gives_them_back() -> None:
    task = Task(data="spirals", steps=40, batch=32, width=16, lr=5e-3, loss_factor=2.0**-18, max_grad_norm=0.0)
    ends = {}
    for words in ("off", "static:65536", "static:1e30"):
        row = run_cell(Cell(Policy(format="fp16", loss_scale=words), 0, task))
        ends[words] = (row["held_out"], row["histogram"]["zeros"], row["skipped"])
    plain = run_cell(Cell(Policy(), 0, task))
    assert ends["off"][1] > 3 * ends["static:65536"][1]
    assert ends["static:65536"][0] == pytest.approx(plain["held_out"], rel=0.02)
    assert ends["off"][0] > plain["held_out"]
    assert ends["static:1e30"][2] == 40  # the cure for overflow is a smaller scale


def test_a_longer_dot_product_has_a_larger_error_in_a_narrower_accumulator() -> None:
    work = DotProducts(lengths=(16, 256, 2048), columns=16)
    errors = {
        words: run_cell(Cell(Policy(format="fp16", accumulator=words), 0, work))["errors"]
        for words in ("fp16", "hopper", "sequential:fp32", "exact")
    }
    assert errors["fp16"][2] > errors["fp16"][0] * 8
    assert errors["fp16"][2] > errors["hopper"][2] > errors["sequential:fp32"][2] > errors["exact"][2]
    normal = run_cell(Cell(Policy(format="bf16"), 0, DotProducts(lengths=(8,), values="normal")))
    assert normal["worst"][0] >= normal["errors"][0] > 0
    assert steps_of(Cell(Policy(), 0, work)) == 3


def test_magnitudes_are_counted_by_exponent_and_clipped_at_both_ends() -> None:
    seen = Magnitudes()
    seen.add(np.array([2.0**-140, 2.0**100, np.nan, -np.inf, -0.0, 1.99]))
    assert (seen.counts[0], seen.counts[-1], seen.counts[-LOWEST], seen.zeros, seen.infinite) == (1, 1, 1, 1, 2)
    assert len(seen.counts) == HIGHEST - LOWEST + 1


def test_processes_and_one_process_give_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    counted = {"one": 0, "two": 0}

    def count(where: str) -> Any:
        def add(steps: int) -> None:
            counted[where] += steps

        return add

    before = os.environ.get("OMP_NUM_THREADS")
    alone = run_grid(experiment(), tmp_path / "one", 1, count("one"))
    together = run_grid(experiment(), tmp_path / "two", 2, count("two"))
    assert stripped(alone) == stripped(together)
    assert [row["key"] for row in alone] == [cell.key for cell in experiment().cells]
    assert counted == {"one": 16, "two": 16}
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_threads_of_workers_are_limited_only_while_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    with grid._one_thread_each():
        assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("1", "1")
    assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["MKL_NUM_THREADS"] == "7"


def test_the_work_of_a_process_reports_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Steps(list[int]):
        put = list.append

    steps = Steps()
    handlers: list[Any] = []
    monkeypatch.setattr(grid, "_steps", None)
    monkeypatch.setattr(signal, "signal", lambda *handler: handlers.append(handler))
    grid._start(steps)
    assert handlers == [(signal.SIGINT, signal.SIG_DFL)]
    grid._work(Cell(Policy(), 0, TASK))
    assert sum(steps) == 4


def test_finished_cells_are_not_run_again_and_a_line_cut_short_is(tmp_path: Path) -> None:
    first = run_grid(experiment(), tmp_path)
    lines = (tmp_path / RESULTS).read_text().splitlines(keepends=True)
    marked = lines[0].replace('"seconds": ', '"seconds": 9')
    (tmp_path / RESULTS).write_text(marked + lines[1] + lines[2] + lines[3][:40])
    cut = (tmp_path / RESULTS).read_text()
    assert len(read_rows(tmp_path / RESULTS)) == 3
    assert (tmp_path / RESULTS).read_text() == cut  # whoever reads while a run goes on changes nothing
    counted: list[int] = []
    again = run_grid(experiment(), tmp_path, progress=counted.append)
    assert stripped(again) == stripped(first)
    assert again[0]["seconds"] >= 9  # read, not run
    assert sum(counted) == 16
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 4


def test_a_grid_that_grew_keeps_what_was_done(tmp_path: Path) -> None:
    run_grid(experiment(seeds=(0,)), tmp_path)
    size = (tmp_path / RESULTS).stat().st_size
    rows = run_grid(experiment(seeds=(0, 1)), tmp_path)
    assert len(rows) == 4
    assert (tmp_path / RESULTS).stat().st_size > size


def test_a_broken_line_is_named_and_infinities_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / RESULTS
    grid._append(path, {"a": [math.inf, -math.inf, 1.5], "b": {"c": math.nan}, "d": "text"})
    (row,) = read_rows(path)
    assert row["a"] == [math.inf, -math.inf, 1.5]
    assert math.isnan(row["b"]["c"])
    path.write_text("{oops\n" + path.read_text())
    with pytest.raises(ValueError, match=r"line 1, is no JSON: .*; remove the line to run its cell again"):
        read_rows(path)
    assert read_rows(tmp_path / "nothing.jsonl") == []


def test_no_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers=0 must be at least 1; 1 runs in this process"):
        run_grid(experiment(), tmp_path, 0)


SLOW = """
name = "slow"
question = "What survives an interrupt?"
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
[task]
data = "spirals"
steps = 200
width = 8
[grid]
format = ["fp32", "bf16"]
"""


# A shell lets what it runs in the background ignore interrupts, and children inherit that.
HEEDING = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('mp_reference.lab', run_name='__main__')"
)


@pytest.mark.parametrize("whole_group", [False, True])  # kill -INT, or an interrupt typed at the terminal
def test_an_interrupted_run_keeps_its_finished_cells_and_ends_in_one_line(tmp_path: Path, whole_group: bool) -> None:
    path, results = tmp_path / "slow.toml", tmp_path / "results"
    path.write_text(SLOW)
    command = [sys.executable, "-c", HEEDING, "run", str(path), "--results", str(results), "--workers", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(read_rows(results / RESULTS)) < 2:
        time.sleep(0.05)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "finished cells are kept, the same command goes on with the rest" in errors
    assert "Traceback" not in errors
    kept = [row["key"] for row in read_rows(results / RESULTS)]
    assert 2 <= len(kept) < 20
    assert set(kept) <= {cell.key for cell in load(path).cells}


def test_the_command_line_runs_compares_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, results = tmp_path / "tiny.toml", tmp_path / "results"
    path.write_text(
        "name = 'tiny'\nquestion = 'Does it run?'\nseeds = [0, 1]\n[task]\ndata = 'spirals'\nsteps = 4\nwidth = 8\n"
        "[grid]\nformat = ['fp32', 'fp16']\nloss_scale = ['static:8', 'off']\n"
    )
    assert cli.main(["run", str(path), "--results", str(results), "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "tiny: Does it run?" in shown
    assert "fp16, static:8" in shown
    with (results / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 8
    assert {"label", "loss", "held-out", "applied", "skipped", "away", "zeros", "scale", "seconds", "key"} <= set(
        table[0]
    )
    assert cli.main(["compare", str(results), str(results)]) == 0
    assert "means over the seeds" in capsys.readouterr().out
    assert cli.main(["plot", str(results)]) == 0
    names = {"loss.png", "loss-scale.png", "gradients.png", "rounded-away.png", "depth.png"}
    assert {one.name for one in results.glob("*.png")} == names
    assert all(one.read_bytes().startswith(b"\x89PNG") and one.stat().st_size > 10_000 for one in results.glob("*.png"))


def test_results_go_to_runs_and_the_experiment_s_name_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dots.toml"
    path.write_text(
        "name = 'dots'\nquestion = 'How large?'\n[dot_products]\nlengths = [2, 3, 4, 5, 6, 7, 8, 9, 10]\ncolumns = 2\n"
        "[grid]\nformat = ['fp16']\naccumulator = ['fp16', 'exact']\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", str(path), "--workers", "1"]) == 0
    assert (tmp_path / "runs" / "dots" / RESULTS).exists()
    shown = capsys.readouterr().out
    assert shown.count("error") == 5  # every other one of nine lengths
    path.write_text(path.read_text().replace("lengths = [2, 3, 4, 5, 6, 7, 8, 9, 10]", "lengths = [2, 3]"))
    assert cli.main(["run", str(path), "--workers", "1", "--results", "few"]) == 0
    assert capsys.readouterr().out.count("error") == 2
    run_grid(experiment(seeds=(0,)), tmp_path / "trained")
    assert cli.main(["compare", "few", "trained"]) == 0  # each line has the numbers of its own kind
    assert len(capsys.readouterr().out.splitlines()) > 6
    assert [one.name for one in draw(read_rows(tmp_path / "runs" / "dots" / RESULTS), tmp_path)] == ["dot-products.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.toml"], "nowhere.toml: No such file or directory; give a TOML file or one of the shipped"),
        (
            ["plot", "nowhere"],
            "nowhere holds no finished cell; give a folder that `run` wrote, such as runs/loss-scaling",
        ),
        (["compare", "nowhere"], "nowhere holds no finished cell"),
        (["run", "masters", "--workers", "0"], "workers=0 must be at least 1"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_one(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_an_interrupt_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupted)
    assert cli.main(["run", "masters"]) == 130
    assert "interrupted; finished cells are kept" in capsys.readouterr().err


def test_the_module_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lab", "compare", "nowhere-at-all"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("mp_reference.lab", run_name="__main__")
    assert ended.value.code == 1
    assert "nowhere-at-all" in capsys.readouterr().err
    importlib.import_module("mp_reference.lab.__main__")  # which does nothing by itself


@pytest.mark.parametrize("package", ["rich.console", "matplotlib"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("mp_reference.lab")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"needs {package}.*; python -m pip install 'mp-reference\[lab\]'"):
        runpy.run_module("mp_reference.lab", run_name="__main__")


def test_nothing_to_draw_is_refused_and_an_empty_table_has_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no finished cell to draw; run the experiment first"):
        draw([], tmp_path)
    write_csv([], tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().strip() == "key"


def test_a_run_that_diverged_is_drawn_with_gaps_and_summed_up_as_nan(tmp_path: Path) -> None:
    row = run_cell(Cell(Policy(format="fp16"), 0, TASK))
    row["losses"][-1] = math.nan
    row["depth"] = [math.inf, 0.0, *row["depth"][2:]]
    row["histogram"] = {"counts": [0] * (HIGHEST - LOWEST + 1), "zeros": 5, "infinite": 1}
    assert math.isnan(summary(row)["loss"])
    assert [one.name for one in draw([row], tmp_path)] == ["loss.png", "gradients.png", "rounded-away.png", "depth.png"]
