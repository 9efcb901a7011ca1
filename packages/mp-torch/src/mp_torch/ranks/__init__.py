"""Ranks: the one place that knows how many processes train together."""

from mp_torch.ranks.base import Ranks
from mp_torch.ranks.local import LocalRanks

__all__ = ["LocalRanks", "Ranks"]
