"""The end of a run: it fits a screen, names what matters, and says what changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mp_conformance import report
from mp_conformance.runner import Result
from mp_conformance.summary import change_lines, changes, summary_lines

if TYPE_CHECKING:
    from pathlib import Path

RESULTS = [
    Result("cast.float64.bf16", "torch", "cpu", "kept", compared=12345),
    Result("cast.float64.fp16", "torch", "cpu", "broken", message="0x1 <b>& more\nand a second line"),
    Result("cast.float64.fp16", "reference", "cpu", "error", message="ValueError: why\n\nTraceback\n)"),
    Result("op-rules.cuda.fp16", "torch", "cpu", "kept", remarks=["torch 2.14.0: aten::new is fp32"]),
    Result("step.skip", "engine", "cpu", "not reached"),
]


def document(results: list[Result], **changed: Any) -> dict[str, Any]:
    return report.document(results, device="cpu", seed=0, examples=20, pattern="*") | changed


def test_the_summary_names_failures_by_their_first_words_and_remarks_and_what_was_not_reached() -> None:
    text = "\n".join(summary_lines(RESULTS, 1.0))
    assert "torch on cpu         2 kept, 1 broken; 12,345 values compared" in text
    assert "BROKEN cast.float64.fp16 [torch]: 0x1 <b>& more\n" in text
    assert "ERROR cast.float64.fp16 [reference]: ValueError: why\n" in text
    assert "REMARK op-rules.cuda.fp16 [torch]: torch 2.14.0: aten::new is fp32" in text
    assert "not reached: 1 claims of step" in text
    assert text.endswith("2 claims are not kept; 5 questions in 1.0 s")


@pytest.mark.parametrize("width", [100, 60])
@pytest.mark.parametrize("compared", [[], ["a line"] * 9])
def test_the_summary_fits_a_screen_whatever_happened(width: int, compared: list[str]) -> None:
    many = RESULTS + [
        Result("cast.float64.bf16", f"subject {n}", "cpu", "hung", message="slow " * 40) for n in range(9)
    ]
    many += [Result("cast.float64.bf16", "torch", "cpu", "hung", message="slow") for _ in range(30)]
    lines = summary_lines(many, 1.0, compared, width)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    assert width == 100 or any(line.endswith("...") for line in lines), "a line that was cut says so"
    assert any("more; --report or --json has them all" in line for line in lines)


def test_a_run_compared_with_itself_changed_nothing(tmp_path: Path) -> None:
    data = document(RESULTS)
    report.write_json(tmp_path / "x.json", data)
    read = report.read_json(tmp_path / "x.json")
    assert changes(read, data) == []
    assert change_lines(read, data) == [f"compared with the run of {data['when']}: same settings", "0 answers changed"]


def test_a_comparison_tells_changed_answers_from_questions_that_one_run_alone_asked() -> None:
    before = document(RESULTS[1:], environment={"torch": "2.12.0"}, when="then", seed=1)
    kept = Result("cast.float64.fp16", "torch", "cpu", "kept")
    now = document([RESULTS[0], kept, *RESULTS[2:4]], environment={"torch": "2.13.0"})
    assert change_lines(before, now) == [
        "compared with the run of then: torch 2.12.0 -> 2.13.0; seed 1 -> 0",
        "1 answers changed; 1 questions were asked then alone, 1 now alone",
        "  cast.float64.fp16 [torch]: broken -> kept",
    ]
    assert [row["now"] for row in changes(before, now)] == ["kept", "kept", "not asked"]


def test_a_worst_distance_that_moved_is_a_change_and_many_changes_are_counted() -> None:
    worst = {"distance": 1.0, "inputs": "", "actual": "", "expected": ""}
    before = document([Result(f"elementary.{n}", "torch", "cpu", "kept", worst=worst) for n in range(9)])
    now = document([Result(f"elementary.{n}", "torch", "cpu", "kept") for n in range(9)])
    lines = change_lines(before, now)
    assert "  elementary.0 [torch]: kept, worst 1 -> kept" in lines
    assert lines[-1] == "  ... and 3 more; --report has them all"
