"""A tape over NumPy arrays: reverse-mode differentiation in which every value has a format and casts are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mp_reference.amp.autocast import active_autocast
from mp_reference.nn.arithmetic import Arithmetic, Rules
from mp_reference.numerics.bits import format_of
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.formats import FP32, FloatFormat

__all__ = ["Tape", "Tensor"]

Array = NDArray[Any]
Vjp = Callable[[Array], Sequence["Array | None"]]


class Tensor:
    """A value on a tape: an array in a format.

    Values live in a carrier, an fp32 array that holds them exactly (float64 where there is no format: reference runs;
    integers as they are). ``data`` is the array in the format's own dtype.

    >>> Tape().leaf(np.float16([1.0, 2.0])).format.name
    'fp16'
    """

    __slots__ = ("carrier", "format", "index", "leaf", "requires_grad", "tape")

    def __init__(
        self, tape: Tape, carrier: Array, fmt: FloatFormat | None, requires_grad: bool, leaf: bool = False
    ) -> None:
        self.tape = tape
        self.carrier = carrier
        self.format = fmt
        self.requires_grad = requires_grad
        self.leaf = leaf
        self.index = tape.count()

    @property
    def data(self) -> Array:
        """The values in the format's dtype; fp32 for a custom format."""
        return self.carrier if self.format is None else self.carrier.astype(self.format.dtype, copy=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.carrier.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.carrier.ndim

    @property
    def floating(self) -> bool:
        """Whether the values are floating-point numbers."""
        return self.carrier.dtype.kind == "f"

    def __repr__(self) -> str:
        """Format, shape and values."""
        name = self.carrier.dtype.name if self.format is None else self.format.name
        return f"Tensor({name}, shape {self.shape}, {np.array2string(self.carrier, threshold=8)})"


@dataclass(frozen=True, slots=True)
class _Node:
    output: Tensor
    inputs: tuple[Tensor, ...]
    vjp: Vjp
    exact: bool


class Tape:
    """Records operations and differentiates them once, newest first.

    Args:
        arithmetic: how results are rounded and products added.
        rules: the op rules that cast inputs; None follows ``mp.autocast``, where one is entered.
        kept: where to put the output of every operation but casts, in order, for those who study them.

    Source: reverse accumulation; the order of additions into one gradient is newest operation first, as in torch.

    >>> from mp_reference.nn import ops
    >>> tape = Tape()
    >>> x = tape.leaf(np.float16([3.0]), requires_grad=True)
    >>> tape.gradients(ops.mul(x, x), [x])
    [array([6.], dtype=float16)]
    """

    def __init__(
        self, arithmetic: Arithmetic | None = None, rules: Rules | None = None, kept: list[Tensor] | None = None
    ) -> None:
        self.arithmetic = Arithmetic() if arithmetic is None else arithmetic
        self.rules = rules
        self.kept = kept
        self._nodes: list[_Node] = []
        self._count = 0
        self._casts: dict[tuple[int, FloatFormat | None], Tensor] = {}

    def count(self) -> int:
        """Number the next tensor."""
        self._count += 1
        return self._count

    def leaf(self, data: Array, fmt: FloatFormat | None = None, requires_grad: bool = False) -> Tensor:
        """Put an array on the tape.

        Args:
            data: floating (float64 is not rounded anywhere), integer or boolean, any shape.
            fmt: the format of fp32 values, where the dtype does not say it; every value must be in it.
            requires_grad: whether gradients are wanted; floating arrays only.

        Returns:
            The tensor.

        Raises:
            ValueError: values outside ``fmt``, or gradients of integers.

        Source: none.

        >>> from mp_reference.spec.formats import FP16
        >>> Tape().leaf(np.float32([1.0]), FP16).data.dtype
        dtype('float16')
        """
        data = np.asarray(data)
        if data.dtype.kind in "iub":
            if requires_grad or fmt is not None:
                raise ValueError(f"an array of {data.dtype} has neither gradients nor a format; cast it to float first")
            return Tensor(self, data, None, False, leaf=True)
        if data.dtype == np.float64 and fmt is None:
            return Tensor(self, data, None, requires_grad, leaf=True)
        carrier = data.astype(np.float32)
        own = FP32 if data.dtype == np.float64 else format_of(data.dtype)
        if fmt is not None and fmt != own and not np.array_equal(round_to(data, fmt), carrier, equal_nan=True):
            raise ValueError(f"the array holds values outside {fmt.name}; round_to(x, fmt) first, or leave fmt out")
        return Tensor(self, carrier, own if fmt is None else fmt, requires_grad, leaf=True)

    def record(
        self,
        carrier: Array,
        fmt: FloatFormat | None,
        inputs: Sequence[Tensor],
        vjp: Vjp,
        *,
        rounded: bool = False,
        exact: bool = False,
    ) -> Tensor:
        """Round a kernel's result into its format and remember how to differentiate it.

        Args:
            carrier: the unrounded result.
            fmt: the format of the output.
            inputs: the tensors it was computed from.
            vjp: gradient of the output (a carrier) -> gradients of ``inputs``, unrounded carriers of their shapes or
                shapes that they broadcast to; None where there is none.
            rounded: the carrier is in the format already, and need not be looked at again.
            exact: so are the gradients: the operation moves or selects values.

        Returns:
            The output.
        """
        wanted = any(one.requires_grad for one in inputs)
        values = carrier if rounded or exact else self.arithmetic.rounded(carrier, fmt)
        output = Tensor(self, np.asarray(values), fmt, wanted)
        if wanted:
            self._nodes.append(_Node(output, tuple(inputs), vjp, exact))
        if self.kept is not None:
            self.kept.append(output)
        return output

    def cast(self, x: Tensor, fmt: FloatFormat | None) -> Tensor:
        """``x`` in another format; the gradient is cast back. A leaf is cast once per format and tape."""
        if x.format == fmt or not x.floating:
            return x
        key = (x.index, fmt)
        if key not in self._casts or not (x.leaf and x.requires_grad):
            dtype = np.float64 if fmt is None else np.float32
            kept, self.kept = self.kept, None  # a cast is no step of the model
            widened = x.carrier if x.format is None and fmt is not None else x.carrier.astype(dtype, copy=False)
            self._casts[key] = self.record(widened, fmt, (x,), lambda gradient: (gradient,))
            self.kept = kept
        return self._casts[key]

    def prepared(self, op: str, *tensors: Tensor) -> tuple[tuple[Tensor, ...], FloatFormat | None]:
        """Apply the op's rule to its floating inputs.

        Args:
            op: ATen's name of the op.
            tensors: the inputs that take part.

        Returns:
            The inputs, cast where the rule says so, and the output's format: the rule's, else the inputs' widest.

        Raises:
            RuntimeError: the op is banned under autocast.
        """
        region = active_autocast() if self.rules is None else None
        rules = self.rules if region is None else Rules(device=region.device, fmt=region.fmt)
        rule = None if rules is None else rules.rule(op)
        if rule == "banned":
            raise RuntimeError(f"{op} is banned under autocast; use its version on logits, or a tape without rules")
        widest = self._widest(tensors)
        if rule is None or rules is None or widest is None:
            return tensors, widest
        if rule in ("fp32_set_opt_dtype", "fp32_append_dtype"):
            return tensors, FP32
        target = {"lower_precision_fp": rules.fmt, "fp32": FP32}.get(rule, widest)
        return tuple(self.cast(x, target) for x in tensors), target

    @staticmethod
    def _widest(tensors: Sequence[Tensor]) -> FloatFormat | None:
        """The format that holds all inputs' values, as type promotion finds it; None if any is float64."""
        formats = {x.format for x in tensors if x.floating}
        if None in formats or not formats:
            return None
        if len(formats) == 1:
            return formats.pop()
        return FP32

    def gradients(
        self,
        loss: Tensor,
        wrt: Sequence[Tensor],
        seed: float = 1.0,
        into: Sequence[Array | None] | None = None,
        accumulate: FloatFormat | None = None,
        observe: Callable[[Array], None] | None = None,
    ) -> list[Array | None]:
        """Gradients of a loss, added to those of earlier micro-steps.

        Args:
            loss: a tensor of one element.
            wrt: the leaves.
            seed: the gradient of the loss itself: the loss scale times the micro-step's weight; rounded to the loss's
                format, through fp32.
            into: what to add the new gradients to, one array (or None) a leaf.
            accumulate: the format of the sums; each leaf's own unless given. fp32 for 16-bit leaves is what engines
                call fp32 gradient accumulation.
            observe: called with the gradient (a carrier) of every recorded value, for those who study them.

        Returns:
            One array a leaf in the format's dtype, or None where the loss does not depend on it.

        Raises:
            ValueError: the loss has more than one element.

        Source: as the class.

        >>> from mp_reference.nn import ops
        >>> tape = Tape()
        >>> w = tape.leaf(np.float16([1.0]), requires_grad=True)
        >>> tape.gradients(ops.sum(w), [w], seed=4.0, into=[np.float32([0.5])], accumulate=FP32)
        [array([4.5], dtype=float32)]
        """
        if loss.carrier.size != 1:
            raise ValueError(f"loss has shape {loss.shape}, gradients need one element; sum or average it first")
        found = self._backward(loss, seed, observe)
        results: list[Array | None] = []
        for position, leaf in enumerate(wrt):
            gradient = found.get(leaf.index)
            earlier = None if into is None else into[position]
            if gradient is None:
                results.append(earlier)
                continue
            fmt = leaf.format if accumulate is None else accumulate
            carrier = self.arithmetic.rounded(gradient, fmt)
            if earlier is not None:
                with np.errstate(all="ignore"):
                    carrier = self.arithmetic.rounded(earlier.astype(carrier.dtype) + carrier, fmt)
            results.append(carrier if fmt is None else carrier.astype(fmt.dtype, copy=False))
        return results

    def _backward(self, loss: Tensor, seed: float, observe: Callable[[Array], None] | None) -> dict[int, Array]:
        with np.errstate(over="ignore"):
            start = np.full(loss.shape, seed, loss.carrier.dtype)
        found = {loss.index: self.arithmetic.rounded(start, loss.format)}
        for node in reversed(self._nodes):
            gradient = found.pop(node.output.index, None)
            if gradient is None:
                continue
            if observe is not None:
                observe(gradient)
            with np.errstate(all="ignore"):  # infinities and NaNs are what the loss scale is about
                contributions = node.vjp(gradient)
            for x, contribution in zip(node.inputs, contributions, strict=True):
                if x.requires_grad and contribution is not None:
                    self._add(found, x, self._fitted(contribution, x, node))
        return found

    def _fitted(self, contribution: Array, x: Tensor, node: _Node) -> Array:
        """A gradient in the shape and format of its input: in the output's format first, as torch's autograd has it."""
        fmt = node.output.format
        rounded = contribution if node.exact else self.arithmetic.rounded(contribution, fmt)
        if rounded.shape != x.shape:
            extra = rounded.ndim - x.ndim
            axes = tuple(range(extra)) + tuple(
                extra + axis for axis, size in enumerate(x.shape) if size == 1 and rounded.shape[extra + axis] != 1
            )
            summed = np.sum(np.asarray(rounded, order="C"), axis=axes, dtype=np.float64).reshape(x.shape)
            rounded = self.arithmetic.rounded(summed.astype(rounded.dtype), fmt)
        if x.format == fmt:
            return rounded
        return self.arithmetic.rounded(rounded.astype(x.carrier.dtype, copy=False), x.format)

    def _add(self, found: dict[int, Array], x: Tensor, gradient: Array) -> None:
        if x.index not in found:
            found[x.index] = gradient
            return
        with np.errstate(all="ignore"):
            found[x.index] = self.arithmetic.rounded(found[x.index] + gradient, x.format)
