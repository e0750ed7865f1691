"""A pool of fake engines that can be killed, broken and kept from starting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.support.engine_contract import FREE
from tests.support.fake_engine import FakeEngine
from tunesmith.errors import EngineError, EngineLostError
from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.weights.base import Offer
from tunesmith.types import Completion, Sampling

CONTEXT = 64
LONG = replace(FREE, max_new_tokens=40)


class FakeMember:
    """A member made of a ``FakeEngine``, which can be killed."""

    def __init__(self, number: int) -> None:
        self.name = f"fake {number}"
        self.engine = FakeEngine(context=CONTEXT)
        self.asked: list[tuple[int, ...]] = []
        self.answered = 0
        self.dead = self.closed = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.taken: list[Offer] = []
        self.take_fails: list[Exception] = []
        """Of the next times, one each."""
        self.broken = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._check()
        self.asked.append(tuple(prompt_ids))
        if self.broken:
            raise EngineError(f"{self.name} failed: an illegal memory access")
        try:
            done = await self.engine.generate(prompt_ids, sampling)
        except EngineError:
            self._check()
            raise
        await self.may_answer.wait()
        self._check()
        self.answered += 1
        return done

    async def interrupt(self) -> None:
        self._check()
        await self.engine.interrupt()

    async def take(self, version: int, offer: Offer) -> None:
        self._check()
        await asyncio.sleep(0)
        if self.take_fails:
            raise self.take_fails.pop()
        assert offer["version"] == version
        self.taken.append(offer)
        await self.engine.load_weights(version)

    async def sleep(self, level: int = 1) -> None:
        del level
        self._check()
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def close(self) -> None:
        self.closed = True
        await self.engine.close()

    async def kill(self) -> None:
        self.dead = True
        await self.engine.close()

    def _check(self) -> None:
        if self.dead:
            raise EngineLostError(f"{self.name} is no more")


class FakePlane:
    def __init__(self) -> None:
        self.version = -1
        self.withdrawn = 0
        self.seconds = 0.0

    async def publish(self, version: int) -> None:
        await asyncio.sleep(self.seconds)
        self.version = version

    async def offer(self, takers: int) -> list[Offer]:
        return [{"version": self.version, "bytes": 1000} for _ in range(takers)]

    async def withdraw(self, offers: Sequence[Offer]) -> None:
        self.withdrawn += len(offers)

    async def close(self) -> None: ...


class Bench:
    """A pool and every member that it ever had."""

    def __init__(self, size: int = 2, **options: Any) -> None:
        self.made: list[FakeMember] = []
        self.refused: list[Exception] = []
        """Why the next engines do not start, one each."""
        self.plane = FakePlane()
        self.said = list[str]()
        self.pool = EnginePool(
            self.start, self.plane, size=size, report=self.said.append, **options
        )

    async def start(self, number: int) -> FakeMember:
        await asyncio.sleep(0.001)
        if self.refused:
            raise self.refused.pop(0)
        self.made.append(FakeMember(number))
        return self.made[-1]

    async def engines(self, count: int) -> None:
        """Wait until so many are running."""
        async with asyncio.timeout(60):
            while len(self.pool.members) != count:
                await asyncio.sleep(0)

    async def ask(self, count: int, sampling: Sampling = LONG) -> list[asyncio.Task[Completion]]:
        """As many requests, in flight on all engines."""
        tasks = [
            asyncio.create_task(self.pool.generate([30 + i] * 20, replace(sampling, seed=i)))
            for i in range(count)
        ]
        while self._in_flight() < count:
            await asyncio.sleep(0)
        return tasks

    def _in_flight(self) -> int:
        engines: Any = [member.engine for member in self.made]
        return sum(engine._running for engine in engines)
