"""An engine in another process: the pool's side, and what runs there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

from tunesmith.distributed.far import STARTING, Far
from tunesmith.engines.base import RolloutEngine
from tunesmith.engines.stats import EngineStats
from tunesmith.errors import EngineError, EngineLostError, TunesmithError, boundary
from tunesmith.types import Completion, Sampling
from tunesmith.weights.base import Offer

CLOSING = 10.0
"""Seconds that an engine has to end what it runs before its process is killed."""

TakeWeights = Callable[[Offer], Awaitable[None]]
"""Puts offered weights where the engine finds them; other requests are answered meanwhile."""


@dataclass(frozen=True, slots=True)
class EngineHost:
    """The engine where it runs. Every answer carries the engine's counters."""

    engine: RolloutEngine
    take_weights: TakeWeights

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, EngineStats]:
        return await self._answer(self.engine.generate(prompt_ids, sampling))

    async def take(self, version: int, offer: Offer) -> tuple[None, EngineStats]:
        with boundary(EngineError, "cannot take new weights", Exception):
            await self.take_weights(offer)
        return await self._answer(self.engine.load_weights(version))

    async def interrupt(self) -> tuple[None, EngineStats]:
        return await self._answer(self.engine.interrupt())

    async def sleep(self, level: int) -> tuple[None, EngineStats]:
        return await self._answer(self.engine.sleep(level))

    async def wake(self) -> tuple[None, EngineStats]:
        return await self._answer(self.engine.wake())

    async def close(self) -> None:
        await self.engine.close()

    async def _answer(self, work: Awaitable[Any]) -> tuple[Any, EngineStats]:
        with boundary(EngineError, "the engine failed", Exception):
            return await work, self.engine.stats()


class FarEngine:
    """A ``Member`` of an ``EnginePool``: an ``EngineHost`` in another process."""

    def __init__(self, far: Far) -> None:
        self.far = far
        self._stats = EngineStats()

    @classmethod
    async def start(cls, far: Far, make: Callable[[], EngineHost], timeout: float = STARTING) -> FarEngine:
        """Build the engine there.

        Raises:
            EngineLostError: its process was killed meanwhile.
            TunesmithError: it cannot be built, or is not ready within ``timeout`` seconds; its process has ended.
        """
        try:
            await asyncio.wait_for(asyncio.wrap_future(far.make(make)), timeout)
        except TimeoutError:
            await asyncio.to_thread(far.close)
            raise EngineError(f"{far.name} was not ready within {timeout:g} s") from None
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(far.close))
            if isinstance(error, EngineLostError) and (far.code or 0) > 0:  # it would end again
                raise EngineError(str(error)) from None
            raise
        return cls(far)

    @property
    def name(self) -> str:
        return self.far.name

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self._ask("generate", list(prompt_ids), sampling)

    async def interrupt(self) -> None:
        await self._ask("interrupt")

    async def take(self, version: int, offer: Offer) -> None:
        await self._ask("take", version, offer)

    async def sleep(self, level: int = 1) -> None:
        await self._ask("sleep", level)

    async def wake(self) -> None:
        await self._ask("wake")

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self) -> None:
        with suppress(TunesmithError, TimeoutError):
            await asyncio.wait_for(self.far.call_async("close"), CLOSING)
        await asyncio.to_thread(self.far.close)

    async def _ask(self, method: str, *args: Any) -> Any:
        result, stats = await self.far.call_async(method, *args)
        # Answers may arrive out of order, and counters only rise.
        self._stats = EngineStats(*map(max, astuple(self._stats), astuple(stats)))
        return result
