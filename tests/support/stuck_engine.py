"""An engine whose process answers, but which computes nothing; light to import."""

from __future__ import annotations

import asyncio
from typing import Any

from tunesmith.run.engines.base import EngineStats
from tunesmith.run.engines.far import EngineHost


class StuckEngine:
    version = 0

    async def generate(self, *_: object) -> None:
        await asyncio.sleep(600)

    async def load_weights(self, version: int) -> None:
        del version
        await asyncio.sleep(600)

    async def interrupt(self) -> None:
        await asyncio.sleep(600)

    async def sleep(self, level: int) -> None:
        del level
        await asyncio.sleep(600)

    async def wake(self) -> None:
        await asyncio.sleep(600)

    async def close(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(steps=7)


async def take_nothing(_: Any) -> None: ...


def stuck() -> EngineHost:
    engine: Any = StuckEngine()
    return EngineHost(engine, take_nothing)
