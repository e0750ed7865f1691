"""Which groups may start and which must be trained on next, so that none is ever trained on too late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """No token is trained on by a policy more than ``max_staleness`` versions after the one that sampled it.

    A version is a step: the one that trains on batch ``b`` makes version ``b + 1`` of version ``b``. A group starts
    with the version that samples then; it is alive until it is trained on or thrown away.

    Both rules together keep the bound without dropping anything (admission: AReaL, arXiv:2505.24298, eq. 3): as many
    groups start as fit the batches up to ``version + max_staleness``, and of those that are alive at most
    ``batch_size`` for each batch to come may be as old as that batch allows.

    Example:
        >>> bound = Bound(batch_size=2, max_staleness=1)
        >>> bound.room(version=3, batches=3, alive=3)
        1
        >>> bound.newest_start(version=3, starts=[2, 2, 3], slots=2)  # both of version 2 must be in this batch
        2
    """

    batch_size: int
    max_staleness: int

    def room(self, version: int, batches: int, alive: int) -> int:
        """How many groups may start now, with ``version``, when ``batches`` have been taken and so many are alive."""
        return max(0, self.batch_size * (version + self.max_staleness + 1 - batches) - alive)

    def newest_start(self, version: int, starts: Sequence[int], slots: int) -> int:
        """The newest starting version that the next group of batch ``version`` may have.

        Args:
            starts: of all groups alive, finished or not.
            slots: groups that are still wanted for this batch.
        """
        for later in range(self.max_staleness):
            limit = version - self.max_staleness + later
            due = sum(start <= limit for start in starts) - self.batch_size * later
            if due >= slots:
                return limit
        return version
