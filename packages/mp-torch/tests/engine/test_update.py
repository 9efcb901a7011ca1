"""The update: bit for bit the reference, separately rounded or in the arithmetic of torch's fused kernels."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mp_reference.amp.fused import fused_step
from mp_reference.amp.loss_scale import LossScale as ReferenceLossScale
from mp_reference.amp.optimizers import SGD, Adam, AdamW
from mp_reference.amp.step import StepPolicy, initial_state, step
from mp_reference.spec.formats import BF16, FP16, FP32
from mp_torch import AmpConfigError, AmpEngine, LossScale

FORMATS = {"fp32": FP32, "fp16-true": FP16, "bf16-true": BF16}
RULES = [
    (torch.optim.SGD, SGD, {"lr": 0.1}),
    (torch.optim.SGD, SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (torch.optim.Adam, Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, AdamW, {"lr": 0.01, "maximize": True}),
    (torch.optim.AdamW, AdamW, {"lr": 0.01, "betas": (0.3, 0.9), "weight_decay": 0.0}),
]
HAS_FMA = torch.backends.cpu.get_cpu_capability() != "DEFAULT"


@st.composite
def histories(draw):
    """Windows of micro-steps: magnitudes of their gradients, overflows among them."""
    kinds = st.sampled_from(["small", "normal", "large", "inf", "nan", "zero"])
    return draw(st.lists(st.lists(kinds, min_size=1, max_size=3), min_size=1, max_size=12)), draw(st.integers(0, 2**32))


def gradient_of(kind, shape, rng):
    size = {"small": 1e-6, "normal": 1.0, "large": 1e3, "inf": 1.0, "nan": 1.0, "zero": 0.0}[kind]
    values = np.asarray(rng.standard_normal(shape) * size, np.float32)
    if kind in ("inf", "nan") and values.size:
        values.flat[rng.integers(values.size)] = math.inf if kind == "inf" else math.nan
    return torch.from_numpy(values)


def same(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return (a.view(np.uint32) == b.view(np.uint32)).all() or (
        (np.isnan(a) == np.isnan(b)).all()
        and np.array_equal(a[~np.isnan(a)].view(np.uint32), b[~np.isnan(b)].view(np.uint32))
    )


def replay(precision, rule, update, history, seed, max_norm):
    kind, reference, options = rule
    rng = np.random.default_rng(seed)
    model = nn.ParameterDict(
        {name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for name, shape in
         (("a", (3, 7)), ("b", (33,)), ("c", ()))}
    )  # fmt: skip
    originals = [one.detach().numpy().copy() for one in model.values()]
    knobs = {"init_scale": 1024.0, "growth_interval": 3, "skip_limit": None}
    engine = AmpEngine(
        model, kind(model.parameters(), **options), precision, update=update, max_grad_norm=max_norm,
        loss_scale=LossScale(**knobs),
    )  # fmt: skip
    policy = StepPolicy(optimizer=reference(**options), loss_scale=ReferenceLossScale(**knobs), max_grad_norm=max_norm)
    state = initial_state(policy, originals, FORMATS[precision])
    for window in history:
        for at, magnitude in enumerate(window):
            loss = sum((one.float() * gradient_of(magnitude, one.shape, rng)).sum() for one in model.values())
            engine.backward(loss, boundary=at == len(window) - 1)
        stored = [engine.gradients()[name].float().numpy().copy() for name in model]
        assert engine.divisor == np.float32(engine.loss_scale * len(window))
        report = engine.step()
        if update == "exact":
            state, expected = step(policy, state, stored, weight=len(window))
            for name in ("applied", "skipped", "grad_norm", "clipped_norm", "clip_coef", "next_loss_scale"):
                assert getattr(report, name) == pytest.approx(getattr(expected, name), rel=0, abs=0, nan_ok=True)
        else:
            state, norm, coefficient = fused_step(policy, state, stored, weight=len(window))
            assert (report.grad_norm, report.clip_coef) == pytest.approx((norm, coefficient), rel=0, abs=0, nan_ok=True)
        for name, master, parameter in zip(model, state.masters, state.parameters, strict=True):
            assert same(engine.masters()[name].numpy(), master)
            assert same(model[name].detach().float().numpy(), parameter)
        assert engine.loss_scale == state.loss_scale.scale
        assert engine.update_index == state.update_index


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule[1].__name__}-{len(rule[2])}")
@pytest.mark.parametrize("update", ["exact", "fused"])
@settings(max_examples=10)
@given(history=histories(), max_norm=st.sampled_from([None, 1.0, 1e4]))
def test_every_update_has_the_references_bits_over_any_history(precision, rule, update, history, max_norm):
    if update == "fused" and not HAS_FMA:
        pytest.skip("this CPU has no FMA, which the model of the fused kernels is about")
    replay(precision, rule, update, *history, max_norm)


@pytest.mark.parametrize(
    ("build", "update", "reason"),
    [
        (torch.optim.RMSprop, "exact", "only torch.optim.SGD, Adam and AdamW have this form"),
        (torch.optim.RMSprop, "fused", "only torch.optim.SGD, Adam and AdamW have this form"),
        (partial(torch.optim.SGD, differentiable=True), "exact", "differentiable=True needs the optimizer's own"),
    ],
)
def test_an_update_that_an_optimizer_has_no_form_of_is_refused(build, update, reason):
    model = nn.Linear(1, 1)
    with pytest.raises(AmpConfigError, match=f"update='{update}' with .*: {reason}.*; use update='auto'"):
        AmpEngine(model, build(model.parameters()), "fp32", update=update)


def test_an_optimizer_that_calls_closures_is_refused_at_construction_with_the_way_out():
    model = nn.Linear(1, 1)
    with pytest.raises(AmpConfigError, match=r"^LBFGS calls a closure several times a step.*use an optimizer with a"):
        AmpEngine(model, torch.optim.LBFGS(model.parameters()), "fp32")


@pytest.mark.parametrize("build", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adadelta])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true", "fp16-true"])
def test_any_other_optimizer_steps_by_itself_on_unscaled_gradients(build, precision):
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 1), nn.Linear(4, 1)
    twin.load_state_dict(model.state_dict())
    engine = AmpEngine(
        model, build(model.parameters(), lr=0.01), precision, loss_scale=LossScale.static(1024.0), max_grad_norm=None
    )
    plain = build(twin.parameters(), lr=0.01)
    for _ in range(3):
        for one in (model, twin):
            loss = (one.weight.float() * 0.5).sum() + one.bias.float().sum()
            if one is model:
                engine.backward(loss)
                assert engine.step().applied
            else:
                loss.backward()
                plain.step()
                plain.zero_grad()
    assert torch.equal(engine.masters()["weight"], twin.weight)


@pytest.mark.parametrize("precision", ["bf16-sr", "bf16-kahan"])
def test_an_optimizer_that_cannot_see_carried_bits_is_refused(precision):
    model = nn.Linear(1, 1)
    with pytest.raises(
        AmpConfigError, match=r"^RMSprop updates its own parameters.*use torch.optim.SGD, Adam or AdamW"
    ):
        AmpEngine(model, torch.optim.RMSprop(model.parameters()), precision)


def test_a_parameter_whose_gradient_comes_later_starts_its_moments_then():
    model = nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    engine = AmpEngine(model, optimizer, "fp32", max_grad_norm=None)
    for names in (["a"], ["a", "b"], ["b"]):
        engine.backward(sum(model[name].sum() for name in names))
        engine.step()
    buffers = {name: optimizer.state[model[name]]["momentum_buffer"][0].item() for name in "ab"}
    assert buffers == {"a": pytest.approx(1.4), "b": pytest.approx(1.4)}


def test_moments_are_kept_in_fp32_under_torchs_names():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = AmpEngine(model, optimizer, "bf16-true")
    engine.backward(model(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum())
    engine.step()
    for state in optimizer.state.values():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert {one.dtype for one in state.values()} == {torch.float32}
