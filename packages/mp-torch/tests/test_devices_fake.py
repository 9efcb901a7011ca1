"""Devices of accelerators, on CPU-backed ones: each test is a process, since a device's name can be given once."""

import pytest

from mp_conformance.fake_devices import FakeDeviceUnavailable, run_script

PROBE = """
from mp_torch.devices import device_named, Probe
d = device_named(fake.device)
p = d.probe()
rest = dict(subnormals=True, bf16=True, foreach_norm=True, fused_optimizers=True)
"""


def test_a_saturating_npu_tells_of_an_overflow_by_its_flag_and_forgets_it_when_cleared():
    printed = run_script(
        "npu",
        PROBE
        + """
assert p == Probe(half_overflow="saturate", finite_check=False, **rest), p
assert p.saturates and d.reads_overflow and d.name == "Ascend910A" and d.type == "npu"
assert not d.overflow().item()                       # the probe's own overflow is cleared
x = torch.full((4,), 6e4, device=d.device).half()
y = x * 4
assert y.cpu().tolist() == [65504.0] * 4             # neither inf nor NaN
flag = d.overflow()
assert flag.device == d.device and flag.dtype == torch.float32 and flag.shape == () and flag.item() == 1.0
x * 0.5
assert d.overflow().item() == 1.0                    # sticky
d.clear_overflow_()
assert d.overflow().item() == 0.0
assert ((y - y) / (y - y)).cpu().tolist() == [0.0] * 4  # 0 / 0 is 0 there
assert d.overflow().item() == 1.0
d.require("fp16-mixed", p); d.require("fp32", p)
d.synchronize()
print("done")
""",
        saturate=True,
    )
    assert printed == "done\n"


def test_reading_the_flag_costs_no_host_sync():
    run_script(
        "npu",
        PROBE
        + """
fake.host_syncs.clear()
d.clear_overflow_()
flag = d.overflow()
assert not fake.host_syncs, fake.host_syncs
flag.item()
assert fake.host_syncs == ["aten::_local_scalar_dense"]
""",
        saturate=True,
    )


def test_fp16_is_refused_on_an_npu_that_saturates_without_a_flag():
    run_script(
        "npu",
        PROBE
        + """
from mp_torch.errors import UnsupportedDeviceError
assert p.saturates and not d.reads_overflow
for precision in ("fp16-mixed", "fp16-true", "fp32"):
    try:
        d.require(precision, p)
    except UnsupportedDeviceError as error:
        assert f"precision='{precision}' on npu:0: " in str(error), error
    else:
        raise AssertionError(precision)
""",
        saturate=True,
        flag=False,
    )


def test_an_npu_in_inf_nan_mode_has_infinities_and_no_flag_to_read():
    run_script(
        "npu",
        PROBE
        + """
assert p == Probe(half_overflow="inf", finite_check=True, **rest), p
assert not d.reads_overflow and d.overflow() is None and d.name == "Ascend910B1"
d.clear_overflow_()
for precision in ("fp16-mixed", "bf16-mixed", "fp32"):
    d.require(precision, p)
""",
    )


def test_a_cuda_device_has_a_name_and_a_compute_capability():
    script = PROBE + "print(d.name, d.compute_capability, p.half_overflow, d.reads_overflow, d.supports_float64)\n"
    try:
        printed = run_script("cuda", script, name="NVIDIA H100 80GB HBM3", capability=(9, 0))
    except FakeDeviceUnavailable as reason:
        pytest.skip(str(reason))
    assert printed == "NVIDIA H100 80GB HBM3 9.0 inf False True\n"
