"""torch's own lists of what autocast does on CUDA, with torch's own check, on CPU tensors."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("torch_lists.py")


def outcomes(emulated):
    pytest.importorskip("expecttest", reason="torch's own test helpers import expecttest; pip install expecttest")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), emulated], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_every_row_of_torchs_cuda_lists_passes_torchs_own_check_under_emulate():
    found = outcomes("cuda")
    skipped = {name for name, outcome in found.items() if outcome == "None"}
    assert skipped == {f"torch_fp16 {op}" for op in ("cudnn_convolution", "cudnn_convolution_transpose", "einsum")}
    assert {name: outcome for name, outcome in found.items() if outcome not in ("True", "None")} == {}
    assert len(found) > 90


def test_the_same_lists_fail_by_the_rules_of_the_cpu():
    counted = Counter(outcomes("cpu").values())
    assert counted.total() - counted["True"] - counted["None"] > 20
