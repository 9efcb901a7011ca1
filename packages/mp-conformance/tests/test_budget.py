"""A drawn claim keeps to its budget: of draws, and in a deep run of seconds."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from mp_conformance.claims import Run, rows
from mp_conformance.compare import DisagreementError


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
