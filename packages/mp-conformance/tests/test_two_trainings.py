from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mp_conformance.claims import select
from mp_conformance.claims.rows import Run
from mp_conformance.claims.two_trainings import assert_same_training
from mp_conformance.compare import DisagreementError
from mp_conformance.implementations import NotOfferedError, subject_named
from mp_conformance.runner import ask
from mp_conformance.two_trainings import STEPS, by_the_reference
from mp_reference.spec.formats import FP16


@pytest.mark.parametrize("claim", [claim.id for claim in select("two-trainings.*")])
def test_the_claims_are_kept_here(claim):
    result = ask(select(claim)[0], subject_named("emulated-engine"), Run())
    assert (result.status, result.message) == ("kept", "")


def test_both_trainings_skip_and_grow_within_the_run():
    scales = [one.loss_scale for one in by_the_reference("mlp", "fp16")]
    assert len(scales) == STEPS
    assert min(scales) < scales[0]
    assert any(after > before for before, after in pairwise(scales))


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_another_accumulator_breaks_the_agreement(kind):
    steps = 3
    found = subject_named("emulated-engine").perform(
        "two_trainings", kind=kind, fmt="fp16", kernels="reference", steps=steps
    )
    with pytest.raises(DisagreementError, match=r"step \d: (loss|gradients\[)"):
        assert_same_training(found, by_the_reference(kind, "fp16", steps, accumulator=FP16))


def test_the_comparison_notices_each_thing_that_it_compares():
    (expected,) = by_the_reference("mlp", "bf16", steps=1)
    changed = {name: one.copy() for name, one in expected.masters.items()}
    changed["2.bias"][3] = np.nextafter(changed["2.bias"][3], np.float32(9))
    cases = {
        "applied": replace(expected, applied=False),
        "next_loss_scale": replace(expected, next_loss_scale=2.0),
        "loss:": replace(expected, loss=expected.loss * 2),
        r"masters\[2.bias\]": replace(expected, masters=changed),
        "gradients of": replace(expected, gradients={}),
    }
    for message, other in cases.items():
        with pytest.raises(DisagreementError, match=f"step 0: {message}"):
            assert_same_training([other], [expected])
    with pytest.raises(DisagreementError, match="0 steps were made, expected 1"):
        assert_same_training([], [expected])
    assert assert_same_training([expected], [expected]).compared > 500


def test_the_subject_does_nothing_else():
    with pytest.raises(NotOfferedError, match="an emulated engine has no sum"):
        subject_named("emulated-engine").perform("sum")
