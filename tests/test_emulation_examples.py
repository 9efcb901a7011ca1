"""The models of ``examples/emulation`` train as their own assertions say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_emulation_examples_run_and_their_effects_show(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn; pip install scikit-learn")
    picture = tmp_path / "report.png"
    done = subprocess.run(
        [sys.executable, "-m", "examples.emulation", "--steps", "60", "--plot", str(picture)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1.0 without masters, 0.621 with fp32 masters" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
