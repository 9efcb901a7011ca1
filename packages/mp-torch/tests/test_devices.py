"""Devices: found from the parameters, probed, and refused where a precision cannot be honoured."""

import dataclasses

import pytest
import torch

from mp_torch import AmpEngine
from mp_torch.devices import Device, Probe, device_named, device_of
from mp_torch.devices.cpu import CPUDevice, cpu_capabilities
from mp_torch.devices.mps import MPSDevice
from mp_torch.devices.xpu import XPUDevice
from mp_torch.errors import AmpConfigError, UnsupportedDeviceError

GOOD = Probe(
    half_overflow="inf", subnormals=True, bf16=True, finite_check=True, foreach_norm=True, fused_optimizers=True
)


def with_(**changes):
    return dataclasses.replace(GOOD, **changes)


def test_the_device_of_a_model_is_where_its_parameters_are():
    assert isinstance(device_of(torch.nn.Linear(2, 2).parameters()), CPUDevice)


def test_a_model_without_parameters_has_no_device():
    with pytest.raises(AmpConfigError, match=r"no parameters, so there is no device.*; pass the one that trains"):
        device_of([])


def test_a_model_on_two_devices_is_refused_and_both_are_named():
    tensors = [torch.zeros(1), torch.zeros(1, device="meta")]
    with pytest.raises(AmpConfigError, match=r"on 2 devices \(cpu, meta\).*move them with model\.to\(device\)"):
        device_of(tensors)


def test_a_model_on_meta_is_refused_with_the_way_to_fill_it():
    with pytest.raises(UnsupportedDeviceError, match=r"on 'meta', where there is nothing to train.*to_empty"):
        device_of([torch.zeros(1, device="meta")])


@pytest.mark.parametrize("name", ["vulkan", "no such thing"])
def test_an_unknown_device_is_refused_with_the_known_ones(name):
    with pytest.raises(UnsupportedDeviceError, match=rf"device '{name}' is not one of cpu, cuda, mps, npu, xpu; "):
        device_named(name)


def test_the_probe_of_a_cpu_shows_ieee_arithmetic():
    assert device_named("cpu").probe() == GOOD
    assert not GOOD.saturates


def test_a_cpu_has_no_overflow_flag_and_nothing_to_wait_for():
    cpu = device_named("cpu")
    cpu.clear_overflow_()
    assert cpu.overflow() is None
    assert not cpu.reads_overflow
    assert cpu.compute_capability is None
    cpu.synchronize()


def test_a_device_whose_kernels_are_missing_probes_as_missing_without_raising():
    probe = device_named("mps").probe()  # this build of torch has no Metal
    if torch.backends.mps.is_available():
        pytest.skip("an Apple GPU is here and has its kernels")
    assert probe == Probe(half_overflow="missing", subnormals=False, bf16=False, finite_check=False)


@dataclasses.dataclass(frozen=True)
class WrappingDevice(Device):
    """A device whose fp16 multiplication wraps around."""

    def _tensor(self, values, dtype):
        return -super()._tensor(values, dtype) if values == [65504.0] else super()._tensor(values, dtype)


def test_a_half_overflow_that_follows_no_rule_is_refused():
    with pytest.raises(UnsupportedDeviceError, match=r"65504 \* 2 gives -inf, which is neither infinity .* nor 65504"):
        WrappingDevice(torch.device("cpu")).probe()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16-mixed", "fp16-true", "bf16-mixed", "bf16-sr"])
def test_every_precision_is_allowed_where_all_kernels_are_right(precision):
    device_named("cpu").require(precision, GOOD)


@pytest.mark.parametrize(
    ("precision", "probe", "message"),
    [
        ("fp16-mixed", with_(half_overflow="missing"), "it cannot multiply in fp16; use 'bf16-mixed' or 'fp32'"),
        ("bf16-true", with_(bf16=False), "it cannot multiply in bf16; use 'fp16-mixed' or 'fp32'"),
        ("fp16-true", with_(half_overflow="saturate"), "65504 [*] 2 gives 65504 there and no status flag tells of it"),
        ("fp32", with_(finite_check=False), "torch.isfinite does not tell 1, inf and NaN apart there"),
    ],
)
def test_a_precision_that_a_device_cannot_honour_is_refused(precision, probe, message):
    with pytest.raises(UnsupportedDeviceError, match=f"precision='{precision}' on cpu: {message}"):
        device_named("cpu").require(precision, probe)


def test_a_missing_format_does_not_refuse_the_precisions_without_it():
    device_named("cpu").require("bf16-mixed", with_(half_overflow="missing"))
    device_named("cpu").require("fp16-mixed", with_(bf16=False))


@pytest.mark.parametrize("name", ["_fused_adamw_", "_fused_sgd_"])
def test_a_fused_kernel_that_does_not_heed_found_inf_is_not_taken(monkeypatch, name):
    real = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args, **options: real(*args, **options | {"found_inf": None}))
    assert device_named("cpu").probe() == with_(fused_optimizers=False)


@pytest.mark.parametrize("name", ["_fused_adamw_", "_fused_sgd_"])
def test_a_device_without_a_fused_kernel_updates_without_it(monkeypatch, name):
    def missing(*_, **__):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(torch, name, missing)
    assert device_named("cpu").probe() == with_(fused_optimizers=False)
    model = torch.nn.Linear(1, 1)
    engine = AmpEngine(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    engine.backward(model(torch.ones(1, 1)).sum())
    assert engine.step().applied
    with pytest.raises(AmpConfigError, match="update='fused': the device has no fused optimizer kernels"):
        AmpEngine(model, torch.optim.AdamW(model.parameters()), precision="fp32", update="fused")


def test_the_cpu_is_named_by_what_torch_will_use_of_its_instructions():
    has = cpu_capabilities()
    expected = "CPU with AMX" if has["amx_bf16"] else "CPU with AVX512-BF16" if has["avx512_bf16"] else "CPU"
    assert device_named("cpu").name == expected


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, "CPU with AMX"),
        ({"amx_bf16": False, "avx512_bf16": True}, "CPU with AVX512-BF16"),
        ({}, "CPU"),
    ],
)
def test_each_instruction_set_has_its_name(monkeypatch, flags, name):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert device_named("cpu").name == name


def test_instructions_that_torch_was_told_not_to_use_do_not_count(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert device_named("cpu").name == "CPU"


def test_apple_gpus_have_no_float64():
    mps = MPSDevice(torch.device("mps"))
    assert (mps.supports_float64, mps.name) == (False, "Apple GPU")


@pytest.mark.parametrize("has_fp64", [True, False])
def test_intel_gpus_have_float64_as_the_chip_says(monkeypatch, has_fp64):
    properties = type("Properties", (), {"has_fp64": has_fp64})  # no Intel GPU is here to ask
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)
    assert XPUDevice(torch.device("xpu", 0)).supports_float64 is has_fp64


def test_a_device_whose_driver_does_not_answer_is_named_by_its_kind(monkeypatch):
    def refuse(device):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.xpu, "get_device_name", refuse)
    assert device_named("xpu:0").name == "xpu"


def test_amd_gpus_have_no_compute_capability(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert device_named("cuda:0").compute_capability is None


def test_tf32_holds_while_its_context_is_open_and_no_longer():
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [one.fp32_precision for one in settings]
    with device_named("cuda:0").tf32():
        assert [one.fp32_precision for one in settings] == ["tf32", "tf32"]
    with pytest.raises(ZeroDivisionError), device_named("cuda:0").tf32():
        1 / 0  # noqa: B018  # what a forward pass may do
    assert [one.fp32_precision for one in settings] == before
    with device_named("cpu").tf32():
        assert [one.fp32_precision for one in settings] == before  # a CPU has none


def test_values_on_the_cpu_are_read_at_once_and_may_be_asked_for_later():
    cpu = device_named("cpu")
    assert cpu.reads_are_free
    assert cpu.later(torch.tensor([1.0, 2.0]))() == [1.0, 2.0]
