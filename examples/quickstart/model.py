"""A byte-level transformer language model, small enough for a laptop and built like the large ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True)
class Size:
    """The shape of the model and of a batch."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch_size: int = 16

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.context * self.batch_size


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm_feed = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)
        self.register_buffer("later", torch.ones(size.context, size.context).triu(1).bool(), persistent=False)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Attention written out, so that autocast decides over each of its operations."""
        batch, time, width = x.shape
        split = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(self.later[:time, :time], -torch.inf).softmax(-1)  # type: ignore[index]  # a buffer
        mixed = (weights.to(value.dtype) @ value).transpose(1, 2).reshape(batch, time, width)
        return self.project(mixed)  # type: ignore[no-any-return]  # nn.Module's call is untyped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, time, width]`` to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.narrow(functional.gelu(self.widen(self.norm_feed(x))))  # type: ignore[no-any-return]  # as above


class ByteGPT(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 ``[batch, time]`` to scores ``[batch, time, 256]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(positions))
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # nn.Module's call is untyped


def next_byte_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood in nats per byte."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
