"""The loop: windows and weights, several losses and optimizers, buffers, schedulers, clipping by group and by value."""

import logging
import math
import re
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from mp_torch import AmpConfigError, AmpEngine, AmpStateError, LossScale


def one_weight(*values, precision="fp32", lr=1.0, **settings):
    model = nn.ParameterDict({"w": torch.tensor(values)})
    settings.setdefault("max_grad_norm", None)
    return model, AmpEngine(model, torch.optim.SGD(model.parameters(), lr=lr), precision, **settings)


def feed(model, engine, *gradient, **keywords):
    engine.backward((model["w"].float() * torch.tensor(gradient)).sum(), **keywords)


# ---- windows ----


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-true"])
def test_a_window_takes_the_mean_over_its_micro_steps(precision):
    model, engine = one_weight(8.0, precision=precision, accumulate_steps=4)
    for value in (1.0, 2.0, 3.0, 6.0):
        feed(model, engine, value)
        report = engine.step()
    assert report.applied
    assert report.micro_steps == 4
    assert model["w"].item() == 5.0


def test_before_the_boundary_a_step_does_nothing_but_say_so():
    model, engine = one_weight(1.0, accumulate_steps=3)
    for at in (1, 2):
        feed(model, engine, 1.0)
        report = engine.step()
        assert (report.applied, report.skipped, report.update_index) == (False, False, 0)
        assert report.reason == f"accumulating: the boundary is not reached after micro-step {at}"
    assert model["w"].item() == 1.0


def test_a_last_short_window_is_exact():
    model, engine = one_weight(8.0, accumulate_steps=4)
    feed(model, engine, 1.0)
    feed(model, engine, 3.0, boundary=True)
    assert engine.step().applied
    assert model["w"].item() == 6.0


def test_the_boundary_may_be_decided_by_hand():
    model, engine = one_weight(8.0)
    for boundary in (False, False, True):
        feed(model, engine, 3.0, boundary=boundary)
        report = engine.step()
    assert report.micro_steps == 3
    assert model["w"].item() == 5.0


def test_unequal_micro_batches_are_weighted_by_their_samples():
    model, engine = one_weight(8.0, accumulate_steps=2)
    feed(model, engine, 1.0, weight=3)
    feed(model, engine, 5.0, weight=1)
    assert engine.divisor == 4.0
    engine.step()
    assert model["w"].item() == 6.0


@pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf, True, "2", 1e-300, 1e300, 10**400])
def test_a_weight_that_no_mean_can_be_taken_with_is_refused_and_opens_no_window(weight):
    model, engine = one_weight(1.0)
    with pytest.raises(AmpConfigError, match=r"^weight=.* must be a finite fp32 number above 0, such as the number"):
        feed(model, engine, 1.0, weight=weight)
    assert not engine.phase.open
    assert model["w"].grad is None


def test_a_boundary_cannot_be_taken_back():
    model, engine = one_weight(1.0)
    feed(model, engine, 1.0)
    with pytest.raises(
        AmpStateError, match=r"^backward\(boundary=False\) after the boundary of a window of 1 micro-steps"
    ):
        feed(model, engine, 1.0, boundary=False)


def test_a_step_without_backward_is_refused():
    with pytest.raises(AmpStateError, match=r"^step\(\) without backward\(\) since the last step: there is nothing to"):
        one_weight(1.0)[1].step()


def test_a_step_clears_the_gradients_so_that_none_is_used_twice():
    model, engine = one_weight(4.0)
    for _ in range(2):
        feed(model, engine, 1.0)
        engine.step()
        assert model["w"].grad is None
    assert model["w"].item() == 2.0


# ---- several losses, several optimizers ----


def test_several_losses_of_one_micro_step_add_up_however_they_are_given():
    results = []
    for together in (True, False):
        model, engine = one_weight(8.0, precision="fp16-mixed")
        losses = [(model["w"] * 1.0).sum(), (model["w"] * 2.0).sum()]
        for loss in [losses] if together else losses:
            engine.backward(loss)
        engine.step()
        results.append(model["w"].item())
    assert results == [5.0, 5.0]


def test_no_loss_and_a_loss_without_gradient_are_refused():
    _, engine = one_weight(1.0)
    with pytest.raises(AmpStateError, match="of no loss at all"):
        engine.backward([])
    with pytest.raises(AmpStateError, match="of a loss that needs no gradient: it was computed under no_grad"):
        engine.backward(torch.ones(()))


def pair(skip):
    model = nn.ModuleDict({"g": nn.Linear(1, 1, bias=False), "d": nn.Linear(1, 1, bias=False)})
    optimizers = [torch.optim.SGD(model["g"].parameters(), lr=1.0), torch.optim.AdamW(model["d"].parameters(), lr=0.1)]
    return model, AmpEngine(model, optimizers, "fp16-mixed", skip=skip, loss_scale=LossScale(init_scale=1024.0))


@pytest.mark.parametrize("bad", ["g", "d"])
@pytest.mark.parametrize("skip", ["all", "each"])
def test_two_optimizers_share_one_scale_and_skip_together_or_each_for_itself(skip, bad):
    model, engine = pair(skip)
    good = "d" if bad == "g" else "g"
    before = {key: model[key].weight.item() for key in "gd"}
    engine.backward([model[bad].weight.sum() * math.inf, model[good].weight.sum()])
    report = engine.step()
    assert report.skipped
    assert report.applied == (skip == "each")
    assert report.next_loss_scale == 512.0
    assert model[bad].weight.item() == before[bad]
    assert (model[good].weight.item() == before[good]) == (skip == "all")
    assert [one.applied for one in report.optimizers] == [skip == "each" and key == good for key in "gd"]
    assert report.first_nonfinite == f"{bad}.weight"


def test_the_order_of_losses_and_optimizers_changes_no_bit():
    results = []
    for order in ("gd", "dg"):
        torch.manual_seed(0)
        model, engine = pair("all")
        engine.backward([model[key](torch.ones(2, 1)).sum() for key in order])
        engine.step()
        results.append([model[key].weight.item() for key in "gd"])
    assert results[0] == results[1]


def test_a_parameter_in_two_optimizers_is_refused_by_name():
    model = nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
    with pytest.raises(AmpConfigError, match=r"^parameter 'bias' is in both SGD 0 and SGD 1; give it to one of them"):
        AmpEngine(model, optimizers, "fp32")


def test_no_optimizer_at_all_is_refused():
    with pytest.raises(AmpConfigError, match="holds no optimizer; pass one"):
        AmpEngine(nn.Linear(1, 1), [], "fp32")


def test_frozen_16_bit_parameters_may_stand_beside_trained_fp32_ones():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16().requires_grad_(False), nn.Linear(2, 1))
    engine = AmpEngine(model, torch.optim.SGD(model[1].parameters(), lr=0.1), "bf16-mixed")
    with engine.autocast():
        loss = model(torch.ones(1, 2)).float().sum()
    engine.backward(loss)
    assert engine.step().applied
    assert model[0].weight.dtype == torch.bfloat16


# ---- buffers and schedulers ----


@pytest.mark.parametrize("restore", [True, False])
def test_a_skip_gives_buffers_back_what_they_were_before_the_window(restore):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    engine = AmpEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-mixed", accumulate_steps=2, restore_buffers=restore,
        loss_scale=LossScale(init_scale=16.0),
    )  # fmt: skip
    before = [one.clone() for one in model.buffers()]
    for factor in (1.0, math.inf):
        with engine.autocast():
            loss = (model(torch.randn(8, 2)).float() * factor).sum()
        engine.backward(loss)
        report = engine.step()
    assert report.skipped
    same = all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert same == restore


def test_an_applied_step_keeps_what_the_window_taught_the_buffers():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    with engine.autocast():
        loss = model(torch.randn(8, 2)).float().square().sum()
    engine.backward(loss)
    assert engine.step().applied
    assert model[1].num_batches_tracked.item() == 1
    assert model[1].running_mean.abs().sum() > 0


def test_an_evaluation_between_two_windows_does_not_move_what_a_skip_restores():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    with torch.no_grad(), engine.autocast():
        model.eval()(torch.randn(4, 2))
    model.train()
    model[1].running_mean.fill_(3.0)
    with engine.autocast():
        loss = model(torch.randn(8, 2)).float().sum() * math.nan
    engine.backward(loss)
    assert engine.step().skipped
    assert model[1].running_mean.tolist() == [3.0, 3.0]


def test_a_forward_outside_the_context_is_warned_of_once_where_buffers_are_at_stake():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    with pytest.warns(UserWarning, match=r"not computed inside engine.autocast\(\).*restore_buffers=False"):
        engine.backward(model(torch.randn(8, 2)).sum())
    engine.step()
    engine.backward(model(torch.randn(8, 2)).sum())


def test_a_scheduler_steps_with_applied_updates_only():
    model = nn.ParameterDict({"w": torch.ones(1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = AmpEngine(model, optimizer, "fp16-mixed", scheduler=scheduler, accumulate_steps=2)
    rates = []
    for factor in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0):
        engine.backward((model["w"] * factor).sum())
        engine.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau needs a metric at every step()"),
        (lambda _: "cosine", "scheduler='cosine' is none; pass one of torch.optim.lr_scheduler, or a list of them"),
        (lambda optimizer: optimizer, "scheduler=SGD ("),
        (
            lambda _: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters()), 1),
            "StepLR moves the learning rate of another optimizer than the engine's; build it from the one",
        ),
    ],
)
def test_a_scheduler_that_the_engine_cannot_step_is_refused(make, message):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AmpConfigError, match=r"^" + re.escape(message)):
        AmpEngine(model, optimizer, "fp32", scheduler=make(optimizer))


# ---- clipping ----


@pytest.mark.parametrize("update", ["auto", "exact"])
def test_clipping_by_value_clamps_the_unscaled_gradient(update):
    model, engine = one_weight(0.0, 0.0, 0.0, precision="fp16-mixed", clip_value=0.5, update=update)
    feed(model, engine, 3.0, -4.0, 0.25)
    report = engine.step()
    assert model["w"].tolist() == [-0.5, 0.5, -0.25]
    assert report.grad_norm == pytest.approx(math.sqrt(25.0625))
    assert report.clipped_norm == pytest.approx(0.75)


@pytest.mark.parametrize("update", ["auto", "exact"])
def test_clipping_by_norm_comes_before_clipping_by_value(update):
    model, engine = one_weight(0.0, 0.0, clip_value=0.7, max_grad_norm=1.0, update=update)
    feed(model, engine, 3.0, 4.0)
    engine.step()
    assert model["w"].tolist() == [pytest.approx(-0.6), pytest.approx(-0.7)]


@pytest.mark.parametrize("update", ["auto", "exact"])
@pytest.mark.parametrize(("norm_type", "expected"), [(math.inf, 4.0), (2.0, 5.0)])
def test_the_norm_may_be_another_one(update, norm_type, expected):
    model, engine = one_weight(0.0, 0.0, max_grad_norm=1.0, norm_type=norm_type, update=update, precision="fp16-mixed")
    feed(model, engine, 3.0, -4.0)
    report = engine.step()
    assert report.grad_norm == expected
    assert model["w"].tolist() == pytest.approx([-3 / expected, 4 / expected], rel=1e-5)


def test_a_sum_norm_is_possible_with_the_fused_update():
    model, engine = one_weight(0.0, 0.0, max_grad_norm=1.0, norm_type=1.0, precision="fp16-mixed")
    feed(model, engine, 3.0, -4.0)
    assert engine.step().grad_norm == pytest.approx(7.0)


@pytest.mark.parametrize("update", ["auto", "exact"])
def test_a_group_with_a_limit_of_its_own_is_clipped_by_its_own_norm(update):
    model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)})
    groups = [
        {"params": [model["a"]], "max_grad_norm": 0.5},
        {"params": [model["b"]]},
        {"params": [model["c"]], "max_grad_norm": None},
    ]
    engine = AmpEngine(model, torch.optim.SGD(groups, lr=1.0), "fp32", max_grad_norm=2.0, update=update)
    engine.backward((model["a"] * torch.tensor([3.0, 4.0])).sum() + (model["b"] * torch.tensor([6.0, 8.0])).sum()
                    + model["c"].sum() * 7.0)  # fmt: skip
    report = engine.step()
    assert model["a"].norm().item() == pytest.approx(0.5, rel=1e-5)
    assert model["b"].norm().item() == pytest.approx(2.0, rel=1e-5)
    assert model["c"].item() == -7.0
    assert report.grad_norm == pytest.approx(math.sqrt(25 + 100 + 49))
    assert report.clip_coef == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("limit", [-1.0, 0, math.nan, True])
def test_a_nonsensical_limit_of_a_group_is_refused(limit):
    model = nn.Linear(1, 1)
    with pytest.raises(AmpConfigError, match=r"^max_grad_norm=.* of a parameter group must be a finite number above 0"):
        AmpEngine(model, torch.optim.SGD([{"params": model.parameters(), "max_grad_norm": limit}], lr=0.1), "fp32")


# ---- raising instead of skipping ----


def test_a_non_finite_gradient_may_raise_instead_and_the_loop_can_go_on():
    model, engine = one_weight(1.0, nonfinite="raise")
    feed(model, engine, math.nan)
    with pytest.raises(
        AmpStateError, match=r"^non-finite gradient: NaN in w at loss scale 1.0, which no smaller one could"
    ):
        engine.step()
    assert model["w"].item() == 1.0
    feed(model, engine, 0.5)
    assert engine.step().applied


def test_an_overflow_that_a_smaller_scale_can_cure_still_skips():
    model, engine = one_weight(1.0, precision="fp16-mixed", nonfinite="raise", loss_scale=LossScale(init_scale=4.0))
    for _ in range(2):
        feed(model, engine, math.inf)
        assert engine.step().skipped
    feed(model, engine, math.inf)
    with pytest.raises(AmpStateError, match=r"Inf in w at loss scale 1.0"):
        engine.step()


# ---- what can be read between backward and step ----


def test_stored_gradients_divisor_and_masters_are_what_the_step_will_use():
    model, engine = one_weight(1.0, 2.0, precision="bf16-true", loss_scale=LossScale.static(8.0))
    feed(model, engine, 3.0, 4.0)
    assert engine.gradients()["w"].tolist() == [24.0, 32.0]
    assert engine.gradients()["w"].dtype == torch.bfloat16
    assert engine.divisor == 8.0
    assert engine.masters()["w"].dtype == torch.float32
    engine.step()
    assert engine.masters()["w"].tolist() == [-2.0, -2.0]
    assert engine.gradients() == {}


def test_a_report_reads_the_same_whenever_it_is_read():
    model, engine = one_weight(1.0, precision="fp16-mixed", loss_scale=LossScale(init_scale=4.0, growth_interval=1))
    reports = []
    for value in (1.0, math.inf, 1.0):
        feed(model, engine, value)
        reports.append(engine.step())
    assert [one.loss_scale for one in reports] == [4.0, 8.0, 4.0]
    assert [one.next_loss_scale for one in reports] == [8.0, 4.0, 8.0]
    assert "skipped=True" in repr(reports[1])
    assert np.isinf(reports[1].grad_norm)


def test_a_report_that_is_kept_does_not_keep_the_gradients_alive():
    model, engine = one_weight(1.0, precision="fp16-mixed", max_grad_norm=1.0)
    feed(model, engine, 3.0)
    alive = weakref.ref(model["w"].grad)
    report = engine.step()
    assert alive() is None
    assert report.applied


# ---- what is said unasked ----


def test_a_skip_that_no_loss_scale_explains_is_logged_once(caplog):
    model, engine = one_weight(1.0, precision="bf16-mixed")
    with caplog.at_level(logging.WARNING, logger="mp_torch"):
        for value in (1.0, math.nan, math.nan):
            feed(model, engine, value)
            engine.step()
    assert [one.message for one in caplog.records] == [
        "step skipped: NaN in w; no smaller loss scale could help, parameters are kept; further ones are told by the "
        "reports alone"
    ]


def test_an_ordinary_overflow_of_a_dynamic_scale_is_not_logged(caplog):
    model, engine = one_weight(1.0, precision="fp16-mixed")
    feed(model, engine, math.inf)
    assert engine.step().skipped
    assert not caplog.records


@pytest.mark.parametrize("master_weights", ["fp32", "none"])
def test_a_weight_that_an_update_carried_past_fp16_is_named_at_the_first_skip(master_weights):
    model, engine = one_weight(
        65000.0, precision="fp16-true", lr=600.0, loss_scale=LossScale(init_scale=8.0), master_weights=master_weights
    )
    feed(model, engine, -1.0)
    assert engine.step().applied  # its gradient was finite
    assert model["w"].item() == math.inf
    feed(model, engine, math.inf)
    with pytest.warns(UserWarning, match=r"w holds values past fp16's largest, 65504: an update wrote them back as"):
        assert engine.step().skipped
    feed(model, engine, math.inf)
    engine.step()  # said once


def test_a_scale_that_stops_at_its_ceiling_is_logged_once(caplog):
    policy = LossScale(init_scale=4.0, max_scale=8.0, growth_interval=1)
    model, engine = one_weight(1.0, precision="fp16-mixed", loss_scale=policy)
    for _ in range(4):
        feed(model, engine, 1e-3)
        engine.step()
    assert engine.loss_scale == 8.0
    assert [one.message.split(":")[0] for one in caplog.records] == ["the loss scale stops at its ceiling, 8.0"]
