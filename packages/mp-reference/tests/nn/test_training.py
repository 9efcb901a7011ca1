"""Training: three models under every precision, any rounding, accumulator and custom format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mp_reference.amp.loss_scale import LossScale
from mp_reference.amp.optimizers import SGD, AdamW
from mp_reference.nn import ops
from mp_reference.nn.arithmetic import Arithmetic, Rules
from mp_reference.nn.layers import Scope
from mp_reference.nn.models import ACTIVATIONS, CNN, MLP, Transformer
from mp_reference.nn.tensor import Tape
from mp_reference.nn.training import PRECISIONS, Precision, Training, precision_named
from mp_reference.spec.accumulators import sequential
from mp_reference.spec.formats import BF16, E4M3FN, FP16, FP32, FloatFormat
from mp_reference.spec.tensor_cores import tensor_core

E5M4 = FloatFormat("e5m4", exponent_bits=5, mantissa_bits=4)
TEXT = np.frombuffer(
    b"to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer " * 4, np.uint8
)


def regression(model: Any, scope: Scope, batch: Any) -> Any:
    return ops.mse_loss(model(scope, scope.tape.leaf(batch[0])), batch[1])


def images(model: Any, scope: Scope, batch: Any) -> Any:
    return ops.cross_entropy(model(scope, scope.tape.leaf(batch[0])), batch[1])


def language(model: Any, scope: Scope, batch: Any) -> Any:
    logits = model(scope, batch[:, :-1])
    return ops.cross_entropy(ops.reshape(logits, (-1, logits.shape[-1])), batch[:, 1:].reshape(-1))


def scale_for(precision: Precision) -> LossScale:
    fp16 = FP16 in (precision.storage, precision.rules and precision.rules.fmt)
    return LossScale(init_scale=1024.0) if fp16 else LossScale(init_scale=1.0, dynamic=False)


def batches(task: str, count: int) -> list[Any]:
    random = np.random.default_rng(7)
    if task == "mlp":
        x = random.standard_normal((count, 16, 4)).astype(np.float32)
        return [(one, np.sin(one[:, :2]).astype(np.float32)) for one in x]
    if task == "cnn":
        labels = random.integers(0, 3, (count, 8))
        noise = random.standard_normal((count, 8, 1, 6, 6))
        return [(x.astype(np.float32), y) for x, y in zip(noise + labels[:, :, None, None, None], labels, strict=True)]
    starts = random.integers(0, len(TEXT) - 17, (count, 4))
    return [np.stack([TEXT[start : start + 17] for start in row]).astype(np.int64) for row in starts]


MODELS: dict[str, Any] = {
    "mlp": (MLP((4, 16, 2)), regression, 0.02),
    "cnn": (CNN(1, 4, 3), images, 0.02),
    "transformer": (Transformer(128, width=16, layers=1, heads=2, context=16), language, 0.01),
}


def trained(task: str, precision: Precision, steps: int = 30, **options: Any) -> tuple[list[float], Any]:
    model, loss, lr = MODELS[task]
    options = {"loss_scale": scale_for(precision), "max_grad_norm": 1.0} | options
    training = Training.of(model, loss, precision, AdamW(lr=lr), **options)
    state, losses = training.start(np.random.default_rng(1)), []
    random = np.random.default_rng(2)
    for batch in batches(task, steps):
        state, _, seen = training.step(state, [batch], random=random)
        losses += seen
    return losses, state


@pytest.mark.parametrize("name", sorted(PRECISIONS))
@pytest.mark.parametrize("task", sorted(MODELS))
def test_every_model_learns_in_every_precision(task: str, name: str) -> None:
    losses, state = trained(task, precision_named(name))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    assert state.step.update_index >= 28  # of 30: at most two overflows while the scale settles
    storage = PRECISIONS[name].storage
    assert {value.dtype for value in state.parameters.values()} == {storage.dtype}
    assert all(master.dtype == np.float32 for master in state.step.masters)


@pytest.mark.parametrize(
    "change",
    [
        {"rules": Rules(fmt=E5M4)},
        {"rules": Rules(fmt=FP16, overrides={"softmax.int": "lower_precision_fp", "layer_norm": "none"})},
        {"storage": E5M4},
        {"rules": Rules(fmt=FP16), "arithmetic": Arithmetic(accumulator=tensor_core("hopper"))},
        {"rules": Rules(fmt=FP16), "arithmetic": Arithmetic(accumulator=FP16)},
        {"rules": Rules(fmt=BF16), "arithmetic": Arithmetic(accumulator=sequential(FP32))},
        {"rules": Rules(fmt=FP16), "arithmetic": Arithmetic(rounding="toward-zero")},
        {"rules": Rules(fmt=BF16), "arithmetic": Arithmetic(rounding="stochastic", random=np.random.default_rng(3))},
        {"rules": Rules(fmt=E4M3FN), "arithmetic": Arithmetic(overflow="saturate")},
        {"storage": BF16, "accumulate": FP32},
    ],
    ids=str,
)
def test_a_perceptron_learns_in_any_format_rounding_and_accumulator(change: dict[str, Any]) -> None:
    losses, _ = trained("mlp", replace(precision_named("fp32"), **change))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])


def test_fused_and_composed_attention_agree_in_float64() -> None:
    random = np.random.default_rng(0)
    models = [Transformer(9, width=8, layers=2, heads=2, context=5, fused=fused) for fused in (True, False)]
    parameters = models[0].parameters(random)
    tokens = random.integers(0, 9, (2, 5))
    outputs = []
    for model in models:
        tape = Tape()
        leaves = {name: tape.leaf(value.astype(np.float64), requires_grad=True) for name, value in parameters.items()}
        outputs.append(model(Scope(tape, leaves), tokens).data)
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5)  # the scale is an fp32 number in one of them


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_perceptron_takes_every_activation(activation: Any) -> None:
    tape, model = Tape(), MLP((2, 3, 1), activation)
    leaves = {name: tape.leaf(value) for name, value in model.parameters(np.random.default_rng(0)).items()}
    assert model(Scope(tape, leaves), tape.leaf(np.ones((4, 2), np.float32))).shape == (4, 1)
    assert model.buffers() == {}


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="heads=3 must divide width=16; choose another number of heads"):
        Transformer(9, width=16, heads=3)


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="precision 'fp12' is not one of fp32, tf32, fp16-mixed"):
        precision_named("fp12")


def test_a_skipped_step_gives_the_buffers_back_as_they_were() -> None:
    model, loss, lr = MODELS["cnn"]
    precision = precision_named("fp16-mixed")
    training = Training.of(model, loss, precision, AdamW(lr=lr), loss_scale=LossScale(init_scale=2.0**20))
    state = training.start(np.random.default_rng(1))
    (batch,) = batches("cnn", 1)
    new, report, _ = training.step(state, [(np.full_like(batch[0], 7e4), batch[1])])
    assert report.skipped
    assert all(np.array_equal(new.buffers[name], value) for name, value in state.buffers.items())
    good, report, _ = training.step(replace(state, step=new.step), [(batch[0] * 1e-3, batch[1])])
    if report.applied:
        assert any(not np.array_equal(good.buffers[name], value) for name, value in state.buffers.items())


def test_batch_norm_s_statistics_are_used_where_not_training() -> None:
    model, *_ = MODELS["cnn"]
    tape = Tape()
    leaves = {name: tape.leaf(value) for name, value in model.parameters(np.random.default_rng(0)).items()}
    scope = Scope(tape, leaves, model.buffers(), training=False)
    model(scope, tape.leaf(np.ones((1, 1, 4, 4), np.float32)))
    assert all(np.array_equal(scope.new_buffers[name], value) for name, value in model.buffers().items())


def test_a_window_of_micro_steps_updates_by_the_weighted_mean() -> None:
    model, loss, _ = MODELS["mlp"]
    first, second = batches("mlp", 2)
    both = (np.concatenate([first[0], second[0], second[0]]), np.concatenate([first[1], second[1], second[1]]))
    training = Training.of(model, loss, precision_named("fp32"), SGD(lr=0.1), loss_scale=LossScale(init_scale=8.0))
    start = training.start(np.random.default_rng(1))
    window, report, losses = training.step(start, [first, second], weights=[1.0, 2.0])
    whole, _, _ = training.step(start, [both])
    assert len(losses) == 2
    assert report.applied
    for ours, theirs in zip(window.step.masters, whole.step.masters, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_training_is_the_same_bits_each_time_and_changes_no_state() -> None:
    runs = [trained("transformer", precision_named("fp16-mixed"), steps=5) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert all(
        a.tobytes() == b.tobytes() for a, b in zip(runs[0][1].step.masters, runs[1][1].step.masters, strict=True)
    )


def test_a_loss_scale_of_a_power_of_two_changes_no_bit_of_an_fp32_training() -> None:
    ends = [
        trained("mlp", precision_named("fp32"), loss_scale=LossScale(init_scale=scale, dynamic=False))[1].step.masters
        for scale in (1.0, 2.0**10)
    ]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*ends, strict=True))
