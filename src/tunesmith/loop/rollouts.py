"""Where a step's groups come from: played when they are wanted, or ahead of that while the policy trains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil
from typing import ParamSpec, Protocol, TypeVar

from tunesmith.engines.base import EngineStats, RolloutEngine, add_stats
from tunesmith.loop.collect import Collector
from tunesmith.loop.gate import Gate
from tunesmith.loop.learner import Metrics
from tunesmith.loop.parts import RLParts
from tunesmith.loop.seeds import derive_seed
from tunesmith.loop.session import Session
from tunesmith.loop.staleness import Bound
from tunesmith.loop.step_batch import check_failures, collect_step_batch, informative, play, step_metrics, tell_rewards
from tunesmith.monitor import interrupts
from tunesmith.plan.weights import weights_apart
from tunesmith.types import RolloutGroup, Task

P = ParamSpec("P")
R = TypeVar("R")


class RolloutSource(Protocol):
    """What the loop asks of whoever plays."""

    async def sync(self) -> None:
        """Give the sampler the trainer's weights, as the version of the session's step."""
        ...

    async def next(self) -> tuple[list[RolloutGroup], Metrics]:
        """The groups of the session's step."""
        ...

    async def run_training(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the trainer's work: alone, or while sampling goes on where the engine has weights of its own."""
        ...

    def evaluating(self) -> AbstractAsyncContextManager[Collector]:
        """Who plays an evaluation, with the trainer's weights as they are inside. ``sync`` ends it."""
        ...

    async def close(self) -> None: ...


def open_rollout_source(parts: RLParts, session: Session) -> RolloutSource:
    """As ``[rollout]`` asks for."""
    if isinstance(parts.engine, Gate):
        return AsyncRollouts(parts, session, parts.engine)
    return SyncRollouts(parts, session)


@dataclass(slots=True)
class SyncRollouts:
    """Every step plays its own groups, with the newest policy: ``max_staleness = 0``."""

    parts: RLParts
    session: Session

    async def sync(self) -> None:
        await load_engine(self.parts, self.parts.engine, self.session.step)

    async def next(self) -> tuple[list[RolloutGroup], Metrics]:
        return await collect_step_batch(self.parts, self.session)

    async def run_training(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        await hand_device_to_trainer(self.parts)
        return work(*args, **kwargs)

    @asynccontextmanager
    async def evaluating(self) -> AsyncGenerator[Collector]:
        await load_engine(self.parts, self.parts.engine, self.session.step)
        yield self.parts.collector

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A group on its way: being played, or finished and waiting to be trained on."""

    number: int
    start: int
    """The version that sampled when it began."""
    task: Task


@dataclass(slots=True)
class AsyncRollouts:
    """Plays ahead of the steps, within ``rollout.max_staleness``.

    ``rollout.over_generation`` groups are played at once for each that a step takes: a step goes on with those that
    finished first, and the slow ones are finished for a later one. Where the engine has weights of its own, playing
    goes on while the policy trains; where it shares the trainer's, what is in flight is interrupted meanwhile.
    """

    parts: RLParts
    session: Session
    gate: Gate
    over_generation: float = field(init=False)
    queue_size: int = field(init=False)
    _playing: dict[_Group, asyncio.Task[None]] = field(default_factory=dict[_Group, "asyncio.Task[None]"], init=False)
    _waiting: dict[_Group, RolloutGroup] = field(default_factory=dict[_Group, RolloutGroup], init=False)
    _batch: list[RolloutGroup] = field(default_factory=list[RolloutGroup], init=False)
    """Chosen for the step so far."""
    _tried: list[RolloutGroup] = field(default_factory=list[RolloutGroup], init=False)
    """Finished since the last batch."""
    _rejected: list[RolloutGroup] = field(default_factory=list[RolloutGroup], init=False)
    """Of those, the ones that nothing can be learned from."""
    _choosing: bool = field(default=False, init=False)
    """Whether a step waits for its groups."""
    _counted: EngineStats = field(default_factory=EngineStats, init=False)
    """The engine's counters that are not the next step's."""
    _batches: int = field(init=False)
    _numbers: count[int] = field(default_factory=count, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _failure: Exception | None = field(default=None, init=False)
    _trainer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "trainer"), init=False)

    def __post_init__(self) -> None:
        rollout = self.parts.config.rollout
        self.over_generation = rollout.over_generation
        self.queue_size = rollout.queue_size
        self._batches = self.session.step

    @property
    def bound(self) -> Bound:
        rollout = self.parts.config.rollout
        return Bound(rollout.prompts_per_step, rollout.max_staleness)

    async def sync(self) -> None:
        # Without ``partial`` the gate shuts here until what is in flight has ended; ``release`` opens it again, also
        # after an evaluation's ``hold``.
        await load_engine(self.parts, self.gate, self.session.step)
        self.gate.release()
        tell_rewards(self.parts, self.session)

    async def next(self) -> tuple[list[RolloutGroup], Metrics]:
        """As many groups as a step takes, oldest first; fewer where none of as many as the data has has contrast."""
        wanted, version, batch = self.bound.batch_size, self.gate.version, self._batch
        self._choosing = True
        while len(batch) < wanted and not self._exhausted(version):
            self._changed.clear()
            self._admit()
            if (group := self._choose(version, wanted - len(batch))) is not None:
                batch.append(self._waiting.pop(group))
                self.parts.tasks.settle([group.task])
            else:
                await self._changed.wait()
            if self._failure is not None:
                raise self._failure
        self._choosing, self._batch, self._batches = False, [], self._batches + 1
        played, self._tried, self._rejected = [*batch, *self._rejected], [], []
        self._admit()
        stats, counted = self.gate.stats(), self._counted
        self._counted = stats
        return batch, step_metrics(self.parts, played, batch, len(batch) / len(played), stats.since(counted))

    async def run_training(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if not weights_apart(self.parts.config):
            await self.gate.hold()
            await hand_device_to_trainer(self.parts)
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        with interrupts.elsewhere():
            return await loop.run_in_executor(self._trainer, lambda: work(*args, **kwargs))

    @asynccontextmanager
    async def evaluating(self) -> AsyncGenerator[Collector]:
        await self.gate.hold()
        before = self.gate.stats()
        await load_engine(self.parts, self.gate.engine, self.session.step)
        collector = self.parts.collector
        if isinstance(collector.slot, asyncio.Semaphore):  # those that are held keep theirs
            collector = replace(collector, slot=asyncio.Semaphore(self.parts.config.environment.concurrency))
        yield replace(collector, engine=self.gate.engine)
        self._counted = add_stats(self._counted, self.gate.stats().since(before))

    async def close(self) -> None:
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)
        self._trainer.shutdown()

    @property
    def _alive(self) -> int:
        return len(self._playing) + len(self._waiting) + len(self._batch)

    def _admit(self) -> None:
        """Start groups while the bound, the engine's share and the queue have room for them."""
        version, size = self.gate.version, self.bound.batch_size
        while (
            self._failure is None
            and len(self._playing) < ceil(size * self.over_generation)
            and len(self._waiting) < self.queue_size
            and self.bound.room(version, self._batches, self._alive)
            and not (self._choosing and self._tried_enough)
        ):
            [task] = self.parts.tasks.next_batch(1)
            group = _Group(next(self._numbers), version, task)
            self._playing[group] = asyncio.create_task(self._play(group))
        self._report_queue()

    async def _play(self, group: _Group) -> None:
        config = self.parts.config
        seed = derive_seed(config.train.seed, config.rollout.seed, "ahead", self.session.step, group.number)
        try:
            [played] = await play(self.parts, [group.task], seed)
            kept = informative(self.parts, [played])
            self._tried.append(played)
            if not kept:
                self._rejected.append(played)
            self._check_failures()
        except Exception as error:
            self._failure = error
        else:
            if kept:
                self._waiting[group] = kept[0]
            else:
                self.parts.tasks.settle([group.task])
        finally:
            del self._playing[group]
            self._changed.set()
        self._admit()

    def _choose(self, version: int, slots: int) -> _Group | None:
        """The oldest finished group that this batch may have, none where an older one must be waited for."""
        starts = [group.start for group in (*self._playing, *self._waiting)]
        newest = self.bound.newest_start(version, starts, slots)
        fitting = [group for group in self._waiting if group.start <= newest]
        return min(fitting, key=lambda group: group.start, default=None)

    @property
    def _tried_enough(self) -> bool:
        """Whether as many groups as the data has have finished since the last batch."""
        return len(self._tried) >= max(self.bound.batch_size, len(self.parts.tasks))

    def _exhausted(self, version: int) -> bool:
        """Whether the batch stays short: enough were tried, none waits, and later batches have room for the rest."""
        starts, bound = [group.start for group in self._playing], self.bound
        have_room = len(starts) <= bound.batch_size * bound.max_staleness
        in_time = bound.newest_start(version, starts, 1) == version
        return self._tried_enough and not self._waiting and have_room and in_time

    def _check_failures(self) -> None:
        if len(self._tried) >= self.bound.batch_size:
            check_failures(self.parts, self._tried)

    def _report_queue(self) -> None:
        self.session.timeline.level("queue", len(self._waiting))
        self.session.timeline.level("playing", len(self._playing))


async def hand_device_to_trainer(parts: RLParts) -> None:
    """The trainer's turn on a shared device. Weights are loaded before the next rollout, so none need be kept."""
    if parts.config.system.hybrid:
        await parts.engine.sleep(2)
        for backend in parts.backends:
            backend.reload()


async def load_engine(parts: RLParts, engine: RolloutEngine, version: int) -> None:
    """The engine's turn, with new weights: they are taken first, as the memory for them is all that they need."""
    if parts.config.system.hybrid:
        for backend in parts.backends:
            backend.offload()
    await engine.load_weights(version)
    if parts.config.system.hybrid:
        await engine.wake()
