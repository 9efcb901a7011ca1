import pytest
import torch

from mp_conformance import dispatcher
from mp_conformance.claims import select
from mp_conformance.claims.op_rules import compare_rules
from mp_conformance.claims.rows import Run
from mp_conformance.implementations import subject_named
from mp_conformance.runner import ask
from mp_reference.spec.op_rules import op_rules
from mp_torch.emulate import emulate


class Changed:
    """A torch whose table differs in one row and has one more."""

    name, device = "torch", "cpu"

    def offers(self, operation, options):
        return operation == "op_rules" and bool(options)

    def perform(self, operation, *operands, **options):
        assert (operation, operands) == ("op_rules", ())
        rules = {op: row.rule for op, row in op_rules(options["device"]).items()}
        return {**rules, "aten::exp": "promote", "aten::brand_new": "fp32"}


def test_a_changed_row_breaks_the_claim_on_the_probed_release(monkeypatch):
    claim = select("op-rules.cuda.fp16")[0]
    result = ask(claim, Changed(), Run())
    assert result.status == "broken"
    assert (
        "aten::exp is promote, the rows say fp32; aten::brand_new is fp32, the rows have no such op" in result.message
    )


@pytest.mark.parametrize("installed", ["2.14.0", "2.11.0+cpu"])
def test_on_another_torch_than_the_probed_one_changes_are_remarks_and_no_failure(installed):
    from mp_conformance.claims import op_rules as module

    run = Run()
    module._same_rules("cuda", "fp16", installed)(Changed(), run)
    assert run.remarks == [
        f"torch {installed}: aten::exp is promote, the rows say fp32",
        f"torch {installed}: aten::brand_new is fp32, the rows have no such op",
    ]
    assert compare_rules({}, {"aten::exp": "fp32"}) == ["aten::exp is not registered, the rows say fp32"]


def test_probing_leaves_autocast_as_it_was_and_finds_no_rule_where_there_is_none():
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    assert dispatcher.probe("cpu", torch.float16, ["aten::relu"]) == {"aten::relu": "none"}
    after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    assert before == after


def test_a_probe_sees_what_an_emulation_does():
    with emulate("npu"):
        found = dispatcher.probe("cpu", torch.bfloat16, ["aten::exp", "aten::rms_norm", "aten::cat"])
    assert found == {"aten::exp": "fp32", "aten::rms_norm": "none", "aten::cat": "none"}


def test_an_op_that_refuses_some_dtypes_for_another_reason_is_unclear(monkeypatch):
    answers = iter(["no kernel", "no kernel", dispatcher.Seen("aten::mm", (torch.float32,), None), "no kernel"])
    monkeypatch.setattr(dispatcher, "_see", lambda *_: next(answers))
    assert dispatcher.rule_seen("aten::mm", "cpu", torch.float16) == "unclear: no kernel"


def test_a_torch_without_its_test_lists_leaves_the_second_witness_out(monkeypatch):
    monkeypatch.setattr(dispatcher.importlib.util, "find_spec", lambda _: None)
    result = ask(select("op-rules.test-lists.cuda")[0], subject_named("torch"), Run())
    assert (result.status, result.message) == ("not offered", "torch is not installed; pip install torch")
