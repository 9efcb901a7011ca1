"""The choice of a precision: by the hardware's row, proved on the device, with a reason that says which and why."""

import dataclasses

import pytest
import torch

from mp_reference.spec.hardware import HARDWARE
from mp_torch.choice import PrecisionChoice, select_precision
from mp_torch.devices import Probe, device_named
from mp_torch.devices.base import Device
from mp_torch.dtypes import PRECISIONS
from mp_torch.errors import AmpConfigError, UnsupportedDeviceError


@pytest.mark.parametrize("workload", ["pretrain", "finetune", "inference"])
@pytest.mark.parametrize("name", HARDWARE)
def test_hardware_that_is_not_here_is_chosen_for_by_its_row(name, workload):
    choice = select_precision(name, workload)
    assert choice == getattr(HARDWARE[name], workload)
    assert choice.hardware is HARDWARE[name]
    assert choice in PRECISIONS
    assert choice.reason.startswith(f"{name}: {choice} for {workload}. ")
    assert choice.reason.endswith(".")


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_device_here_is_looked_up_and_proved(device):
    if device is None and torch.accelerator.is_available():
        pytest.skip("an accelerator is here")
    choice = select_precision(device)
    assert choice.hardware.name == device_named("cpu").name
    assert f"cpu is '{choice.hardware.name}'" in choice.reason


def test_a_choice_may_be_passed_on_as_a_string():
    choice = select_precision("H100")
    assert isinstance(choice, str)
    assert PRECISIONS[choice].name == "bf16-mixed"
    assert isinstance(choice, PrecisionChoice)


def test_the_reason_gives_the_published_ratio():
    assert "bf16 runs at 16 times the rate of fp32" in select_precision("A100").reason
    assert "times the rate" not in select_precision("Ascend 950").reason  # fp32's is not published
    assert "times the rate" not in select_precision("CPU").reason


def test_finetuning_in_fp16_warns_of_checkpoints_trained_in_bf16():
    assert "A checkpoint trained in bf16 may overflow" in select_precision("T4", "finetune").reason
    assert "A checkpoint" not in select_precision("T4", "pretrain").reason
    assert "A checkpoint" not in select_precision("A100", "finetune").reason


def test_inference_stores_sixteen_bits_where_they_are_multiplied():
    assert select_precision("A100", "inference") == "bf16-true"
    assert "Without gradients" in select_precision("A100", "inference").reason


def test_an_unknown_workload_is_refused():
    with pytest.raises(AmpConfigError, match="workload='train' must be one of 'pretrain', 'finetune', 'inference'"):
        select_precision("A100", "train")


def test_an_unknown_device_is_refused_with_the_devices_and_the_hardware_that_are_known():
    with pytest.raises(
        UnsupportedDeviceError, match=r"device 'A9000' is not one of cpu, .*or name hardware: V100, T4, "
    ):
        select_precision("A9000")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("A100-SXM4-80GB", "A100"),
        ("RTX 3090", "RTX 30"),
        ("NVIDIA L4", "RTX 40"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300"),
        ("Ascend910B3", "Ascend 910B"),
    ],
)
def test_hardware_may_be_named_as_its_driver_does(name, row):
    choice = select_precision(name)
    assert choice.hardware.name == row
    assert choice == select_precision(row)


@pytest.mark.parametrize("device", ["cuda", "cuda:63", "xpu", "mps"])
def test_a_device_that_is_not_here_is_refused_with_the_way_out(device):
    kind = device.partition(":")[0]
    if kind != "cuda" and getattr(torch, kind).is_available():
        pytest.skip(f"{kind} is here")
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("cuda is here")
    with pytest.raises(UnsupportedDeviceError, match=rf"^device '{device}' is not here \(.*\); leave it out to take"):
        select_precision(device)


def test_a_device_of_unknown_hardware_is_refused_with_the_known_rows(monkeypatch):
    monkeypatch.setattr(type(device_named("cpu")), "name", "RISC-V")
    with pytest.raises(
        UnsupportedDeviceError, match=r"cpu is 'RISC-V': hardware 'RISC-V' is not one of V100, .*nearest"
    ):
        select_precision("cpu")


GOOD = Probe(
    half_overflow="inf", subnormals=True, bf16=True, finite_check=True, foreach_norm=True, fused_optimizers=True
)


@pytest.mark.parametrize(
    ("probe", "precision"),
    [
        ({}, "bf16-mixed"),
        ({"bf16": False}, "fp16-mixed"),
        ({"bf16": False, "half_overflow": "missing"}, "fp32"),
        ({"bf16": False, "half_overflow": "saturate"}, "fp32"),
    ],
)
def test_a_precision_that_the_device_does_not_prove_is_passed_over_with_the_reason(monkeypatch, probe, precision):
    monkeypatch.setattr(type(device_named("cpu")), "name", "CPU with AMX")
    monkeypatch.setattr(Device, "probe", lambda _: dataclasses.replace(GOOD, **probe))
    choice = select_precision("cpu")
    assert choice == precision
    assert ("Passed over: " in choice.reason) == (precision != "bf16-mixed")


def test_a_device_that_honours_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(Device, "probe", lambda _: dataclasses.replace(GOOD, finite_check=False))
    with pytest.raises(UnsupportedDeviceError, match=r"no precision can be honoured on cpu\. Passed over: .*isfinite"):
        select_precision("cpu")


def test_an_accelerator_is_preferred_to_the_cpu():
    from mp_conformance.fake_devices import run_script

    script = """
from mp_torch.choice import select_precision
choice = select_precision()
print(choice, choice.hardware.name, select_precision("npu", "inference"), select_precision("cpu").hardware.device)
assert f"npu is '{torch.npu.get_device_name()}', a {choice.hardware.name}" in choice.reason, choice.reason
"""
    assert run_script("npu", script) == "bf16-mixed Ascend 910B bf16-true cpu\n"
    assert run_script("npu", script, saturate=True) == "fp16-mixed Ascend 910A fp16-true cpu\n"
