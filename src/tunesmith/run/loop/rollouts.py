"""The source of a step's groups: played on demand, or ahead of time while the policy trains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, TypeVar

from tunesmith.plan.length import prompts_left, prompts_of
from tunesmith.records import interrupts
from tunesmith.run.engines.base import EngineStats, add_stats
from tunesmith.run.loop.buffer import Buffer, Started
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.gate import Gate
from tunesmith.run.loop.groups import (
    check_failures,
    play,
    select_learnable,
    step_metrics,
    update_trainer_state,
)
from tunesmith.run.loop.learner import Metrics
from tunesmith.run.loop.parts import RLParts
from tunesmith.run.loop.session import Session
from tunesmith.types import RolloutGroup, Task

T = TypeVar("T")


@dataclass(slots=True)
class SyncRollouts:
    """Plays each step's groups within the step, with the newest policy: ``max_staleness = 0``."""

    parts: RLParts
    session: Session
    _synced: EngineStats = field(default_factory=EngineStats, init=False)
    """What the engine counted in the last sync."""

    async def sync(self) -> None:
        """Give the engine the trainer's weights, with the session's step as their version."""
        engine = self.parts.engine
        before = engine.stats()
        await hand_device_to_engine(self.parts, engine.load_weights, self.session.step)
        self._synced = engine.stats().since(before)

    async def next(self) -> tuple[list[RolloutGroup], Metrics]:
        """Play and reward the groups of the session's step.

        With dynamic filtering (DAPO, arXiv:2503.14476, section 3.2) new tasks replace groups
        without contrast until the batch is full or as many groups were tried as the data has tasks.
        ``rollout.oversample`` tries more at once, so that fewer rounds are needed; surplus groups
        are not trained on.
        """
        parts = self.parts
        plan = parts.plan
        oversample = plan.said.rollout.oversample
        wanted = prompts_of(plan.training, self.session.step, len(parts.tasks))
        counted = parts.engine.stats()
        update_trainer_state(parts, self.session)
        played: list[RolloutGroup] = []
        kept: list[RolloutGroup] = []
        while len(kept) < wanted and len(played) < max(wanted, len(parts.tasks)):
            tasks = parts.tasks.next_batch(ceil((wanted - len(kept)) * oversample))
            groups = await play(parts, tasks, self.session.step, len(played))
            played += groups
            check_failures(parts, played)
            kept += select_learnable(parts, groups)
        parts.tasks.settle([group.task for group in played])
        counts = parts.engine.stats().since(counted)
        synced = self._synced
        stats = replace(counts, sync_bytes=synced.sync_bytes, sync_seconds=synced.sync_seconds)
        metrics = step_metrics(parts, played, kept[:wanted], stats)
        return kept[:wanted], metrics | {"groups_kept": len(kept) / len(played)}

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[Executor]:
        """The thread for the trainer's work: this one, because the engine is idle meanwhile."""
        await hand_device_to_trainer(self.parts)
        yield AtOnce()

    @asynccontextmanager
    async def evaluating(self) -> AsyncGenerator[Collector]:
        """The collector for an evaluation; the engine holds the trainer's current weights. ``sync``
        ends it."""
        await hand_device_to_engine(self.parts, self.parts.engine.load_weights, self.session.step)
        yield self.parts.collector

    async def close(self) -> None:
        pass


@dataclass(slots=True)
class AsyncRollouts:
    """Plays ahead of the steps, within ``rollout.max_staleness``: starts groups while the buffer
    has room for them, and waits for the buffer's batch.

    ``rollout.over_generation`` groups play at once for each group that a step takes. A step trains
    on the groups that finish first; slow ones finish for a later step. An engine with its own
    weights continues to sample while the policy trains; if it shares the trainer's weights,
    requests in flight are interrupted for that time.
    """

    parts: RLParts
    session: Session
    gate: Gate = field(init=False)
    buffer: Buffer = field(init=False)
    _players: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"], init=False)
    """Failed tasks stay until ``next`` raises their error."""
    _counted: EngineStats = field(default_factory=EngineStats, init=False)
    """The engine's counters up to the last batch, and those of evaluations since."""
    _trainer: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "trainer"), init=False
    )

    def __post_init__(self) -> None:
        assert self.parts.gate is not None, "playing ahead needs a gate"
        self.gate = self.parts.gate
        plan = self.parts.plan
        rollout = plan.said.rollout
        prompts = plan.training.prompts
        self.buffer = Buffer(
            prompts,
            rollout.max_staleness,
            max_playing=ceil(prompts * rollout.over_generation),
            max_waiting=plan.sampling.queue,
            enough=max(prompts, len(self.parts.tasks)),
            left=prompts_left(plan.training, self.session.step, len(self.parts.tasks)),
            batches=self.session.step,
        )

    async def sync(self) -> None:
        # Without ``partial`` the gate closes here until the requests in flight have ended.
        # ``release`` opens it again, also after ``evaluating`` has held it.
        await hand_device_to_engine(self.parts, self.gate.load_weights, self.session.step)
        self.gate.release()
        update_trainer_state(self.parts, self.session)

    async def next(self) -> tuple[list[RolloutGroup], Metrics]:
        """A full batch, oldest groups first. It is short only if too many groups of the data set
        were rejected."""
        self._raise_failures()
        while (groups := self.buffer.take(self.parts.engine.version)) is None:
            self._admit()
            await asyncio.wait(self._players, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failures()
        batch, rejected = groups
        self.parts.tasks.settle([group.task for group in batch])
        self._admit()
        stats = self.parts.engine.stats()
        before = self._counted
        self._counted = stats
        played = [*batch, *rejected]
        metrics = step_metrics(self.parts, played, batch, stats.since(before))
        return batch, metrics | {"groups_kept": len(batch) / len(played)}

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[Executor]:
        """The thread for the trainer's work: another one if the engine has its own weights and
        continues to sample."""
        if self.parts.plan.devices.weights_apart:
            with interrupts.elsewhere():
                yield self._trainer
        else:
            await self.gate.hold()
            await hand_device_to_trainer(self.parts)
            yield AtOnce()

    @asynccontextmanager
    async def evaluating(self) -> AsyncGenerator[Collector]:
        await self.gate.hold()
        engine = self.parts.engine
        before = engine.stats()
        await hand_device_to_engine(self.parts, engine.load_weights, self.session.step)
        yield replace(self.parts.collector, complete=engine.generate)
        self._counted = add_stats(self._counted, engine.stats().since(before))

    async def close(self) -> None:
        for player in self._players:
            player.cancel()
        await asyncio.gather(*self._players, return_exceptions=True)
        self._trainer.shutdown()

    def _admit(self) -> None:
        version = self.parts.engine.version
        for task in self.parts.tasks.next_batch(self.buffer.room(version)):
            player = asyncio.create_task(self._play(self.buffer.start(version), task))
            self._players.add(player)
            player.add_done_callback(self._forget)
        timeline = self.session.recorder.timeline
        timeline.level("queue", self.buffer.waiting)
        timeline.level("playing", self.buffer.playing)

    async def _play(self, started: Started, task: Task) -> None:
        groups = await play(self.parts, [task], "ahead", self.session.step, started.number)
        keep = bool(select_learnable(self.parts, groups))
        self.buffer.put(started, groups[0], keep=keep)
        if not keep:
            self.parts.tasks.settle([task])
        if len(self.buffer.finished) >= self.buffer.batch_size:
            check_failures(self.parts, self.buffer.finished)
        self._admit()

    def _raise_failures(self) -> None:
        """Raise the error of a player that failed, also while the policy was training."""
        for player in self._players:
            if player.done():
                player.result()

    def _forget(self, player: asyncio.Task[None]) -> None:
        if player.cancelled() or player.exception() is None:
            self._players.discard(player)


class AtOnce(Executor):
    """Runs work at once, in the thread that submits it; ``submit`` raises what the work raises."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


RolloutSource = SyncRollouts | AsyncRollouts
"""The sampling side of a run. Both have the same methods."""


async def hand_device_to_trainer(parts: RLParts) -> None:
    """Give a shared device to the trainer. The engine discards its weights: it gets new ones before
    it samples."""
    if parts.plan.devices.hybrid:
        await parts.engine.sleep(2)
        for backend in parts.backends:
            backend.reload()


async def hand_device_to_engine(
    parts: RLParts, load_weights: Callable[[int], Awaitable[None]], version: int
) -> None:
    """Give the device to the engine, with new weights. It loads them before it wakes and takes its
    KV memory back."""
    if parts.plan.devices.hybrid:
        for backend in parts.backends:
            backend.offload()
    await load_weights(version)
    if parts.plan.devices.hybrid:
        await parts.engine.wake()
