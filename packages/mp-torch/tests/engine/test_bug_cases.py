"""Faults that other engines had for years, each as the sentence of what is right."""

import math
import warnings

import pytest
import torch
from torch import nn

from mp_torch import AmpConfigError, AmpEngine, AmpStateError, LossScale

INF, NAN = math.inf, math.nan


def engine_of(*values, lr=1.0, precision="fp32", optimizer=torch.optim.SGD, options=None, **settings):
    """One parameter, its optimizer and an engine; the parameter's gradient is whatever ``feed`` says."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(values))
    settings.setdefault("max_grad_norm", None)
    chosen = optimizer(model.parameters(), lr=lr, **(options or {}))
    return model, AmpEngine(model, chosen, precision, **settings)


def feed(model, engine, *gradient, **keywords):
    """A backward whose unscaled gradient is this one."""
    engine.backward((model.weight.float() * torch.tensor(gradient)).sum(), **keywords)


def feed_stored(model, engine, *gradient):
    """A backward after which the stored, still scaled gradient is this one."""
    feed(model, engine, *[0.0] * len(gradient))
    model.weight.grad = torch.tensor(gradient)


# ---- the loss scale's ends ----


@pytest.mark.parametrize("min_scale", [1.0, 2.0**-20])
def test_a_run_of_nan_losses_never_takes_the_scale_below_its_floor_nor_touches_a_weight(min_scale):
    model, engine = engine_of(1.0, precision="fp16-mixed", loss_scale=LossScale(min_scale=min_scale, skip_limit=None))
    for _ in range(166):
        feed(model, engine, NAN)
        assert engine.step().skipped
    assert engine.loss_scale == min_scale
    feed(model, engine, 0.25)
    assert engine.step().applied
    assert model.weight.item() == 0.75


def test_without_a_floor_a_scale_of_zero_skips_the_healthy_batch_instead_of_poisoning_the_weights():
    policy = LossScale(min_scale=0.0, skip_limit=None, growth_interval=1)
    model, engine = engine_of(1.0, precision="fp16-mixed", loss_scale=policy)
    for _ in range(170):
        feed(model, engine, NAN)
        engine.step()
    assert engine.loss_scale == 0.0
    feed(model, engine, 1.0)
    report = engine.step()
    assert report.skipped
    assert model.weight.item() == 1.0


def test_persistent_non_finite_gradients_end_the_run_naming_the_cause():
    model, engine = engine_of(1.0, precision="fp16-mixed", loss_scale=LossScale(skip_limit=3))
    for _ in range(3):
        feed(model, engine, NAN)
        assert engine.step().skipped
    feed(model, engine, NAN)
    with pytest.raises(
        AmpStateError, match=r"^4 steps in a row were skipped, skip_limit=3: NaN in weight at loss scale"
    ):
        engine.step()
    assert model.weight.item() == 1.0


def test_an_overflow_at_the_floor_is_an_error_if_the_policy_says_so():
    policy = LossScale(init_scale=2.0, on_floor="raise")
    model, engine = engine_of(1.0, precision="fp16-mixed", loss_scale=policy)
    feed(model, engine, INF)
    assert engine.step().next_loss_scale == 1.0
    feed(model, engine, INF)
    with pytest.raises(
        AmpStateError, match=r"at its floor, min_scale=1.0, and the gradients still overflow: Inf in weight"
    ):
        engine.step()


def test_the_scale_grows_to_a_finite_ceiling_and_comes_back_from_it():
    model, engine = engine_of(0.0, precision="fp16-mixed", loss_scale=LossScale(growth_interval=1))
    for _ in range(200):
        feed(model, engine, 1e-38)
        engine.step()
    assert engine.loss_scale == 2.0**127
    feed(model, engine, 4.0)
    report = engine.step()
    assert report.skipped
    assert report.next_loss_scale == 2.0**126


# ---- the check is on the unscaled gradient ----


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true", "bf16-kahan"])
@pytest.mark.parametrize("update", ["fused", "exact"])
@pytest.mark.parametrize(("scale", "gradient"), [(2.0**-20, 1e36), (2.0**-130, 1.0)])
def test_a_gradient_that_only_unscaling_makes_infinite_is_skipped_in_every_precision(
    precision, update, scale, gradient
):
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16 if precision == "fp16-true" else None
    gradient = 6e4 if dtype == torch.float16 else gradient
    scale = 2.0**-120 if dtype == torch.float16 else scale
    model, engine = engine_of(1.0, 1.0, precision=precision, update=update, loss_scale=LossScale.static(scale))
    feed(model, engine, 0.0, 0.0)
    model.weight.grad = torch.tensor([gradient, 0.0], dtype=model.weight.dtype)
    before = model.weight.detach().clone()
    report = engine.step()
    assert report.skipped
    assert (report.first_nonfinite, report.nonfinite_kind) == ("weight", "Inf")
    assert torch.equal(model.weight, before)


def test_a_scale_of_two_to_minus_twenty_and_a_small_gradient_is_a_good_step():
    model, engine = engine_of(1.0, loss_scale=LossScale.static(2.0**-20))
    feed(model, engine, 0.5)
    assert engine.step().applied
    assert model.weight.item() == 0.5


def test_nan_that_only_unscaling_would_make_never_reaches_the_weights():
    model, engine = engine_of(1.0, 1.0, loss_scale=LossScale.static(2.0**-20))
    feed_stored(model, engine, 1e36, 1.0)
    assert engine.step().skipped
    assert model.weight.tolist() == [1.0, 1.0]


# ---- windows ----


def test_a_window_is_unscaled_once_with_the_scale_that_made_it():
    policy = LossScale(init_scale=1024.0, growth_interval=1)
    model, engine = engine_of(0.0, precision="fp16-mixed", loss_scale=policy, accumulate_steps=2)
    for _ in range(2):
        feed(model, engine, 2.0)
        engine.step()
    assert model.weight.item() == -2.0
    assert engine.loss_scale == 2048.0


@pytest.mark.parametrize("bad", range(4))
def test_an_overflow_in_any_micro_step_skips_the_whole_window_once_with_one_backoff(bad):
    model, engine = engine_of(1.0, precision="fp16-mixed", accumulate_steps=4)
    for at in range(4):
        feed(model, engine, NAN if at == bad else 1.0)
        report = engine.step()
    assert report.skipped
    assert (report.loss_scale, report.next_loss_scale) == (65536.0, 32768.0)
    assert model.weight.item() == 1.0
    assert model.weight.grad is None
    for _ in range(4):
        feed(model, engine, 0.25)
        report = engine.step()
    assert report.applied
    assert model.weight.item() == 0.75


# ---- nothing to do ----


def test_a_step_without_any_gradient_is_legal_and_moves_nothing():
    _, engine = engine_of(1.0, precision="fp16-mixed", loss_scale=LossScale(growth_interval=1))
    frozen = nn.Parameter(torch.ones(1))
    engine.backward((frozen * 2).sum())
    report = engine.step()
    assert (report.applied, report.skipped, report.reason) == (False, False, "no gradients")
    assert engine.loss_scale == 65536.0


def test_an_optimizer_without_gradients_stands_beside_one_that_has_them():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    optimizers = [torch.optim.SGD(model[key].parameters(), lr=0.1) for key in "ab"]
    engine = AmpEngine(model, optimizers, "fp16-mixed")
    engine.backward(model["b"](torch.ones(1, 1)).sum())
    report = engine.step()
    assert [one.applied for one in report.optimizers] == [False, True]
    assert [one.reason for one in report.optimizers] == ["no gradients", ""]
    assert report.applied


def test_a_parameter_that_is_not_the_models_is_refused_at_construction():
    with pytest.raises(AmpConfigError, match=r"SGD holds a parameter of shape \(2, 2\) that is not the model's; build"):
        AmpEngine(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "fp32")


# ---- 16-bit models ----


def test_a_half_model_without_masters_is_refused_at_construction_naming_its_parameters():
    model = nn.Linear(2, 2).half()
    with pytest.raises(AmpConfigError, match=r"'weight' \(float16\), 'bias' \(float16\); use the -true precision"):
        AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-mixed")


def test_a_half_model_trains_with_masters():
    model = nn.Linear(2, 2).half()
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=1e-4), "fp16-true", loss_scale=LossScale.off())
    before = engine.masters()["weight"].clone()
    with engine.autocast():
        loss = model(torch.ones(1, 2)).float().sum()
    engine.backward(loss)
    assert engine.step().applied
    assert not torch.equal(engine.masters()["weight"], before)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_an_fp16_loss_of_any_shape_does_not_lose_the_first_step(shape):
    model, engine = engine_of(*[2.0] * math.prod(shape), precision="fp16-mixed")
    losses = model.weight.half().reshape(shape)
    engine.backward(losses)
    report = engine.step()
    assert report.applied
    assert report.loss_scale == 32768.0
    assert model.weight.flatten().tolist() == [1.0] * losses.numel()


def test_a_bf16_parameter_keeps_moving_under_a_tiny_learning_rate_with_masters():
    """Without masters the distance to the next bf16 number below 1.0 is never bridged."""
    moved = {}
    for kind in ("fp32", "none"):
        model, engine = engine_of(
            1.0, lr=1.9e-3, precision="bf16-true", optimizer=torch.optim.Adam, master_weights=kind
        )
        for _ in range(200):
            feed(model, engine, 1.0)
            report = engine.step()
        moved[kind] = model.weight.item()
    assert moved["none"] == 1.0
    assert report.rounded_away == 1.0
    assert moved["fp32"] == pytest.approx(0.62, abs=0.01)


@pytest.mark.parametrize("gradient", [0.0, 1e-4])
def test_an_epsilon_that_fp16_rounds_to_zero_still_guards_the_division(gradient):
    model, engine = engine_of(
        1.0, lr=0.1, precision="fp16-true", optimizer=torch.optim.Adam, loss_scale=LossScale.off()
    )
    feed(model, engine, gradient)
    assert engine.step().applied
    assert model.weight.item() == (1.0 if gradient == 0 else pytest.approx(0.9, abs=1e-3))


# ---- norms ----


@pytest.mark.parametrize("precision", ["fp32", "fp16-true", "bf16-true"])
def test_a_representable_norm_never_overflows(precision):
    model, engine = engine_of(*[1.0] * 4, precision=precision, max_grad_norm=1.0, loss_scale=LossScale.off())
    value = 40000.0 if precision != "bf16-true" else float(torch.tensor(3e19).bfloat16())
    feed(model, engine, *[value] * 4)
    report = engine.step()
    assert report.grad_norm == pytest.approx(2 * value, rel=1e-6)
    assert report.applied
    assert model.weight.float().tolist() == pytest.approx([0.5] * 4)


def test_finite_gradients_whose_norm_overflows_fp32_are_clipped_and_not_silently_zeroed():
    model, engine = engine_of(*[1.0] * 100, max_grad_norm=1.0)
    feed(model, engine, *[3e38] * 100)
    report = engine.step()
    assert report.grad_norm == pytest.approx(3e39)
    assert report.applied
    assert model.weight.tolist() == pytest.approx([0.9] * 100)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_non_finite_norm_skips_and_names_the_parameter_and_leaves_the_others_alone(bad):
    model = nn.ParameterDict({"p": torch.ones(2), "q": torch.ones(1)})
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32")
    loss = (model["p"] * torch.tensor([bad, 4.0])).sum() + model["q"].sum()
    engine.backward(loss)
    report = engine.step()
    assert report.skipped
    assert report.first_nonfinite == "p"
    assert report.nonfinite_kind == ("NaN" if math.isnan(bad) else "Inf")
    assert not math.isfinite(report.grad_norm)
    assert [one.tolist() for one in model.values()] == [[1.0, 1.0], [1.0]]


@pytest.mark.parametrize("value", [-1, 0, NAN, INF, True, "1"])
def test_a_nonsensical_max_grad_norm_is_refused_at_construction(value):
    with pytest.raises(AmpConfigError, match=r"^max_grad_norm=.* must be a finite number above 0; None switches"):
        engine_of(1.0, max_grad_norm=value)


def test_the_report_tells_the_norm_before_and_after_clipping():
    model, engine = engine_of(1.0, 1.0, max_grad_norm=1.0)
    feed(model, engine, 3.0, 4.0)
    report = engine.step()
    assert report.grad_norm == 5.0
    assert report.clipped_norm <= 1.0
    assert report.clip_coef == pytest.approx(0.2)
    assert report.clipped


# ---- a skip is a skip ----


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.RMSprop, {}),
    ],
)
@pytest.mark.parametrize("update", ["auto", "exact"])
def test_a_skip_changes_no_bit_of_parameters_moments_counters_or_schedule(optimizer, options, update):
    if optimizer is torch.optim.RMSprop and update == "exact":
        return
    model = nn.Linear(3, 1)
    chosen = optimizer(model.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(chosen, 1, 0.5)
    policy = LossScale(init_scale=1024.0)
    engine = AmpEngine(model, chosen, "fp16-mixed", scheduler=scheduler, update=update, loss_scale=policy)

    def step(factor):
        with engine.autocast():
            loss = (model(torch.ones(2, 3)).float() * factor).sum()
        engine.backward(loss)
        return engine.step()

    assert step(1.0).applied
    before = bits(model, chosen), scheduler.last_epoch, chosen.param_groups[0]["lr"]
    report = step(INF)
    assert report.skipped
    assert not report.applied
    assert (bits(model, chosen), scheduler.last_epoch, chosen.param_groups[0]["lr"]) == before
    assert step(1.0).applied
    assert scheduler.last_epoch == before[1] + 1


def bits(model, optimizer):
    """Everything that a step could change, as bytes."""
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    return [one.detach().numpy().tobytes() for one in [*model.state_dict().values(), *state]]


@pytest.mark.parametrize(
    "policy",
    [LossScale.static(1024.0), LossScale(hysteresis=3), LossScale(init_scale=1.0), LossScale.off()],
    ids=["static", "hysteresis", "floor", "off"],
)
def test_a_skip_is_told_though_the_scale_stays(policy):
    model, engine = engine_of(1.0, precision="fp16-mixed", loss_scale=policy)
    feed(model, engine, INF)
    report = engine.step()
    assert report.skipped
    assert report.next_loss_scale == report.loss_scale


def test_a_nan_step_among_good_ones_is_counted_and_reported_as_nan():
    model, engine = engine_of(1.0, lr=0.1)
    reports = []
    for at in range(5):
        feed(model, engine, NAN if at == 2 else 1.0)
        reports.append(engine.step())
    assert [one.skipped for one in reports] == [False, False, True, False, False]
    assert math.isnan(reports[2].grad_norm)
    assert [one.update_index for one in reports] == [1, 2, 2, 3, 4]
    assert [one.consecutive_skips for one in reports] == [0, 0, 1, 0, 0]


# ---- hysteresis and configuration ----


def test_hysteresis_follows_the_documented_sequence():
    model, engine = engine_of(1.0, precision="fp16-mixed", loss_scale=LossScale(hysteresis=3))
    seen = []
    for _ in range(5):
        feed(model, engine, INF)
        engine.step()
        seen.append(engine.loss_scale)
    assert seen == [65536.0, 65536.0, 32768.0, 16384.0, 8192.0]


@pytest.mark.parametrize(
    "extra", [{}, {"growth_interval": 7}, {"hysteresis": 2}, {"min_scale": 2.0}, {"skip_limit": 5}]
)
def test_the_initial_scale_is_the_documented_one_whatever_else_is_set(extra):
    _, engine = engine_of(1.0, precision="fp16-mixed", loss_scale=LossScale(**extra))
    assert engine.loss_scale == 65536.0
    assert engine_of(1.0, precision="fp16-mixed")[1].loss_scale == 65536.0


# ---- autocast ----


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_does_not_poison_the_next_one(context):
    model = nn.Linear(4, 1)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    with engine.autocast():
        with context():
            model(torch.ones(1, 4))
        out = model(torch.ones(1, 4))
    assert out.requires_grad
    engine.backward(out.float().sum())
    assert model.weight.grad is not None


def test_weights_changed_in_one_long_autocast_block_are_seen_by_the_next_forward():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    x, losses = torch.randn(8, 4), []
    with engine.autocast():
        for _ in range(4):
            loss = model(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


@pytest.mark.parametrize("change", ["fill_", "data", "load_state_dict"])
def test_a_weight_swapped_inside_an_autocast_block_is_seen_by_the_next_forward(change):
    model = nn.Linear(1, 1, bias=False)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    x = torch.ones(1, 1)
    with engine.autocast():
        model(x)
        if change == "fill_":
            with torch.no_grad():
                model.weight.fill_(2.0)
        elif change == "data":
            model.weight.data.copy_(torch.full((1, 1), 2.0))
        else:
            model.load_state_dict({"weight": torch.full((1, 1), 2.0)})
        assert model(x).item() == 2.0


def test_an_outer_autocast_of_another_dtype_gives_way_with_one_warning():
    model = nn.Linear(2, 2)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    with torch.autocast("cpu", torch.float16):
        with pytest.warns(UserWarning, match="within it the engine's precision 'bf16-mixed' holds"), engine.autocast():
            assert model(torch.ones(1, 2)).dtype == torch.bfloat16
        assert model(torch.ones(1, 2)).dtype == torch.float16
        with warnings.catch_warnings(), engine.autocast():
            warnings.simplefilter("error")
            assert model(torch.ones(1, 2)).dtype == torch.bfloat16


def test_fp32_stays_fp32_inside_an_outer_autocast():
    model = nn.Linear(2, 2)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="holds"), engine.autocast():
        assert model(torch.ones(1, 2)).dtype == torch.float32


# ---- resume ----


def test_the_scalers_state_survives_save_and_load_and_the_load_changes_nothing_else():
    policy = LossScale(init_scale=1024.0, growth_interval=2)
    model, engine = engine_of(1.0, lr=0.1, precision="fp16-mixed", loss_scale=policy)
    feed(model, engine, 1.0)
    engine.step()
    state, weights = engine.state_dict(), model.weight.item()
    other, fresh = engine_of(weights, lr=0.1, precision="fp16-mixed", loss_scale=policy)
    fresh.load_state_dict(state)
    assert other.weight.item() == weights
    runs = []
    for each, running in ((model, engine), (other, fresh)):
        seen = []
        for value in (1.0, INF, 1.0, 1.0, 1.0):
            feed(each, running, value)
            report = running.step()
            seen.append((report.next_loss_scale, report.skipped, each.weight.item()))
        runs.append(seen)
    assert runs[0] == runs[1]
