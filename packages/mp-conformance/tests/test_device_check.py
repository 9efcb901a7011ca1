"""The one command for a real accelerator: what it says where something is missing, and that its steps are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "device_check.sh"


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell script")
def test_a_python_without_the_modules_is_told_what_to_bring(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    run = subprocess.run(
        [SCRIPT, "cpu", str(tmp_path / "out")], env={**os.environ, "PYTHON": str(bare), "PYTHONPATH": ""},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "this python lacks: torch numpy ml_dtypes hypothesis" in run.stderr
    assert "MP_WHEELS=folder" in run.stderr


def test_every_benchmark_that_the_script_runs_is_in_the_tree() -> None:
    text = SCRIPT.read_text()
    for name in ("engine", "emulate"):
        assert f"benchmarks/{name}.py" in text
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()
    limits = [int(seconds) for seconds in re.findall(r"^step \w+ (\d+) ", text, re.MULTILINE)]
    grace = int(re.findall(r"running\.wait\((\d+)\)", text)[0])
    assert len(limits) == 4
    assert sum(limits) + 4 * grace <= 480, "the script must end within 8 minutes"


def called(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, with a python whose long steps only print their command."""
    quick = tmp_path / "python"
    steps = '*mp_conformance*|*benchmarks/*) echo "ran: $*"; exit 0'
    quick.write_text(f'#!/bin/sh\ncase "$1 $2" in {steps};; esac\nexec {sys.executable} "$@"\n')
    quick.chmod(0o755)
    return subprocess.run(
        [SCRIPT, *arguments], env={**os.environ, "PYTHON": str(quick)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_a_device_that_is_not_there_is_named_and_the_cpu_is_measured_into_the_callers_folder(tmp_path: Path) -> None:
    import torch

    absent = next(d for d in ("cuda", "xpu", "mps") if not getattr(torch, d).is_available())
    run = called(tmp_path, absent, "results")
    assert run.returncode == 0, run.stderr
    note = f"{absent}: torch {torch.__version__} can use none here, everything below was measured on the CPU\n"
    assert (tmp_path / "results" / "note.txt").read_text() == note
    assert note in run.stdout
    summary = (tmp_path / "results" / "summary.txt").read_text()
    assert "ran: -m mp_conformance --device cpu --minutes 3" in summary
    assert "ran: -m mp_conformance probe --device cpu" in summary
    assert "ran: benchmarks/engine.py --device cpu" in summary
    assert summary.count("exit 0") == 4


def test_a_device_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    run = called(tmp_path, "tpu", "results")
    assert run.returncode == 2
    assert "device 'tpu' is not one of cuda, npu, xpu, mps or cpu" in run.stderr
