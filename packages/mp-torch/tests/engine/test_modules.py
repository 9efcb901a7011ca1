"""What torch's own modules compute in, against what ``explain()`` says; operators; spectral norms."""

import collections
import operator

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from mp_torch import AmpConfigError, AmpEngine, AmpStateError, LossScale


def r(*shape):
    return torch.randn(*shape)


def labels(*shape):
    return torch.randint(1, 3, shape)


ONES = torch.ones(2)
MODULES = {
    "linear": (lambda: nn.Linear(4, 4), [r(2, 4)]),
    "linear, a subclass": (lambda: type("Mine", (nn.Linear,), {})(4, 4), [r(2, 4)]),
    "linear, parametrized": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), [r(2, 4)]),
    "bilinear": (lambda: nn.Bilinear(4, 4, 4), [r(2, 4), r(2, 4)]),
    "conv1d": (lambda: nn.Conv1d(3, 3, 1), [r(2, 3, 4)]),
    "conv2d": (lambda: nn.Conv2d(3, 3, 1), [r(2, 3, 4, 4)]),
    "conv3d": (lambda: nn.Conv3d(3, 3, 1), [r(2, 3, 4, 4, 4)]),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 3, 1), [r(2, 3, 4)]),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 3, 1), [r(2, 3, 4, 4)]),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(3, 3, 1), [r(2, 3, 4, 4, 4)]),
    "lstm": (lambda: nn.LSTM(4, 4), [r(2, 3, 4)]),
    "rnn": (lambda: nn.RNN(4, 4), [r(2, 3, 4)]),
    "rnn_cell": (lambda: nn.RNNCell(4, 4), [r(2, 4)]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), [r(2, 3, 4)] * 3),
    "layer_norm": (lambda: nn.LayerNorm(4), [r(2, 4)]),
    "rms_norm": (lambda: nn.RMSNorm(4), [r(2, 4)]),
    "group_norm": (lambda: nn.GroupNorm(2, 4), [r(2, 4, 3)]),
    "instance_norm1d": (lambda: nn.InstanceNorm1d(3, affine=True), [r(2, 3, 4)]),
    "instance_norm3d": (lambda: nn.InstanceNorm3d(3), [r(2, 3, 4, 4, 4)]),
    "batch_norm": (lambda: nn.BatchNorm1d(4), [r(3, 4)]),
    "softmax": (lambda: nn.Softmax(-1), [r(2, 4)]),
    "softmax2d": (nn.Softmax2d, [r(2, 3, 4, 4)]),
    "log_softmax": (lambda: nn.LogSoftmax(-1), [r(2, 4)]),
    "gelu": (nn.GELU, [r(2, 4)]),
    "prelu": (nn.PReLU, [r(2, 4)]),
    "silu": (nn.SiLU, [r(2, 4)]),
    "max_pool2d": (lambda: nn.MaxPool2d(2), [r(2, 3, 4, 4)]),
    "max_pool3d": (lambda: nn.MaxPool3d(2), [r(2, 3, 4, 4, 4)]),
    "adaptive_avg_pool3d": (lambda: nn.AdaptiveAvgPool3d(1), [r(2, 3, 4, 4, 4)]),
    "reflection_pad1d": (lambda: nn.ReflectionPad1d(1), [r(2, 3, 4)]),
    "reflection_pad3d": (lambda: nn.ReflectionPad3d(1), [r(2, 3, 4, 4, 4)]),
    "l1_loss": (nn.L1Loss, [r(2, 4), r(2, 4)]),
    "mse_loss": (nn.MSELoss, [r(2, 4), r(2, 4)]),
    "smooth_l1_loss": (nn.SmoothL1Loss, [r(2, 4), r(2, 4)]),
    "huber_loss": (nn.HuberLoss, [r(2, 4), r(2, 4)]),
    "cross_entropy": (nn.CrossEntropyLoss, [r(2, 4), labels(2)]),
    "nll_loss": (nn.NLLLoss, [r(2, 4), labels(2)]),
    "kl_div": (lambda: nn.KLDivLoss(reduction="sum"), [r(2, 4), r(2, 4)]),
    "binary_cross_entropy": (nn.BCELoss, [r(2, 4).sigmoid(), r(2, 4).sigmoid()]),
    "bce_with_logits": (nn.BCEWithLogitsLoss, [r(2, 4), r(2, 4).sigmoid()]),
    "ctc_loss": (nn.CTCLoss, [r(5, 2, 4), labels(2, 3), torch.tensor([5, 5]), torch.tensor([3, 3])]),
    "margin_ranking_loss": (nn.MarginRankingLoss, [r(2), r(2), ONES]),
    "hinge_embedding_loss": (nn.HingeEmbeddingLoss, [r(2), ONES]),
    "cosine_embedding_loss": (nn.CosineEmbeddingLoss, [r(2, 4), r(2, 4), ONES]),
    "triplet_margin_loss": (nn.TripletMarginLoss, [r(2, 4)] * 3),
    "soft_margin_loss": (nn.SoftMarginLoss, [r(2), ONES]),
    "multi_margin_loss": (nn.MultiMarginLoss, [r(2, 4), labels(2)]),
    "multilabel_margin_loss": (nn.MultiLabelMarginLoss, [r(2, 4), labels(2, 4)]),
    "poisson_nll_loss": (nn.PoissonNLLLoss, [r(2, 4), r(2, 4)]),
}  # fmt: skip


def engine_of(model, precision="bf16-mixed", **settings):
    return AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.01), precision, **settings)


@pytest.mark.parametrize("name", MODULES)
def test_what_explain_says_of_a_module_is_what_its_output_shows(name):
    make, inputs = MODULES[name]
    module = make()
    engine = engine_of(nn.ModuleDict({"it": module, "trained": nn.Linear(1, 1)}))
    promised = engine.explain()["it"].compute
    for given in (torch.float32, torch.bfloat16):
        with engine.autocast():
            output = module(*[one.to(given) if one.is_floating_point() else one for one in inputs])
        output = output[0] if isinstance(output, tuple) else output
        widest = torch.promote_types(given, torch.float32 if list(module.parameters()) else given)
        wanted = {
            "bfloat16": torch.bfloat16,
            "float32": torch.float32,
            "as its inputs": given,
            "the widest of its inputs": widest,
        }
        assert output.dtype == wanted[promised], (promised, given)


# ---- rules by op, written as operators ----


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("pow", lambda x: x**2),
        ("pow", lambda x: 2**x),
        ("pow", lambda x: x**x),
        ("sub", lambda x: x - 1),
        ("sub", lambda x: 1 - x),
        ("add", lambda x: 1 + x),
        ("mul", lambda x: 2 * x),
        ("div", lambda x: x / 3),
        ("div", lambda x: 3 / x),
        ("matmul", lambda x: x @ x),
        ("remainder", lambda x: x % 3),
        ("remainder", lambda x: 3 % x),
        ("floor_divide", lambda x: x // 3),
        ("floor_divide", lambda x: 3 // x),
        ("neg", operator.neg),
    ],
)
def test_a_rule_by_op_holds_for_the_operator_too(name, compute):
    engine = engine_of(nn.Linear(1, 1), op_rules={name: "fp32"})
    with engine.autocast():
        assert compute(torch.full((2, 2), 1.5, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_square_written_as_an_operator_does_not_overflow_under_a_rule():
    engine = engine_of(nn.Linear(1, 1), "fp16-mixed", op_rules={"pow": "fp32"})
    with engine.autocast():
        assert (torch.tensor([300.0], dtype=torch.float16) ** 2).item() == 90000.0


# ---- spectral norms ----


def discriminator(spectral_norm):
    torch.manual_seed(0)
    return nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.ReLU(), spectral_norm(nn.Linear(8, 1)))


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true", "bf16-sr"])
def test_spectral_norms_train_and_come_back_after_a_skip_in_every_precision(precision):
    model = discriminator(parametrizations.spectral_norm)
    scale = LossScale(init_scale=8.0) if precision.startswith("fp16") else None
    engine = engine_of(model, precision, loss_scale=scale)
    for x in (r(3, 4), r(3, 4), torch.full((3, 4), float("nan"))):
        before = [one.clone() for one in model.state_dict().values()]
        with engine.autocast():
            loss = model(x).float().square().mean()
        engine.backward(loss)
        report = engine.step()
    assert report.skipped
    assert report.update_index == 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


def test_a_16_bit_model_whose_spectral_norm_is_a_hook_is_refused_with_the_way_out():
    hooked = nn.utils.spectral_norm
    with pytest.raises(
        AmpConfigError, match=r"^the hook of torch\.nn\.utils\.spectral_norm on '0' .* keep_fp32=\['0'\]"
    ):
        engine_of(discriminator(hooked), "bf16-true")
    kept = engine_of(discriminator(hooked), "bf16-true", keep_fp32=["0", "2"])
    with kept.autocast():
        kept.backward(kept.model(r(3, 4)).float().mean())
    assert kept.step().applied


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-true", "bf16-kahan"])
def test_a_parametrized_weight_trains_by_what_it_is_made_of(precision):
    model = nn.Linear(4, 2)
    parametrize.register_parametrization(model, "weight", nn.Softplus())
    before = model.weight.detach().clone()
    scale = LossScale(init_scale=8.0) if precision.startswith("fp16") else None
    engine = engine_of(model, precision, loss_scale=scale)
    for _ in range(3):
        with engine.autocast():
            loss = model(torch.ones(3, 4)).float().square().mean()
        engine.backward(loss)
        assert engine.step().applied
    assert (model.weight < before).all()
    assert (model.weight > 0).all()


# ---- regions ----


def output_dtype(engine, module):
    with engine.autocast():
        return module(r(2, 4)).dtype


@pytest.mark.parametrize("second", [{}, {"lower": ["0"]}, {"keep_fp32": ["1"]}])
def test_a_second_engine_takes_back_what_the_first_one_told_modules(second):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine_of(model, keep_fp32=["0"])
    engine = engine_of(model, **second)
    for at in (0, 1):
        promised = engine.explain()[str(at)].compute
        assert output_dtype(engine, model[at]) == getattr(torch, promised)
    engine_of(model, "fp32")
    assert all("forward" not in one.__dict__ for one in model)


def test_a_forward_that_one_module_was_given_runs_in_the_modules_region_and_comes_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layer = model[0]

    def own(x):
        return 2 * nn.functional.linear(x, layer.weight, layer.bias)

    layer.forward = own
    x = r(2, 4)
    expected = own(x)
    for _ in range(2):
        engine = engine_of(model, keep_fp32=["0"])
        with engine.autocast():
            assert torch.equal(layer(x), expected)
    engine_of(model, "fp32")
    assert layer.forward is own


def test_a_shared_module_answers_to_each_of_its_names():
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"encoder": layer, "decoder": layer})
    engine = engine_of(model, keep_fp32=["decoder"])
    assert output_dtype(engine, model["encoder"]) == torch.float32
    assert engine.explain()["encoder"].rule == "keep_fp32: decoder"


def test_the_dtype_contract_is_broken_by_a_cast_of_the_model():
    model = nn.Linear(4, 4)
    engine = engine_of(model, "bf16-true")
    model.float()
    with pytest.raises(
        AmpStateError, match=r"^parameter 'weight' was torch\.bfloat16 when the engine was built and is"
    ):
        engine.dtypes()


def test_weight_decay_that_rounding_loses_counts_as_lost_though_no_gradient_asked_for_it():
    model = nn.ParameterDict({"w": torch.ones(8)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
    engine = AmpEngine(model, optimizer, "bf16-true", master_weights="none", max_grad_norm=None)
    engine.backward((model["w"].float() * 0.0).sum())
    report = engine.step()
    assert report.rounded_away == 1.0


Pair = collections.namedtuple("Pair", ["x", "label"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: Pair(x, "a"),
        lambda x: collections.OrderedDict(x=x, label=None),
        lambda x: {"x": x, "rest": [x, (x, 3)]},
        lambda x: collections.defaultdict(list, x=x),
    ],
)
@pytest.mark.parametrize("settings", [{"keep_fp32": ["it"]}, {"lower": ["it"]}])
def test_inputs_in_any_container_are_cast_for_a_region_and_keep_their_kind(wrap, settings):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, inputs):
            self.seen = type(inputs)
            x = inputs.x if isinstance(inputs, Pair) else inputs["x"]
            return self.linear(x) + 0 * x.sum()

    model = nn.ModuleDict({"it": Takes()})
    engine = engine_of(model, **settings)
    given = wrap(r(2, 4).bfloat16())
    with engine.autocast():
        output = model["it"](given)
    assert output.dtype == (torch.float32 if "keep_fp32" in settings else torch.bfloat16)
    assert model["it"].seen is type(given)
