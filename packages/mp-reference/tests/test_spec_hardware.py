"""Hardware rows: found by the names that drivers give, consistent, and complete in what they recommend."""

import math

import pytest

from mp_reference.spec.formats import FORMATS
from mp_reference.spec.hardware import HARDWARE, Hardware, hardware_named, hardware_table
from mp_reference.spec.memory import STORAGE

NAMES = {  # as CUDA, ROCm, torch_npu and this project's devices say them
    "Tesla V100-SXM2-16GB": "V100",
    "NVIDIA TITAN V": "V100",
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 2080 Ti": "RTX 20",
    "Quadro RTX 6000": "RTX 20",
    "NVIDIA GeForce RTX 3090": "RTX 30",
    "NVIDIA RTX A6000": "RTX 30",
    "NVIDIA A10G": "RTX 30",
    "NVIDIA A40": "RTX 30",
    "NVIDIA GeForce RTX 4090": "RTX 40",
    "NVIDIA L4": "RTX 40",
    "NVIDIA L40S": "RTX 40",
    "NVIDIA RTX 6000 Ada Generation": "RTX 40",
    "NVIDIA GeForce RTX 5090": "RTX 50",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A30": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA GH200 480GB": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "B200",
    "AMD Instinct MI250X": "MI250",
    "AMD Instinct MI210": "MI250",
    "AMD Instinct MI300X": "MI300",
    "AMD Instinct MI325X": "MI300",
    "Intel(R) Data Center GPU Max 1550": "Intel Max 1550",
    "Ascend910A": "Ascend 910A",
    "Ascend910ProB": "Ascend 910A",
    "Ascend910PremiumA": "Ascend 910A",
    "Ascend910B": "Ascend 910A",
    "Ascend910B1": "Ascend 910B",
    "Ascend910B4": "Ascend 910B",
    "Ascend910_9391": "Ascend 910B",
    "Ascend950PR": "Ascend 950",
    "CPU": "CPU",
    "CPU with AMX": "CPU with AMX",
    "CPU with AVX512-BF16": "CPU with AVX512-BF16",
    "Apple GPU": "Apple GPU",
    "Apple M3 Max": "Apple GPU",
}


@pytest.mark.parametrize(("name", "row"), NAMES.items())
def test_a_driver_name_finds_its_row_and_no_other(name, row):
    import re

    assert hardware_named(name).name == row
    matching = [each.name for each in HARDWARE.values() if re.search(each.pattern, name, re.IGNORECASE)]
    assert matching == [row]


def test_every_row_is_found_by_a_driver_name():
    assert set(NAMES.values()) == set(HARDWARE)


@pytest.mark.parametrize("row", HARDWARE.values(), ids=HARDWARE)
def test_a_row_is_found_by_its_own_name_in_any_case(row):
    assert hardware_named(row.name.upper()) is row


@pytest.mark.parametrize(
    ("capability", "row"),
    [("7.0", "V100"), ("8.0", "A100"), ("8.6", "RTX 30"), ("8.9", "RTX 40"), ("9.0", "H100"), ("10.0", "B200"),
     ("12.0", "RTX 50")],
)  # fmt: skip
def test_an_unknown_name_falls_back_to_the_architecture(capability, row):
    assert hardware_named("NVIDIA Something New", capability).name == row


def test_each_compute_capability_stands_in_one_row():
    listed = [capability for row in HARDWARE.values() for capability in row.compute_capabilities]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("capability", [None, "7.5", "6.1"])
def test_unknown_hardware_is_refused_with_the_list_of_rows(capability):
    with pytest.raises(ValueError, match=r"hardware 'NVIDIA GeForce GTX 1080' is not one of V100, T4, .*Apple GPU;"):
        hardware_named("NVIDIA GeForce GTX 1080", capability)


@pytest.mark.parametrize("row", HARDWARE.values(), ids=HARDWARE)
def test_every_row_names_known_formats_and_precisions_and_its_source(row: Hardware):
    assert set(row.formats) <= set(FORMATS)
    assert set(row.flushes) <= set(row.formats)
    assert {row.pretrain, row.finetune, row.inference} <= set(STORAGE)
    assert row.why
    assert len(row.source) > 10
    assert row.device in {"cuda", "xpu", "npu", "cpu", "mps"}
    assert not math.isnan(row.bandwidth or 1.0)
    assert row.bandwidth is None or row.bandwidth > 0


@pytest.mark.parametrize("row", HARDWARE.values(), ids=HARDWARE)
def test_no_row_recommends_a_16_bit_format_that_it_does_not_multiply(row: Hardware):
    for precision in (row.pretrain, row.finetune, row.inference):
        compute = precision.split("-")[0]
        assert compute == "fp32" or compute in row.formats


@pytest.mark.parametrize("row", HARDWARE.values(), ids=HARDWARE)
def test_a_narrower_format_is_never_slower(row: Hardware):
    rates = [(FORMATS[name].bits, rate) for name, rate in row.throughput.items() if rate is not None]
    assert rates == sorted(rates, key=lambda pair: (-pair[0], pair[1]))


def test_bf16_is_preferred_to_fp16_wherever_the_hardware_multiplies_both():
    for row in HARDWARE.values():
        if {"bf16", "fp16"} <= set(row.formats) and row.pretrain != "fp32":
            assert row.pretrain.startswith("bf16")


def test_ratios_come_from_published_rates_alone():
    assert HARDWARE["A100"].ratio("tf32") == 8.0
    assert HARDWARE["CPU with AMX"].ratio("bf16") == 16.0
    assert HARDWARE["Ascend 910B"].ratio("fp16") is None  # fp32 is not published
    assert HARDWARE["Ascend 910A"].ratio("fp16") is None
    assert HARDWARE["V100"].ratio("bf16") is None


def test_published_numbers_agree_with_each_other():
    """Dense rates of one architecture double from tf32 to fp16 to fp8, as the documents' own tables do."""
    for name in ("H100", "H200", "MI300"):
        rates = HARDWARE[name].throughput
        assert rates["bf16"] == rates["fp16"] == pytest.approx(2 * rates["tf32"], rel=1e-3)
        assert next(rates[key] for key in rates if key.startswith("float8")) == pytest.approx(
            2 * rates["fp16"], rel=1e-3
        )


def test_only_the_first_ascend_saturates():
    assert [row.name for row in HARDWARE.values() if row.overflow == "saturate"] == ["Ascend 910A"]


def test_the_table_has_a_line_for_every_row():
    lines = hardware_table().splitlines()
    assert len(lines) == len(HARDWARE) + 1
    assert lines[0].split()[:3] == ["hardware", "bandwidth", "overflow"]
    assert "bf16 x16" in next(line for line in lines if line.startswith("A100"))
