"""Memory layouts: strides, gaps and sparse gradients never reach a kernel that reads memory in a row."""

import pytest
import torch
from torch import nn

from mp_torch import AmpEngine, LossScale

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
}


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3))


def train(model, optimizer, precision="fp32", *, make_input, between=None, hook=None, **settings):
    """Four steps; ``between`` is called after the second; returns the weights."""
    if hook is not None:
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(hook)
    engine = AmpEngine(model, OPTIMIZERS[optimizer](model.parameters()), precision, **settings)
    for at in range(4):
        torch.manual_seed(at)
        with engine.autocast():
            loss = model(make_input()).float().square().mean()
        engine.backward(loss)
        assert engine.step().applied
        if at == 1 and between is not None:
            between(engine)
    return [one.detach().clone() for one in model.parameters()]


def images():
    return torch.randn(2, 3, 8, 8)


def close(left, right, tolerance=1e-5):
    """A sum may be taken in another order, never of other elements."""
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("update", ["fused", "exact"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "bf16-kahan"])
def test_a_model_that_moves_to_channels_last_takes_its_moments_along(precision, optimizer, update):
    settings = {"make_input": images, "update": update, "max_grad_norm": None}
    stays = train(convolutions(), optimizer, precision, **settings)

    def move(engine):
        engine.model.to(memory_format=torch.channels_last)

    moves = train(convolutions(), optimizer, precision, between=move, **settings)
    assert close(stays, moves, 1e-5 if precision == "fp32" else 0.02)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "bf16-sr"])
def test_a_channels_last_model_resumes_from_a_file_bit_for_bit(tmp_path, precision, optimizer):
    def model():
        return convolutions().to(memory_format=torch.channels_last)

    def through_a_file(engine):
        engine.save(tmp_path / "run")
        engine.load(tmp_path / "run")

    never = train(model(), optimizer, precision, make_input=images)
    resumed = train(model(), optimizer, precision, make_input=images, between=through_a_file)
    assert all(torch.equal(a, b) for a, b in zip(never, resumed, strict=True))


def test_gradients_of_an_open_window_resume_in_their_parameters_layout(tmp_path):
    model = convolutions().to(memory_format=torch.channels_last)
    engine = AmpEngine(model, torch.optim.AdamW(model.parameters()), "fp32", accumulate_steps=2)
    engine.backward(model(images()).square().mean())
    before = {name: one.stride() for name, one in engine.gradients().items()}
    engine.save(tmp_path / "run")
    engine.load(tmp_path / "run")
    assert {name: one.stride() for name, one in engine.gradients().items()} == before


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "lay",
    [lambda g: g.t().contiguous().t(), lambda g: g[:1].expand(8, 4), lambda g: g[:, :1].expand(8, 4)],
    ids=["transposed", "one-row", "one-column"],
)
def test_a_hook_may_leave_a_gradient_in_any_layout(optimizer, lay):
    def run(laid):
        def hook(parameter):
            if parameter.dim() == 2:
                parameter.grad = lay(parameter.grad) if laid else lay(parameter.grad).contiguous()

        torch.manual_seed(0)
        return train(nn.Linear(4, 8), optimizer, make_input=lambda: torch.randn(3, 4), hook=hook)

    assert close(run(laid=True), run(laid=False))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "bf16-sr", "bf16-kahan"])
def test_a_parameter_that_is_a_view_with_gaps_trains_like_one_without(precision, optimizer):
    def run(gaps):
        torch.manual_seed(0)
        view = torch.randn(8, 8)[:, ::2]
        model = nn.Linear(4, 8)
        model.weight = nn.Parameter(view if gaps else view.clone(memory_format=torch.contiguous_format))
        return train(model, optimizer, precision, make_input=lambda: torch.randn(3, 4), max_grad_norm=None)

    assert close(run(gaps=True), run(gaps=False))


class Table(nn.Module):
    """Asks for sparse gradients in its forward, where nobody can see it beforehand."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.sparse_later = sparse

    def forward(self, places):
        return nn.functional.embedding(places, self.weight, sparse=self.sparse_later)


@pytest.mark.parametrize("accumulate", ["fp32", "parameter"])
@pytest.mark.parametrize("update", ["auto", "exact"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-true"])
def test_a_sparse_gradient_that_no_module_announced_is_applied_as_a_dense_one(precision, optimizer, update, accumulate):
    def run(sparse):
        model = Table(sparse)
        engine = AmpEngine(
            model, OPTIMIZERS[optimizer](model.parameters()), precision, update=update, accumulate=accumulate
        )
        for places in ([0, 1], [1, 1], [2, 5], [0, 5]):
            with engine.autocast():
                loss = model(torch.tensor(places)).float().square().sum()
            engine.backward(loss, boundary=places[1] == 5)
            engine.step()
        assert engine.update_index == 2
        return [model.weight.detach()]

    assert close(run(sparse=True), run(sparse=False), 0.01 if accumulate == "parameter" else 1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
def test_sparse_16_bit_gradients_add_up_over_a_window_also_beside_dense_ones(precision, tied):
    def run(sparse):
        torch.manual_seed(0)
        table = nn.Embedding(6, 4, sparse=sparse)
        engine = AmpEngine(
            table,
            torch.optim.SGD(table.parameters(), lr=0.1),
            precision,
            max_grad_norm=None,
            loss_scale=LossScale.static(256.0),
        )
        for at, places in enumerate(([0, 1], [1, 1], [2, 5])):
            loss = table(torch.tensor(places)).float().square().sum()
            if tied and at == 1:
                loss = loss + table.weight.float().sum()
            engine.backward(loss, boundary=at == 2)
        assert engine.step().applied
        return [table.weight.detach()]

    assert close(run(sparse=True), run(sparse=False))
