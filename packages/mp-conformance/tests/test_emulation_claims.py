import numpy as np
import pytest
import torch

from mp_conformance.autocast_cases import CALLS, NOT_CALLED, VARIANTS, call_all
from mp_conformance.claims import select
from mp_conformance.claims.emulation import assert_same_results
from mp_conformance.claims.rows import Run
from mp_conformance.compare import DisagreementError
from mp_conformance.implementations import NotOfferedError
from mp_conformance.implementations.emulation import DTYPES, EmulationSubject, real_dispatcher
from mp_conformance.runner import ask
from mp_reference.spec.op_rules import op_rules
from mp_torch.emulate import emulate


class PlainCpu(EmulationSubject):
    """The CPU's own autocast, which has other rules."""

    def perform(self, operation, *operands, **options):
        assert (operation, operands) == ("autocast_calls", ())
        return call_all("cpu", DTYPES[options["fmt"]])


def fake_cuda_or_skip():
    try:
        real_dispatcher("fp16")
    except NotOfferedError as reason:
        pytest.skip(str(reason))


def test_every_op_with_a_cuda_rule_is_called_or_says_why_not():
    assert set(CALLS) | set(NOT_CALLED) == set(op_rules("cuda"))
    assert not set(CALLS) & set(NOT_CALLED)


def test_every_call_succeeds_in_some_variant_but_the_banned_one():
    with emulate("cuda"):
        found = call_all("cpu", torch.bfloat16)
    refused = {op for op in CALLS if all(isinstance(found[f"{op} {variant}"], str) for variant in VARIANTS)}
    assert refused == {"aten::binary_cross_entropy"}


def test_the_claim_is_broken_by_the_rules_of_the_cpu():
    fake_cuda_or_skip()
    result = ask(select("emulation.calls.cuda.fp16")[0], PlainCpu(), Run())
    assert result.status == "broken"
    assert "dtypes" in result.message


ONE = np.float32([1.0])


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([ONE], [ONE.astype(np.float16)], r"exp: dtypes \['float32'\], expected \['float16'\]"),
        ([ONE], "RuntimeError", "exp: .*, expected 'RuntimeError'"),
        ([ONE, ONE], [ONE, np.nextafter(ONE, 2)], "exp, array 1: 1 of 1"),
    ],
)
def test_a_difference_in_dtype_bits_or_refusal_is_reported(actual, expected, message):
    with pytest.raises(DisagreementError, match=message):
        assert_same_results("exp", actual, expected)


def test_gradients_by_another_formula_may_differ_by_the_last_bits_of_the_largest_and_no_more():
    wanted = np.float32([1.0, 1e-3])
    assert_same_results("aten::prod fp32", [ONE, wanted + np.float32(2.0**-22)], [ONE, wanted])
    with pytest.raises(DisagreementError, match="aten::prod fp32, array 1"):
        assert_same_results("aten::prod fp32", [ONE, wanted + np.float32(2.0**-20)], [ONE, wanted])
    with pytest.raises(DisagreementError, match="aten::prod fp32, array 0"):
        assert_same_results("aten::prod fp32", [np.nextafter(ONE, 2), wanted], [ONE, wanted])


def test_an_operation_that_no_emulation_has_is_not_offered():
    subject = EmulationSubject()
    assert not subject.offers("cast", {})
    with pytest.raises(NotOfferedError, match="an emulation has no cast"):
        subject.perform("cast")
