"""Tracks groups that are played ahead, from their start to their training step; without tasks or
clocks.

::

                        put                  take
    start ──► playing ──┬──► waiting ─────────────► batch of a step
                        └──► rejected: nothing can be learned from it

``room`` limits how many groups start; ``take`` returns a batch as soon as it is complete, the
oldest groups first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunesmith.types import RolloutGroup


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """A group that is playing, or waiting to be trained on."""

    number: int
    version: int
    """The policy version that was sampling when the group started."""


@dataclass(slots=True)
class Buffer:
    """No token is trained on by a policy more than ``max_staleness`` versions newer than the one
    that sampled it.

    A version is a step: training on batch ``b`` turns version ``b`` into version ``b + 1``. Two
    rules keep the bound without dropping a group (admission: AReaL, arXiv:2505.24298, eq. 3): only
    as many groups start as fit into the batches up to ``version + max_staleness``; and for each
    later batch, at most ``batch_size`` of the groups that play or wait are as old as that batch
    allows.
    """

    batch_size: int
    max_staleness: int
    max_playing: int
    max_waiting: int
    """No group starts while this many wait."""
    enough: int
    """Number of finished groups after which a batch may stay short, because the others were
    rejected."""
    left: int
    """Groups that the run's batches still take."""
    batches: int = 0
    """Batches taken so far."""
    finished: list[RolloutGroup] = field(default_factory=list[RolloutGroup], init=False)
    """Groups that finished since the last batch."""
    _rejected: list[RolloutGroup] = field(default_factory=list[RolloutGroup], init=False)
    _playing: set[Started] = field(default_factory=set[Started], init=False)
    _waiting: dict[Started, RolloutGroup] = field(
        default_factory=dict[Started, RolloutGroup], init=False
    )
    _batch: list[RolloutGroup] = field(default_factory=list[RolloutGroup], init=False)
    _started: int = field(default=0, init=False)

    @property
    def playing(self) -> int:
        return len(self._playing)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def room(self, version: int) -> int:
        """How many groups may start now, with ``version``. Each has a place in a batch, of which
        the run may have no more than the current one."""
        if self.waiting >= self.max_waiting or (self._tried_enough and not self._waiting):
            return 0
        on_their_way = self.playing + self.waiting + len(self._batch)
        batches = version + self.max_staleness + 1 - self.batches
        taken = min(self.batch_size * batches, self.left)
        return max(0, min(taken - on_their_way, self.max_playing - self.playing))

    def start(self, version: int) -> Started:
        started = Started(self._started, version)
        self._started += 1
        self._playing.add(started)
        return started

    def put(self, started: Started, group: RolloutGroup, *, keep: bool) -> None:
        """Record that a group was played.

        Args:
            keep: whether the group can be learned from.
        """
        self._playing.remove(started)
        self.finished.append(group)
        if keep:
            self._waiting[started] = group
        else:
            self._rejected.append(group)

    def take(self, version: int) -> tuple[list[RolloutGroup], list[RolloutGroup]] | None:
        """The batch that ``version`` trains on and the groups rejected since the last one; None
        while it is incomplete.

        A short batch counts as complete once ``enough`` groups have finished and waiting for more
        could not fill it.
        """
        while len(self._batch) < self._wanted and (oldest := self._next(version)) is not None:
            self._batch.append(self._waiting.pop(oldest))
        if len(self._batch) < self._wanted and not self._exhausted(version):
            return None
        batch = self._batch
        rejected = self._rejected
        self.left -= self._wanted
        self._batch = []
        self._rejected = []
        self.finished = []
        self.batches += 1
        return batch, rejected

    @property
    def _wanted(self) -> int:
        """Groups of the current batch."""
        return min(self.batch_size, self.left)

    @property
    def _tried_enough(self) -> bool:
        return len(self.finished) >= self.enough

    def _next(self, version: int) -> Started | None:
        """The oldest finished group that this batch may have; None if it must wait for an older
        one."""
        slots = self._wanted - len(self._batch)
        newest = self._newest_start(version, [*self._playing, *self._waiting], slots)
        fitting = [started for started in self._waiting if started.version <= newest]
        return min(fitting, key=lambda started: started.version, default=None)

    def _newest_start(self, version: int, groups: Sequence[Started], slots: int) -> int:
        """The newest starting version that the next group of this batch may have, if it has
        ``slots`` left."""
        for later in range(self.max_staleness):
            limit = version - self.max_staleness + later
            due = sum(group.version <= limit for group in groups) - self.batch_size * later
            if due >= slots:
                return limit
        return version

    def _exhausted(self, version: int) -> bool:
        """Whether enough groups were tried, none is waiting, and later batches have room for those
        still playing."""
        places = min(self.batch_size * self.max_staleness, self.left - self._wanted)
        later_have_room = self.playing <= places
        none_due = self._newest_start(version, list(self._playing), 1) == version
        return self._tried_enough and not self._waiting and later_have_room and none_due
