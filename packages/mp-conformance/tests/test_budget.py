"""A drawn claim keeps to its budget: of draws, and in a deep run of seconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from mp_conformance.claims import Run, casts, rows, select
from mp_conformance.compare import DisagreementError
from mp_conformance.implementations import subject_named


@pytest.mark.parametrize("deep", [False, True])
def test_every_draw_of_the_budget_is_made_and_no_round_repeats_another(deep: bool) -> None:
    run, seen = Run(examples=500, deep=deep), list[int]()
    run.draw(st.integers(0, 2**64), seen.append)
    assert run.drawn == len(seen) == 500
    assert len(set(seen)) > 400
    assert not run.notes


def test_shares_of_a_claim_add_up_to_its_budget() -> None:
    run = Run(examples=600)
    for _ in range(3):
        run.draw(st.integers(0, 2**64), lambda _: None, share=3)
    assert run.drawn == 600


def test_a_deep_run_ends_a_claims_draws_when_its_seconds_are_over_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PATIENCE", 0.0)
    run = Run(examples=5000, deep=True)
    run.draw(st.integers(0, 2**64), lambda _: None)
    assert run.drawn == 200
    assert run.notes == [
        "200 of 5,000 draws, then its 0 s of a deep run were over; --max-examples 5000 without --deep draws all"
    ]


def test_a_false_claim_is_found_in_a_later_round() -> None:
    run = Run(examples=600)

    def later(value: int) -> None:
        if run.drawn > 400:
            raise DisagreementError(str(value))

    with pytest.raises(DisagreementError):
        run.draw(st.integers(), later)


def test_a_deep_run_asks_a_slow_subject_part_of_every_binade_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(casts, "_ALL_WITHIN", 0.0)
    monkeypatch.setattr(casts, "_STEP", 1 << 8)
    run = Run(deep=True)
    (claim,) = (row for row in select("cast.*") if "midpoints" in row.sentence and "float32 to fp16" in row.sentence)
    with np.errstate(all="ignore"):
        claim.check(subject_named("reference"), run)
    assert run.tally.compared == 14 * (1 << 14) + 512 * (1 << 8)
    assert run.notes[0].startswith("256 inputs in every binade; all 2**32 would take it ")
