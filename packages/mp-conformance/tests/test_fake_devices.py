"""The CPU-backed devices are what they claim: real dispatch above the kernels, the chip's own faults below."""

import pytest

from mp_conformance.fake_devices import FakeDeviceUnavailable, run_script
from mp_conformance.fake_devices.cuda import install, library

TRAIN = """
import torch.nn as nn
def losses(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10)).to(device)
    x, y = torch.randn(64, 16).to(device), torch.randint(0, 10, (64,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append(loss.item())
    return found
assert losses(fake.device) == losses("cpu") and losses("cpu")[-1] < losses("cpu")[0]
"""


def on_cuda(script, **options):
    try:
        return run_script("cuda", script, **options)
    except FakeDeviceUnavailable as reason:
        pytest.skip(str(reason))


def test_fp32_training_on_the_fake_npu_gives_the_bits_of_the_cpu():
    run_script("npu", TRAIN)


def test_fp32_training_on_the_fake_cuda_device_gives_the_bits_of_the_cpu():
    on_cuda(TRAIN)


def test_the_fake_cuda_device_runs_the_real_autocast_kernels():
    on_cuda("""
assert torch.accelerator.current_accelerator().type == "cuda"
linear, norm = torch.nn.Linear(8, 8).to("cuda"), torch.nn.LayerNorm(8).to("cuda")
x = torch.randn(4, 8, device="cuda")
with torch.autocast("cuda", dtype=torch.float16):
    h = linear(x)
    assert h.dtype == torch.float16 and h.device.type == "cuda"
    assert norm(h).dtype == h.softmax(-1).dtype == h.sum().dtype == h.exp().dtype == torch.float32  # CUDA's rules
    assert torch.cat([h, x]).dtype == torch.float32  # promote
    try:
        torch.nn.functional.binary_cross_entropy(torch.rand(3, device="cuda"), torch.rand(3, device="cuda"))
    except RuntimeError as error:
        assert "unsafe to autocast" in str(error), error
    else:
        raise AssertionError("binary_cross_entropy is banned on CUDA")
""")


def test_the_fake_npu_follows_the_autocast_rules_of_torch_npu():
    run_script(
        "npu",
        """
assert torch.accelerator.current_accelerator().type == "npu"
linear = torch.nn.Linear(8, 8).to("npu")
x = torch.randn(4, 8, device="npu")
for dtype in (torch.float16, torch.bfloat16):
    with torch.autocast("npu", dtype=dtype):
        h = linear(x)
        assert h.dtype == dtype and h.device.type == "npu"
        assert h.softmax(-1).dtype == h.sum().dtype == h.exp().dtype == torch.float32
        assert torch.nn.functional.rms_norm(h, (8,)).dtype == dtype  # on CUDA's list and not on torch_npu's
        assert torch.cat([h, x]).dtype == torch.float32
        try:
            torch.nn.functional.binary_cross_entropy(torch.rand(3, device="npu"), torch.rand(3, device="npu"))
        except RuntimeError as error:
            assert "banned under autocast" in str(error), error
        else:
            raise AssertionError("binary_cross_entropy is banned")
    h.sum().backward()
    assert linear.weight.grad.dtype == torch.float32
""",
    )


def test_the_fake_cuda_device_computes_a_softmax_from_half_to_float_with_gradients():
    on_cuda("""
for function in (torch.softmax, torch.log_softmax):
    half = torch.randn(3, 5, device="cuda").half().requires_grad_()
    full = half.detach().float().requires_grad_()
    out = function(half, -1, dtype=torch.float32)
    assert out.dtype == torch.float32 and torch.equal(out.cpu(), function(full, -1).cpu())
    weights = torch.randn(3, 5, device="cuda")
    (out * weights).sum().backward()
    (function(full, -1) * weights).sum().backward()
    assert torch.equal(half.grad.cpu(), full.grad.half().cpu())
attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).to("cuda")
q = torch.randn(2, 5, 16, device="cuda")
with torch.autocast("cuda", dtype=torch.float16):
    out = attention(q, q, q)[0]
out.float().sum().backward()
assert attention.in_proj_weight.grad.dtype == torch.float32
""")


def test_the_fake_cuda_device_is_refused_once_torch_is_imported():
    import torch  # noqa: F401

    with pytest.raises(FakeDeviceUnavailable, match=r"torch is imported already.*in a process of its own"):
        install()


def test_a_machine_without_a_compiler_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FakeDeviceUnavailable, match=r"needs a C\+\+ compiler; install g\+\+ or clang\+\+, or set CXX"):
        library()


def test_a_compiler_that_refuses_the_source_is_quoted_and_leaves_nothing_behind(monkeypatch, tmp_path):
    compiler = tmp_path / "refuses"
    compiler.write_text("#!/bin/sh\necho no such standard >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FakeDeviceUnavailable, match=r"could not compile cuda_hooks\.cpp: no such standard"):
        library()
    assert list((tmp_path / "cache" / "mp-conformance").iterdir()) == []


def test_the_library_is_compiled_once_and_then_taken_from_the_cache():
    try:
        first = library()
    except FakeDeviceUnavailable as reason:
        pytest.skip(str(reason))
    written = first.stat().st_mtime_ns
    assert library() == first
    assert first.stat().st_mtime_ns == written


def test_saturation_mode_keeps_given_infinities_and_saturates_computed_ones():
    run_script(
        "npu",
        """
inf = float("inf")
given = torch.tensor([inf, -inf, float("nan"), 1.0], device="npu")
assert str(given.cpu().tolist()) == "[inf, -inf, nan, 1.0]"
assert not fake.overflowed                     # moving data is no arithmetic
masked = torch.zeros(2, device="npu").masked_fill(torch.tensor([True, False], device="npu"), -inf)
assert masked.cpu().tolist() == [-inf, 0.0] and not fake.overflowed
limit = torch.finfo(torch.float32).max
assert (given * 1.0).cpu().tolist() == [limit, -limit, 0.0, 1.0] and fake.overflowed
fake.overflowed = False
x = torch.full((2,), -6e4, device="npu").half()
x.mul_(2)                                      # in place
assert x.cpu().tolist() == [-65504.0] * 2 and fake.overflowed
fake.overflowed = False
assert torch.full((2,), 1e6, device="npu").half().cpu().tolist() == [65504.0] * 2 and fake.overflowed  # a conversion
fake.overflowed = False
torch._foreach_mul_([x], 4.0)                  # a kernel over a list that returns nothing
assert x.cpu().tolist() == [-65504.0] * 2 and fake.overflowed
fake.overflowed = False
half = torch.empty(2, dtype=torch.float16, device="npu").copy_(torch.tensor([1e6, 1.0]))  # copy and conversion in one
assert half.cpu().tolist() == [65504.0, 1.0] and fake.overflowed
fake.overflowed = False
assert (torch.full((1,), 1e300, dtype=torch.float64, device="npu") * 1e300).cpu().tolist() == [inf]
assert not fake.overflowed                     # float64 is computed elsewhere, by IEEE 754
""",
        saturate=True,
    )


def test_every_read_by_the_host_is_recorded():
    run_script(
        "npu",
        """
x = torch.ones(3, device="npu")
(x * 2).sum()
assert fake.host_syncs == []
reads = {
    "item": lambda: x.sum().item(), "cpu": lambda: x.cpu(), "to": lambda: x.to("cpu"), "bool": lambda: bool(x[0]),
    "copy_": lambda: torch.zeros(3).copy_(x), "nonzero": lambda: x.nonzero(), "equal": lambda: torch.equal(x, x),
}
for name, read in reads.items():
    fake.host_syncs.clear()
    read()
    assert len(fake.host_syncs) >= 1, name
""",
    )


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_a_value_that_is_fetched_later_is_waited_for_only_when_it_is_read(device):
    script = """
from mp_torch.devices import device_named
d = device_named(fake.device)
fetched = d.later(torch.arange(3.0, device=d.device))
assert fake.host_syncs == [], fake.host_syncs
assert fetched() == [0.0, 1.0, 2.0] and fake.host_syncs == ["Event.synchronize"]
assert not d.reads_are_free
d.synchronize()
"""
    if device == "cuda":
        on_cuda(script)
    else:
        run_script("npu", script)


def test_the_fake_npu_offers_what_torch_asks_of_a_backend():
    run_script(
        "npu",
        """
assert torch.npu.is_available() and torch.npu.device_count() == 1 and torch.npu.is_bf16_supported()
assert torch.npu.get_amp_supported_dtype() == [torch.float16, torch.bfloat16]
state = torch.npu.get_rng_state()
a = torch.randn(4, device="npu").cpu()
torch.npu.set_rng_state(state)
assert torch.equal(a, torch.randn(4, device="npu").cpu())
torch.npu.synchronize()
x = torch.ones(2, device="npu")
assert repr(x) == "BackedTensor(tensor([1., 1.]), device='npu:0')"
inner, meta = x.__tensor_flatten__()
assert torch.equal(type(x).__tensor_unflatten__({"raw": x.raw}, meta, None, None).cpu(), x.cpu()) and inner == ["raw"]
view = x[:1]
view += 1
assert x.cpu().tolist() == [2.0, 1.0]          # views share storage
parameter = torch.nn.Parameter(x)
parameter.data = parameter.data.half()         # as casting a model in place does
assert parameter.dtype == torch.float16 and (parameter * 1).cpu().dtype == torch.float16
""",
    )


def test_a_script_that_fails_shows_its_output():
    with pytest.raises(AssertionError, match=r"(?s)the script on the fake npu failed\nbefore\n.*ZeroDivisionError"):
        run_script("npu", "print('before')\n1 / 0")
