"""Where reading means waiting: nothing is read, and everything comes out as if it had been."""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mp_torch import AmpEngine, AmpStateError, LossScale, assembly
from mp_torch.devices import Device

READING = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item"}


@dataclass(frozen=True)
class Elsewhere(Device):
    """The CPU, which pretends that reading from it means waiting."""


class Readings(TorchDispatchMode):
    """Counts what would wait for an accelerator."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().split(".")[0] in READING
        return func(*args, **(kwargs or {}))


@contextmanager
def pretending():
    """Engines that are built in this block think that their parameters are on an accelerator."""
    real = assembly.device_of
    assembly.device_of = lambda tensors: Elsewhere(real(tensors).device)
    try:
        yield
    finally:
        assembly.device_of = real


def build(precision, deferred, optimizer=torch.optim.AdamW, options=None, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9, bias=False), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 1))
    chosen = optimizer(model.parameters(), lr=0.01, **(options or {}))
    kwargs.setdefault("loss_scale", LossScale(init_scale=256.0, growth_interval=2, skip_limit=None))
    kwargs["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.9)
    if deferred:
        with pretending():
            return model, AmpEngine(model, chosen, precision, **kwargs)
    return model, AmpEngine(model, chosen, precision, **kwargs)


def micro_step(model, engine, at, factor=1.0):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(at))
    with engine.autocast():
        loss = (model(x).float() * factor).square().mean()
    engine.backward(loss)
    return engine.step()


def everything(model, engine):
    engine.settle()
    state = engine.state_dict()
    return (
        [one.clone() for one in model.state_dict().values()],
        [one.clone() for one in engine.masters().values()],
        [value for one in state["optimizers"] for each in one["state"].values() for value in each.values()],
        (state["loss_scale"], state["update_index"], engine.schedulers[0].last_epoch),
    )


def assert_same(a, b, tolerance=0.0):
    for left, right in zip(a[:3], b[:3], strict=True):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert a[3] == b[3]


PRECISIONS = ["fp32", "fp16-mixed", "bf16-true", "fp16-true", "bf16-kahan", "bf16-sr"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("update", ["exact", "fused"])
@settings(max_examples=8)
@given(flags=st.lists(st.sampled_from(["good", "good", "inf", "nan"]), max_size=8))
def test_a_deferred_history_is_the_immediate_one(precision, update, flags):
    results, reports = [], []
    for deferred in (False, True):
        model, engine = build(precision, deferred, update=update, max_grad_norm=0.05)
        seen = []
        for at, flag in enumerate(flags):
            factor = {"good": 1.0, "inf": math.inf, "nan": math.nan}[flag]
            seen.append(micro_step(model, engine, at, factor))
        results.append(everything(model, engine))
        names = ("applied", "skipped", "reason", "loss_scale", "next_loss_scale", "first_nonfinite", "update_index")
        reports.append([[getattr(one, name) for name in names] for one in seen])
    assert reports[0] == reports[1]
    assert_same(*results, tolerance=0.0 if update == "exact" else 1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True})],
)
@pytest.mark.parametrize("update", ["exact", "fused"])
def test_backward_and_step_read_nothing_on_the_applied_path(precision, optimizer, options, update):
    model, engine = build(precision, deferred=True, optimizer=optimizer, options=options, update=update)
    micro_step(model, engine, 0)
    engine.settle()
    x = torch.randn(8, 4)
    with engine.autocast():
        loss = model(x).float().square().mean()
    with Readings() as readings:
        engine.backward(loss)
        report = engine.step()
        counted = readings.count
    # the optimizer's own step counters live on the CPU in the exact form: reading those waits for nothing
    assert counted <= (len(list(model.parameters())) if update == "exact" else 0)
    assert report.applied


def test_the_counter_counts_what_waits():
    with Readings() as readings:
        torch.ones(1).item()
        bool(torch.ones(1))
    assert readings.count == 2


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("update", ["exact", "fused"])
def test_a_skipped_first_step_leaves_no_state_behind(optimizer, update):
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    model, engine = build("fp16-mixed", deferred=True, optimizer=optimizer, options=options, update=update)
    micro_step(model, engine, 0, math.inf)
    engine.settle()
    assert not engine.optimizers[0].state
    assert micro_step(model, engine, 1).applied


def test_one_skip_too_many_is_told_when_the_next_step_begins():
    model, engine = build("fp32", deferred=True, loss_scale=LossScale.off(skip_limit=1))
    for at in range(2):
        micro_step(model, engine, at, math.nan)
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(AmpStateError, match=r"2 steps in a row were skipped, skip_limit=1: NaN in 0.weight"):
        micro_step(model, engine, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_that_steps_by_itself_is_decided_before_it_does():
    model, engine = build("fp16-mixed", deferred=True, optimizer=torch.optim.RMSprop)
    before = [one.clone() for one in model.parameters()]
    assert micro_step(model, engine, 0, math.inf).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert engine.loss_scale == 128.0
    assert micro_step(model, engine, 1).applied


def test_a_report_that_is_read_late_still_tells_its_own_step():
    model, engine = build("fp16-mixed", deferred=True)
    reports = [micro_step(model, engine, at, math.inf if at == 1 else 1.0) for at in range(4)]
    assert [one.skipped for one in reports] == [False, True, False, False]
    assert [one.update_index for one in reports] == [1, 1, 2, 3]
    assert reports[1].first_nonfinite is not None


def test_weights_and_16_bit_losses_scale_on_the_device_as_on_the_host():
    results = []
    policy = LossScale(init_scale=65536.0)
    for deferred in (False, True):
        model, engine = build("fp16-mixed", deferred, loss_scale=policy, accumulate_steps=2, restore_buffers=False)
        for weight in (3.0, 0.1):
            loss = (model[0].weight.half() * 0.01).sum()
            engine.backward(loss, weight=weight)
        results.append((engine.gradients()["0.weight"].clone(), engine.divisor))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("skip", ["all", "each"])
@pytest.mark.parametrize("scale", [256.0, 2.0**-20])
def test_several_optimizers_decide_on_the_device_as_on_the_host(skip, scale):
    results = []
    for deferred in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
        optimizers = [
            torch.optim.SGD(model["a"].parameters(), lr=0.1),
            torch.optim.AdamW(model["b"].parameters(), lr=0.1),
        ]
        options = {"skip": skip, "loss_scale": LossScale.static(scale), "max_grad_norm": 0.05}
        if deferred:
            with pretending():
                engine = AmpEngine(model, optimizers, "fp16-mixed", update="exact", **options)
        else:
            engine = AmpEngine(model, optimizers, "fp16-mixed", update="exact", **options)
        seen = []
        for factor in (1.0, math.inf, 1.0):
            engine.backward([model["a"].weight.sum() * factor, model["b"].weight.square().sum()])
            report = engine.step()
            seen.append((report.applied, report.skipped, [one.applied for one in report.optimizers], report.clip_coef))
        results.append((seen, [one.detach().clone() for one in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_an_overflow_by_unscaling_is_seen_beside_an_optimizer_that_steps_by_itself():
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    optimizers = [torch.optim.SGD([model["a"]], lr=0.1), torch.optim.RMSprop([model["b"]], lr=0.1)]
    engine = AmpEngine(model, optimizers, "fp32", loss_scale=LossScale.static(2.0**-20), norm_type=3.0)
    engine.backward(model["a"].sum() + model["b"].sum())
    assert engine.step().applied
    engine.backward(model["a"].sum() + model["b"].sum())
    model["a"].grad = torch.tensor([1e36, 0.0])
    report = engine.step()
    assert report.skipped
    assert report.first_nonfinite == "a"
