"""The arrows between packages and modules hold, and each contract can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src"))
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

# contract -> (module that gets the line, the line, what the report must name)
PLANTED = {
    "reference-layers": [
        (
            "mp_reference/spec/formats.py",
            "from mp_reference.numerics import rounding",
            "mp_reference.numerics.rounding",
        ),
        ("mp_reference/numerics/rounding.py", "from mp_reference.amp import step", "mp_reference.amp.step"),
        ("mp_reference/amp/step.py", "from mp_reference.nn import tensor", "mp_reference.nn.tensor"),
        ("mp_reference/nn/tensor.py", "import mp_reference.lab", "mp_reference.lab"),
        ("mp_reference/attic.py", "import math", "attic"),
    ],
    "exact-beside-rounding": [
        ("mp_reference/numerics/exact.py", "from mp_reference.numerics.rounding import round_to", "numerics.rounding"),
        ("mp_reference/numerics/rounding.py", "from mp_reference.numerics import exact", "numerics.exact"),
    ],
    "spec-standard-library": [("mp_reference/spec/sources.py", "import yaml", "spec.sources imports yaml")],
    "reference-no-torch": [
        ("mp_reference/amp/step.py", "import torch", "torch"),
        ("mp_reference/amp/step.py", "import mp_torch", "mp_torch"),
    ],
    "torch-layers": [
        ("mp_torch/precision.py", "from mp_torch.engine import AmpEngine", "mp_torch.engine"),
        ("mp_torch/devices/base.py", "from mp_torch import scaling", "mp_torch.scaling"),
        ("mp_torch/ranks/base.py", "from mp_torch import clipping", "mp_torch.clipping"),
        ("mp_torch/errors.py", "from mp_torch import devices", "mp_torch.devices"),
        ("mp_torch/attic.py", "import math", "attic"),
    ],
    "torch-spec": [
        ("mp_torch/scaling.py", "from mp_reference.amp import loss_scale", "mp_reference.amp.loss_scale"),
        ("mp_torch/emulate/__init__.py", "from mp_reference.numerics.rounding import round_to", "numerics.rounding"),
    ],
    "emulate-public": [("mp_torch/scaling.py", "import mp_reference", "mp_torch.scaling -> mp_reference")],
    "conformance-on-top": [
        ("mp_reference/lab/__init__.py", "import mp_conformance", "mp_conformance"),
        ("mp_torch/report.py", "from mp_conformance import claims", "mp_conformance.claims"),
    ],
    "conformance-public": [("mp_conformance/compare.py", "from mp_torch.engine import AmpEngine", "mp_torch.engine")],
    "distributed-in-ranks": [
        ("mp_torch/scaling.py", "import torch.distributed as dist", "mp_torch.scaling:"),
        ("mp_torch/clipping.py", "from torch import distributed", "mp_torch.clipping:"),
        ("mp_torch/engine.py", "reduce = torch.distributed.all_reduce", "mp_torch.engine:"),
        ("mp_torch/master.py", 'dtensor = import_module("torch.distributed.tensor")', "mp_torch.master:"),
    ],
    "npu-in-devices": [
        ("mp_torch/devices/base.py", "import torch_npu", "mp_torch.devices.base:"),
        ("mp_torch/engine.py", "import torch_npu.npu", "mp_torch.engine:"),
    ],
}


def lint(*arguments: str, sources: list[Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "COLUMNS": "200"}
    program = "from importlinter.cli import lint_imports_command as lint; lint()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The three source trees, copied to where a violation can be planted."""
    folder = tmp_path_factory.mktemp("arrows")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    return [Path(shutil.copytree(source, folder / source.parent.name, ignore=ignore)) for source in SOURCES]


def test_every_arrow_holds() -> None:
    result = lint(sources=SOURCES)
    assert result.returncode == 0, result.stdout[-4000:]
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


def test_every_contract_has_a_planted_violation() -> None:
    assert {contract["id"] for contract in CONTRACTS} == set(PLANTED)


@pytest.mark.parametrize(
    ("contract", "where", "line", "named"),
    [(contract, *row) for contract, rows in PLANTED.items() for row in rows],
    ids=lambda value: re.sub(r"\W+", "-", value) if "import" not in value else "",
)
def test_a_planted_violation_is_reported(copies: list[Path], contract: str, where: str, line: str, named: str) -> None:
    source = next(path for path in copies if (path / where.split("/")[0]).is_dir())
    path = source / where
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        result = lint("--contract", contract, sources=copies)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)
    assert result.returncode == 1, result.stdout[-2000:]
    assert "0 kept, 1 broken" in result.stdout
    assert named in result.stdout


def test_the_spec_loads_where_nothing_else_is_installed() -> None:
    """``-S`` leaves site-packages out, so that NumPy or torch would not be found."""
    modules = sorted(path.stem for path in ROOT.glob("packages/mp-reference/src/mp_reference/spec/[a-z]*.py"))
    program = f"""
import sys
for name in {modules}:
    __import__(f"mp_reference.spec.{{name}}")
assert not {{"numpy", "ml_dtypes", "torch"}} & set(sys.modules)
"""
    source = ROOT / "packages/mp-reference/src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    result = subprocess.run([sys.executable, "-S", "-c", program], env=environment, capture_output=True, text=True,
                            timeout=60, check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr
