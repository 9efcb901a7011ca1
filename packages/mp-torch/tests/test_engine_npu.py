"""The engine on an Ascend NPU that computes on the CPU, in INF_NAN mode and in saturation mode."""

import pytest

from mp_conformance.fake_devices import run_script

SETUP = """
import copy, warnings
from torch import nn
from mp_torch import AmpEngine, LossScale, UnsupportedDeviceError

def data(device, n=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 4, generator=generator).to(device), torch.randn(16, 1, generator=generator).to(device))
            for _ in range(n)]

def build(device, precision="fp16-mixed", **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, AmpEngine(model, optimizer, precision=precision, **settings)

def micro_step(model, engine, x, y, factor=1.0, **kwargs):
    with engine.autocast():
        loss = nn.functional.mse_loss(model(x).float(), y) * factor
    engine.backward(loss, **kwargs)
    return loss

def bits(model, engine):
    engine.loss_scale  # waits for the last step, which the device may not have told yet
    optimizer = engine.optimizers[0]
    held = [*model.state_dict().values(), *engine.masters().values()]
    held += [one for state in optimizer.state.values() for one in state.values()]
    return [one.detach().cpu().clone() for one in held]

def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))

def check(condition, message=""):
    if not condition:
        raise AssertionError(message)
"""


def on_npu(script, **options):
    return run_script("npu", SETUP + script, **options)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_training_in_fp16_with_a_loss_scale_learns_and_applies_every_step(precision, saturate):
    on_npu(
        f"""
model, engine = build("npu", {precision!r}, loss_scale=LossScale(init_scale=1024.0, growth_interval=4))
(x, y), losses, scales = data("npu", 1)[0], [], []
for _ in range(12):
    losses.append(micro_step(model, engine, x, y).item())
    report = engine.step()
    check(report.applied and not report.skipped, report)
    scales.append(report.next_loss_scale)
check(losses[-1] < 0.8 * losses[0], losses)
check(scales[3] == 2048.0 and scales[-1] == 8192.0, scales)
check(all(p.device.type == "npu" and p.grad is None for p in model.parameters()))
check(report.grad_norm > 0 and report.update_index == 12, report)
""",
        saturate=saturate,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true", "bf16-sr", "bf16-kahan"])
def test_every_precision_without_a_loss_scale_learns_there(precision):
    on_npu(
        f"""
model, engine = build("npu", {precision!r})
(x, y), losses = data("npu", 1)[0], []
for _ in range(10):
    losses.append(micro_step(model, engine, x, y).item())
    check(engine.step().applied)
check(losses[-1] < losses[0], losses)
"""
    )


@pytest.mark.parametrize("update", ["exact", "fused"])
def test_an_exact_update_gives_the_bits_of_the_cpu(update):
    on_npu(
        f"""
def run(device):
    model, engine = build(device, "fp32", update={update!r}, max_grad_norm=0.05)
    reports = []
    for x, y in data(device):
        micro_step(model, engine, x, y)
        reports.append(engine.step())
    return bits(model, engine), [(r.grad_norm, r.clip_coef) for r in reports]
(here, norms_here), (cpu, norms_cpu) = run("npu"), run("cpu")
if {update!r} == "exact":
    check(same(here, cpu) and norms_here == norms_cpu, (norms_here, norms_cpu))
else:
    check(all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(here, cpu)))
check(all(coefficient < 1 for _, coefficient in norms_here))
"""
    )


OVERFLOW = """
model, engine = build("npu", {precision!r}, loss_scale=LossScale(init_scale=1024.0))
batches = data("npu")
for x, y in batches[:2]:
    micro_step(model, engine, x, y)
    check(engine.step().applied)
before = bits(model, engine)
x, y = batches[2]
micro_step(model, engine, x, y, factor={factor})
report = engine.step()
check(report.skipped and not report.applied, report)
check(report.loss_scale == 1024.0 and report.next_loss_scale == 512.0 == engine.loss_scale, report)
check({reason!r} in report.reason, report.reason)
check(report.update_index == 2 and report.consecutive_skips == 1, report)
check(same(before, bits(model, engine)), "a skipped step changed bits")
x, y = batches[3]
micro_step(model, engine, x, y)
report = engine.step()
check(report.applied and report.loss_scale == 512.0 and not same(before, bits(model, engine)), report)
"""


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_an_overflow_with_infinities_skips_the_step_and_changes_no_bit(precision):
    on_npu(OVERFLOW.format(precision=precision, factor=1e6, reason="non-finite gradient"))


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_an_overflow_that_saturates_is_read_from_the_flag_skips_the_step_and_changes_no_bit(precision):
    on_npu(OVERFLOW.format(precision=precision, factor=1e6, reason="overflow flag"), saturate=True)


def test_without_the_flag_the_saturated_gradients_would_have_been_applied():
    """What the flag is for: the gradients of the overflow above are all finite."""
    on_npu(
        """
model, engine = build("npu", "fp16-mixed", loss_scale=LossScale(init_scale=1024.0))
x, y = data("npu", 1)[0]
micro_step(model, engine, x, y, factor=1e6)
check(all(gradient.cpu().isfinite().all() for gradient in engine.gradients().values()))
check(fake.overflowed)
fake.overflowed = False   # a chip that does not tell
check(engine.step().applied)
""",
        saturate=True,
    )


def test_an_overflow_in_any_micro_step_skips_the_whole_window_once():
    on_npu(
        """
for bad in range(3):
    model, engine = build("npu", accumulate_steps=3, loss_scale=LossScale(init_scale=1024.0))
    for x, y in data("npu", 3, seed=3):
        micro_step(model, engine, x, y)
        engine.step()
    before = bits(model, engine)
    for at, (x, y) in enumerate(data("npu", 3)):
        micro_step(model, engine, x, y, factor=1e6 if at == bad else 1.0)
        report = engine.step()
    check(report.skipped and report.next_loss_scale == 512.0, (bad, report))
    check(same(before, bits(model, engine)), bad)
    for x, y in data("npu", 3, seed=2):
        micro_step(model, engine, x, y)
        report = engine.step()
    check(report.applied, (bad, report))
""",
        saturate=True,
    )


def test_an_overflow_outside_the_window_concerns_nobody():
    on_npu(
        """
model, engine = build("npu", loss_scale=LossScale(init_scale=1024.0))
x, y = data("npu", 1)[0]
def overflow():
    return torch.full((2,), 6e4, device="npu").half() * 4
overflow()                                   # before the first window
micro_step(model, engine, x, y)
check(engine.step().applied)
with torch.no_grad(), engine.autocast():     # an evaluation between two windows
    overflow()
check(fake.overflowed)
micro_step(model, engine, x, y)
check(engine.step().applied)
""",
        saturate=True,
    )


def test_a_window_without_autocast_starts_with_a_cleared_flag_too():
    on_npu(
        """
model, engine = build("npu", "fp16-mixed", restore_buffers=False, loss_scale=LossScale(init_scale=1024.0))
x, y = data("npu", 1)[0]
micro_step(model, engine, x, y, factor=1e6)
check(engine.step().skipped)
for _ in range(2):
    engine.backward(nn.functional.mse_loss(model(x), y))
    check(engine.step().applied)
""",
        saturate=True,
    )


def test_fp16_is_refused_at_construction_where_overflows_cannot_be_seen():
    on_npu(
        """
for precision in ("fp16-mixed", "fp16-true"):
    model, _ = None, None
    torch.manual_seed(0)
    model = nn.Linear(2, 2).to("npu")
    before = model.weight.cpu().clone()
    try:
        AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
    except UnsupportedDeviceError as error:
        check("npu:0" in str(error) and precision in str(error), error)
    else:
        raise AssertionError("not refused")
    check(model.weight.dtype == torch.float32 and torch.equal(model.weight.cpu(), before))
""",
        saturate=True,
        flag=False,
    )


@pytest.mark.parametrize("saturate", [False, True])
def test_backward_and_step_wait_for_nothing_on_the_applied_path(saturate):
    on_npu(
        """
model, engine = build("npu", loss_scale=LossScale(init_scale=1024.0, growth_interval=2))
batches = data("npu")
x, y = batches[0]
micro_step(model, engine, x, y)
engine.step().applied                        # first step: states are made
for x, y in batches[1:]:
    with engine.autocast():
        loss = nn.functional.mse_loss(model(x).float(), y)
    fake.host_syncs.clear()
    engine.backward(loss)
    report = engine.step()
    waited = [one for one in fake.host_syncs if one != "Event.synchronize"]
    check(not waited, waited)                # an event of the step before, which is long past, may be asked
check(report.applied)
check(fake.host_syncs.count("Event.synchronize") >= 1)
""",
        saturate=saturate,
    )


def test_a_run_saved_in_the_middle_of_a_window_resumes_with_the_same_bits_there():
    on_npu(
        """
def go(model, engine, batches):
    for x, y in batches:
        micro_step(model, engine, x, y)
        engine.step()
settings = dict(accumulate_steps=2, loss_scale=LossScale(init_scale=1024.0, growth_interval=2))
batches = data("npu", 8)
model, engine = build("npu", "fp16-true", **settings)
go(model, engine, batches)
for stop in (3, 4):
    first, first_engine = build("npu", "fp16-true", **settings)
    go(first, first_engine, batches[:stop])
    saved = copy.deepcopy((first.state_dict(), first_engine.state_dict()))
    second, second_engine = build("npu", "fp16-true", **settings)
    second.load_state_dict(saved[0])
    second_engine.load_state_dict(saved[1])
    go(second, second_engine, batches[stop:])
    check(same(bits(model, engine), bits(second, second_engine)), stop)
    check(engine.loss_scale == second_engine.loss_scale)
"""
    )
