"""Golden files: readable by anybody, checked line by line, and no damaged one stops the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mp_conformance import vectors
from mp_conformance.claims import Run, select
from mp_conformance.implementations import subject_named
from mp_conformance.runner import ask
from mp_conformance.vectors import files

HERE = Path(files.__file__).parent


def changed(folder: Path, number: int, old: str, new: str) -> None:
    """One line of fp16_add with something else in it."""
    lines = (HERE / "fp16_add.txt").read_text().split("\n")
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    (folder / "fp16_add.txt").write_text("\n".join(lines))


def test_a_reader_of_twenty_lines_in_any_language_finds_sums_that_are_right() -> None:
    checked = 0
    for line in (HERE / "fp16_add.txt").read_text().split("\n"):
        if not line or line[0] == "#":
            continue
        a, b, result, flags = (int(cell, 16) for cell in line.split(" "))
        x, y, z = np.array([a, b, result], np.uint16).view(np.float16).astype(np.float64)
        if np.isfinite([x, y]).all() and not flags & 4:
            assert abs((x + y) - z) <= (abs(z) * 2.0**-11 if flags & 1 else 0)
            checked += 1
    assert checked > 300


def test_arithmetic_has_flags_in_every_rounding_and_nans_are_quiet() -> None:
    rounded = vectors.read("fp16_add_toward-zero")
    assert rounded.flags is not None
    assert {4, 5} & set(rounded.flags.tolist()), "an overflow toward zero gives the largest number, and the flag"
    codes = rounded.results.view(np.uint16)[np.isnan(rounded.results)]
    assert set(codes.tolist()) == {0x7E00}


@pytest.mark.parametrize(
    ("number", "old", "new", "message"),
    [
        (100, "87ff 00", "87fe 00", "line 100 holds '83ff 8400 87fe 00', the oracle gives '83ff 8400 87ff 00'"),
        (100, "87ff 00", "87ff 01", "line 100 holds '83ff 8400 87ff 01'"),
        (100, "87ff 00", "87ff", "line 100 holds '83ff 8400 87ff', the oracle"),
        (100, "87ff 00", "87zf 00", "line 100 holds '83ff 8400 87zf 00'"),
        (100, "83ff 8400 87ff 00", "", "line 101 holds"),
    ],
)
def test_a_changed_byte_is_found_and_its_line_named(
    number: int, old: str, new: str, message: str, tmp_path: Path
) -> None:
    changed(tmp_path, number, old, new)
    found = vectors.check(tmp_path)
    assert list(found) == ["fp16_add"]
    assert message in found["fp16_add"]


def test_another_simulators_file_may_choose_its_nan_and_write_in_capitals(tmp_path: Path) -> None:
    text = (HERE / "fp16_add.txt").read_text().replace(" 7e00 ", " FE01 ")
    (tmp_path / "fp16_add.txt").write_text(text.replace("87ff 00", "87FF 0"))
    assert vectors.check(tmp_path) == {}


def test_a_file_that_ends_early_and_a_folder_without_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no golden file; their names are bf16_add"):
        vectors.check(tmp_path)
    lines = (HERE / "fp16_add.txt").read_text().split("\n")
    (tmp_path / "fp16_add.txt").write_text("\n".join(lines[:200]))
    assert vectors.check(tmp_path) == {"fp16_add": "198 lines of data, 724 belong there"}


def test_a_damaged_file_is_one_failed_claim_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fp16_add", "fp16_sub"):
        shutil.copy(HERE / f"{name}.txt", tmp_path)
    changed(tmp_path, 100, "87ff", "87zf")
    monkeypatch.setattr(files, "files", lambda _: tmp_path)
    claims = select("vectors.held.fp16_add,vectors.held.fp16_sub,vectors.held.fp16_mul")
    results = {claim.id: ask(claim, subject_named("vectors"), Run(3)) for claim in claims}
    statuses = {name.rsplit("_", 1)[1]: result.status for name, result in results.items()}
    assert statuses == {"add": "error", "sub": "kept", "mul": "error"}
    assert "fp16_add, line 100: '83ff 8400 87zf 00' is not hexadecimal" in results["vectors.held.fp16_add"].message
    assert "fp16_mul.txt" in results["vectors.held.fp16_mul"].message
    assert files.check()["fp16_mul"] == "is missing"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="vectors 'fp16_pow' are not among bf16_add, bf16_div"):
        vectors.read("fp16_pow")
