"""Three models: a perceptron, a convolutional classifier, a transformer language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from mp_reference.nn import ops
from mp_reference.nn.layers import BatchNorm2d, Conv2d, Embedding, LayerNorm, Linear, named

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_reference.nn.layers import Array, Model, Parameters, Scope
    from mp_reference.nn.tensor import Tensor

__all__ = ["ACTIVATIONS", "CNN", "MLP", "Transformer"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": ops.relu, "gelu": ops.gelu, "gelu-tanh": partial(ops.gelu, approximate="tanh"), "silu": ops.silu,
    "tanh": ops.tanh,
}  # fmt: skip
"""Activations by name."""

Activation = Literal["relu", "gelu", "gelu-tanh", "silu", "tanh"]


class _Parts(ABC):
    """A model made of named parts."""

    @abstractmethod
    def parts(self) -> dict[str, Model]:
        """The parts by name, in order."""

    def parameters(self, random: np.random.Generator) -> Parameters:
        """First values of all parts."""
        return named({name: part.parameters(random) for name, part in self.parts().items()})

    def buffers(self) -> Parameters:
        """First buffers of all parts."""
        return named({name: part.buffers() for name, part in self.parts().items()})


@dataclass(frozen=True)
class MLP(_Parts):
    """Linear layers with an activation between them; names as in ``torch.nn.Sequential``.

    >>> sorted(MLP((4, 8, 2)).parameters(np.random.default_rng(0)))
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    sizes: tuple[int, ...]
    activation: Activation = "relu"

    def parts(self) -> dict[str, Model]:
        """One layer for each pair of sizes."""
        pairs = zip(self.sizes[:-1], self.sizes[1:], strict=True)
        return {str(2 * number): Linear(*pair) for number, pair in enumerate(pairs)}

    def __call__(self, scope: Scope, x: Tensor) -> Tensor:
        """(..., sizes[0]) to (..., sizes[-1])."""
        parts = self.parts()
        for name, layer in parts.items():
            x = layer(scope.inside(name), x)
            if name != str(2 * (len(parts) - 1)):
                x = ACTIVATIONS[self.activation](x)
        return x


@dataclass(frozen=True)
class CNN(_Parts):
    """Convolution, batch norm, relu, and again with stride 2; the mean over places; a linear classifier.

    >>> sorted(CNN(1, 4, 10).buffers())[:2]
    ['norm1.running_mean', 'norm1.running_var']
    """

    inputs: int
    channels: int
    classes: int

    def parts(self) -> dict[str, Model]:
        """Two convolutions with their norms, and the classifier."""
        return {
            "conv1": Conv2d(self.inputs, self.channels, 3, padding=1),
            "norm1": BatchNorm2d(self.channels),
            "conv2": Conv2d(self.channels, 2 * self.channels, 3, stride=2, padding=1),
            "norm2": BatchNorm2d(2 * self.channels),
            "head": Linear(2 * self.channels, self.classes),
        }

    def __call__(self, scope: Scope, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, classes)."""
        parts = self.parts()
        for number in ("1", "2"):
            x = parts[f"conv{number}"](scope.inside(f"conv{number}"), x)
            x = ops.relu(parts[f"norm{number}"](scope.inside(f"norm{number}"), x))
        return parts["head"](scope.inside("head"), ops.mean(x, (2, 3)))


@dataclass(frozen=True)
class _Block(_Parts):
    """Attention and a perceptron, each after a layer norm and around a residual."""

    width: int
    heads: int
    activation: Activation
    fused: bool

    def parts(self) -> dict[str, Model]:
        """Two norms, four linear layers."""
        return {
            "norm1": LayerNorm(self.width),
            "qkv": Linear(self.width, 3 * self.width),
            "out": Linear(self.width, self.width),
            "norm2": LayerNorm(self.width),
            "up": Linear(self.width, 4 * self.width),
            "down": Linear(4 * self.width, self.width),
        }

    def __call__(self, scope: Scope, x: Tensor) -> Tensor:
        """(B, L, width) to the same."""
        layer = {name: partial(part, scope.inside(name)) for name, part in self.parts().items()}
        x = ops.add(x, layer["out"](self._attention(layer["qkv"](layer["norm1"](x)))))
        return ops.add(x, layer["down"](ACTIVATIONS[self.activation](layer["up"](layer["norm2"](x)))))

    def _attention(self, qkv: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        split = ops.reshape(qkv, (batch, length, 3, self.heads, self.width // self.heads))
        split = ops.permute(split, (2, 0, 3, 1, 4))
        query, key, value = (ops.index(split, number) for number in range(3))
        if self.fused:
            mixed = ops.scaled_dot_product_attention(query, key, value, causal=True)
        else:
            scores = ops.mul(ops.matmul(query, ops.transpose(key, -1, -2)), (self.width // self.heads) ** -0.5)
            scores = ops.where(np.tri(length, dtype=np.bool_), scores, float("-inf"))
            mixed = ops.matmul(ops.softmax(scores, -1), value)
        return ops.reshape(ops.permute(mixed, (0, 2, 1, 3)), (batch, length, self.width))


@dataclass(frozen=True)
class Transformer(_Parts):
    """A causal language model: token and place embeddings, blocks, a norm, a linear head.

    ``fused`` attention is one operation; without it, it is composed of products and a softmax.

    >>> model = Transformer(vocabulary=16, width=8, layers=1, heads=2, context=4)
    >>> len(model.parameters(np.random.default_rng(0)))
    18
    """

    vocabulary: int
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    activation: Activation = "gelu-tanh"
    fused: bool = True

    def __post_init__(self) -> None:
        """Heads must divide the width."""
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} must divide width={self.width}; choose another number of heads")

    def parts(self) -> dict[str, Model]:
        """Embeddings, blocks, norm and head."""
        blocks: dict[str, Model] = {
            f"block{number}": _Block(self.width, self.heads, self.activation, self.fused)
            for number in range(self.layers)
        }
        return {
            "tokens": Embedding(self.vocabulary, self.width),
            "places": Embedding(self.context, self.width),
            **blocks,
            "norm": LayerNorm(self.width),
            "head": Linear(self.width, self.vocabulary),
        }

    def __call__(self, scope: Scope, x: Array) -> Tensor:
        """Integers (B, L), L up to context, to logits (B, L, vocabulary)."""
        parts = self.parts()
        places = np.arange(x.shape[1])
        h = ops.add(parts["tokens"](scope.inside("tokens"), x), parts["places"](scope.inside("places"), places))
        for name in [*(f"block{number}" for number in range(self.layers)), "norm", "head"]:
            h = parts[name](scope.inside(name), h)
        return h
