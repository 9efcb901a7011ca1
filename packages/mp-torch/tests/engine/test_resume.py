"""A run that is saved and resumed at any micro-step gives the bits of a run that never stopped."""

import copy

import pytest
import torch
from torch import nn

from mp_torch import AmpEngine, LossScale
from mp_torch.dtypes import PRECISIONS

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "own": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
}
STEPS, WINDOW, BAD = 11, 3, (4, 7)  # micro-steps; two of them overflow, in different windows; the last window is short


class Net(nn.Module):
    """Tied weights, normalisation with buffers, a layer that is used every other micro-step, a frozen one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.sometimes = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x, micro_step):
        h = self.norm(self.embedding(x))
        h = self.frozen(self.sometimes(h) if micro_step % 2 else h)
        return self.head(h).float()


def built(precision, optimizer, update="auto"):
    torch.manual_seed(0)
    model = Net()
    scale = LossScale(init_scale=256.0, growth_interval=1, hysteresis=2) if precision.startswith("fp16") else None
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    engine = AmpEngine(
        model, optimizer, precision=precision, scheduler=scheduler, accumulate_steps=WINDOW, update=update,
        loss_scale=scale, max_grad_norm=0.5, seed=3,
    )  # fmt: skip
    return model, engine


def run(model, engine, micro_steps):
    """Micro-steps by their number, each with its own data; returns what every step reported."""
    reports = []
    for number in micro_steps:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randint(0, 5, (6,), generator=generator), torch.randint(0, 5, (6,), generator=generator)
        with engine.autocast():
            loss = nn.functional.cross_entropy(model(x, number), y)
        loss = loss * float("inf") if number in BAD else loss
        engine.backward(loss, boundary=True if number == STEPS - 1 else None, weight=1.0 + number % 2)
        report = engine.step()
        norm = str(report.grad_norm)  # NaN equals NaN in words
        reports.append(
            (report.applied, report.reason, report.loss_scale, report.next_loss_scale, norm, report.clip_coef)
        )
    return reports


def bits(model, engine):
    held = {**model.state_dict(), **{f"master {name}": one for name, one in engine.masters().items()}}
    for number, state in enumerate(engine.optimizers[0].state.values()):
        held |= {f"state {number} {key}": one for key, one in state.items() if isinstance(one, torch.Tensor)}
    return {name: one.detach().clone() for name, one in held.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_resumes(precision, optimizer, transfer, update="auto"):
    whole_model, whole = built(precision, optimizer, update)
    reports = run(whole_model, whole, range(STEPS))
    assert [report[0] for report in reports].count(True) == 2  # four windows, two of them overflow
    for stop in range(STEPS + 1):
        first_model, first = built(precision, optimizer, update)
        run(first_model, first, range(stop))
        second_model, second = built(precision, optimizer, update)
        run(second_model, second, range(2))  # what it did before must not matter
        transfer(first_model, first, second_model, second)
        assert run(second_model, second, range(stop, STEPS)) == reports[stop:]
        assert_same(bits(whole_model, whole), bits(second_model, second))
        assert second.loss_scale == whole.loss_scale
        assert second.optimizers[0].param_groups[0]["lr"] == whole.optimizers[0].param_groups[0]["lr"]


def by_dict(first_model, first, second_model, second):
    model_state, engine_state = copy.deepcopy((first_model.state_dict(), first.state_dict()))
    run(first_model, first, range(2))  # training on must not change what was saved
    second_model.load_state_dict(model_state)
    second.load_state_dict(engine_state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "fp16-true", "bf16-true"])
def test_resuming_from_a_dict_at_any_micro_step_never_shows(precision, optimizer):
    assert_resumes(precision, optimizer, by_dict)


@pytest.mark.parametrize("precision", ["tf32", "bf16-mixed", "bf16-sr", "bf16-kahan"])
def test_resuming_every_other_precision_at_any_micro_step_never_shows(precision):
    assert set(PRECISIONS) == {
        "fp32",
        "fp16-mixed",
        "fp16-true",
        "bf16-true",
        "tf32",
        "bf16-mixed",
        "bf16-sr",
        "bf16-kahan",
    }
    assert_resumes(precision, "adamw", by_dict)


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-true"])
def test_resuming_with_exact_updates_never_shows(precision):
    assert_resumes(precision, "adamw", by_dict, update="exact")


@pytest.mark.parametrize("precision", ["fp16-true", "bf16-kahan"])
def test_resuming_from_a_file_at_any_micro_step_never_shows(precision, tmp_path):
    def by_file(first_model, first, second_model, second):
        first.save(tmp_path / "run.safetensors")
        second.load(tmp_path / "run.safetensors")

    assert_resumes(precision, "adamw", by_file)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
@pytest.mark.parametrize(
    "name",
    ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"],
)
def test_every_optimizer_of_torch_resumes_from_a_file_bit_for_bit(name, precision, tmp_path):
    def fresh():
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False)  # Muon takes matrices alone
        return AmpEngine(model, getattr(torch.optim, name)(model.parameters()), precision)

    def train(engine, steps):
        for at in steps:
            torch.manual_seed(at)
            with engine.autocast():
                loss = engine.model(torch.randn(5, 4)).float().square().mean()
            engine.backward(loss * (float("nan") if at == 1 else 1.0))
            engine.step()

    whole, first, second = fresh(), fresh(), fresh()
    train(whole, range(5))
    train(first, range(3))
    first.save(tmp_path / "run")
    second.load(tmp_path / "run")
    train(second, range(3, 5))
    assert second.update_index == whole.update_index == 4
    assert torch.equal(second.model.weight, whole.model.weight)
    assert torch.equal(second.masters()["weight"], whole.masters()["weight"])
