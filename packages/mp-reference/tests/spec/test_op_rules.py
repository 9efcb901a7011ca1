import json
from pathlib import Path

import pytest

from mp_reference.spec import sources
from mp_reference.spec.op_rules import (
    AUTOCAST_FORMATS,
    BANNED_MESSAGES,
    DEVICES,
    RULES,
    op_rules,
    overload_of,
    rule_of,
)

WITNESS = json.loads((Path(__file__).parent.parent / "data" / "oplists_torch_2_13.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_equals_what_the_real_dispatcher_showed(device):
    assert {op: row.rule for op, row in op_rules(device).items()} == WITNESS[device]


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_names_its_device_rule_and_source(device):
    for op, row in op_rules(device).items():
        assert (row.op, row.device) == (op, device)
        assert row.rule in RULES
        assert (sources.TORCH_NPU_AUTOCAST if device == "npu" else sources.TORCH_AUTOCAST) in row.source


def test_the_table_of_the_probed_release_is_the_newest_table():
    for device in DEVICES:
        assert op_rules(device, WITNESS["torch"]) == op_rules(device)


def test_rms_norm_came_with_torch_2_12_and_the_named_dimensions_left_with_2_13():
    assert "aten::rms_norm" not in op_rules("cuda", "2.11")
    assert "aten::rms_norm" in op_rules("cuda", "2.12")
    assert op_rules("cuda", "2.12.1")["aten::softmax.Dimname"].source == sources.TORCH_AUTOCAST_HEADER
    assert "aten::softmax.Dimname" not in op_rules("cuda", "2.13.0+cpu")
    assert not op_rules("cuda", "2.12")["aten::softmax.Dimname"].holds_in("2.13")


def test_ascend_lacks_rms_norm_the_upsample_family_vdot_and_linalg_vecdot_and_nothing_else():
    missing = {op.removeprefix("aten::") for op in op_rules("cuda").keys() - op_rules("npu").keys()}
    assert {op for op in missing if "upsample" not in op} == {"rms_norm", "vdot", "linalg_vecdot"}
    assert len(missing) == 15
    assert all(rule.rule == op_rules("cuda")[op].rule for op, rule in op_rules("npu").items())


def test_every_banned_op_has_a_message_with_a_way_out():
    banned = {op for device in DEVICES for op, row in op_rules(device).items() if row.rule == "banned"}
    assert banned == set(BANNED_MESSAGES)
    assert all("call binary_cross_entropy_with_logits" in text for text in BANNED_MESSAGES.values())


def test_a_rule_is_found_by_short_name_by_overload_or_not_at_all():
    assert rule_of("mm", "cpu") == rule_of("aten::mm", "cpu") == "lower_precision_fp"
    assert rule_of("norm", "cuda") == "fp32_append_dtype"
    assert rule_of("norm.names_dim", "cuda") is None
    assert rule_of("relu", "cuda") is None


@pytest.mark.parametrize("device", DEVICES)
def test_the_listed_overloads_of_one_bare_name_share_a_rule(device):
    table = op_rules(device)
    for op, row in table.items():
        bare = op.split(".")[0]
        if bare not in table:
            assert rule_of(bare, device) == row.rule
            assert table[overload_of(bare, device)].rule == row.rule


def test_only_cuda_autocasts_to_fp32():
    assert [device for device, formats in AUTOCAST_FORMATS.items() if "fp32" in formats] == ["cuda"]
    assert set(AUTOCAST_FORMATS) == set(DEVICES)


def test_an_unknown_device_is_refused_with_the_known_ones():
    message = r"device='cuda:0' has no op rules; the tables cover cuda, cpu, xpu, mps, mtia, maia, npu: pass the type"
    with pytest.raises(ValueError, match=message):
        op_rules("cuda:0")


@pytest.mark.parametrize("version", ["2", "two.13", "2.x"])
def test_a_version_without_two_numbers_is_refused(version):
    with pytest.raises(ValueError, match=r"must start with two numbers; write it like '2.13'"):
        op_rules("cuda", version)


def test_a_version_before_the_first_row_of_a_device_is_refused():
    with pytest.raises(ValueError, match=r"'2.12' is older than the first release known for cpu, 2.13; ask for"):
        op_rules("cpu", "2.12")
