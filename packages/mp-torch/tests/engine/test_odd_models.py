"""Models that are not two Linear layers: tied, frozen, scalar, empty, sparse, complex, integer, and changing ones."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from mp_torch import AmpConfigError, AmpEngine, AmpStateError, LossScale
from mp_torch.dtypes import PRECISIONS

KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "own": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def engine_on(model, precision="fp32", optimizer="adamw", parameters=None, **settings):
    if precision.startswith("fp16"):
        settings.setdefault("loss_scale", LossScale.static(8.0))
    return AmpEngine(model, KINDS[optimizer](parameters or model.parameters()), precision=precision, **settings)


def step(engine, loss):
    with engine.autocast():
        value = loss()
    engine.backward(value)
    return engine.step()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x)).float()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tied_parameter_stays_tied_and_is_trained_once(precision):
    model = Tied()
    engine = engine_on(model, precision)
    x = torch.arange(7)
    for _ in range(3):
        assert step(engine, lambda: functional.cross_entropy(model(x), x)).applied
    assert model.head.weight is model.embedding.weight
    assert list(engine.masters()) == ["embedding.weight"]


def test_a_tied_parameter_counts_once_in_the_norm():
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    x = torch.arange(7)
    functional.cross_entropy(twin(x), x).backward()
    report = step(engine_on(model, update="exact"), lambda: functional.cross_entropy(model(x), x))
    assert report.grad_norm == pytest.approx(float(twin.head.weight.grad.norm()), rel=1e-6)


class Odd(nn.Module):
    """Parameters of every odd shape, one without a use, one frozen, and buffers of other dtypes."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.used = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("phases", torch.ones(2, dtype=torch.complex64))

    def forward(self, x):
        self.steps += 1
        return ((x * self.used).sum() * self.scalar + self.empty.sum() + self.frozen.sum()).float()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scalar_empty_unused_and_frozen_parameters_train_or_stay_as_they_should(precision, optimizer):
    model = Odd()
    engine = engine_on(model, precision, optimizer)
    x = torch.ones(3)
    for _ in range(3):
        assert step(engine, lambda: model(x)).applied
    assert model.scalar.item() != 2.0
    assert (model.used != 1.0).all()
    assert (model.unused == 1.0).all()
    assert (model.frozen == 1.0).all()
    assert model.steps.tolist() == [3, 3, 3]
    assert step(engine, lambda: model(x) * float("nan")).skipped
    assert model.steps.tolist() == [3, 3, 3]  # an integer buffer is given back too
    engine.load_state_dict(engine.state_dict())


def test_complex_parameters_are_refused_by_name_unless_they_do_not_train():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
            self.weight = nn.Parameter(torch.ones(2))

    model = Complex()
    with pytest.raises(AmpConfigError, match=r"trains .*float32 parameters, not 'phase' \(complex64\)"):
        engine_on(model, "bf16-mixed", "sgd")
    engine = engine_on(model, "bf16-true", "sgd", parameters=[model.weight])
    assert step(engine, lambda: model.weight.float().sum()).applied
    assert model.phase.dtype == torch.complex64


def test_frozen_parameters_of_a_dtype_that_somebody_chose_keep_it_in_a_true_precision():
    model = nn.Linear(4, 1)
    dtypes = (torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.float32)
    for dtype in dtypes:
        frozen = nn.Parameter(torch.ones(4).to(dtype), requires_grad=False)
        model.register_parameter(str(dtype).removeprefix("torch."), frozen)
    AmpEngine(model, torch.optim.SGD([model.weight, model.bias], lr=0.1), "bf16-true")
    held = [getattr(model, str(dtype).removeprefix("torch.")).dtype for dtype in dtypes]
    assert held == [*dtypes[:-1], torch.bfloat16]


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-mixed", "bf16-true"])
def test_sparse_gradients_are_clipped_and_applied_as_dense_ones(precision):
    def run(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 3))
        engine = engine_on(model, precision, "sgd", max_grad_norm=0.1)
        x = torch.tensor([1, 1, 2, 9])
        reports = [step(engine, lambda: model(x).float().square().sum()) for _ in range(3)]
        assert all(report.applied for report in reports)
        return [one.detach().float() for one in model.parameters()], [report.grad_norm for report in reports]

    (sparse, sparse_norms), (dense, dense_norms) = run(True), run(False)
    assert sparse_norms == pytest.approx(dense_norms, rel=1e-6)
    for one, other in zip(sparse, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_sparse_gradient_whose_duplicates_add_up_to_infinity_is_skipped():
    model, twice = nn.Embedding(10, 4, sparse=True), torch.tensor([1, 1])
    before = model.weight.detach().clone()
    report = step(engine_on(model, "fp32", "sgd"), lambda: model(twice).mul(3e38).sum())
    assert report.skipped
    assert torch.equal(model.weight, before)


def test_each_parameter_group_keeps_its_own_hyperparameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    twin = copy.deepcopy(model)

    def optimizer_of(net):
        slow = {"params": net[1].parameters(), "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
        return torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.1}, slow], lr=1.0)

    engine = AmpEngine(model, optimizer_of(model), precision="fp32", max_grad_norm=None)
    plain, x = optimizer_of(twin), torch.randn(5, 3)
    for _ in range(4):
        step(engine, lambda: model(x).square().sum())
        plain.zero_grad()
        twin(x).square().sum().backward()
        plain.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_that_is_unfrozen_later_trains_from_then_on(precision):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    engine = engine_on(model, precision)
    x, before = torch.ones(2, 3), model[0].weight.detach().clone()
    assert step(engine, lambda: model(x).float().sum()).applied
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    assert step(engine, lambda: model(x).float().sum()).applied
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_of_any_memory_layout_train_and_resume(precision):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.randn(16, 2).t())
    engine = engine_on(model, precision)
    x = torch.randn(2, 3, 4, 4).to(model[0].weight.dtype)
    for _ in range(2):
        assert step(engine, lambda: model(x).float().square().sum()).applied
    engine.load_state_dict(engine.state_dict())
    assert step(engine, lambda: model(x).float().square().sum()).applied


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_with_regions_can_be_copied_and_pickled_and_keeps_them(precision):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    engine = engine_on(model, precision)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.randn(4, 3)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with engine.autocast():
            assert twin(x).dtype == model(x).dtype
        with torch.no_grad():
            twin[2].weight.fill_(3.0)  # its own module's forward, not the original's
        with engine.autocast():
            assert not torch.equal(twin(x).float(), model(x).float())


# ---- what changes after the engine was built ----


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_parameter_group_added_later_is_refused_instead_of_never_trained(precision):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    engine = AmpEngine(model, optimizer, precision=precision)
    optimizer.add_param_group({"params": model[1].parameters()})
    with pytest.raises(AmpStateError, match=r"groups hold 4 parameters that are not the 2 which the engine"):
        step(engine, lambda: model(torch.ones(1, 3)).float().sum())


def test_a_model_cast_later_is_refused_by_the_parameters_name():
    model = nn.Linear(3, 3)
    engine = engine_on(model, "fp16-mixed")
    model.half()
    with pytest.raises(AmpStateError, match=r"'weight' was torch.float32 when the engine .* is torch.float16 now"):
        step(engine, lambda: model(torch.ones(1, 3).half()).float().sum())


def test_a_parameter_replaced_later_is_refused_instead_of_never_trained():
    model = nn.Linear(3, 3)
    engine = engine_on(model)
    model.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(AmpStateError, match=r"parameter 'weight' was replaced by another"):
        step(engine, lambda: model(torch.ones(1, 3)).sum())


@pytest.mark.parametrize(
    ("name", "value"), [("lr", torch.tensor(float("nan"))), ("lr", torch.tensor(math.inf)), ("betas", (math.nan, 0.9))]
)
def test_a_tensor_or_a_pair_that_is_not_finite_is_refused_too(name, value):
    model = nn.Linear(2, 2)
    engine = AmpEngine(model, torch.optim.AdamW(model.parameters()), "fp32")
    engine.optimizers[0].param_groups[0][name] = value
    engine.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(AmpStateError, match=rf"^{name}=.* in parameter group 0 of AdamW 0 is not finite"):
        engine.step()
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"keep_fp32": ["*"]}, {"keep_fp32": [nn.Module]}])
def test_a_compiled_model_is_the_model_itself_under_its_own_names(settings):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")
    engine = AmpEngine(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), "bf16-mixed", **settings)
    assert engine.model is model
    with engine.autocast():
        loss = compiled(torch.ones(2, 4)).float().mean()
    engine.backward(loss)
    assert engine.step().applied
    assert list(engine.masters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hyperparameter_that_is_not_finite_is_refused_before_it_reaches_a_parameter(name, value):
    model = nn.Linear(2, 2)
    engine = engine_on(model)
    engine.optimizers[0].param_groups[0][name] = value
    before = model.weight.detach().clone()
    with pytest.raises(AmpStateError, match=rf"{name}={value!r} in parameter group 0 of AdamW 0 is not finite"):
        step(engine, lambda: model(torch.ones(1, 2)).sum())
    assert torch.equal(model.weight, before)
    engine.optimizers[0].param_groups[0][name] = 0.01
    assert engine.step().applied  # the window is still there


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_an_optimizers_step_hooks_run_when_the_update_is_applied_and_only_then(precision):
    model = nn.Linear(2, 2)
    optimizer, calls = torch.optim.AdamW(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    engine = AmpEngine(model, optimizer, precision=precision)
    assert step(engine, lambda: model(torch.ones(1, 2)).float().sum()).applied
    assert step(engine, lambda: model(torch.ones(1, 2)).float().sum() * float("nan")).skipped
    assert calls == ["before", "after"]


def test_step_hooks_registered_later_are_refused_instead_of_never_called():
    model = nn.Linear(2, 2)
    engine = engine_on(model)
    engine.optimizers[0].register_step_post_hook(lambda *_: None)
    with pytest.raises(AmpStateError, match=r"AdamW 0 got step hooks after the engine was built"):
        step(engine, lambda: model(torch.ones(1, 2)).sum())


def test_an_optimizers_own_step_never_sees_the_gradient_of_an_earlier_window():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    model = Two()
    engine = engine_on(model, "bf16-true", "own")
    step(engine, lambda: (model.a + model.b).float().sum())
    before = engine.masters()["b"].clone()
    assert step(engine, lambda: model.a.float().sum()).applied
    assert torch.equal(engine.masters()["b"], before)
