"""Operations on single elements: arithmetic, powers, activations, selection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from mp_reference.nn import kernels
from mp_reference.nn.ops._common import Array, Number, Tape, Tensor, basic, operands, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_reference.spec.formats import FloatFormat

__all__ = [
    "add", "cast", "div", "dropout", "exp", "gelu", "log", "mul", "neg", "pow", "relu", "rsqrt", "sigmoid", "silu",
    "softplus", "sqrt", "sub", "tanh", "where",
]  # fmt: skip


def _binary(op: str, x: Tensor | Number, y: Tensor | Number) -> tuple[Tape, Tensor, Tensor, FloatFormat | None]:
    tape, (left, right) = operands(op, x, y)
    try:
        np.broadcast_shapes(left.shape, right.shape)
    except ValueError:
        require(False, op, f"shapes {left.shape} and {right.shape} do not broadcast", "reshape one of them")
    (left, right), fmt = tape.prepared(op, left, right)
    return tape, left, right, fmt


def _unary(
    rule: str, x: Tensor, forward: Callable[[Array], Array], backward: Callable[[Array, Array, Array], Array]
) -> Tensor:
    """An operation on one tensor: ``forward(input)`` and ``backward(gradient, input, output)``, both on carriers."""
    tape, (a,) = operands(rule.partition(".")[0], x)
    (a,), fmt = tape.prepared(rule, a)
    output = tape.arithmetic.rounded(forward(a.carrier), fmt)
    return tape.record(output, fmt, (a,), lambda g: (backward(g, a.carrier, output),), rounded=True)


def add(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """Sum x + y.

    Vjp: the gradient, to both. Autocast: add, no rule (two formats promote to fp32).
    Rounding: the exact sum, once; a number takes part as an fp32 value.

    >>> leaf = Tape().leaf
    >>> add(leaf(np.float16([2048.0])), leaf(np.float16([1.0]))).data
    array([2.048e+03], dtype=float16)
    """
    tape, a, b, fmt = _binary("add", x, y)
    return tape.record(basic(tape, "add", fmt, a.carrier, b.carrier), fmt, (a, b), lambda g: (g, g))


def sub(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """Difference x - y.

    Vjp: the gradient to x, its negative to y. Autocast: sub, no rule. Rounding: the exact difference, once.

    >>> sub(Tape().leaf(np.float16([1.0])), 0.25).data
    array([0.75], dtype=float16)
    """
    tape, a, b, fmt = _binary("sub", x, y)
    return tape.record(basic(tape, "sub", fmt, a.carrier, b.carrier), fmt, (a, b), lambda g: (g, -g))


def mul(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """Product x * y.

    Vjp: g * y, g * x. Autocast: mul, no rule. Rounding: the exact product, once, in the vjp too.

    >>> mul(Tape().leaf(np.float16([300.0])), 300.0).data
    array([inf], dtype=float16)
    """
    tape, a, b, fmt = _binary("mul", x, y)
    return tape.record(
        basic(tape, "mul", fmt, a.carrier, b.carrier), fmt, (a, b),
        lambda g: (basic(tape, "mul", fmt, g, b.carrier), basic(tape, "mul", fmt, g, a.carrier)),
    )  # fmt: skip


def div(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """Quotient x / y.

    Vjp: g / y; -g * ((x / y) / y), each of its operations rounded, as torch composes it. Autocast: div, no rule.
    Rounding: the exact quotient, once.

    >>> div(1.0, Tape().leaf(np.float16([3.0]))).data
    array([0.3333], dtype=float16)
    """
    tape, a, b, fmt = _binary("div", x, y)
    rounded = tape.arithmetic.rounded

    def vjp(g: Array) -> tuple[Array, Array]:
        quotient = rounded(basic(tape, "div", fmt, a.carrier, b.carrier), fmt)
        again = rounded(basic(tape, "div", fmt, quotient, b.carrier), fmt)
        return basic(tape, "div", fmt, g, b.carrier), basic(tape, "mul", fmt, -g, again)

    return tape.record(basic(tape, "div", fmt, a.carrier, b.carrier), fmt, (a, b), vjp)


def neg(x: Tensor) -> Tensor:
    """-x.

    Vjp: -g. Autocast: neg, no rule. Rounding: none, it is exact.

    >>> neg(Tape().leaf(np.float16([0.0]))).data
    array([-0.], dtype=float16)
    """
    tape, (a,) = operands("neg", x)
    return tape.record(-a.carrier, a.format, (a,), lambda g: (-g,), exact=True)


def pow(x: Tensor, exponent: Number) -> Tensor:  # noqa: A001  # torch's name
    """Power x ** exponent for a number.

    Vjp: g * (exponent * x ** (exponent - 1)), fp32 inside. Autocast: pow.Tensor_Scalar, fp32 on cuda.
    Rounding: the power in fp32, then once; in fp32 itself correctly rounded but for one input in some 10**8.

    >>> pow(Tape().leaf(np.float16([300.0])), 2).data
    array([inf], dtype=float16)
    """
    return _unary(
        "pow.Tensor_Scalar", x, lambda a: kernels.power(a, exponent),
        lambda g, a, _: g * (a.dtype.type(exponent) * kernels.power(a, exponent - 1)),
    )  # fmt: skip


def sqrt(x: Tensor) -> Tensor:
    """Square root.

    Vjp: g / (2 * root). Autocast: sqrt, no rule. Rounding: the exact root, once.

    >>> sqrt(Tape().leaf(np.float16([2.0]))).data
    array([1.414], dtype=float16)
    """
    tape, (a,) = operands("sqrt", x)
    (a,), fmt = tape.prepared("sqrt", a)
    output = tape.arithmetic.rounded(basic(tape, "sqrt", fmt, a.carrier), fmt)
    return tape.record(output, fmt, (a,), lambda g: (basic(tape, "div", fmt, g, 2 * output),), rounded=True)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x).

    Vjp: -g / 2 * output ** 3, fp32 inside. Autocast: rsqrt, fp32 on cuda. Rounding: in fp32, then once.

    >>> rsqrt(Tape().leaf(np.float16([4.0]))).data
    array([0.5], dtype=float16)
    """
    return _unary("rsqrt", x, kernels.rsqrt, lambda g, _, y: g.dtype.type(-0.5) * g * (y * y * y))


def exp(x: Tensor) -> Tensor:
    """Exponential e ** x.

    Vjp: g * output. Autocast: exp, fp32 on cuda. Rounding: in fp32, then once.

    >>> exp(Tape().leaf(np.float16([12.0]))).data
    array([inf], dtype=float16)
    """
    tape, (a,) = operands("exp", x)
    (a,), fmt = tape.prepared("exp", a)
    output = tape.arithmetic.rounded(kernels.exp(a.carrier), fmt)
    return tape.record(output, fmt, (a,), lambda g: (basic(tape, "mul", fmt, g, output),), rounded=True)


def log(x: Tensor) -> Tensor:
    """Natural logarithm.

    Vjp: g / x. Autocast: log, fp32 on cuda. Rounding: in fp32, then once.

    >>> log(Tape().leaf(np.float16([1.0]))).data
    array([0.], dtype=float16)
    """
    tape, (a,) = operands("log", x)
    (a,), fmt = tape.prepared("log", a)
    return tape.record(kernels.log(a.carrier), fmt, (a,), lambda g: (basic(tape, "div", fmt, g, a.carrier),))


def relu(x: Tensor) -> Tensor:
    """Positive part: x where it is above 0, else 0.

    Vjp: g where the output is above 0, else 0. Autocast: relu, no rule. Rounding: none, it is exact.

    >>> relu(Tape().leaf(np.float16([-1.0, 2.0]))).data
    array([0., 2.], dtype=float16)
    """
    tape, (a,) = operands("relu", x)
    output = np.where(a.carrier <= 0, np.zeros_like(a.carrier), a.carrier)  # NaN stays
    return tape.record(output, a.format, (a,), lambda g: (np.where(output > 0, g, np.zeros_like(g)),), exact=True)


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Product of x and the normal distribution function, by erf ("none") or tanh (several times faster).

    Vjp: the derivative, fp32 inside. Autocast: gelu, no rule. Rounding: the whole formula in fp32, then once.

    >>> gelu(Tape().leaf(np.float16([1.0])), approximate="tanh").data
    array([0.8413], dtype=float16)
    """
    require(approximate in ("none", "tanh"), "gelu", f"approximate={approximate!r}", "use 'none' or 'tanh'")
    return _unary(
        "gelu", x, lambda a: kernels.gelu(a, approximate), lambda g, a, _: kernels.gelu_backward(g, a, approximate)
    )


def silu(x: Tensor) -> Tensor:
    """Product x * sigmoid(x).

    Vjp: the derivative, fp32 inside. Autocast: silu, no rule. Rounding: the whole formula in fp32, then once.

    >>> silu(Tape().leaf(np.float16([0.0]))).data
    array([0.], dtype=float16)
    """
    return _unary("silu", x, kernels.silu, lambda g, a, _: kernels.silu_backward(g, a))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e ** -x).

    Vjp: g * (1 - output) * output, fp32 inside. Autocast: sigmoid, no rule. Rounding: in fp32, then once.

    >>> sigmoid(Tape().leaf(np.float16([0.0]))).data
    array([0.5], dtype=float16)
    """
    return _unary("sigmoid", x, kernels.sigmoid, lambda g, _, y: kernels.sigmoid_backward(g, y))


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent.

    Vjp: g * (1 - output ** 2), fp32 inside. Autocast: tanh, no rule. Rounding: in fp32, then once.

    >>> tanh(Tape().leaf(np.float16([20.0]))).data
    array([1.], dtype=float16)
    """
    return _unary("tanh", x, kernels.tanh, lambda g, _, y: kernels.tanh_backward(g, y))


def softplus(x: Tensor, beta: Number = 1.0, threshold: Number = 20.0) -> Tensor:
    """log(1 + e ** (beta x)) / beta; x itself where beta x exceeds the threshold.

    Vjp: g * sigmoid(beta x), fp32 inside. Autocast: softplus, fp32 on cuda. Rounding: in fp32, then once.

    >>> softplus(Tape().leaf(np.float16([30.0]))).data
    array([30.], dtype=float16)
    """
    return _unary(
        "softplus", x, lambda a: kernels.softplus(a, beta, threshold),
        lambda g, a, _: kernels.softplus_backward(g, a, beta, threshold),
    )  # fmt: skip


def where(condition: Array, x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """Choice: x where the condition holds, else y.

    Vjp: g where each was taken, else 0. Autocast: where, no rule. Rounding: none but that of a promotion.

    >>> where(np.array([True, False]), Tape().leaf(np.float16([1.0, 1.0])), 7.0).data
    array([1., 7.], dtype=float16)
    """
    tape, a, b, fmt = _binary("where", x, y)
    return tape.record(
        np.where(condition, a.carrier, b.carrier), fmt, (a, b),
        lambda g: (np.where(condition, g, np.zeros_like(g)), np.where(condition, np.zeros_like(g), g)),
    )  # fmt: skip


def dropout(x: Tensor, mask: Array, p: float) -> Tensor:
    """Keep x / (1 - p) where the mask is true, else 0; the mask is an argument, so nothing is random inside.

    Vjp: the same on g. Autocast: dropout, no rule. Rounding: x times fp32(1 / (1 - p)) in fp32, then once.

    >>> dropout(Tape().leaf(np.float16([1.0, 3.0])), np.array([True, False]), p=0.5).data
    array([2., 0.], dtype=float16)
    """
    tape, (a,) = operands("dropout", x)
    require(0 <= p < 1, "dropout", f"p={p!r} is not inside [0, 1)", "p is the share that is dropped")
    require(mask.shape == a.shape, "dropout", f"mask {mask.shape} for x {a.shape}", "draw a mask of x's shape")
    factor = mask.astype(a.carrier.dtype) * a.carrier.dtype.type(1 / (1 - p))
    return tape.record(a.carrier * factor, a.format, (a,), lambda g: (g * factor,))


def cast(x: Tensor, fmt: FloatFormat | None) -> Tensor:
    """Value of x in another format; None is float64.

    Vjp: g in the format of x. Autocast: none, this is the cast. Rounding: once.

    >>> from mp_reference.spec.formats import BF16
    >>> cast(Tape().leaf(np.float32([1.001])), BF16).data
    array([1], dtype=bfloat16)
    """
    tape, (a,) = operands("cast", x)
    return tape.cast(a, fmt)
