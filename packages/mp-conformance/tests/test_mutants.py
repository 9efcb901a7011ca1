"""The suite's own test: every seeded fault is found by the claim that must find it."""

from __future__ import annotations

import pytest

from mp_conformance.claims import registered
from mp_conformance.mutants import Mutant, MutantSubject, catch, catchers, seeded
from mp_conformance.runner import FAILURES


@pytest.mark.parametrize("mutant", seeded(), ids=lambda mutant: f"{mutant.id}: {mutant.sentence}")
def test_the_named_claim_catches_the_seeded_fault(mutant: Mutant) -> None:
    assert catch(mutant), f"{mutant.id} survives {mutant.caught_by}"


def test_at_least_sixty_faults_of_every_kind_are_seeded_and_no_two_share_a_name() -> None:
    names = [mutant.id for mutant in seeded()]
    assert len(names) == len(set(names)) >= 60
    assert {mutant.operation for mutant in seeded()} >= {
        "cast",
        "add",
        "fma",
        "loss_scale",
        "clip",
        "optimizer",
        "train",
    }
    assert {mutant.caught_by for mutant in seeded()} <= {claim.id for claim in registered()}


def test_a_mutant_that_does_nothing_wrong_survives() -> None:
    innocent = Mutant(
        id="none", sentence="nothing is wrong", operation="cast", caught_by="cast.float32.fp16",
        fault=lambda x, to, **options: MutantSubject(seeded()[0])._honest.perform("cast", x, to=to, **options),
    )  # fmt: skip
    assert catch(innocent, examples=20) == ""


def test_every_claim_that_finds_a_fault_can_be_listed() -> None:
    flaw = next(mutant for mutant in seeded() if mutant.id == "clip.no-root")
    assert catchers(flaw, examples=20) == ["clipping.norm"]


def test_a_mutant_offers_its_faulty_operation_alone() -> None:
    subject = MutantSubject(seeded()[0])
    assert subject.offers("cast", {"to": "fp16"})
    assert not subject.offers("clip", {})
    assert subject.perform("facts", format="fp16")["bits"] == 16.0
    assert "kept" not in FAILURES
