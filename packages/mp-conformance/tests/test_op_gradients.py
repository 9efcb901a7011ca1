import re

import numpy as np
import pytest

from mp_conformance.claims import select
from mp_conformance.claims.op_gradients import CASES, OTHER_BITS
from mp_conformance.claims.rows import Run
from mp_conformance.implementations import NotOfferedError, subject_named
from mp_conformance.implementations.autograd import CALLS, AutogradSubject
from mp_conformance.runner import ask
from mp_reference.nn import ops


class Leaky(AutogradSubject):
    """An autograd that loses a part in 2**30 of the last gradient."""

    def perform(self, operation, *operands, **options):
        found = super().perform(operation, *operands, **options)
        if operation == "differentiate_low":
            return [*found[:-1], -found[-1]]
        return [*found[:-1], found[-1] * np.float64(1 - 2.0**-30)]


def test_every_operation_but_casts_is_compared():
    assert {op.partition("-")[0] for op in CASES} == set(ops.__all__) - {"cast"}
    assert CASES.keys() == CALLS.keys()


@pytest.mark.parametrize("claim", [claim.id for claim in select("op-gradients.*,op-bits.*")])
def test_the_claims_are_kept_here(claim):
    result = ask(select(claim)[0], subject_named("autograd"), Run())
    assert (result.status, result.message) == ("kept", "")


@pytest.mark.parametrize("op", ["layer_norm", "conv2d", "gelu"])
def test_a_gradient_that_is_slightly_wrong_breaks_its_claim(op):
    result = ask(select(f"op-gradients.{op}")[0], Leaky(), Run())
    assert result.status == "broken"
    assert re.search(rf"{op}, gradient \d", result.message)


@pytest.mark.parametrize("op", ["linear", "relu", "softmax"])
def test_a_gradient_of_the_other_sign_breaks_its_claim_of_bits(op):
    result = ask(select(f"op-bits.{op}.fp16")[0], Leaky(), Run())
    assert result.status == "broken"
    assert re.search(rf"{op}, gradient \d", result.message)


def test_bits_are_claimed_for_most_operations_and_every_exception_is_an_operation():
    assert OTHER_BITS.keys() <= CASES.keys()
    assert len(select("op-bits.*")) == 2 * (len(CASES) - len(OTHER_BITS)) > 70


def test_the_subject_does_nothing_else():
    with pytest.raises(NotOfferedError, match="autograd has no sum"):
        subject_named("autograd").perform("sum")
