"""The one command for a real accelerator: what it says where something is missing, and that its steps are there."""

from __future__ import annotations

import os
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
        assert name in text
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()
    assert sum(int(part) for part in ("240", "60", "80", "80")) <= 480, "the script must end within 8 minutes"
