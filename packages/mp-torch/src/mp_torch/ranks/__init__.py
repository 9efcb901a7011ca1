"""Ranks: the one place that knows how many processes train together."""

from mp_torch.ranks.base import Ranks
from mp_torch.ranks.local import LocalRanks, like, local, place_of
from mp_torch.ranks.selection import Sharding, pipelined, ranks_of, replicated, sharded_, unwrapped

__all__ = [
    "LocalRanks", "Ranks", "Sharding", "like", "local", "pipelined", "place_of", "ranks_of", "replicated", "sharded_",
    "unwrapped",
]  # fmt: skip
