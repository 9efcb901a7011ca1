"""Every operation: its gradient, its formats, its stated autocast rule, its rounding."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_reference.nn import kernels, ops
from mp_reference.nn.arithmetic import Arithmetic, Rules
from mp_reference.nn.tensor import Tape, Tensor
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.accumulators import sequential
from mp_reference.spec.formats import BF16, E5M2, FP16, FP32, TF32, FloatFormat
from mp_reference.spec.op_rules import overload_of, rule_of
from mp_reference.spec.tensor_cores import tensor_core

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Case:
    """An operation's name, float64 inputs that are not near a kink, and the call."""

    name: str
    inputs: tuple[Array, ...]
    call: Callable[..., Tensor]
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.label and '-'}{self.label}"


def _draw(*shapes: tuple[int, ...], low: float = -1.5, high: float = 1.5) -> tuple[Array, ...]:
    random = np.random.default_rng(sum(sum(shape) for shape in shapes))
    values = [random.uniform(low, high, shape) for shape in shapes]
    return tuple(np.where(np.abs(value) < 0.05, value + 0.1, value) for value in values)


TARGET = np.array([2, 0, 3, -100])
MASK = np.array([[True, False, True], [False, True, True]])
WEIGHT = np.array([0.5, 1.0, 2.0, 0.25])
BUFFERS = (np.array([0.3, -0.2]), np.array([1.5, 0.5]))
ANGLES = np.random.default_rng(5).uniform(0, 6, (3, 2))
Q = (2, 2, 3, 4)

CASES = [
    Case("add", _draw((2, 3), (3,)), ops.add, "broadcast"),
    Case("add", _draw((2, 1), (1, 3)), ops.add, "both"),
    Case("add", _draw((2, 3)), lambda x: ops.add(x, 0.5), "number"),
    Case("sub", _draw((2, 3), (2, 1)), ops.sub),
    Case("mul", _draw((2, 3), (3,)), ops.mul),
    Case("div", (_draw((2, 3))[0], _draw((3,), low=0.5)[0]), ops.div),
    Case("neg", _draw((3,)), ops.neg),
    Case("pow", _draw((3,), low=0.5), lambda x: ops.pow(x, 2.5)),
    Case("sqrt", _draw((3,), low=0.5), ops.sqrt),
    Case("rsqrt", _draw((3,), low=0.5), ops.rsqrt),
    Case("exp", _draw((3,)), ops.exp),
    Case("log", _draw((3,), low=0.5), ops.log),
    Case("relu", _draw((2, 5)), ops.relu),
    Case("gelu", _draw((2, 5)), ops.gelu, "none"),
    Case("gelu", _draw((2, 5)), partial(ops.gelu, approximate="tanh"), "tanh"),
    Case("silu", _draw((2, 5)), ops.silu),
    Case("sigmoid", _draw((2, 5)), ops.sigmoid),
    Case("tanh", _draw((2, 5)), ops.tanh),
    Case("softplus", _draw((2, 5)), partial(ops.softplus, beta=2.0, threshold=2.0)),
    Case("where", _draw((2, 3), (3,)), lambda x, y: ops.where(MASK, x, y)),
    Case("dropout", _draw((2, 3)), lambda x: ops.dropout(x, MASK, 0.25)),
    Case("cast", _draw((2, 3)), lambda x: ops.cast(x, None)),
    Case("sum", _draw((2, 3, 2)), ops.sum, "all"),
    Case("sum", _draw((2, 3, 2)), lambda x: ops.sum(x, (0, -1)), "dims"),
    Case("mean", _draw((2, 3, 2)), lambda x: ops.mean(x, 1, keepdim=True)),
    Case("prod", _draw((2, 3)), lambda x: ops.prod(x, 1)),
    Case("prod", (np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 1.0]]),), lambda x: ops.prod(x, 1, keepdim=True), "zeros"),
    Case("cumsum", _draw((2, 3)), lambda x: ops.cumsum(x, 1)),
    Case("softmax", _draw((2, 3)), ops.softmax),
    Case("log_softmax", _draw((2, 3)), lambda x: ops.log_softmax(x, 0)),
    Case("layer_norm", _draw((2, 3, 4), (3, 4), (3, 4)), lambda x, w, b: ops.layer_norm(x, (3, 4), w, b)),
    Case("layer_norm", _draw((2, 4)), lambda x: ops.layer_norm(x, (4,)), "plain"),
    Case("rms_norm", _draw((2, 4), (4,)), lambda x, w: ops.rms_norm(x, (4,), w)),
    Case("rms_norm", _draw((2, 4)), lambda x: ops.rms_norm(x, (4,)), "plain"),
    Case("group_norm", _draw((2, 4, 3), (4,), (4,)), lambda x, w, b: ops.group_norm(x, 2, w, b)),
    Case("group_norm", _draw((2, 4)), lambda x: ops.group_norm(x, 2), "plain"),
    Case("batch_norm", _draw((3, 2, 2), (2,), (2,)), lambda x, w, b: ops.batch_norm(x, *BUFFERS, w, b)[0]),
    Case("batch_norm", _draw((3, 2)), lambda x: ops.batch_norm(x, *BUFFERS)[0], "plain"),
    Case("batch_norm", _draw((3, 2), (2,), (2,)), lambda x, w, b: ops.batch_norm(x, *BUFFERS, w, b, False)[0], "eval"),
    Case("batch_norm", _draw((3, 2, 2)), lambda x: ops.batch_norm(x, *BUFFERS, training=False)[0], "eval-plain"),
    Case("nll_loss", _draw((4, 4)), lambda x: ops.nll_loss(x, TARGET, WEIGHT)),
    Case("nll_loss", _draw((4, 4)), lambda x: ops.nll_loss(x, TARGET, reduction="none"), "none"),
    Case("cross_entropy", _draw((4, 4)), lambda x: ops.cross_entropy(x, TARGET, reduction="sum")),
    Case("mse_loss", _draw((2, 3)), lambda x: ops.mse_loss(x, np.ones((2, 3)))),
    Case("mse_loss", _draw((2, 3)), lambda x: ops.mse_loss(x, x.tape.leaf(np.ones((2, 3))), "none"), "none"),
    Case("bce_with_logits", _draw((2, 3)), lambda x: ops.bce_with_logits(x, MASK.astype(float))),
    Case("bce_with_logits", _draw((2, 3)), lambda x: ops.bce_with_logits(x, MASK.astype(float), "sum"), "sum"),
    Case("matmul", _draw((2, 3, 4), (4, 2)), ops.matmul),
    Case("bmm", _draw((2, 3, 4), (2, 4, 2)), ops.bmm),
    Case("linear", _draw((2, 3, 4), (5, 4), (5,)), ops.linear),
    Case("linear", _draw((3, 4), (5, 4)), ops.linear, "plain"),
    Case("einsum", _draw((2, 3, 4), (2, 5, 4)), partial(ops.einsum, "bik,bjk->bji")),
    Case("einsum", _draw((3,), (2,)), partial(ops.einsum, "i,j->ji"), "outer"),
    Case("conv2d", _draw((2, 2, 5, 4), (3, 2, 3, 2), (3,)), partial(ops.conv2d, stride=2, padding=1)),
    Case("conv2d", _draw((1, 2, 5, 5), (1, 2, 2, 2)), partial(ops.conv2d, dilation=2), "plain"),
    Case("scaled_dot_product_attention", _draw(Q, Q, Q), ops.scaled_dot_product_attention),
    Case("scaled_dot_product_attention", _draw(Q, Q, Q),
         partial(ops.scaled_dot_product_attention, causal=True, scale=0.3), "causal"),
    Case("embedding", _draw((4, 3)), lambda w: ops.embedding(w, np.array([[1, 3], [1, 0]]))),
    Case("cat", _draw((2, 3), (2, 1)), lambda x, y: ops.cat([x, y], -1)),
    Case("stack", _draw((2, 3), (2, 3)), lambda x, y: ops.stack([x, y], 1)),
    Case("index", _draw((3, 4)), lambda x: ops.index(x, (slice(None), 1))),
    Case("index", _draw((3, 4)), lambda x: ops.index(x, np.array([0, 2, 0])), "repeated"),
    Case("reshape", _draw((2, 3)), lambda x: ops.reshape(x, (3, -1))),
    Case("permute", _draw((2, 3, 4)), lambda x: ops.permute(x, (2, 0, -2))),
    Case("transpose", _draw((2, 3, 4)), lambda x: ops.transpose(x, 0, -1)),
    Case("rotary", _draw((2, 3, 4)), lambda x: ops.rotary(x, np.cos(ANGLES), np.sin(ANGLES))),
]  # fmt: skip


E6M14 = FloatFormat("e6m14", exponent_bits=6, mantissa_bits=14)
FORMATS = [FP16, BF16, FP32, E6M14]


def weighted(output: Tensor) -> Tensor:
    """A number that depends on every element in a way of its own."""
    weights = np.cos(np.arange(output.carrier.size)).reshape(output.shape)
    return ops.sum(ops.mul(output, output.tape.leaf(weights)))


def run(case: Any, inputs: Any, tape: Tape, fmt: FloatFormat | None = None) -> tuple[Tensor, list[Tensor]]:
    """The operation on leaves."""
    leaves = [tape.leaf(value, fmt, requires_grad=True) for value in inputs]
    return case.call(*leaves), leaves


def test_the_cases_cover_every_operation_but_none_twice_under_one_label() -> None:
    assert {case.name for case in CASES} == set(ops.__all__)
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_finite_differences_in_float64(case: Any) -> None:
    tape = Tape()
    output, leaves = run(case, case.inputs, tape)
    gradients = tape.gradients(weighted(output), leaves)
    step = 1e-6
    for position, gradient in enumerate(gradients):
        assert gradient is not None
        numeric = np.empty_like(gradient)
        for place in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                inputs = [value.copy() for value in case.inputs]
                inputs[position][place] += sign * step
                ends.append(float(weighted(run(case, inputs, Tape())[0]).data))
            numeric[place] = (ends[0] - ends[1]) / (2 * step)
        # truncation is of order step**2, cancellation of order 1e-16 / step
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_lie_in_the_format_of_the_inputs(case: Any, fmt: FloatFormat) -> None:
    tape = Tape()
    inputs = [round_to(value.astype(np.float32), fmt) for value in case.inputs]
    output, leaves = run(case, inputs, tape, fmt)
    if case.name == "cast":
        assert output.format is None
        return
    assert output.format == fmt
    assert output.data.dtype == fmt.dtype
    assert np.array_equal(output.carrier, round_to(output.carrier, fmt), equal_nan=True)
    weights = tape.leaf(
        round_to(np.cos(np.arange(output.carrier.size, dtype=np.float32)), fmt).reshape(output.shape), fmt
    )
    for gradient, leaf in zip(tape.gradients(ops.sum(ops.mul(output, weights)), leaves), leaves, strict=True):
        assert gradient is not None
        assert gradient.dtype == fmt.dtype
        assert gradient.shape == leaf.shape
        assert np.array_equal(gradient.astype(np.float32), round_to(gradient.astype(np.float32), fmt))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp16_results_are_close_to_float64_results_of_the_same_inputs(case: Any) -> None:
    half = [value.astype(np.float16) for value in case.inputs]
    tape, wide = Tape(), Tape()
    output, leaves = run(case, half, tape)
    exact, wide_leaves = run(case, [value.astype(np.float64) for value in half], wide)
    # one rounding to fp16, or a few composed ones, of numbers no larger than the largest intermediate
    np.testing.assert_allclose(output.carrier, exact.carrier, rtol=2.0**-8, atol=2.0**-9)
    total = ops.sum(ops.cast(output, None))
    gradients = tape.gradients(total, leaves)
    expected = wide.gradients(ops.sum(exact), wide_leaves)
    for found, wanted in zip(gradients, expected, strict=True):
        assert found is not None
        assert wanted is not None
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("name", ops.__all__)
def test_the_docstring_states_vjp_rounding_and_the_rule_that_the_table_has(name: str) -> None:
    text = " ".join((inspect.getdoc(getattr(ops, name)) or "").split())
    assert "Vjp:" in text
    assert "Rounding:" in text
    assert ">>>" in text
    stated = re.search(r"Autocast: ([\w.]+), ([^.]*)\.", text)
    assert stated is not None
    op, words = stated.groups()
    if op == "none":
        return
    rule = rule_of(overload_of(op, "cuda"), "cuda")
    expected = {
        None: "no rule", "lower_precision_fp": "lower_precision_fp on cuda", "fp32": "fp32 on cuda",
        "fp32_set_opt_dtype": "output fp32 on cuda", "promote": "promote on cuda",
    }[rule]  # fmt: skip
    assert words.startswith(expected) or (op == "cross_entropy_loss" and rule is None), (op, rule)


ELEMENTWISE = [case for case in CASES if case.name in {"add", "sub", "mul", "div", "sqrt"} and len(case.inputs[0]) > 1]


@pytest.mark.parametrize("rounding", ["nearest-even", "toward-zero", "toward-negative", "nearest-away"])
@pytest.mark.parametrize("fmt", [FP16, BF16, E5M2, E6M14], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_basic_operations_round_the_exact_result_once(case: Any, fmt: FloatFormat, rounding: Any) -> None:
    tape = Tape(Arithmetic(rounding=rounding))
    inputs = [round_to(value.astype(np.float32), fmt) for value in case.inputs]
    output, _ = run(case, inputs, tape, fmt)
    with np.errstate(all="ignore"):
        exact, _ = run(case, [value.astype(np.float64) for value in inputs], Tape())
    # float64 holds sums and products of these inputs exactly; quotients and roots of 15 bits are never within 2**-53
    assert output.carrier.tolist() == round_to(exact.carrier, fmt, rounding).astype(np.float32).tolist()


def test_a_wide_custom_format_is_not_rounded_twice() -> None:
    tape = Tape()
    one = tape.leaf(np.float32([1 + 2.0**-14]), E6M14)
    tiny = tape.leaf(np.float32([2.0**-15 - 2.0**-29]), E6M14)
    assert ops.add(one, tiny).carrier[0] == 1 + 2.0**-14  # through fp32 the sum would become a tie and go up


def test_matrix_products_follow_the_accumulator() -> None:
    a, b = np.float16([[2048.0, 1.0, 1.0, -2048.0]]), np.ones((4, 1), np.float16)
    found = {}
    for row in ("fp32", "exact", FP16, sequential(FP32), tensor_core("hopper")):
        tape = Tape(Arithmetic(accumulator=row))
        found[str(getattr(row, "name", row))] = float(ops.matmul(tape.leaf(a), tape.leaf(b)).data[0, 0])
    assert found.pop("fp16") == 0.0
    assert set(found.values()) == {2.0}


@pytest.mark.parametrize("row", [FP16, sequential(FP32), tensor_core("hopper"), "exact"], ids=str)
@pytest.mark.parametrize("name", ["linear", "conv2d", "matmul", "einsum", "scaled_dot_product_attention"])
def test_every_product_and_its_vjp_run_under_any_accumulator(name: str, row: Any) -> None:
    case = next(case for case in CASES if case.name == name)
    tape = Tape(Arithmetic(accumulator=row))
    output, leaves = run(case, [value.astype(np.float16) for value in case.inputs], tape)
    exact, _ = run(case, case.inputs, Tape())
    np.testing.assert_allclose(output.carrier, exact.carrier, rtol=2.0**-7, atol=2.0**-6)
    assert all(one is not None for one in tape.gradients(ops.mean(output), leaves))


def test_fp32_products_do_not_run_on_a_tensor_core_but_tf32_cuts_their_operands() -> None:
    x = np.float32([[1 + 2.0**-12]])
    one = np.float32([[1.0]])
    for arithmetic, expected in (
        (Arithmetic(accumulator=tensor_core("hopper")), 1 + 2.0**-12),
        (Arithmetic(tf32=True), 1.0),
    ):
        tape = Tape(arithmetic)
        assert float(ops.matmul(tape.leaf(x), tape.leaf(one)).data[0, 0]) == expected
    assert round_to(x, TF32)[0, 0] == 1.0


def test_saturating_and_flushing_tapes_do_so_in_every_operation() -> None:
    tape = Tape(Arithmetic(overflow="saturate", subnormals=False))
    assert float(ops.mul(tape.leaf(np.float16([300.0])), 300.0).data[0]) == 65504.0
    assert float(ops.mul(tape.leaf(np.float16([2.0**-14])), 0.5).data[0]) == 0.0


def test_a_stochastic_tape_draws_from_its_own_generator() -> None:
    results = []
    for seed in (1, 1, 2):
        tape = Tape(Arithmetic(rounding="stochastic", random=np.random.default_rng(seed)))
        results.append(
            ops.add(tape.leaf(np.full(64, 2048, np.float16)), tape.leaf(np.ones(64, np.float16))).data.tolist()
        )
    assert results[0] == results[1] != results[2]
    assert set(results[0]) == {2048.0, 2050.0}


def test_infinities_and_nans_pass_through_products_and_losses_without_a_warning() -> None:
    tape = Tape()
    x = tape.leaf(np.float16([[np.inf, 1.0], [np.nan, 60000.0]]), requires_grad=True)
    loss = ops.cross_entropy(ops.linear(x, x, None), np.array([0, 1]))
    assert not np.isfinite(loss.data)
    (gradient,) = tape.gradients(loss, [x], seed=65536.0)
    assert gradient is not None
    assert not np.isfinite(gradient).all()


def test_relu_keeps_nan_and_turns_negative_zero_positive() -> None:
    out = ops.relu(Tape().leaf(np.float16([np.nan, -0.0, -1.0]))).carrier
    assert np.isnan(out[0])
    assert not np.signbit(out[1:]).any()


def test_a_kernel_sums_in_float64_whatever_the_order() -> None:
    x = np.float32([1e8, 1.0, -1e8, 1.0])
    assert kernels.total(x) == 2.0
    assert kernels.mean(x) == 0.5


def test_the_rows_of_an_embedding_gradient_that_share_an_index_are_added_once_rounded() -> None:
    gradient = kernels.embedding_backward(np.float32([[1e8], [1.0], [-1e8]]), np.array([2, 2, 2]), 4, padding_idx=1)
    assert gradient.tolist() == [[0.0], [0.0], [1.0], [0.0]]
    assert kernels.embedding_backward(np.zeros((0, 2), np.float32), np.zeros(0, int), 3).shape == (3, 2)
    with pytest.raises(ValueError, match="scale_grad_by_freq=True is not offered"):
        kernels.embedding_backward(np.zeros((0, 2), np.float32), np.zeros(0, int), 3, scale_grad_by_freq=True)


def test_a_layer_norm_kernel_computes_only_the_gradients_it_is_asked_for() -> None:
    x = np.float32([[1.0, 3.0]])
    _, mean, rstd = kernels.layer_norm(x, (2,), None, None, 0.0)
    gradients = kernels.layer_norm_backward(x, x, (2,), mean, rstd, None, None, (False, True, False))
    assert gradients == (None, None, None)


@pytest.mark.parametrize("name", sorted(kernels.ATEN))
def test_every_kernel_of_the_table_is_called_by_aten_s_name(name: str) -> None:
    assert callable(kernels.ATEN[name])
    assert re.fullmatch(r"[a-z_]+(\.\w+)?", name)


def test_batch_norm_moves_its_buffers_towards_mean_and_unbiased_variance() -> None:
    tape = Tape()
    x = np.float32([[1.0], [2.0], [6.0]])
    mean, var = np.float32([1.0]), np.float32([2.0])
    _, new_mean, new_var = ops.batch_norm(tape.leaf(x), mean, var, momentum=0.5)
    assert (new_mean.tolist(), new_var.tolist()) == ([2.0], [4.5])
    assert (mean.tolist(), var.tolist()) == ([1.0], [2.0])


def test_the_rules_of_cuda_decide_the_formats_of_outputs() -> None:
    tape = Tape(rules=Rules(device="cuda", fmt=FP16))
    x = tape.leaf(np.ones((2, 2), np.float32))
    half = ops.matmul(x, x)
    found = {
        "matmul": half, "relu": ops.relu(half), "softmax": ops.softmax(half), "exp": ops.exp(half),
        "sum": ops.sum(half), "cat": ops.cat([half, x]), "cat16": ops.cat([half, half]), "add": ops.add(half, x),
        "layer_norm": ops.layer_norm(half, (2,)), "mse_loss": ops.mse_loss(half, np.zeros((2, 2))),
    }  # fmt: skip
    assert {name: one.format.name for name, one in found.items() if one.format is not None} == {
        "matmul": "fp16", "relu": "fp16", "softmax": "fp32", "exp": "fp32", "sum": "fp32", "cat": "fp32",
        "cat16": "fp16", "add": "fp32", "layer_norm": "fp32", "mse_loss": "fp32",
    }  # fmt: skip
