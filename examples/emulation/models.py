"""A byte-level GPT, a small residual network and an LSTM, as plain PyTorch modules."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["ByteGpt", "SmallResNet", "WaveLstm"]


class _Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        grown: torch.Tensor = x + self.feed(self.norm_2(x))
        return grown


class ByteGpt(nn.Module):
    """Predicts the next byte: logits of shape (batch * length, 256)."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits for bytes of shape (batch, length)."""
        hidden = self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]])
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits.flatten(0, 1)


class _Residual(nn.Module):
    """Two convolutions around which the input passes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class SmallResNet(nn.Sequential):
    """Tells ten digits apart: logits of shape (batch, 10)."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1), _Residual(channels), nn.MaxPool2d(2), _Residual(channels),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10),
        )  # fmt: skip


class WaveLstm(nn.Module):
    """Predicts a wave's next increment at every step: shape (batch, length, 1)."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, hidden, batch_first=True), nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Increments for a wave of shape (batch, length, 1)."""
        predicted: torch.Tensor = self.head(self.lstm(x)[0])
        return predicted
