"""The claims about saturation hold, and fail for an engine that does not read the flag."""

import pytest

from mp_conformance.claims import select
from mp_conformance.claims.rows import Run
from mp_conformance.compare import DisagreementError
from mp_conformance.implementations import NotOfferedError, subject_named
from mp_conformance.implementations.saturating_npu import SaturatingNPUSubject


def test_an_engine_that_does_not_read_the_flag_is_caught_on_the_saturating_npu():
    (claim,) = select("saturation.flag.fp16")
    with pytest.raises(DisagreementError, match=r"window 2: .* is \(True, False, .*expected \(False, True, "):
        claim.check(SaturatingNPUSubject(deaf=True), Run())


def test_the_npu_offers_windows_alone():
    subject = subject_named("npu-on-cpu")
    assert subject.offers("overflow_windows", {})
    assert not subject.offers("cast", {})
    with pytest.raises(NotOfferedError, match="the NPU has no cast"):
        subject.perform("cast")
