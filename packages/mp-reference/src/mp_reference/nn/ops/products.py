"""Operations that multiply matrices, all under the tape's accumulator: products, linear, convolution, attention."""

from __future__ import annotations

import math

import numpy as np

from mp_reference.nn import kernels
from mp_reference.nn.ops._common import Array, Tape, Tensor, operands, product, require
from mp_reference.spec.formats import FloatFormat

__all__ = ["bmm", "conv2d", "einsum", "linear", "matmul", "scaled_dot_product_attention"]

Format = FloatFormat | None


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Matrix product x @ y; both have at least two dimensions, the leading ones broadcast.

    Vjp: g @ y.T and x.T @ g, under the same accumulator. Autocast: matmul, lower_precision_fp on cuda.
    Rounding: as the accumulator adds, to fp32, then once.

    >>> leaf = Tape().leaf
    >>> matmul(leaf(np.float16([[300.0, 1.0]])), leaf(np.float16([[1.0], [2.0]]))).data
    array([[302.]], dtype=float16)
    """
    return _matmul("matmul", x, y)


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """Matrix products x @ y of a batch: (B, M, K) by (B, K, N).

    Vjp: as matmul. Autocast: bmm, lower_precision_fp on cuda. Rounding: as matmul.

    >>> leaf = Tape().leaf
    >>> bmm(leaf(np.ones((2, 1, 3), "f4")), leaf(np.ones((2, 3, 1), "f4"))).shape
    (2, 1, 1)
    """
    require(x.ndim == 3 and y.ndim == 3 and x.shape[0] == y.shape[0], "bmm", f"shapes {x.shape} and {y.shape}",
            "give (B, M, K) and (B, K, N)")  # fmt: skip
    return _matmul("bmm", x, y)


def _matmul(op: str, x: Tensor, y: Tensor) -> Tensor:
    tape, (a, b) = operands(op, x, y)
    require(a.ndim >= 2 and b.ndim >= 2 and a.shape[-1] == b.shape[-2], op, f"shapes {a.shape} and {b.shape}",
            "the last dimension of x must equal the last but one of y")  # fmt: skip
    (a, b), fmt = tape.prepared(op, a, b)
    left, right = a.carrier, b.carrier
    if b.ndim == 2:  # the rows of all batches are multiplied at once, so that the gradient of y is one product
        left = left.reshape(-1, a.shape[-1])

    def vjp(g: Array) -> tuple[Array | None, Array | None]:
        rows = g.reshape(left.shape[:-1] + g.shape[-1:])
        return (
            product(tape, g, fmt, right.swapaxes(-1, -2), b.format) if a.requires_grad else None,
            product(tape, left.swapaxes(-1, -2), a.format, rows, fmt) if b.requires_grad else None,
        )

    output = product(tape, left, a.format, right, b.format)
    return tape.record(output.reshape(*a.shape[:-1], -1) if b.ndim == 2 else output, fmt, (a, b), vjp)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Affine map x @ weight.T + bias; x is (..., in), weight (out, in), bias (out,).

    Vjp: g @ weight; g.T @ x and the sum of g over all rows at once. Autocast: linear, lower_precision_fp on cuda.
    Rounding: the product as the accumulator adds, to fp32; the bias added in fp32; then once.

    >>> leaf = Tape().leaf
    >>> linear(leaf(np.float16([[1.0, 2.0]])), leaf(np.float16([[3.0, 4.0]])), leaf(np.float16([0.5]))).data
    array([[11.5]], dtype=float16)
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    tape, _ = operands("linear", *inputs)
    require(weight.ndim == 2 and x.shape[-1:] == weight.shape[1:], "linear",
            f"x {x.shape} with weight {weight.shape}", "x is (..., in), weight (out, in)")  # fmt: skip
    require(bias is None or bias.shape == weight.shape[:1], "linear",
            f"bias {bias and bias.shape} with weight {weight.shape}", "bias is (out,)")  # fmt: skip
    prepared, fmt = tape.prepared("linear", *inputs)
    a, w = prepared[:2]
    rows = a.carrier.reshape(-1, a.shape[-1])
    addend = None if bias is None else prepared[2].carrier
    output = product(tape, rows, a.format, w.carrier.T, w.format, addend)

    def vjp(g: Array) -> list[Array | None]:
        flat = g.reshape(-1, g.shape[-1])
        return [
            product(tape, flat, fmt, w.carrier, w.format).reshape(a.shape) if a.requires_grad else None,
            product(tape, flat.T, fmt, rows, a.format) if w.requires_grad else None,
            *([] if bias is None else [kernels.total(flat, (0,))]),
        ]

    return tape.record(output.reshape(*a.shape[:-1], -1), fmt, prepared, vjp)


def einsum(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """A product of two tensors written with letters, such as ``"bik,bjk->bij"``: one batched matrix product.

    Vjp: the einsum of g with the other input. Autocast: einsum, lower_precision_fp on cuda.
    Rounding: as matmul.

    >>> leaf = Tape().leaf
    >>> einsum("ik,jk->ij", leaf(np.float16([[1.0, 2.0]])), leaf(np.float16([[3.0, 4.0]]))).data
    array([[11.]], dtype=float16)
    """
    tape, (a, b) = operands("einsum", x, y)
    left, right, out = _letters(equation, a, b)
    (a, b), fmt = tape.prepared("einsum", a, b)
    return tape.record(
        _einsum(tape, (left, right, out), a.carrier, a.format, b.carrier, b.format), fmt, (a, b),
        lambda g: (
            _einsum(tape, (out, right, left), g, fmt, b.carrier, b.format),
            _einsum(tape, (left, out, right), a.carrier, a.format, g, fmt),
        ),
    )  # fmt: skip


def _letters(equation: str, a: Tensor, b: Tensor) -> tuple[str, str, str]:
    sides = equation.replace(" ", "").replace("->", ",").split(",")
    require(len(sides) == 3, "einsum", f"equation {equation!r}", "write two inputs and an output, 'ik,kj->ij'")
    left, right, out = sides
    once = all(len(set(side)) == len(side) for side in sides)
    require(once and set(left) ^ set(right) <= set(out) <= set(left) | set(right), "einsum", f"equation {equation!r}",
            "each letter once a side, and letters of one input alone must be in the output")  # fmt: skip
    sizes = dict(zip(left, a.shape, strict=False)) | dict(zip(right, b.shape, strict=False))
    fits = [tuple(sizes[letter] for letter in side) for side in (left, right)] == [a.shape, b.shape]
    require(fits, "einsum", f"shapes {a.shape} and {b.shape} for {equation!r}", "one size for each letter")
    return left, right, out


def _einsum(tape: Tape, letters: tuple[str, str, str], a: Array, a_format: Format, b: Array, b_format: Format) -> Array:
    left, right, out = letters
    batch = [one for one in left if one in right and one in out]
    inner = [one for one in left if one in right and one not in out]
    rows = [one for one in left if one not in right]
    columns = [one for one in right if one not in left]
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))

    def arranged(x: Array, names: str, groups: list[list[str]]) -> Array:
        order = [names.index(one) for group in groups for one in group]
        return x.transpose(order).reshape(
            *(sizes[one] for one in groups[0]), *(math.prod(sizes[one] for one in group) for group in groups[1:])
        )

    result = product(
        tape, arranged(a, left, [batch, rows, inner]), a_format, arranged(b, right, [batch, inner, columns]), b_format
    )
    found = [*batch, *rows, *columns]
    return result.reshape([sizes[one] for one in found]).transpose([found.index(one) for one in out])


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, dilation: int = 1
) -> Tensor:
    """Correlation of images (N, C, H, W) with kernels (O, C, h, w), plus a bias (O,): one matrix product.

    Vjp: two more matrix products and the sum of g over images and places. Autocast: conv2d, lower_precision_fp on cuda.
    Rounding: the product as the accumulator adds, to fp32; the bias added in fp32; then once.

    >>> leaf = Tape().leaf
    >>> conv2d(leaf(np.ones((1, 1, 3, 3), "f2")), leaf(np.ones((1, 1, 2, 2), "f2"))).data.ravel()
    array([4., 4., 4., 4.], dtype=float16)
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    tape, _ = operands("conv2d", *inputs)
    require(x.ndim == 4 and weight.ndim == 4 and x.shape[1] == weight.shape[1], "conv2d",
            f"x {x.shape} with weight {weight.shape}", "x is (N, C, H, W), weight (O, C, h, w)")  # fmt: skip
    require(bias is None or bias.shape == weight.shape[:1], "conv2d",
            f"bias {bias and bias.shape} with weight {weight.shape}", "bias is (O,)")  # fmt: skip
    require(
        min(stride, dilation) >= 1 and padding >= 0,
        "conv2d",
        f"stride={stride}, padding={padding}, dilation={dilation}",
        "stride and dilation >= 1, padding >= 0",
    )
    places = [(x.shape[2 + i] + 2 * padding - dilation * (weight.shape[2 + i] - 1) - 1) // stride + 1 for i in (0, 1)]
    require(min(places) >= 1, "conv2d", f"weight {weight.shape} does not fit x {x.shape}", "pad more")
    prepared, fmt = tape.prepared("conv2d", *inputs)
    a, w = prepared[:2]
    windows = _Windows(a.shape, w.shape, (places[0], places[1]), (stride, padding, dilation))
    columns, flat = windows.gathered(a.carrier), w.carrier.reshape(w.shape[0], -1)
    addend = None if bias is None else prepared[2].carrier
    output = product(tape, columns, a.format, flat.T, w.format, addend)

    def vjp(g: Array) -> list[Array | None]:
        rows = g.transpose(0, 2, 3, 1).reshape(-1, w.shape[0])
        return [
            windows.scattered(product(tape, rows, fmt, flat, w.format)) if a.requires_grad else None,
            product(tape, rows.T, fmt, columns, a.format).reshape(w.shape) if w.requires_grad else None,
            *([] if bias is None else [kernels.total(rows, (0,))]),
        ]

    image = output.reshape(a.shape[0], *places, w.shape[0]).transpose(0, 3, 1, 2)
    return tape.record(np.ascontiguousarray(image), fmt, prepared, vjp)


class _Windows:
    """The windows of a convolution as rows of a matrix, and rows added back onto the image."""

    def __init__(
        self, x: tuple[int, ...], weight: tuple[int, ...], places: tuple[int, int], steps: tuple[int, int, int]
    ) -> None:
        self.x, self.kernel, self.places = x, weight[2:], places
        self.stride, self.padding, self.dilation = steps

    def _slices(self, i: int, j: int) -> tuple[slice, slice, slice, slice]:
        """Where the kernel's element (i, j) meets the padded image."""
        starts = (i * self.dilation, j * self.dilation)
        down, across = (
            slice(start, start + self.stride * (count - 1) + 1, self.stride)
            for start, count in zip(starts, self.places, strict=True)
        )
        return slice(None), slice(None), down, across

    def gathered(self, x: Array) -> Array:
        pad = (self.padding, self.padding)
        padded = np.pad(x, ((0, 0), (0, 0), pad, pad))
        parts = [padded[self._slices(i, j)] for i in range(self.kernel[0]) for j in range(self.kernel[1])]
        stacked = np.stack(parts, axis=2)  # N, C, h * w, H, W
        return stacked.transpose(0, 3, 4, 1, 2).reshape(-1, self.x[1] * len(parts))

    def scattered(self, columns: Array) -> Array:
        n, channels, height, width = self.x
        parts = columns.reshape(n, *self.places, channels, -1).transpose(4, 0, 3, 1, 2)
        padded = np.zeros((n, channels, height + 2 * self.padding, width + 2 * self.padding))
        for number, part in enumerate(parts):
            padded[self._slices(*divmod(number, self.kernel[1]))] += part
        inside = padded[:, :, self.padding : self.padding + height, self.padding : self.padding + width]
        return inside.astype(columns.dtype)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(query @ key.T * scale) @ value over the last two dimensions, as a fused kernel computes it.

    Vjp: by the recomputed probabilities; the gradient of the scores is rounded to the format before its two products.
    Autocast: scaled_dot_product_attention, lower_precision_fp on cuda.
    Rounding: scores and softmax in fp32, the probabilities once, the output once.

    >>> leaf = Tape().leaf
    >>> q = leaf(np.float16([[0.0], [0.0]]))
    >>> scaled_dot_product_attention(q, q, leaf(np.float16([[1.0], [3.0]])), causal=True).data.ravel()
    array([1., 2.], dtype=float16)
    """
    tape, inputs = operands("scaled_dot_product_attention", query, key, value)
    fits = all(one.ndim >= 2 for one in inputs) and query.shape[-1] == key.shape[-1]
    require(
        fits and key.shape[-2] == value.shape[-2],
        "scaled_dot_product_attention",
        f"query {query.shape}, key {key.shape}, value {value.shape}",
        "give (..., L, E), (..., S, E), (..., S, V)",
    )
    (q, k, v), fmt = tape.prepared("scaled_dot_product_attention", *inputs)
    dtype = q.carrier.dtype.type
    factor = dtype(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = product(tape, q.carrier, fmt, k.carrier.swapaxes(-1, -2), fmt) * factor
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores, dtype(-np.inf))
    exact = kernels.softmax(scores, -1)
    shares = tape.arithmetic.rounded(exact, fmt)

    def vjp(g: Array) -> tuple[Array, Array, Array]:
        to_shares = product(tape, g, fmt, v.carrier.swapaxes(-1, -2), fmt)
        to_scores = tape.arithmetic.rounded(kernels.softmax_backward(to_shares, exact, -1) * factor, fmt)
        return (
            product(tape, to_scores, fmt, k.carrier, fmt),
            product(tape, to_scores.swapaxes(-1, -2), fmt, q.carrier, fmt),
            product(tape, shares.swapaxes(-1, -2), fmt, g, fmt),
        )

    return tape.record(product(tape, shares, fmt, v.carrier, fmt), fmt, (q, k, v), vjp)
