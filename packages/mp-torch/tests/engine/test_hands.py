"""What hands do around an engine: own steps, own gradients, odd arguments, long blocks, copies, logs."""

import copy
import gc
import math
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from mp_torch import AmpConfigError, AmpEngine, AmpStateError, LossScale

PRECISIONS = ["fp32", "fp16-mixed", "fp16-true", "bf16-true", "bf16-sr", "bf16-kahan"]
NAN = torch.full((3, 4), float("nan"))


def build(precision="fp32", optimizer=torch.optim.AdamW, model=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)) if model is None else model
    settings.setdefault("loss_scale", LossScale(init_scale=16.0) if precision.startswith("fp16") else None)
    return model, AmpEngine(model, optimizer(model.parameters(), lr=0.01), precision, **settings)


def backward(model, engine, x=None, **keywords):
    with engine.autocast():
        loss = model(torch.randn(3, 4) if x is None else x).float().square().mean()
    engine.backward(loss, **keywords)


def step(model, engine, x=None):
    backward(model, engine, x)
    return engine.step()


def values(model):
    return [one.clone() for one in model.state_dict().values()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- the optimizer's own step ----


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-true"])
def test_an_optimizer_stepped_by_hand_within_a_window_is_refused_before_it_uses_scaled_gradients(precision, optimizer):
    model, engine = build(precision, optimizer)
    before = values(model)
    backward(model, engine)
    after_forward = values(model)
    with pytest.raises(AmpStateError, match=r"\.step\(\) was called by hand after engine\.backward\(\), on gradients"):
        engine.optimizers[0].step()
    assert same(after_forward, values(model))
    assert engine.step().applied
    engine.optimizers[0].step()  # nothing is left that it could do
    assert not same(before, values(model))


def test_an_engine_that_is_gone_bars_nobody():
    model, engine = build()
    backward(model, engine)
    optimizer = engine.optimizers[0]
    del engine
    gc.collect()
    optimizer.step()


def test_engines_that_follow_each_other_hang_one_guard_of_each_kind_on_an_optimizer():
    model, engine = build()
    optimizer = engine.optimizers[0]
    for _ in range(3):
        AmpEngine(model, optimizer, "fp32")
    for kind in ("step_pre", "load_state_dict_pre", "load_state_dict_post"):
        assert len(getattr(optimizer, f"_optimizer_{kind}_hooks")) == 1


# ---- gradients that the engine did not make ----


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_gradient_that_was_there_before_the_window_is_refused_by_name_and_opens_none(precision):
    model, engine = build(precision)
    with engine.autocast():
        model(torch.randn(3, 4)).float().sum().backward()
    with pytest.raises(AmpStateError, match=r"'0\.weight' holds a gradient that this engine did not make"):
        backward(model, engine)
    assert not engine.phase.open
    model.zero_grad()
    assert step(model, engine).applied


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_gradients_set_to_zero_instead_of_none_do_no_harm(precision):
    model, engine = build(precision)
    twin, cleared = build(precision)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    torch.manual_seed(1)
    assert step(model, engine).applied
    torch.manual_seed(1)
    assert step(twin, cleared).applied
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_two_engines_whose_losses_share_a_model_are_told_to_clear_it():
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    makes = AmpEngine(generator, torch.optim.SGD(generator.parameters(), lr=0.1), "fp32")
    judges = AmpEngine(discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.1), "fp32")
    makes.backward(discriminator(generator(torch.randn(3, 4))).mean())
    makes.step()
    with pytest.raises(AmpStateError, match=r"call model\.zero_grad\(\) before the window"):
        judges.backward(discriminator(torch.randn(3, 4)).mean())
    discriminator.zero_grad()
    judges.backward(discriminator(torch.randn(3, 4)).mean())
    assert judges.step().applied


def test_a_frozen_optimizer_in_an_alternating_loop_gets_no_gradient_and_its_scheduler_no_step():
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, discriminator)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers]
    engine = AmpEngine(nn.ModuleList([generator, discriminator]), optimizers, "fp32", scheduler=schedulers)
    fake = generator(torch.randn(3, 4)).detach()
    engine.backward(discriminator(fake).mean())
    assert [one.applied for one in engine.step().optimizers] == [False, True]
    assert [one.last_epoch for one in schedulers] == [0, 1]
    discriminator.requires_grad_(False)
    before = values(discriminator)
    engine.backward(discriminator(generator(torch.randn(3, 4))).mean())
    assert [one.applied for one in engine.step().optimizers] == [True, False]
    assert [one.last_epoch for one in schedulers] == [1, 1]
    assert same(before, values(discriminator))


# ---- schedulers ----


def test_the_scheduler_of_an_optimizer_that_was_skipped_stays_while_anothers_moves_on():
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in model]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers]
    engine = AmpEngine(model, optimizers, "fp32", skip="each", scheduler=schedulers)
    engine.backward([model[0](NAN).sum(), model[1](torch.ones(3, 4)).sum()])
    assert engine.step().skipped
    assert [one.last_epoch for one in schedulers] == [0, 1]


def test_a_scheduler_that_raises_leaves_the_update_applied_once_and_the_window_closed():
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    short = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    other = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    engine = AmpEngine(model, optimizer, "fp32", scheduler=[short, other])
    assert all(step(model, engine).applied for _ in range(2))
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        step(model, engine)
    assert not engine.phase.open
    assert not engine.gradients()
    assert engine.update_index == other.last_epoch == 3


# ---- inference mode ----


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_under_inference_mode_is_the_same_step_and_training_goes_on_outside(precision):
    models = []
    for mode in (torch.inference_mode, torch.enable_grad):
        model, engine = build(precision)
        for at in range(3):
            torch.manual_seed(at)
            backward(model, engine)
            with mode():
                assert engine.step().applied
        models.append(values(model))
    assert same(*models)


# ---- arguments ----


@pytest.mark.parametrize("weight", [np.float32(3.0), np.int64(3), np.float64(3.0), 3])
def test_a_weight_may_be_any_real_number(weight):
    model, engine = build()
    backward(model, engine, weight=weight)
    assert engine.divisor == 3.0


def test_a_tensor_as_a_weight_is_refused_with_the_way_out():
    model, engine = build()
    with pytest.raises(AmpConfigError, match=r"weight=tensor\(3\) must be a finite fp32 number.*\.item\(\) reads one"):
        backward(model, engine, weight=torch.tensor(3))


@pytest.mark.parametrize("boundary", [np.bool_(True), np.bool_(False), True, False])
def test_a_boundary_may_be_numpys_truth_value(tmp_path, boundary):
    model, engine = build()
    backward(model, engine, boundary=boundary)
    assert engine.phase.complete is bool(boundary)
    engine.save(tmp_path / "run")


@pytest.mark.parametrize("boundary", ["no", 0, 1.0, torch.tensor(True)])
def test_a_boundary_that_is_no_truth_value_is_refused_and_opens_no_window(boundary):
    model, engine = build()
    with pytest.raises(AmpConfigError, match="must be True, False, or None to count up to accumulate_steps"):
        backward(model, engine, boundary=boundary)
    assert not engine.phase.open


# ---- blocks and threads ----


def test_one_long_autocast_block_remembers_buffers_for_each_of_its_windows():
    model, engine = build()
    with engine.autocast():
        for _ in range(3):
            engine.backward(model(torch.randn(3, 4)).square().mean())
            assert engine.step().applied
        before = values(model)
        engine.backward(model(NAN).square().mean())
        assert engine.step().skipped
        assert same(before, values(model))


def test_a_context_that_threads_share_closes_in_each_what_it_opened_there():
    _, engine = build("bf16-mixed")
    region = engine.autocast()
    opened, closed = threading.Event(), threading.Event()
    seen = []

    def other():
        with torch.autocast("cpu", torch.bfloat16):
            with region:
                opened.set()
                closed.wait(60)
            seen.append(torch.is_autocast_enabled("cpu"))

    with region:
        thread = threading.Thread(target=other)
        thread.start()
        opened.wait(60)
    assert not torch.is_autocast_enabled("cpu")
    closed.set()
    thread.join()
    assert seen == [True]
    assert engine._depth.value == 0


# ---- copies ----


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_copied_engine_goes_on_exactly_as_the_original(precision, copied):
    model, engine = build(precision, accumulate_steps=2)
    for _ in range(3):  # ends within a window
        backward(model, engine)
        engine.step()
    twin = copied(engine)
    for each in (engine, twin):
        torch.manual_seed(7)
        for _ in range(5):
            backward(each.model, each)
            each.step()
    assert engine.update_index == twin.update_index == 4
    assert same(values(engine.model), values(twin.model))
    assert all(a is not b for a, b in zip(engine.model.parameters(), twin.model.parameters(), strict=True))
    backward(twin.model, twin)
    with pytest.raises(AmpStateError, match="called by hand"):
        twin.optimizers[0].step()


# ---- reports ----


def test_a_report_that_was_read_lets_the_engine_go():
    model, engine = build()
    report = step(model, engine)
    assert report.applied
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert report.update_index == 1


@pytest.mark.parametrize("read", [False, True])
def test_a_report_can_be_pickled_and_copied(read):
    model, engine = build()
    report = step(model, engine, NAN)
    if read:
        assert report.skipped
    for twin in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert repr(twin) == repr(report)
        assert twin.first_nonfinite == "0.weight"


# ---- moments that torch would cast ----


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("bf16-sr", {}),
        ("bf16-kahan", {}),
        ("bf16-true", {}),
        ("bf16-true", {"master_weights": "remainder"}),
        ("bf16-true", {"master_weights": "none"}),
    ],
)
def test_loading_an_optimizers_own_state_keeps_every_bit_of_its_moments(precision, settings):
    model, engine = build(precision, **settings)
    step(model, engine)
    optimizer = engine.optimizers[0]
    saved = copy.deepcopy(optimizer.state_dict())
    moments = [one["exp_avg"].clone() for one in optimizer.state.values()]
    step(model, engine)
    optimizer.load_state_dict(saved)
    assert same(moments, [optimizer.state[part.weight.trained]["exp_avg"] for part in engine.assembly.parts])
    assert engine.dtypes().moments == "float32"
    assert step(model, engine).applied


# ---- weights changed by .data, which torch does not count ----


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
@pytest.mark.parametrize("size", [8, 3000])
def test_weights_clamped_through_data_stay_clamped_though_a_master_holds_them(precision, size):
    model, engine = build(precision, torch.optim.SGD, nn.Sequential(nn.Linear(4, size), nn.Linear(size, 1)))
    step(model, engine)
    for one in model.parameters():
        one.data.clamp_(-0.01, 0.01)
    with pytest.warns(UserWarning, match="were changed from outside; their masters are rebuilt from them"):
        step(model, engine)
    largest = max(one.abs().max().item() for one in model.parameters())
    assert largest < 0.02
    assert max(one.abs().max().item() for one in engine.masters().values()) < 0.02


def test_a_parameters_data_may_be_replaced_by_another_tensor():
    model, engine = build("bf16-true", torch.optim.SGD)
    step(model, engine)
    for one in model.parameters():
        one.data = torch.full_like(one, 7.0)
    with pytest.warns(UserWarning, match="were changed from outside"):
        step(model, engine)
    assert all((one - 7.0).abs().max() < 0.1 for one in model.parameters())


def test_a_few_elements_changed_through_data_are_found_in_time_wherever_they_are():
    model, engine = build("bf16-true", torch.optim.SGD, nn.Sequential(nn.Linear(4, 3000), nn.Linear(3000, 1)))
    step(model, engine)
    masters = engine.assembly.parts[0].weight
    found = 0
    for _ in range(40):
        masters.parameter.data[1717, 3] = 9.0
        found += masters.reconcile_()
    assert found


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
def test_a_master_that_somebody_writes_is_what_the_next_update_starts_from(precision):
    model, engine = build(precision, torch.optim.SGD)
    step(model, engine)
    exact = 1.0 + 2.0**-20
    engine.masters()["0.weight"].fill_(exact)
    for group in engine.optimizers[0].param_groups:
        group["lr"] = 0.0
    assert step(model, engine).applied
    assert (engine.masters()["0.weight"] == exact).all()
    assert (model[0].weight == 1.0).all()


# ---- warnings ----


@pytest.mark.parametrize("case", ["outer", "inner", "outside", "changed"])
def test_a_warning_points_at_the_users_own_line(case):
    model, engine = build("bf16-true" if case == "changed" else "bf16-mixed")

    def outer():
        with torch.autocast("cpu", torch.float16):
            step(model, engine)

    def inner():
        with engine.autocast(), torch.autocast("cpu", torch.float16):
            nn.functional.softmax(torch.ones(2), -1)

    def outside():
        engine.backward(model(torch.randn(3, 4)).sum())

    def changed():
        model[0].load_state_dict({name: one + 1 for name, one in model[0].state_dict().items()})
        step(model, engine)

    provoke = {"outer": outer, "inner": inner, "outside": outside, "changed": changed}[case]
    with pytest.warns(UserWarning, match=r"inside|changed from outside") as caught:
        provoke()
    assert {one.filename for one in caught} == {__file__}


# ---- limits and scales that change ----


@pytest.mark.parametrize("update", ["fused", "exact"])
def test_a_groups_own_limit_may_be_changed_between_steps(update):
    model = nn.ParameterDict({"w": torch.zeros(1)})
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "max_grad_norm": 1.0}], lr=1.0)
    engine = AmpEngine(model, optimizer, "fp32", update=update)
    moved = []
    for limit in (1.0, 0.25, None):
        optimizer.param_groups[0]["max_grad_norm"] = limit
        before = model["w"].item()
        engine.backward((model["w"] * 8.0).sum())
        engine.step()
        moved.append(round(before - model["w"].item(), 4))
    assert moved == [1.0, 0.25, 8.0]
    optimizer.param_groups[0]["max_grad_norm"] = -1.0
    engine.backward((model["w"] * 8.0).sum())
    with pytest.raises(
        AmpConfigError, match=r"max_grad_norm=-1\.0 of a parameter group must be a finite number above 0"
    ):
        engine.step()


def test_a_limit_that_a_group_gets_after_the_engine_was_built_is_refused_instead_of_ignored():
    model, engine = build()
    engine.optimizers[0].param_groups[0]["max_grad_norm"] = 0.1
    backward(model, engine)
    with pytest.raises(AmpStateError, match=r"parameter group 0 of AdamW 0 got a max_grad_norm after the engine was"):
        engine.step()


def test_a_scalers_state_that_comes_within_a_window_is_refused_and_the_window_stays_what_it_is():
    model, engine = build("fp16-mixed")
    backward(model, engine)
    state = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
    with pytest.raises(
        AmpStateError, match=r"import_scaler\(\) within a window, whose 1 micro-steps were scaled by 16"
    ):
        engine.import_scaler("torch.amp", state)
    report = engine.step()
    assert (report.applied, report.loss_scale) == (True, 16.0)


@pytest.mark.parametrize(
    ("update", "norm_type", "max_norm", "gradient"),
    [
        ("fused", 1.0, 1.0, 1e38),
        ("fused", 7.0, 1.0, 3e38),
        ("fused", 7.0, 1.0, 1e-30),
        ("fused", 2.0, 1e-10, 1e38),
        ("exact", 2.0, 1e-10, 1e38),
        ("fused", math.inf, 1e-30, 3e38),
        ("exact", math.inf, 1e-30, 3e38),
    ],
)
def test_no_norm_and_no_limit_of_finite_gradients_skips_or_breaks_a_step(update, norm_type, max_norm, gradient):
    model = nn.ParameterDict({"w": torch.zeros(4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = AmpEngine(model, optimizer, "fp32", norm_type=norm_type, max_grad_norm=max_norm, update=update)
    engine.backward((model["w"] * gradient).sum())
    report = engine.step()
    assert report.applied
    expected = gradient * 4.0 ** (1.0 / norm_type)
    assert report.grad_norm == pytest.approx(expected, rel=1e-6)
    assert model["w"].isfinite().all()
    assert model["w"].abs().max().item() <= min(max_norm, gradient) * 1.0001
