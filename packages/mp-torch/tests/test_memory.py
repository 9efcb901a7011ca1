"""The memory estimate: arithmetic by hand, papers' figures, and the tensors of real runs."""

import gc
import math
import warnings

import pytest
import torch
from torch import nn

from mp_torch import AmpEngine, LossScale
from mp_torch.dtypes import PRECISIONS
from mp_torch.errors import AmpConfigError
from mp_torch.memory import memory_estimate


def test_the_zero_paper_counts_what_this_counts():
    """Figure 1 of ZeRO: 7.5 billion parameters, 64 ranks, Adam: 120, 31.4, 16.6 and 1.9 GB a rank."""
    gigabytes = [
        memory_estimate(7_500_000_000, "fp16-true", "adam", ranks=64, sharding=sharding).total / 1e9
        for sharding in ("none", "zero1", "zero2", "zero3")
    ]
    assert [round(one, 1) for one in gigabytes] == [120.0, 31.4, 16.6, 1.9]


def test_masters_are_counted_in_the_total():
    estimate = memory_estimate(1000, "bf16-true", "adamw")
    assert (estimate.weights, estimate.masters, estimate.gradients, estimate.moments) == (2000, 4000, 2000, 8000)
    assert estimate.total == 16000
    assert estimate.bytes_per_parameter("total") == 16.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_has_an_estimate(precision):
    assert memory_estimate(8, precision).total > 0


def test_frozen_parameters_have_weights_alone_and_buffers_are_counted():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    estimate = memory_estimate(model, "bf16-true", "adamw")
    assert estimate.parameters == 16 + 4 + 8
    assert estimate.trained == 12
    assert estimate.weights == 20 * 2 + 8 * 4  # batch normalisation keeps fp32
    assert estimate.masters == 4 * 4
    assert estimate.gradients == 4 * 2 + 8 * 4
    assert estimate.moments == 12 * 8
    assert estimate.buffers == (4 + 4) * 4 + 8  # mean and variance in fp32, a count in int64


def test_a_tied_parameter_is_counted_once():
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    assert memory_estimate(model, "fp32", "sgd").parameters == 24
    assert memory_estimate([embedding.weight, head.weight], "fp32", "sgd").parameters == 24


def test_a_model_on_meta_is_estimated_without_memory():
    with torch.device("meta"):
        model = nn.Linear(100_000, 100_000)
    assert memory_estimate(model, "bf16-mixed", "adamw").total == 16 * (10**10 + 10**5)


def test_a_model_without_parameters_takes_nothing():
    estimate = memory_estimate([], "fp32", "sgd")
    assert (estimate.total, estimate.bytes_per_parameter("total")) == (0, 0.0)


@pytest.mark.parametrize(
    ("optimizer", "settings", "moments"),
    [
        ("sgd", {}, 0),
        ("sgd", {"momentum": 0.9}, 4),
        ("adam", {}, 8),
        ("adamw", {}, 8),
        ("adamw", {"amsgrad": True}, 12),
    ],
)
def test_moments_follow_the_optimizer_by_name_and_by_itself(optimizer, settings, moments):
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    real = kinds[optimizer]([torch.zeros(10, requires_grad=True)], **settings)
    by_name = memory_estimate(10, "fp32", optimizer, **settings)
    assert by_name.bytes_per_parameter("moments") == moments
    assert memory_estimate(10, "fp32", real) == by_name


def test_fp32_accumulation_holds_gradients_in_fp32():
    assert memory_estimate(10, "bf16-true", accumulate="fp32").gradients == 40
    assert memory_estimate(10, "bf16-true").gradients == 20


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_fsdp_divides_each_tensor_by_rows_and_rounds_up(ranks):
    model = nn.Linear(7, 5)
    estimate = memory_estimate(model, "bf16-mixed", "adamw", ranks=ranks, sharding="fsdp")
    rows = math.ceil(5 / ranks)
    assert estimate.weights == 4 * (rows * 7 + rows)
    assert estimate.total == 16 * (rows * 7 + rows)
    assert estimate.parameters == 40


def test_a_scalar_parameter_is_not_divided():
    assert memory_estimate([torch.zeros((), requires_grad=True)], "fp32", "sgd", ranks=4, sharding="fsdp").weights == 4


def test_zero_divides_the_flattened_whole():
    model = nn.Linear(7, 5)
    one, two = (memory_estimate(model, "bf16-true", "adamw", ranks=3, sharding=name) for name in ("zero1", "zero2"))
    assert one.weights == two.weights == 80
    assert one.gradients == 80
    assert two.gradients == 2 * 14
    assert one.masters == two.masters == 4 * 14
    assert one.moments == two.moments == 8 * 14


def test_the_table_names_every_role():
    lines = str(memory_estimate(2**28, "bf16-true", "adamw")).splitlines()
    assert [line.split()[0] for line in lines] == [
        "role", "weights", "masters", "gradients", "moments", "buffers", "total",
    ]  # fmt: skip
    assert lines[-1].split() == ["total", "4.000", "16.00"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp64"}, r"precision='fp64' is not one of fp32, "),
        ({"optimizer": "lion"}, r"optimizer 'lion' is not one of sgd, adam, adamw; name the one that keeps"),
        ({"sharding": "zero4"}, r"sharding='zero4' must be one of 'none', 'zero1', 'zero2', 'zero3', 'fsdp'"),
        ({"ranks": 0}, r"ranks=0 must be a whole number from 1 up; 1 is a single process"),
        ({"ranks": True}, r"ranks=True must be a whole number"),
        ({"accumulate": "bf16"}, r"accumulate='bf16' must be 'fp32' or 'parameter'"),
        ({"master_weights": "half"}, r"master_weights='half' is not one of fp32, remainder, none"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(AmpConfigError, match=message):
        memory_estimate(10, **arguments)


def test_a_negative_number_of_parameters_is_refused():
    with pytest.raises(AmpConfigError, match=r"-1 parameters: the number must be 0 or more"):
        memory_estimate(-1)


def test_an_optimizer_of_another_kind_is_refused_by_its_name():
    with pytest.raises(AmpConfigError, match=r"optimizer 'rprop' is not one of sgd, adam, adamw"):
        memory_estimate(10, "fp32", torch.optim.Rprop([torch.zeros(1, requires_grad=True)]))


class Odd(nn.Module):
    """Tied, frozen, scalar and normalised parameters, some of which stay in fp32, and integer buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.statistics = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(11, dtype=torch.int64))

    def forward(self, x):
        h = self.statistics(self.norm(self.body(self.embedding(x)) * self.scale))
        return self.head(self.frozen(h))


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw with amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
}


def size(tensors):
    """Bytes of the storages behind some tensors, each counted once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def alive():
    """Every tensor with memory of its own that Python can reach: tracing leaves others behind, which have none."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at every object wakes deprecated ones of other packages
        return [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]


def trained(precision, optimizer, micro_steps=1, **settings):
    """A real model after one update and the micro-steps of the next window, and its optimizer and engine."""
    kind, options = OPTIMIZERS[optimizer]
    model = Odd()
    real = kind([one for one in model.parameters() if one.requires_grad], lr=1e-2, **options)
    settings |= {"loss_scale": LossScale.static(256.0)} if precision.startswith("fp16") else {}
    engine = AmpEngine(model, real, precision=precision, accumulate_steps=micro_steps, **settings)
    x = torch.arange(10) % 11
    for window in range(2):
        for _ in range(micro_steps):
            with engine.autocast():
                loss = nn.functional.cross_entropy(model(x).float(), x)
            engine.backward(loss)
        if window == 0:
            assert engine.step().applied
    return model, real, engine


def by_role(model, optimizer, engine):
    state = [one for held in optimizer.state.values() for name, one in held.items() if name != "step"]
    return {
        "weights": size(model.parameters()),
        "masters": size([one for held in engine.state_dict()["weights"].values() for one in held.values()]),
        "gradients": size(engine.gradients().values()),
        "moments": size([one for one in state if isinstance(one, torch.Tensor)]),
        "buffers": size(model.buffers()),
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_estimate_is_what_the_tensors_of_a_real_engine_measure(precision, optimizer):
    estimate = memory_estimate(Odd(), precision, OPTIMIZERS[optimizer][0]([torch.zeros(1)], **OPTIMIZERS[optimizer][1]))
    model, real, engine = trained(precision, optimizer)
    assert by_role(model, real, engine) == {role: getattr(estimate, role) for role in by_role(model, real, engine)}


@pytest.mark.parametrize("kind", ["fp32", "remainder", "none"])
def test_every_kind_of_master_weights_measures_as_estimated(kind):
    estimate = memory_estimate(Odd(), "bf16-true", "adamw", master_weights=kind)
    measured = by_role(*trained("bf16-true", "adamw", master_weights=kind))
    assert measured == {role: getattr(estimate, role) for role in measured}


@pytest.mark.parametrize("accumulate", ["fp32", "parameter"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_gradients_of_a_long_window_measure_as_estimated(precision, accumulate):
    estimate = memory_estimate(Odd(), precision, "adamw", accumulate=accumulate)
    measured = by_role(*trained(precision, "adamw", micro_steps=3, accumulate=accumulate))
    assert measured == {role: getattr(estimate, role) for role in measured}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_real_engine_keeps_nothing_that_the_total_leaves_out(precision):
    """Every tensor alive in the process is counted, not only those in the roles."""
    others = alive()  # held, so that no new tensor gets the address of an old one
    before = {one.untyped_storage().data_ptr() for one in others}
    model, optimizer, engine = trained(precision, "adamw")
    gradients = engine.gradients()  # held: autograd's tensors are objects only once Python has asked for them
    here = size([one for one in alive() if one.untyped_storage().data_ptr() not in before])
    total = memory_estimate(model, precision, optimizer).total
    small = size(model.buffers()) + 4 * len(list(model.parameters()))  # snapshot of the buffers, step counters
    assert gradients
    assert total <= here <= total + small
