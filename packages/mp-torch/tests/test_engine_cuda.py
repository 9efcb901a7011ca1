"""The engine on a CUDA device that computes on the CPU: torch's own CUDA autocast, decisions that stay there."""

import pytest

from mp_conformance.fake_devices import FakeDeviceUnavailable, run_script

SETUP = """
from torch import nn
from mp_torch import AmpEngine, LossScale, emulate, select_precision

def data(device, n=6):
    seeded = {"generator": torch.Generator().manual_seed(1)}
    pairs = [(torch.randn(16, 4, **seeded), torch.randint(0, 3, (16,), **seeded)) for _ in range(n)]
    return [(x.to(device), y.to(device)) for x, y in pairs]

def train(device, precision, bad=(), **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).to(device)
    scale = LossScale(init_scale=1024.0, growth_interval=2) if precision.startswith("fp16") else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = AmpEngine(model, optimizer, precision=precision, loss_scale=scale, max_grad_norm=0.1, **settings)
    seen = []
    for at, (x, y) in enumerate(data(device)):
        with engine.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        engine.backward(loss * 1e6 if at in bad else loss)
        report = engine.step()
        seen.append((loss.item(), report.applied, report.grad_norm if report.applied else None, report.next_loss_scale))
    return seen, [one.detach().cpu() for one in engine.masters().values()]
"""


def on_cuda(script, **options):
    try:
        return run_script("cuda", SETUP + script, **options)
    except FakeDeviceUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true"])
def test_training_on_cuda_gives_the_bits_of_the_cpu_that_emulates_cuda(precision):
    on_cuda(
        f"""
bad = (3,) if {precision!r}.startswith("fp16") else ()
seen, masters = train("cuda", {precision!r}, bad, update="exact")
with emulate(device="cuda"):
    emulated, twins = train("cpu", {precision!r}, bad, update="exact")
assert seen == emulated, (seen, emulated)
assert all(torch.equal(a, b) for a, b in zip(masters, twins))
assert [applied for _, applied, _, _ in seen] == [at not in bad for at in range(6)]
"""
    )


@pytest.mark.parametrize("update", ["auto", "fused"])
def test_backward_and_step_wait_for_nothing_on_cuda(update):
    on_cuda(
        f"""
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).to("cuda")
engine = AmpEngine(model, torch.optim.AdamW(model.parameters()), precision="fp16-mixed", update={update!r},
                   loss_scale=LossScale(init_scale=1024.0, growth_interval=2))
reports = []
for x, y in data("cuda"):
    with engine.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    fake.host_syncs.clear()
    engine.backward(loss)
    reports.append(engine.step())
    waited = [one for one in fake.host_syncs if one != "Event.synchronize"]
    assert not waited, waited
    assert len(fake.host_syncs) <= 1, fake.host_syncs  # the step before, which is long past, is asked how it went
assert all(report.applied for report in reports)
"""
    )


def test_auto_chooses_by_the_cards_row():
    on_cuda(
        """
choice = select_precision()
assert choice == "fp16-mixed" and choice.hardware.name == "V100", choice.reason
model = nn.Linear(2, 2).to("cuda")
engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="auto")
assert engine.config.precision == "fp16-mixed"
""",
        name="Tesla V100-SXM2-32GB",
        capability=(7, 0),
    )
