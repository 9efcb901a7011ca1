"""Every claim on every subject that this machine has; the id of a test is the claim's sentence."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from mp_conformance.claims import Claim, Run, registered
from mp_conformance.implementations import Subject, subjects_for
from mp_conformance.runner import ask

if TYPE_CHECKING:
    from collections.abc import Callable

QUESTIONS = [
    pytest.param(claim, subject, id=f"{subject.name}: {claim.sentence}")
    for claim in registered()
    for subject in subjects_for("cpu")
    if claim.concerns(subject)
]


@pytest.mark.parametrize(("claim", "subject"), QUESTIONS)
def test_claim(claim: Claim, subject: Subject, run: Run, record_property: Callable[[str, object], None]) -> None:
    result = ask(claim, subject, run, limit=3000.0 if run.deep else 300.0)
    record_property("conformance result", asdict(result))
    if result.status in ("not offered", "not reached"):
        pytest.skip(result.message)
    if result.status == "gap":
        pytest.xfail(result.message)
    assert result.status == "kept", f"{result.status}: {result.message}"
