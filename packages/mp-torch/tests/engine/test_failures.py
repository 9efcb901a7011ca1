"""Calls that cannot work, and calls that fail half way: a typed error, and a state as before the call."""

import pytest
import torch
from torch import nn

from mp_torch import AmpConfigError, AmpEngine, AmpStateError, LossScale
from mp_torch.dtypes import PRECISIONS


def normalised():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def plain():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def built(precision="fp32", make=normalised, **settings):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, AmpEngine(model, optimizer, precision=precision, **settings)


def forward(model, engine, x, factor=1.0):
    with engine.autocast():
        return model(x).float().sum() * factor


def bits(model, engine):
    held = {**model.state_dict(), **{f"master {name}": one for name, one in engine.masters().items()}}
    return {name: one.detach().clone() for name, one in held.items()}


def same(one, other):
    return all(torch.equal(one[name].nan_to_num(7.0), other[name].nan_to_num(7.0)) for name in one)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3.0, r"backward\(\) of 3\.0: a loss must be a floating tensor"),
        (None, r"backward\(\) of None: a loss must be a floating tensor"),
        ([None], r"backward\(\) of None: a loss must be a floating tensor"),
        (torch.tensor(1), r"backward\(\) of torch.int64 tensor: a loss must be a floating tensor"),
        (torch.ones(1, dtype=torch.complex64), r"backward\(\) of torch.complex64 tensor"),
        ([], r"backward\(\[\]\) of no loss at all"),
        (torch.tensor(1.0), r"backward\(\) of a loss that needs no gradient"),
    ],
)
def test_a_loss_that_is_none_is_refused_and_opens_no_window(loss, message):
    model, engine = built()
    with pytest.raises(AmpStateError, match=message):
        engine.backward(loss)
    with pytest.raises(AmpStateError, match=r"step\(\) without backward\(\)"):
        engine.step()
    engine.backward(forward(model, engine, torch.randn(4, 2)))
    assert engine.step().applied


@pytest.mark.parametrize("model", [None, "model", torch.ones(2)])
def test_a_model_that_is_none_is_refused(model):
    with pytest.raises(AmpConfigError, match=r"model=.* must be a torch\.nn\.Module"):
        AmpEngine(model, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def test_a_parameter_without_a_shape_is_refused_by_name_and_trains_once_it_has_one():
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        AmpConfigError, match=r"^parameter '0\.weight' has no shape yet; run one batch through the lazy"
    ):
        AmpEngine(model, optimizer, "bf16-true")
    model(torch.ones(3, 4))
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-true")
    engine.backward(forward(model, engine, torch.randn(3, 4)))
    assert engine.step().applied


def test_a_model_built_under_inference_mode_is_refused_at_construction():
    with torch.inference_mode():
        model = nn.Linear(1, 1)
    with pytest.raises(AmpConfigError, match=r"^parameter 'weight' was made under torch\.inference_mode\(\), where"):
        AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


@pytest.mark.parametrize("optimizer", [None, "adamw", ["adamw"], torch.optim.SGD])
def test_an_optimizer_that_is_none_is_refused(optimizer):
    with pytest.raises(AmpConfigError, match=r"optimizer=.* must be a torch\.optim\.Optimizer, or a sequence of them"):
        AmpEngine(nn.Linear(1, 1), optimizer)


class Breaks(torch.autograd.Function):
    """Goes forward and fails on the way back."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, __):
        raise MemoryError("out of memory")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_backward_pass_that_fails_half_way_leaves_no_half_made_gradient(precision):
    settings = {"loss_scale": LossScale.static(8.0)} if precision.startswith("fp16") else {}
    model, engine = built(precision, plain, **settings)
    x = torch.randn(4, 2)
    before = bits(model, engine)
    with engine.autocast():
        loss = model[1](Breaks.apply(model[0](x))).float().sum()
    with pytest.raises(MemoryError, match="out of memory") as caught:
        engine.backward(loss)
    assert "discarded the window's gradients" in caught.value.__notes__[0]
    assert engine.gradients() == {}
    assert same(before, bits(model, engine))
    once, other = built(precision, plain, **settings)
    for net, one in ((model, engine), (once, other)):
        one.backward(forward(net, one, x))
        assert one.step().applied
    assert same(bits(model, engine), bits(once, other))  # as if the failure had never been


def test_a_failure_in_the_middle_of_a_window_discards_all_of_it():
    model, engine = built(accumulate_steps=3)
    x = torch.randn(4, 2)
    before = bits(model, engine)
    engine.backward(forward(model, engine, x))
    with engine.autocast():
        loss = Breaks.apply(model(x)).sum()
    with pytest.raises(MemoryError):
        engine.backward(loss)
    assert same(before, bits(model, engine))  # BatchNorm's statistics too
    for _ in range(2):
        engine.backward(forward(model, engine, x))
        assert not engine.step().applied
    engine.backward(forward(model, engine, x))
    assert engine.step().applied


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-true"])
def test_one_skip_too_many_raises_and_changes_no_bit_and_the_run_can_go_on(precision):
    scale = LossScale(init_scale=8.0, skip_limit=2) if precision.startswith("fp16") else LossScale.off(skip_limit=2)
    model, engine = built(precision, loss_scale=scale)
    before = bits(model, engine)
    for _ in range(2):
        engine.backward(forward(model, engine, torch.randn(4, 2), float("nan")))
        assert engine.step().skipped
    for _ in range(2):
        engine.backward(forward(model, engine, torch.full((4, 2), float("nan"))))
        with pytest.raises(AmpStateError, match=r"3 steps in a row were skipped, skip_limit=2: NaN in "):
            engine.step()
        assert same(before, bits(model, engine))
    engine.backward(forward(model, engine, torch.randn(4, 2)))
    assert engine.step().applied


def test_the_context_opens_when_it_is_entered_and_may_be_entered_again():
    model, engine = built("bf16-mixed", plain)
    context = engine.autocast()
    assert not torch.is_autocast_enabled("cpu")
    for _ in range(2):
        with context:
            assert torch.is_autocast_enabled("cpu")
            with context:
                assert model(torch.ones(1, 2)).dtype == torch.bfloat16
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")


def test_the_context_closes_when_its_block_raises():
    _, engine = built("bf16-mixed")
    with pytest.raises(ValueError, match="inside"), engine.autocast():
        raise ValueError("inside")
    assert not torch.is_autocast_enabled("cpu")


def test_the_context_decorates_a_function():
    model, engine = built("bf16-mixed", plain)

    @engine.autocast()
    def predict(x):
        return model(x)

    assert predict(torch.ones(1, 2)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_a_16_bit_loss_after_an_fp32_one_is_skipped_if_the_scale_is_too_large_for_it_and_recovers():
    model, engine = built("fp16-mixed", plain, accumulate_steps=2, loss_scale=LossScale(init_scale=65536.0))
    applied = []
    for _ in range(3):
        with engine.autocast():
            wide, narrow = model(torch.ones(1, 2)).float().sum(), model(torch.ones(1, 2)).sum()
        assert (wide.dtype, narrow.dtype) == (torch.float32, torch.float16)
        engine.backward(wide * 0.01)
        engine.backward(narrow * 0.01)
        applied.append(engine.step().applied)
    assert applied == [False, True, True]


NAN = float("nan")


@pytest.mark.parametrize(
    "place", ["input", "loss", "parameter", "buffer", "first gradient", "last gradient", "one element"]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_anywhere_is_skipped_and_changes_no_bit(precision, place):
    settings = {"loss_scale": LossScale(init_scale=8.0)} if precision.startswith("fp16") else {}
    model, engine = built(precision, **settings)
    x = torch.randn(4, 2)
    engine.backward(forward(model, engine, x))
    assert engine.step().applied
    if place == "parameter":
        model[0].weight.data.view(-1)[0] = NAN  # nobody counts it: masters are kept from it
    if place == "buffer":
        model.eval()
        model[1].running_mean[0] = NAN
    before = bits(model, engine)
    loss = forward(model, engine, torch.full_like(x, NAN) if place == "input" else x, NAN if place == "loss" else 1.0)
    engine.backward(loss)
    parameters = list(model.parameters())
    if place in ("first gradient", "last gradient"):
        parameters[0 if place.startswith("first") else -1].grad.fill_(NAN)
    if place == "one element":
        parameters[2].grad.view(-1)[-1] = NAN
    state = {key: value.clone() for key, value in engine.optimizers[0].state_dict()["state"].get(0, {}).items()}
    report = engine.step()
    assert report.skipped
    assert not report.applied
    assert report.first_nonfinite is not None
    assert report.nonfinite_kind == "NaN"
    assert same(before, bits(model, engine))
    for key, value in state.items():
        assert torch.equal(engine.optimizers[0].state_dict()["state"][0][key], value)
