"""Which engine process has which of a machine's GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

from tunesmith.engines.process import ProcessEngine
from tunesmith.errors import EngineError


class GpuSlots:
    """GPUs for processes of their own: each takes a place, and one that ended leaves its place to the next."""

    def __init__(self, devices: Sequence[Sequence[str]]) -> None:
        self._devices = devices
        self._free = list(range(len(devices)))
        self._taken: dict[ProcessEngine, asyncio.Task[None]] = {}

    async def start(self, begin: Callable[[Mapping[str, str]], Awaitable[ProcessEngine]]) -> ProcessEngine:
        """``begin`` with an environment that shows the GPUs of a free place only.

        Raises:
            EngineError: there is none.
        """
        place = await self._take()
        try:
            engine = await begin({**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(self._devices[place])})
        except BaseException:
            self._free.append(place)
            raise
        self._taken[engine] = asyncio.create_task(self._leave(engine, place))
        return engine

    async def _take(self) -> int:
        while not self._free:
            ending = [task for engine, task in self._taken.items() if engine.lost]
            if not ending:
                each = "1 GPU" if len(self._devices[0]) == 1 else f"{len(self._devices[0])} GPUs"
                raise EngineError(
                    f"there are GPUs for {len(self._devices)} engines of {each} each, and none is left for another"
                )
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        return self._free.pop(0)

    async def _leave(self, engine: ProcessEngine, place: int) -> None:
        await engine.ended()
        del self._taken[engine]
        self._free.append(place)
