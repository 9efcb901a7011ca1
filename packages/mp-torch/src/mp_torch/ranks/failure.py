"""One rank that fails takes the others down at once and says why, instead of leaving them waiting."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import distributed
from torch.distributed import distributed_c10d

from mp_torch.errors import AmpStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

__all__ = ["Alarm"]

_KEY = "mp_torch/failed"
_WORDS = ("gloo", "connection closed", "connection reset", "nccl communicator", "timed out waiting")


class Alarm:
    """What ranks tell each other when one of them cannot go on.

    The rank that fails writes why into the store that the process group was made with, and closes its connections. The
    others, who wait in a collective or come to one, fail there at once, read why, and raise that. A rank that dies
    without a word closes its connections too; then the message says that much.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.agreed = False
        self._store: Store = distributed_c10d._get_default_store()  # noqa: SLF001  # the group's own, no public name

    @contextmanager
    def around(self, action: str) -> Iterator[None]:
        """Watch over a part of the training loop.

        Args:
            action: what is done, for the message.

        Raises:
            AmpStateError: another rank failed; its own words are in the message.
        """
        self.agreed = False
        try:
            yield
        except Exception as error:
            if self.agreed:  # all ranks raise this one together, and may go on together
                raise
            first = self._first()
            if first is not None:
                raise AmpStateError(f"{action} on rank {self.rank} stops because {first}") from error
            if _is_of_communication(error):
                raise AmpStateError(
                    f"{action} on rank {self.rank} stops because another rank went away without saying why: "
                    f"{error}; look at the other ranks' output"
                ) from error
            self._raise_alarm(f"rank {self.rank} failed in {action}: {type(error).__name__}: {error}")
            raise

    def _first(self) -> str | None:
        """What the rank that failed first has written; ``None`` if none did, or the store is gone with it."""
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else None
        except (RuntimeError, distributed.DistError):
            return None

    def _raise_alarm(self, message: str) -> None:
        self._store.compare_set(_KEY, "", message)
        distributed_c10d._abort_process_group()  # noqa: SLF001  # destroying would wait for the others


def _is_of_communication(error: Exception) -> bool:
    if isinstance(error, distributed.DistError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in words for word in _WORDS)
