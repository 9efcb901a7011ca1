"""The command line: what it prints, what it writes, how it ends, and what it says to nonsense."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from mp_conformance.cli import BROKEN, KEPT, MISUSED, main

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ["--claims", "format.fp16.*", "--subjects", "reference,torch", "--quiet"]


def test_a_run_ends_with_zero_when_every_claim_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == KEPT
    out = capsys.readouterr().out
    assert "reference on cpu     2 kept; 65,541 values compared" in out
    assert "every claim that was reached is kept; 4 questions in" in out


def test_a_run_with_a_progress_bar_gives_the_same_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL[:-1]) == KEPT
    assert "4 questions" in capsys.readouterr().out


def test_a_page_and_a_json_file_are_written_and_two_runs_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, first, second = tmp_path / "r.html", tmp_path / "a.json", tmp_path / "b.json"
    assert main([*SMALL, "--report", str(page), "--json", str(first)]) == KEPT
    data = json.loads(first.read_text())
    assert data["results"][0]["status"] == "kept"
    data["results"][0]["status"] = "broken"
    first.write_text(json.dumps(data))
    capsys.readouterr()
    assert main([*SMALL, "--compare", str(first), "--json", str(second), "--report", str(page)]) == KEPT
    out = capsys.readouterr().out
    assert "1 answers changed since the run compared with" in out
    assert "format.fp16.facts [reference]: broken -> kept" in out
    assert "What changed" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device 'tpu' is not one of cpu, cuda, npu, xpu, mps; give the type alone"),
        (["--claims", "casting.*"], "no claim matches 'casting.*'; ids begin with one of accumulation, arithmetic"),
        (["--subjects", "tensorflow"], "subject 'tensorflow' is not one of torch, engine, reference"),
        (["--max-examples", "0"], "--max-examples 0 must be at least 1"),
        (["--compare", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
        (["probe", "--device", "tpu"], "--device 'tpu' is not one of"),
        (["probe", "--formats", "fp17"], "format 'fp17' is not one of"),
    ],
)
def test_a_misused_command_ends_with_two_and_names_the_way_out(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == MISUSED
    assert message in capsys.readouterr().err


def test_a_device_that_torch_has_not_is_refused_with_its_own_reason(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    absent = next(d for d in ("cuda", "xpu", "mps") if not getattr(torch, d).is_available())
    assert main(["--device", absent, "--claims", "format.*"]) == MISUSED
    assert f"device '{absent}': torch {torch.__version__} cannot place a tensor there" in capsys.readouterr().err


def test_comparing_with_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main([*SMALL, "--compare", str(other)]) == MISUSED
    assert "--compare needs a file that --json wrote" in capsys.readouterr().err


def test_claims_can_be_listed_and_the_guarantees_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--claims", "resume.*"]) == KEPT
    assert "resume.anywhere" in capsys.readouterr().out
    assert main(["guarantees"]) == KEPT
    assert "| Saving and resuming after any micro-step changes no later bit |" in capsys.readouterr().out


def test_the_golden_files_can_be_written_elsewhere_and_are_what_the_oracle_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vectors", "write", "--folder", str(tmp_path)]) == KEPT
    assert (tmp_path / "fp16_add.txt").read_text().startswith("# origin: mp_reference.numerics.exact")
    assert main(["vectors", "check"]) == KEPT
    assert "files, 0 differ from the oracle: none" in capsys.readouterr().out


def test_the_probe_prints_what_it_found_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "probe.json"
    assert main(["probe", "--formats", "fp32", "--json", str(path)]) == KEPT
    assert "fp32 matrix product on cpu" in capsys.readouterr().out
    assert json.loads(path.read_text())["findings"][0]["differing"] == 0


def test_a_run_that_finds_a_broken_claim_ends_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mp_conformance import gaps

    monkeypatch.setattr(gaps, "known", tuple)
    arguments = ["--claims", "format.float8_e5m2fnuz.facts", "--subjects", "torch", "--quiet"]
    assert main(arguments) == BROKEN
    assert "BROKEN format.float8_e5m2fnuz.facts [torch]: epsilon" in capsys.readouterr().out


def test_a_run_that_takes_too_long_says_what_it_did_not_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--minutes", "0.0000001"]) == KEPT
    assert "not reached in time: " in capsys.readouterr().out
