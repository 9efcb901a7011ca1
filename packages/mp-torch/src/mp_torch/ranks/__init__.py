"""Ranks: the one place that knows how many processes train together."""

from mp_torch.ranks.base import Ranks
from mp_torch.ranks.local import LocalRanks, cast_, like, local, place_of
from mp_torch.ranks.selection import Sharding, pipelined, ranks_of, replicated, sharded_, unwrapped, why_fixed

__all__ = [
    "LocalRanks", "Ranks", "Sharding", "cast_", "like", "local", "pipelined", "place_of", "ranks_of", "replicated",
    "sharded_", "unwrapped", "why_fixed",
]  # fmt: skip
