"""Ranks: the one place that knows how many processes train together."""

from mp_torch.ranks.base import Ranks
from mp_torch.ranks.local import LocalRanks
from mp_torch.ranks.selection import ranks_of

__all__ = ["LocalRanks", "Ranks", "ranks_of"]
