"""Layers: what their parameters are called and start as, and the operations they compute; enough for three models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mp_reference.nn import ops
from mp_reference.nn.tensor import Tape, Tensor

__all__ = [
    "BatchNorm2d", "Conv2d", "Embedding", "LayerNorm", "Linear", "Model", "Parameters", "Scope",
]  # fmt: skip

Array = NDArray[Any]
Parameters = dict[str, Array]
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Scope:
    """What a layer sees during one forward pass: its tensors by name, its buffers, and whether it trains.

    Args:
        tape: where the pass is recorded.
        tensors: parameters by full name.
        buffers: fp32 arrays by full name; never written to.
        new_buffers: where a layer puts the buffers after this pass.
        training: whether statistics come from the batch.
        prefix: the layer's own part of the names.
    """

    tape: Tape
    tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Array] = field(default_factory=dict)
    new_buffers: Parameters = field(default_factory=dict)
    training: bool = True
    prefix: str = ""

    def __getitem__(self, name: str) -> Tensor:
        """The parameter ``name`` of this layer."""
        return self.tensors[self.prefix + name]

    def inside(self, name: str) -> Scope:
        """The scope of a layer that this one is made of."""
        return Scope(self.tape, self.tensors, self.buffers, self.new_buffers, self.training, f"{self.prefix}{name}.")


class Model(Protocol):
    """A layer, or layers of layers."""

    def parameters(self, random: np.random.Generator) -> Parameters:
        """First values, fp32, by name."""
        ...

    def buffers(self) -> Parameters:
        """First buffers, fp32, by name."""
        ...

    def __call__(self, scope: Scope, x: Any) -> Tensor:
        """The forward pass."""
        ...


def named(parts: Mapping[str, Parameters]) -> Parameters:
    """Parameters of parts under the parts' names.

    >>> named({"a": {"weight": np.zeros(1)}})
    {'a.weight': array([0.])}
    """
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def _uniform(random: np.random.Generator, shape: Sequence[int], fan_in: int) -> Array:
    bound = 1 / math.sqrt(fan_in)
    return random.uniform(-bound, bound, shape).astype(np.float32)


class _NoBuffers:
    """A layer without buffers."""

    def buffers(self) -> Parameters:
        """None."""
        return {}


@dataclass(frozen=True)
class Linear(_NoBuffers):
    """x @ weight.T + bias.

    >>> sorted(Linear(2, 3).parameters(np.random.default_rng(0)))
    ['bias', 'weight']
    """

    inputs: int
    outputs: int
    bias: bool = True

    def parameters(self, random: np.random.Generator) -> Parameters:
        """Uniform within 1 / sqrt(inputs)."""
        weight = {"weight": _uniform(random, (self.outputs, self.inputs), self.inputs)}
        return weight | ({"bias": _uniform(random, (self.outputs,), self.inputs)} if self.bias else {})

    def __call__(self, scope: Scope, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return ops.linear(x, scope["weight"], scope["bias"] if self.bias else None)


@dataclass(frozen=True)
class Embedding(_NoBuffers):
    """Rows of a table at integer indices.

    >>> Embedding(5, 2).parameters(np.random.default_rng(0))["weight"].shape
    (5, 2)
    """

    rows: int
    width: int

    def parameters(self, random: np.random.Generator) -> Parameters:
        """Normal with deviation 1 / sqrt(width)."""
        return {"weight": (random.standard_normal((self.rows, self.width)) / math.sqrt(self.width)).astype(np.float32)}

    def __call__(self, scope: Scope, x: Array) -> Tensor:
        """Integers of any shape to (..., width)."""
        return ops.embedding(scope["weight"], x)


@dataclass(frozen=True)
class LayerNorm(_NoBuffers):
    """Normalise the last dimension.

    >>> LayerNorm(2).parameters(np.random.default_rng(0))
    {'weight': array([1., 1.], dtype=float32), 'bias': array([0., 0.], dtype=float32)}
    """

    width: int
    eps: float = 1e-5

    def parameters(self, random: np.random.Generator) -> Parameters:  # noqa: ARG002  # nothing random
        """Ones and zeros."""
        return {"weight": np.ones(self.width, np.float32), "bias": np.zeros(self.width, np.float32)}

    def __call__(self, scope: Scope, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        return ops.layer_norm(x, (self.width,), scope["weight"], scope["bias"], self.eps)


@dataclass(frozen=True)
class Conv2d(_NoBuffers):
    """Correlate images with kernels.

    >>> Conv2d(3, 8, 3).parameters(np.random.default_rng(0))["weight"].shape
    (8, 3, 3, 3)
    """

    inputs: int
    outputs: int
    size: int
    stride: int = 1
    padding: int = 0

    def parameters(self, random: np.random.Generator) -> Parameters:
        """Uniform within 1 / sqrt(inputs * size ** 2)."""
        fan_in = self.inputs * self.size**2
        shape = (self.outputs, self.inputs, self.size, self.size)
        return {"weight": _uniform(random, shape, fan_in), "bias": _uniform(random, (self.outputs,), fan_in)}

    def __call__(self, scope: Scope, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, ...)."""
        return ops.conv2d(x, scope["weight"], scope["bias"], self.stride, self.padding)


@dataclass(frozen=True)
class BatchNorm2d:
    """Normalise each channel over the batch; running statistics are buffers.

    >>> sorted(BatchNorm2d(2).buffers())
    ['running_mean', 'running_var']
    """

    channels: int
    momentum: float = 0.1
    eps: float = 1e-5

    def parameters(self, random: np.random.Generator) -> Parameters:  # noqa: ARG002  # nothing random
        """Ones and zeros."""
        return {"weight": np.ones(self.channels, np.float32), "bias": np.zeros(self.channels, np.float32)}

    def buffers(self) -> Parameters:
        """Mean 0, variance 1."""
        return {
            "running_mean": np.zeros(self.channels, np.float32), "running_var": np.ones(self.channels, np.float32),
        }  # fmt: skip

    def __call__(self, scope: Scope, x: Tensor) -> Tensor:
        """(N, channels, H, W) to the same; the new statistics go to the scope."""
        names = [f"{scope.prefix}{name}" for name in ("running_mean", "running_var")]
        output, *moved = ops.batch_norm(
            x, scope.buffers[names[0]], scope.buffers[names[1]], scope["weight"], scope["bias"], scope.training,
            self.momentum, self.eps,
        )  # fmt: skip
        scope.new_buffers.update(zip(names, moved, strict=True))
        return output
