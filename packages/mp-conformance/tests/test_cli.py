"""The command line: what it prints, what it writes, how it ends, and what it says to nonsense."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mp_conformance import vectors
from mp_conformance.cli import BROKEN, INTERRUPTED, KEPT, MISUSED, main
from mp_conformance.implementations import subject_named

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
    assert "compared with the run of 20" in out
    assert "1 answers changed\n  format.fp16.facts [reference]: broken -> kept" in out
    assert "What changed" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device 'tpu' is not one of cpu, cuda, npu, xpu, mps; give the type alone"),
        (["--claims", "casting.*"], "no claim matches 'casting.*'; ids begin with one of accumulation, arithmetic"),
        (["--subjects", "tensorflow"], "subject 'tensorflow' is not one of torch, engine, "),
        (["--max-examples", "0"], "--max-examples 0 must be at least 1"),
        (["--limit", "-1"], "--limit -1 must be a positive number"),
        (["--minutes", "nan"], "--minutes nan must be a positive number"),
        (["--subjects", ","], "--subjects ',' has an empty name; write names separated by commas"),
        (["--claims", "ranks.*", "--subjects", "vectors"], "none of vectors is asked about 'ranks.*': there is no"),
        (["--report", "."], ". is a folder; give the name of a file"),
        (["probe", "--formats", "tf32"], "tf32 cannot be probed by products whose results are tf32, too"),
        (["probe", "--formats", "fp16,"], "--formats 'fp16,' has an empty name"),
        (["vectors", "check", "--folder", "nowhere"], "--folder nowhere is no folder; make it first"),
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
    err = capsys.readouterr().err
    assert f"device '{absent}': torch {torch.__version__} cannot place a tensor there" in err
    assert err.count("\n") == 1, "a dispatcher that lists all its kernels is cut to its first line"


def test_comparing_with_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main([*SMALL, "--compare", str(other)]) == MISUSED
    err = capsys.readouterr().err
    assert "other.json has no 'what': 'mp-conformance results'; --compare needs a file that --json wrote" in err


def test_what_would_fail_after_the_run_is_refused_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mp_conformance import cli

    monkeypatch.setattr(cli, "ask_all", None)  # nobody is asked
    (tmp_path / "bad.json").write_text("{")
    assert main([*SMALL, "--compare", str(tmp_path / "bad.json")]) == MISUSED
    assert main([*SMALL, "--json", str(tmp_path)]) == MISUSED
    err = capsys.readouterr().err
    assert "bad.json is no JSON (Expecting property name" in err
    assert f"{tmp_path} is a folder; give the name of a file" in err


def test_folders_of_the_report_are_made(tmp_path: Path) -> None:
    page, data = tmp_path / "a" / "r.html", tmp_path / "b" / "c" / "r.json"
    assert main([*SMALL, "--report", str(page), "--json", str(data)]) == KEPT
    assert page.exists()
    assert data.exists()


# A shell lets what it runs in the background ignore interrupts, and children inherit that.
_HEEDING = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('mp_conformance', run_name='__main__')"
)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_keeps_what_it_found_and_says_what_it_did_not_reach(stop: int, tmp_path: Path) -> None:
    code = "import time\nclass Slow:\n  name, device = 'slow', 'cpu'\n"
    code += "  def offers(self, operation, options): return operation == 'cast'\n"
    code += "  def perform(self, *_, **__): print('here', flush=True); time.sleep(60)\n"
    (tmp_path / "slow_subject.py").write_text(code)
    command = [sys.executable, "-c", _HEEDING, "--claims", "format.fp16.*,cast.float32.fp16,cast.float32.bf16"]
    command += ["--subjects", "reference,slow_subject:Slow", "--json", str(tmp_path / "r.json"), "--max-examples", "3"]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == "here\n"
    run.send_signal(stop)
    out, err = run.communicate(timeout=120)
    assert run.returncode == INTERRUPTED, err
    assert "Traceback" not in err
    assert "reference on cpu     2 kept, 2 not reached; 65,541 values compared" in out
    data = json.loads((tmp_path / "r.json").read_text())
    late = [r["message"] for r in data["results"] if r["status"] == "not reached"]
    assert late == ["the run was interrupted before this claim was answered"] * 5


def test_a_run_ends_well_when_its_reader_has_seen_enough() -> None:
    program = f"{sys.executable} -m mp_conformance list | head -1"
    command = ["bash", "-o", "pipefail", "-c", program]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("format.fp32.facts")


def test_a_subject_of_ones_own_is_asked_and_its_row_can_be_asked_again(tmp_path: Path) -> None:
    name = "mp_conformance.implementations.numpy_family:NumpySubject"
    arguments = ["--claims", "format.fp16.facts", "--subjects", name, "--quiet", "--json", str(tmp_path / "r.json")]
    assert main(arguments) == KEPT
    assert json.loads((tmp_path / "r.json").read_text())["asked_as"] == {"ml_dtypes": name}


def test_a_deep_run_says_how_many_examples_it_drew(tmp_path: Path) -> None:
    arguments = ["--claims", "format.fp16.facts", "--subjects", "reference", "--quiet", "--deep"]
    assert main([*arguments, "--json", str(tmp_path / "r.json")]) == KEPT
    data = json.loads((tmp_path / "r.json").read_text())
    assert (data["max_examples"], data["deep"]) == (5000, True)


def test_the_extras_that_are_not_installed_are_named_with_the_way_to_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mp_conformance import cli

    monkeypatch.setattr(cli, "absent", lambda: {"jax": "needs the package jax; pip install jax"})
    monkeypatch.setattr(cli, "subjects_for", lambda _: [subject_named("reference")])
    assert main(["--claims", "format.fp16.facts", "--quiet"]) == KEPT
    assert "not asked: jax needs the package jax; pip install jax" in capsys.readouterr().out


def test_another_simulators_files_are_checked_and_the_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(vectors.__file__).parent / "fp16_add.txt").read_text()
    (tmp_path / "fp16_add.txt").write_text(text.replace("83ff 8400 87ff 00", "83ff 8400 8800 00"))
    assert main(["vectors", "check", "--folder", str(tmp_path)]) == BROKEN
    out = capsys.readouterr().out
    assert "fp16_add.txt: line 100 holds '83ff 8400 8800 00', the oracle gives '83ff 8400 87ff 00'" in out


def test_a_probe_of_a_product_that_the_device_lacks_is_told_and_the_next_format_is_probed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mp_conformance import probes

    find_out = probes.find_out

    def lacks_fp16(matmul: Any, fmt: Any, device: str) -> Any:
        if fmt.name == "fp16":
            raise RuntimeError("no kernel for Half")
        return find_out(matmul, fmt, device)

    monkeypatch.setattr(probes, "find_out", lacks_fp16)
    assert main(["probe", "--formats", "fp16, fp32"]) == BROKEN
    out = capsys.readouterr().out
    assert "fp16 matrix product on cpu raised RuntimeError: no kernel for Half" in out
    assert "0 of 9216 random products differ" in out


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
    assert "0 files differ from the oracle: none" in capsys.readouterr().out


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
    assert "not reached: " in capsys.readouterr().out
