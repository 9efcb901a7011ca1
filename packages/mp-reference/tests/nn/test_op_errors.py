"""Operations refuse what does not fit, with shapes and names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mp_reference.nn import ops
from mp_reference.nn.tensor import Tape, Tensor

HALF = np.float16([[1.0, 2.0]])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda x: ops.add(x, x.tape.leaf(np.zeros((3, 3), "f2"))), r"add: shapes \(1, 2\) and \(3, 3\) do not"),
        (lambda x: ops.gelu(x, "erf"), "gelu: approximate='erf'; use 'none' or 'tanh'"),
        (lambda x: ops.dropout(x, np.ones((1, 2), bool), 1.0), r"dropout: p=1\.0 is not inside \[0, 1\)"),
        (lambda x: ops.dropout(x, np.ones(3, bool), 0.5), r"dropout: mask \(3,\) for x \(1, 2\)"),
        (lambda x: ops.sum(x, 2), r"sum: dims=2 of a tensor of shape \(1, 2\); use dimensions from -2 to 1"),
        (lambda x: ops.layer_norm(x, (3,)), r"layer_norm: normalized_shape=\(3,\) is not the end of x's \(1, 2\)"),
        (lambda x: ops.rms_norm(x, ()), r"rms_norm: normalized_shape=\(\)"),
        (lambda x: ops.layer_norm(x, (2,), x), r"layer_norm: weight has shape \(1, 2\), x \(1, 2\); weight must have"),
        (lambda x: ops.group_norm(x, 3), r"group_norm: groups=3 of x \(1, 2\)"),
        (lambda x: ops.batch_norm(x, np.zeros(3), np.zeros(2)), r"batch_norm: buffers of shapes \(3,\) and \(2,\)"),
        (lambda x: ops.batch_norm(x, np.zeros(2), np.zeros(2)), r"batch_norm: one value a channel in x \(1, 2\)"),
        (lambda x: ops.batch_norm(ops.sum(x), np.zeros(2), np.zeros(2)), r"batch_norm: x has shape \(\)"),
        (lambda x: ops.nll_loss(x, np.array([0]), reduction="max"), "nll_loss: reduction='max'; use 'mean', 'sum'"),
        (lambda x: ops.nll_loss(x, np.array([0.0])), r"nll_loss: x \(1, 2\) with target \(1,\) of float64"),
        (lambda x: ops.cross_entropy(x, np.array([2])), r"cross_entropy: a target outside 0\.\.1"),
        (lambda x: ops.mse_loss(x, np.zeros(3)), r"mse_loss: x \(1, 2\) with target \(3,\)"),
        (lambda x: ops.bce_with_logits(x, np.zeros(3)), r"bce_with_logits: x \(1, 2\) with target \(3,\)"),
        (lambda x: ops.matmul(x, x), r"matmul: shapes \(1, 2\) and \(1, 2\); the last dimension of x must equal"),
        (lambda x: ops.bmm(x, x), r"bmm: shapes \(1, 2\) and \(1, 2\); give \(B, M, K\) and \(B, K, N\)"),
        (lambda x: ops.linear(x, ops.transpose(x, 0, 1)), r"linear: x \(1, 2\) with weight \(2, 1\)"),
        (lambda x: ops.linear(x, x, x), r"linear: bias \(1, 2\) with weight \(1, 2\); bias is \(out,\)"),
        (lambda x: ops.einsum("ij->ji", x, x), "einsum: equation 'ij->ji'; write two inputs and an output"),
        (lambda x: ops.einsum("ii,ij->ij", x, x), "einsum: equation 'ii,ij->ij'; each letter once a side"),
        (lambda x: ops.einsum("ij,jk->ik", x, x), r"einsum: shapes \(1, 2\) and \(1, 2\) for 'ij,jk->ik'"),
        (lambda x: ops.conv2d(x, x), r"conv2d: x \(1, 2\) with weight \(1, 2\)"),
        (lambda _: conv(bias=(3,)), r"conv2d: bias \(3,\) with weight \(2, 1, 2, 2\)"),
        (lambda _: conv(stride=0), "conv2d: stride=0, padding=0, dilation=1"),
        (lambda _: conv(dilation=9), r"conv2d: weight \(2, 1, 2, 2\) does not fit x \(1, 1, 3, 3\); pad more"),
        (lambda x: ops.scaled_dot_product_attention(x, x, ops.sum(x)), r"scaled_dot_product_attention: query \(1, 2\)"),
        (lambda x: ops.embedding(x, np.array([0.0])), r"embedding: weight \(1, 2\), indices of float64"),
        (lambda x: ops.embedding(x, np.array([1])), r"embedding: an index outside 0\.\.0"),
        (lambda x: ops.cat([x, ops.transpose(x, 0, 1)]), r"cat: shapes \(1, 2\), \(2, 1\) along dim 0"),
        (lambda x: ops.cat([x], 2), "cat: dim=2 of 2 dimensions; use -2 to 1"),
        (lambda x: ops.stack([x, ops.transpose(x, 0, 1)]), r"stack: shapes \(1, 2\), \(2, 1\); make them equal"),
        (lambda x: ops.reshape(x, (3,)), r"reshape: x \(1, 2\) to \(3,\); keep the number of elements"),
        (lambda x: ops.permute(x, (0, 0)), r"permute: dims=\(0, 0\) of x \(1, 2\); name each once"),
        (lambda x: ops.rotary(x, np.zeros((2, 1)), np.zeros((1, 1))), r"rotary: x \(1, 2\) with cos \(2, 1\), sin"),
        (lambda x: ops.add(x, Tape().leaf(HALF)), "add: the inputs lie on different tapes"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused_with_shapes_and_names(act: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act(Tape().leaf(HALF))


def conv(bias: tuple[int, ...] | None = None, **options: int) -> Tensor:
    """A convolution of a 3 x 3 image."""
    tape = Tape()
    given = None if bias is None else tape.leaf(np.zeros(bias, "f2"))
    return ops.conv2d(
        tape.leaf(np.zeros((1, 1, 3, 3), "f2")), tape.leaf(np.zeros((2, 1, 2, 2), "f2")), given, **options
    )


def test_numbers_alone_are_refused() -> None:
    with pytest.raises(TypeError, match=r"add needs a Tensor among its inputs, got float, float; put arrays on a tape"):
        ops.add(1.0, 2.0)
