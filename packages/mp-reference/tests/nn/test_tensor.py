"""The tape: formats of leaves, casts, rules, the order and the format of sums of gradients."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mp_reference.amp.autocast import autocast
from mp_reference.nn import ops
from mp_reference.nn.arithmetic import Arithmetic, Rules
from mp_reference.nn.tensor import Tape
from mp_reference.spec.formats import BF16, E4M3FN, FP16, FP32, FloatFormat

E5M4 = FloatFormat("e5m4", exponent_bits=5, mantissa_bits=4)


@pytest.mark.parametrize(
    ("data", "fmt", "name", "dtype"),
    [
        (np.zeros(1, np.float32), None, "fp32", np.float32),
        (np.zeros(1, np.float16), None, "fp16", np.float16),
        (np.zeros(1, ml_dtypes.bfloat16), None, "bf16", ml_dtypes.bfloat16),
        (np.zeros(1, ml_dtypes.float8_e4m3fn), None, "float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        (np.zeros(1, np.float32), E5M4, "e5m4", np.float32),
        (np.zeros(1, np.float32), BF16, "bf16", ml_dtypes.bfloat16),
        (np.zeros(1, np.float64), FP16, "fp16", np.float16),
    ],
)
def test_the_dtype_is_the_format_and_custom_formats_are_carried_in_fp32(
    data: Any, fmt: FloatFormat | None, name: str, dtype: Any
) -> None:
    leaf = Tape().leaf(data, fmt)
    assert leaf.format is not None
    assert (leaf.format.name, leaf.data.dtype, leaf.carrier.dtype) == (name, dtype, np.float32)
    assert name in repr(leaf)


def test_float64_and_integers_have_no_format_and_are_never_rounded() -> None:
    tape = Tape()
    wide, whole = tape.leaf(np.array([1 + 2.0**-50]), requires_grad=True), tape.leaf(np.array([3]))
    assert (wide.format, whole.format, wide.floating, whole.floating) == (None, None, True, False)
    assert ops.add(wide, 0.0).data[0] == 1 + 2.0**-50
    assert tape.cast(whole, FP16) is whole
    assert "float64" in repr(wide)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda t: t.leaf(np.float32([1.01]), FP16), r"the array holds values outside fp16; round_to\(x, fmt\) first"),
        (lambda t: t.leaf(np.array([1]), requires_grad=True), "an array of int64 has neither gradients nor a format"),
        (lambda t: t.leaf(np.array([True]), FP16), "an array of bool has neither gradients nor a format"),
        (lambda t: t.gradients(t.leaf(np.zeros(2, "f4")), []), r"loss has shape \(2,\), gradients need one element"),
        (lambda _: Arithmetic(rounding="up"), "rounding='up'"),
        (lambda _: Arithmetic(rounding="stochastic"), "rounding='stochastic' with random missing"),
        (lambda _: Arithmetic(random=np.random.default_rng(0)), "rounding='nearest-even' with random given"),
        (lambda _: Arithmetic(accumulator="fp64"), "accumulator='fp64' is none of"),
        (lambda _: Rules(device="tpu"), "device='tpu' has no op rules; the tables cover cuda"),
        (lambda _: Rules(overrides={"mm": "fp64"}), r"overrides\['mm'\]='fp64' must be one of lower_precision_fp"),
    ],
)
def test_what_has_no_meaning_is_refused(act: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act(Tape())


def test_a_cast_is_recorded_and_its_gradient_comes_back_in_the_format_before() -> None:
    tape = Tape()
    x = tape.leaf(np.array([1.0], np.float32), requires_grad=True)
    y = ops.mul(ops.cast(x, FP16), 1.001)
    assert y.format == FP16
    (gradient,) = tape.gradients(ops.sum(y), [x])
    assert gradient is not None
    assert gradient.dtype == np.float32
    assert gradient[0] == np.float32(np.float16(1.001))  # computed in fp16, then widened


def test_a_gradient_in_the_wider_of_two_formats_is_rounded_to_each_input_s_own() -> None:
    tape = Tape()
    half = tape.leaf(np.float16([1.0]), requires_grad=True)
    full = tape.leaf(np.array([1.001], np.float32), requires_grad=True)
    product = ops.mul(half, full)
    assert product.format == FP32
    to_half, to_full = tape.gradients(ops.sum(product), [half, full])
    assert to_half is not None
    assert to_full is not None
    assert (to_half.dtype, to_half[0]) == (np.float16, np.float16(1.001))
    assert (to_full.dtype, to_full[0]) == (np.float32, 1.0)


def test_gradients_of_one_tensor_are_added_newest_first_and_rounded_each_time() -> None:
    tape = Tape()
    x = tape.leaf(np.float16([1.0]), requires_grad=True)
    parts = [ops.mul(x, factor) for factor in (2048.0, 1.0, 1.0)]
    total = ops.add(ops.add(parts[0], parts[1]), parts[2])
    (gradient,) = tape.gradients(ops.sum(total), [x])
    assert gradient is not None
    assert gradient[0] == 2050.0  # (1 + 1) + 2048; oldest first it would be (2048 + 1) + 1 = 2048


def test_a_leaf_is_cast_once_so_that_its_gradients_are_added_in_the_low_format() -> None:
    tape = Tape(rules=Rules(fmt=FP16))
    w = tape.leaf(np.ones((1, 1), np.float32), requires_grad=True)
    x = [tape.leaf(np.array([[value]], np.float16)) for value in (2048.0, 1.0)]
    loss = ops.add(ops.matmul(x[0], w), ops.matmul(x[1], w))
    (gradient,) = tape.gradients(ops.sum(loss), [w])
    assert gradient is not None
    assert gradient.dtype == np.float32
    assert gradient[0, 0] == 2048.0


def test_the_sums_over_micro_steps_take_the_format_that_is_asked_for() -> None:
    found = {}
    for accumulate in (None, FP32):
        into: Any = None
        for value in (2048.0, 1.0):
            tape = Tape()
            w = tape.leaf(np.float16([1.0]), requires_grad=True)
            into = tape.gradients(ops.sum(ops.mul(w, value)), [w], into=into, accumulate=accumulate)
        found[accumulate and accumulate.name] = (into[0].dtype.name, float(into[0][0]))
    assert found == {None: ("float16", 2048.0), "fp32": ("float32", 2049.0)}


def test_the_seed_is_the_loss_scale_in_the_loss_s_own_format() -> None:
    for dtype, expected in ((np.float16, np.inf), (np.float32, 65536.0)):
        tape = Tape()
        w = tape.leaf(np.ones(1, dtype), requires_grad=True)
        (gradient,) = tape.gradients(ops.sum(w), [w], seed=65536.0)
        assert gradient is not None
        assert gradient[0] == expected


def test_a_leaf_that_the_loss_does_not_depend_on_has_no_gradient_but_keeps_an_earlier_one() -> None:
    tape = Tape()
    used, unused = (tape.leaf(np.float16([1.0]), requires_grad=True) for _ in range(2))
    ops.mul(unused, 2.0)
    loss = ops.sum(used)
    assert tape.gradients(loss, [unused]) == [None]
    assert tape.gradients(loss, [unused], into=[np.float16([5.0])])[0] == [5.0]


def test_nothing_is_recorded_where_no_gradient_is_wanted() -> None:
    tape = Tape()
    x = tape.leaf(np.float16([1.0]))
    assert not ops.mul(x, x).requires_grad
    assert tape.gradients(ops.sum(ops.mul(x, x)), [x]) == [None]


def test_gradients_of_float64_leaves_through_fp32_are_widened() -> None:
    tape = Tape()
    x = tape.leaf(np.array([0.1]), requires_grad=True)
    y = ops.cast(x, FP32)
    assert y.data[0] == np.float32(0.1)
    (gradient,) = tape.gradients(ops.sum(ops.mul(y, y)), [x])
    assert gradient is not None
    assert gradient.dtype == np.float64
    assert gradient[0] == np.float32(0.1) * 2


def test_an_entered_autocast_region_gives_the_rules_of_a_tape_that_has_none() -> None:
    tape = Tape()
    x = tape.leaf(np.ones((2, 2), np.float32))
    with autocast("cuda", BF16):
        assert ops.matmul(x, x).format == BF16
        assert Tape(rules=Rules(fmt=FP16)).rules is not None
    assert ops.matmul(x, x).format == FP32


def test_rules_take_custom_formats_and_overrides() -> None:
    tape = Tape(
        rules=Rules(fmt=E5M4, overrides={"softmax.int": "lower_precision_fp", "exp": "none", "relu": "promote"})
    )
    x = tape.leaf(np.ones((2, 2), np.float32))
    product = ops.matmul(x, x)
    assert product.format == E5M4
    assert ops.softmax(product).format == E5M4
    assert ops.exp(product).format == E5M4
    assert ops.sum(product).format == FP32


def test_append_dtype_and_banned_rules_do_what_they_say() -> None:
    tape = Tape(rules=Rules(overrides={"sum": "fp32_append_dtype", "exp": "banned"}))
    x = tape.leaf(np.ones(2, np.float16))
    assert ops.sum(x).format == FP32
    with pytest.raises(RuntimeError, match="exp is banned under autocast; use its version on logits"):
        ops.exp(x)


def test_rules_leave_float64_alone() -> None:
    tape = Tape(rules=Rules(fmt=FP16))
    x = tape.leaf(np.ones((2, 2)))
    assert ops.matmul(x, x).format is None


def test_fp8_leaves_compute_and_round_in_fp8() -> None:
    tape = Tape()
    x = tape.leaf(np.array([1.0, 20.0], ml_dtypes.float8_e4m3fn))
    y = ops.mul(x, x)
    assert y.format == E4M3FN
    assert y.data.astype(np.float32).tolist() == [1.0, 384.0]  # 400 is a tie
