"""Claims that every operation of the reference's tape has the values and gradients of torch's autograd."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Bound, DisagreementError, assert_same_bits, assert_within_bound
from mp_reference.nn import ops
from mp_reference.nn.arithmetic import Arithmetic
from mp_reference.nn.tensor import Tape
from mp_reference.numerics.codec import cast
from mp_reference.spec.formats import BF16, FP16

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject
    from mp_reference.nn.tensor import Tensor
    from mp_reference.spec.formats import FloatFormat

__all__ = ["CASES", "CLAIMS", "OTHER_BITS"]

Array = np.ndarray[Any, np.dtype[Any]]
Case = tuple[tuple[tuple[int, ...], ...], "Callable[..., Tensor]"]

_TARGET = np.array([2, 0, 3, -100])
_MASK = np.array([[True, False, True], [False, True, True]])
_BUFFERS = (np.array([0.3, -0.2]), np.array([1.5, 0.5]))
_ANGLES = np.arange(6.0).reshape(3, 2)
_HEADS = (2, 2, 3, 4)
_POSITIVE = frozenset({"pow", "sqrt", "rsqrt", "log", "div"})
_UNIT = 2.0**-40

CASES: Mapping[str, Case] = {
    "add": (((2, 3), (3,)), ops.add),
    "sub": (((2, 3), (2, 1)), ops.sub),
    "mul": (((2, 3), (3,)), ops.mul),
    "div": (((2, 3), (3,)), ops.div),
    "neg": (((3,),), ops.neg),
    "pow": (((3,),), lambda x: ops.pow(x, 2.5)),
    "sqrt": (((3,),), ops.sqrt),
    "rsqrt": (((3,),), ops.rsqrt),
    "exp": (((3,),), ops.exp),
    "log": (((3,),), ops.log),
    "relu": (((2, 5),), ops.relu),
    "gelu": (((2, 5),), ops.gelu),
    "gelu-tanh": (((2, 5),), partial(ops.gelu, approximate="tanh")),
    "silu": (((2, 5),), ops.silu),
    "sigmoid": (((2, 5),), ops.sigmoid),
    "tanh": (((2, 5),), ops.tanh),
    "softplus": (((2, 5),), partial(ops.softplus, beta=2.0, threshold=2.0)),
    "where": (((2, 3), (3,)), lambda x, y: ops.where(_MASK, x, y)),
    "dropout": (((2, 3),), lambda x: ops.dropout(x, _MASK, 0.25)),
    "sum": (((2, 3, 2),), lambda x: ops.sum(x, (0, -1))),
    "mean": (((2, 3, 2),), lambda x: ops.mean(x, 1)),
    "prod": (((2, 3),), lambda x: ops.prod(x, 1)),
    "cumsum": (((2, 3),), lambda x: ops.cumsum(x, 1)),
    "softmax": (((2, 3),), ops.softmax),
    "log_softmax": (((2, 3),), lambda x: ops.log_softmax(x, 0)),
    "layer_norm": (((2, 3, 4), (3, 4), (3, 4)), lambda x, w, b: ops.layer_norm(x, (3, 4), w, b)),
    "rms_norm": (((2, 4), (4,)), lambda x, w: ops.rms_norm(x, (4,), w)),
    "group_norm": (((2, 4, 3), (4,), (4,)), lambda x, w, b: ops.group_norm(x, 2, w, b)),
    "batch_norm": (((3, 2, 2), (2,), (2,)), lambda x, w, b: ops.batch_norm(x, *_BUFFERS, w, b)[0]),
    "batch_norm-eval": (((3, 2, 2), (2,), (2,)), lambda x, w, b: ops.batch_norm(x, *_BUFFERS, w, b, False)[0]),
    "nll_loss": (((4, 4),), lambda x: ops.nll_loss(x, _TARGET)),
    "cross_entropy": (((4, 4),), lambda x: ops.cross_entropy(x, _TARGET, reduction="sum")),
    "mse_loss": (((2, 3),), lambda x: ops.mse_loss(x, np.ones((2, 3)))),
    "bce_with_logits": (((2, 3),), lambda x: ops.bce_with_logits(x, _MASK.astype(np.float64))),
    "matmul": (((2, 3, 4), (4, 2)), ops.matmul),
    "bmm": (((2, 3, 4), (2, 4, 2)), ops.bmm),
    "linear": (((2, 3, 4), (5, 4), (5,)), ops.linear),
    "einsum": (((2, 3, 4), (2, 5, 4)), partial(ops.einsum, "bik,bjk->bji")),
    "conv2d": (((2, 2, 5, 4), (3, 2, 3, 2), (3,)), partial(ops.conv2d, stride=2, padding=1)),
    "conv2d-dilated": (((1, 2, 5, 5), (1, 2, 2, 2), (1,)), partial(ops.conv2d, dilation=2)),
    "scaled_dot_product_attention": ((_HEADS,) * 3, partial(ops.scaled_dot_product_attention, causal=True)),
    "embedding": (((4, 3),), lambda w: ops.embedding(w, np.array([[1, 3], [1, 0]]))),
    "cat": (((2, 3), (2, 1)), lambda x, y: ops.cat([x, y], -1)),
    "stack": (((2, 3), (2, 3)), lambda x, y: ops.stack([x, y], 1)),
    "index": (((3, 4),), lambda x: ops.index(x, np.array([0, 2, 0]))),
    "reshape": (((2, 3),), lambda x: ops.reshape(x, (3, -1))),
    "permute": (((2, 3, 4),), lambda x: ops.permute(x, (2, 0, 1))),
    "transpose": (((2, 3, 4),), lambda x: ops.transpose(x, 0, -1)),
    "rotary": (((2, 3, 4),), lambda x: ops.rotary(x, np.cos(_ANGLES), np.sin(_ANGLES))),
}
"""By operation: the shapes of its inputs and the call, the same one as ``implementations.autograd.CALLS`` makes."""


def _inputs(op: str) -> list[Array]:
    random = np.random.default_rng(len(op))
    draw = [random.uniform(-1.5, 1.5, shape) for shape in CASES[op][0]]
    return [np.abs(one) + 0.5 for one in draw] if op in _POSITIVE else draw


def _by_the_tape(op: str, inputs: list[Array]) -> list[Array]:
    tape = Tape()
    leaves = [tape.leaf(one, requires_grad=True) for one in inputs]
    output = CASES[op][1](*leaves)
    weights = tape.leaf(np.cos(np.arange(float(output.carrier.size))).reshape(output.shape))
    gradients = tape.gradients(ops.sum(ops.mul(output, weights)), leaves)
    return [output.carrier, *(np.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True))]


def _check(op: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        run.drawn += 1
        inputs = _inputs(op)
        found, expected = subject.perform("differentiate", *inputs, op=op), _by_the_tape(op, inputs)
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            bound = np.full(theirs.shape, _UNIT * max(float(np.abs(theirs).max()), 1.0))
            try:
                run.record(assert_within_bound(ours, theirs, bound))
            except DisagreementError as difference:
                raise DisagreementError(f"{op}, {_name(place)}: {difference}") from None

    return check


OTHER_BITS: Mapping[str, str] = {
    **dict.fromkeys(("pow", "rsqrt", "prod"), "torch composes the gradient of several rounded operations"),
    **dict.fromkeys(("layer_norm", "group_norm", "batch_norm", "batch_norm-eval"), "torch's CPU rounds the statistics"),
    "rms_norm": "torch's CPU composes it of several rounded operations",
    "scaled_dot_product_attention": "a fused kernel, whose order of operations no two devices share",
    "bce_with_logits": "torch composes the gradient of several rounded operations",
    "rotary": "no operation of torch",
    "dropout": "torch composes it of several rounded operations",
}
"""Operations whose 16-bit bits are not claimed, and why."""


def _by_the_tape_in_low_precision(op: str, inputs: list[Array]) -> list[Array]:
    tape = Tape(Arithmetic(accumulator="exact"))
    leaves = [tape.leaf(one, requires_grad=True) for one in inputs]
    output = CASES[op][1](*leaves)
    weights = np.cos(np.arange(float(output.carrier.size))).astype(np.float32).astype(inputs[0].dtype)
    gradients = tape.gradients(ops.sum(ops.mul(output, tape.leaf(weights.reshape(output.shape)))), leaves)
    return [output.data, *(np.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True))]


def _check_bits(op: str, fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        run.drawn += 1
        inputs = [cast(one, fmt) for one in _inputs(op)]
        found = subject.perform("differentiate_low", *inputs, op=op)
        for place, (ours, theirs) in enumerate(zip(found, _by_the_tape_in_low_precision(op, inputs), strict=True)):
            try:
                run.record(assert_same_bits(ours, theirs))
            except DisagreementError as difference:
                raise DisagreementError(f"{op}, {_name(place)}: {difference}") from None

    return check


def _name(place: int) -> str:
    return "output" if place == 0 else f"gradient {place - 1}"


_IN_FLOAT64 = tuple(
    Claim(
        id=f"op-gradients.{op}",
        sentence=f"in float64, {op} on the reference's tape has the output and the gradients that torch's autograd has",
        source="torch's derivative formulas (tools/autograd/derivatives.yaml), run in float64 on the CPU",
        agreement=Bound(
            "2**-40 of the larger of 1 and the largest element: fewer than 2**8 operations in float64 on each side, on "
            "intermediate values below 2**4"
        ),
        operation="differentiate",
        check=_check(op),
        devices=("cpu",),
        exhaustive=True,
    )
    for op in CASES
)

_IN_16_BITS = tuple(
    Claim(
        id=f"op-bits.{op}.{fmt.name}",
        sentence=f"in {fmt.name}, {op} on the reference's tape has the bits and dtypes, of output and gradients, that "
        "torch's autograd has with exact products and the reference's kernels",
        source="torch's derivative formulas (tools/autograd/derivatives.yaml), run on CPU tensors under emulate",
        agreement=Bits(),
        operation="differentiate_low",
        check=_check_bits(op, fmt),
        format=fmt.name,
        devices=("cpu",),
        exhaustive=True,
    )
    for op in CASES
    if op not in OTHER_BITS
    for fmt in (FP16, BF16)
)
CLAIMS = (*_IN_FLOAT64, *_IN_16_BITS)
