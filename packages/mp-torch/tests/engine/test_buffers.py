"""Buffers come back after a skip, however a forward pass changed them."""

import copy

import pytest
import torch
from torch import nn

from mp_torch import AmpEngine
from mp_torch.buffers import BufferSnapshot

NAN = torch.full((3, 4), float("nan"))


class Centre(nn.Module):
    """Puts new tensors in its buffers' places, as many published models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("last", None)
        self.register_buffer("queue", torch.zeros(0, 4), persistent=False)

    def forward(self, x):
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        self.seen = self.seen + len(x)
        self.last = x.detach().sum()
        self.queue = torch.cat((self.queue, x.detach()))
        return self.linear(x - self.centre)


def step(model, engine, x):
    with engine.autocast():
        loss = model(x).float().square().mean()
    engine.backward(loss)
    return engine.step()


def buffers(model):
    return {name: one.clone() for name, one in model.named_buffers()}


def same(before, model):
    after = dict(model.named_buffers())
    return before.keys() == after.keys() and all(torch.equal(one, after[name]) for name, one in before.items())


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-true"])
def test_a_buffer_whose_tensor_was_replaced_comes_back_after_a_skip(precision):
    model = Centre()
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    before = buffers(model)
    assert step(model, engine, NAN).skipped
    assert same(before, model)
    assert model.last is None
    engine.import_scaler("torch.amp", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=99).state_dict())
    assert step(model, engine, torch.ones(3, 4)).applied
    assert model.seen.item() == len(model.queue) == 3
    learnt = buffers(model)
    assert step(model, engine, NAN).skipped
    assert same(learnt, model)


def test_a_whole_window_of_replaced_buffers_comes_back():
    model = Centre()
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate_steps=3)
    for x in (torch.ones(3, 4), NAN, torch.ones(3, 4)):
        report = step(model, engine, x)
    assert report.skipped
    assert model.seen.item() == len(model.queue) == 0


def test_a_window_of_replaced_buffers_that_goes_through_a_checkpoint_comes_back():
    model = Centre()
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate_steps=2)
    before = buffers(model)
    step(model, engine, NAN)
    model.last = None  # only buffers that there were when the engine was built can be loaded into another
    fresh = Centre()
    resumed = AmpEngine(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), "fp32", accumulate_steps=2)
    fresh.load_state_dict(model.state_dict())
    resumed.load_state_dict(engine.state_dict())
    assert step(fresh, resumed, torch.ones(3, 4)).skipped
    assert same(before, fresh)


def test_an_engine_of_a_copied_model_restores_the_copys_buffers():
    model = Centre()
    twin = copy.deepcopy(model)
    engine = AmpEngine(twin, torch.optim.SGD(twin.parameters(), lr=0.1), "fp32")
    model(torch.ones(3, 4))
    assert step(twin, engine, NAN).skipped
    assert (twin.seen.item(), model.seen.item()) == (0, 3)


def test_a_buffer_that_an_evaluation_replaced_under_inference_mode_comes_back_usable():
    model = Centre()
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    with torch.inference_mode():
        model(torch.ones(3, 4))
    before = buffers(model)
    with engine.autocast():
        model(torch.ones(3, 4))  # replaces what only inference may change
    engine.backward(model.linear(NAN).sum())
    assert engine.step().skipped
    assert same(before, model)
    assert step(model, engine, torch.ones(3, 4)).applied


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_where_the_device_decides_replaced_buffers_are_chosen_there(skipped):
    model = Centre()
    snapshot = BufferSnapshot(model, enabled=True)
    snapshot.take_()
    before = buffers(model)
    model(torch.ones(3, 4))
    after = buffers(model)
    snapshot.restore_(torch.tensor(skipped))
    assert same(before if skipped else after, model)


def test_modules_without_a_single_buffer_need_no_snapshot():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    assert not BufferSnapshot(model, enabled=True).needed
