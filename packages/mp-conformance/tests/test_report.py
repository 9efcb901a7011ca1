"""The report: complete, self-contained, and looked at in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mp_conformance import report
from mp_conformance.claims import Run, select
from mp_conformance.implementations import subject_named
from mp_conformance.runner import Result, ask_all

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    claims = select("format.fp16.*,cast.float64.bf16,elementary.exp.*,loss-scale.machine")
    found = list(ask_all(claims, [subject_named("reference"), subject_named("torch")], lambda: Run(20)))
    found.append(Result("cast.float64.fp16", "torch", "cpu", "broken", 7, 9, {"0": 8, "3": 1}, None, "0x1 <b>& more"))
    found.append(Result("cast.float64.fp16", "reference", "cpu", "error", message="ValueError: why\n\nTraceback"))
    found.append(Result("step.skip", "engine", "cpu", "not reached"))
    return found


@pytest.fixture(scope="module")
def page(results: list[Result]) -> str:
    data = report.document(results, device="cpu", seed=5, examples=20, pattern="*")
    before = json.loads(json.dumps(data))
    before["environment"]["torch"] = "2.12.0"
    before["results"] = [{**r, "status": "kept"} if r["status"] == "broken" else r for r in before["results"]]
    return report.html(data, before)


def test_the_page_needs_nothing_from_the_network(page: str) -> None:
    assert not re.search(r'(src|href)="(?!#|https?://)', page)
    assert "<script" not in page
    assert not re.search(r"@import|url\(", page)


def test_every_row_shows_its_sentence_evidence_source_and_the_command_that_asks_again(page: str) -> None:
    for text in (
        "casting float64 to bf16 rounds once, to nearest, ties to even",
        "mp-conformance --device cpu --claims &#39;cast.float64.bf16&#39; --subjects torch --seed 5 --max-examples 20",
        'href="#source-1"',
        "known since 2026-11-29",
        "0x1 &lt;b&gt;&amp; more",
        "IEEE 754-2019, 4.3.1",
        "hypothesis",
        "torch threads",
        "every input",
        "20 draws",
    ):
        assert text in page, text


def test_the_worst_value_of_a_ulp_claim_is_shown_in_hex_and_decimal(page: str) -> None:
    assert re.search(r"1 at float16 0x[0-9a-f]{4} \(", page)
    assert "the kernel computes in fp32" in page


def test_the_page_says_what_changed_and_under_which_circumstances(page: str) -> None:
    assert "torch 2.12.0 -&gt; " in page
    changed = page[page.index('id="changes"') : page.index('id="matrix"')]
    assert changed.count('<td class="mono">') == 1
    assert "<td>kept</td>" in changed
    assert "<td>broken</td>" in changed


def test_a_row_is_asked_again_with_the_draws_it_had_also_after_a_deep_run_and_for_a_subject_of_ones_own() -> None:
    data = report.document(
        [], device="cpu", seed=3, examples=5000, pattern="*", deep=True, asked_as={"mine": "my.module:Mine"}
    )
    assert report.rerun_command(data, {"claim": "cast.x", "device": "cpu", "subject": "mine"}) == (
        "mp-conformance --device cpu --claims 'cast.x' --subjects my.module:Mine --seed 3 --max-examples 5000 --deep"
    )


def test_the_environment_names_the_extras_that_were_not_asked_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "absent", lambda: {"jax": "needs the package jax; pip install jax"})
    assert report.environment("cpu")["not asked: jax"] == "needs the package jax; pip install jax"


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", r"x.json is no JSON .*; --compare needs a file"), ("[]", "x.json has no 'what'"), ("{}", "has no 'what'")],
)
def test_a_file_that_is_no_document_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        report.read_json(tmp_path / "x.json")


def test_the_guarantees_table_has_one_row_a_family() -> None:
    lines = report.guarantees_table().splitlines()
    heads = {line.split("--claims '")[1].split(".")[0] for line in lines[2:]}
    assert len(lines) - 2 == len(heads) > 10


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
def test_a_browser_renders_the_page_as_written(page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    picture = tmp_path / "report.png"
    subprocess.run(
        [BROWSER, *flags, "--window-size=1280,2400", f"--screenshot={picture}", file.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000, "the page is empty"
    dom = subprocess.run(
        [BROWSER, *flags, "--dump-dom", file.as_uri()], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert dom.count("<details") == page.count("<details")
    assert "Which claims does cpu keep, bit by bit?" in dom


def test_a_pytest_run_says_where_it_wrote_and_what_its_expected_failures_are(tmp_path: Path) -> None:
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    asked = ["-k", "torch and gelu and fp16", f"--conformance-report={page}", f"--conformance-json={data}"]
    command = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("test_claims.py")), *asked]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 0, shown.stdout
    known = sum(result["status"] == "gap" for result in json.loads(data.read_text())["results"])
    assert known
    assert f"x: {known} claims that are known to be false of a library, listed in gaps.toml" in shown.stdout
    assert f"written: {page}" in shown.stdout
    assert f"written: {data}" in shown.stdout
