"""An engine in another process: the pool's side and the engine's side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import count
from typing import Any

from tunesmith.errors import EngineError, EngineLostError, TunesmithError, boundary
from tunesmith.learn.usercode.far import STARTING, Far
from tunesmith.models.vision.rows import Image, ImageRows, UnsentImages
from tunesmith.run.engines.base import EngineStats, RolloutEngine
from tunesmith.run.engines.partial import FOLLOWER, PartialCompletion, Tokens, follow
from tunesmith.run.weights.base import Offer
from tunesmith.types import Completion, Sampling

CLOSING = 10.0
"""Seconds that an engine has to close before its process is killed."""
PROGRESS = 10.0
"""Seconds between questions for the progress of unfinished completions."""
STREAMED = 0.05
"""The same where somebody follows a completion."""
STUCK = 1800.0
"""Seconds without a step, while there are requests, after which an engine is lost: its process
answers, but its GPU hangs."""
TAKING = 1800.0
"""Seconds in which an engine takes new weights, ends its requests, sleeps or wakes."""

TakeWeights = Callable[[Offer], Awaitable[None]]
"""Puts offered weights where the engine reads them; other requests are answered meanwhile."""
TakeImages = Callable[[Sequence[Image]], None]
"""Learns of images before the prompts that have them."""


@dataclass(frozen=True, slots=True)
class EngineHost:
    """The engine, in its own process. Every answer carries the engine's counters."""

    engine: RolloutEngine
    take_weights: TakeWeights
    take_images: TakeImages = lambda _: None
    unfinished: dict[int, PartialCompletion] = field(default_factory=dict[int, PartialCompletion])
    """By the numbers of their requests."""

    async def ask(self, method: str, *args: object) -> tuple[Any, EngineStats]:
        """Call a method of the engine."""
        with boundary(EngineError, "the engine failed", Exception):
            return await getattr(self.engine, method)(*args), self.engine.stats()

    async def generate(
        self,
        number: int,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        images: Sequence[Image] = (),
    ) -> tuple[Completion, EngineStats]:
        """Generate as ``RolloutEngine.generate``; what is written so far is kept under ``number``.

        Args:
            images: those that earlier requests have not brought.
        """
        self.take_images(images)
        FOLLOWER.set(partial(self.unfinished.__setitem__, number))
        try:
            return await self.ask("generate", prompt_ids, sampling)
        finally:
            self.unfinished.pop(number, None)

    async def progress(self, known: Mapping[int, int]) -> tuple[dict[int, Tokens], EngineStats]:
        """The tokens of unfinished completions beyond the number that is ``known`` of each."""
        new = {
            number: self.unfinished[number].beyond(count)
            for number, count in known.items()
            if number in self.unfinished
        }
        return new, self.engine.stats()

    async def take(self, version: int, offer: Offer) -> tuple[None, EngineStats]:
        with boundary(EngineError, "cannot take new weights", Exception):
            await self.take_weights(offer)
        return await self.ask("load_weights", version)


class FarEngine:
    """A ``Member`` of an ``EnginePool``: an ``EngineHost`` in another process.

    Args:
        keeps: if the engine is lost, a request ends with the tokens that are known of it,
            ``finish_reason="abort"``; others are lost with the engine.
        images: those of the run, which the engine gets with the requests.
    """

    def __init__(self, far: Far, *, keeps: bool = False, images: ImageRows | None = None) -> None:
        self.far = far
        self._unsent = UnsentImages(images)
        self._stats = EngineStats()
        self._keeps = keeps
        self._numbers = count()
        self.unfinished: dict[int, PartialCompletion] = {}
        """What is known of the requests in flight."""
        self._following: asyncio.Task[None] | None = None
        self._followed: set[int] = set()
        """Requests whose tokens somebody reads as they come."""
        self._asked = asyncio.Event()
        """Set when one is made."""
        self._taking = False

    @classmethod
    async def start(
        cls,
        far: Far,
        make: Callable[[], EngineHost],
        timeout: float = STARTING,
        *,
        keeps: bool = False,
        images: ImageRows | None = None,
    ) -> FarEngine:
        """Build the engine in its process.

        Raises:
            EngineLostError: its process was killed meanwhile.
            TunesmithError: it cannot be built, or is not ready within ``timeout`` seconds; its
                process has ended.
        """
        try:
            await asyncio.wait_for(asyncio.wrap_future(far.make(make)), timeout)
        except TimeoutError:
            await asyncio.to_thread(far.close)
            raise EngineError(f"{far.name} was not ready within {timeout:g} s") from None
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(far.close))
            exited = isinstance(error, EngineLostError) and (far.code or 0) > 0
            if exited:  # a restart would exit again
                raise EngineError(str(error)) from None
            raise
        return cls(far, keeps=keeps, images=images)

    @property
    def name(self) -> str:
        return self.far.name

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        number = next(self._numbers)
        known = self.unfinished[number] = PartialCompletion()
        if FOLLOWER.get() is not None:
            follow(known)
            self._followed.add(number)
            self._asked.set()
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        try:
            images = self._unsent.take()
            return await self._ask("generate", number, list(prompt_ids), sampling, images)
        except EngineLostError:
            if self._keeps and known.token_ids:
                return known.completion("abort")
            raise
        finally:
            del self.unfinished[number]
            self._followed.discard(number)

    async def interrupt(self) -> None:
        await self._in_time("end its requests", "ask", "interrupt")

    async def take(self, version: int, offer: Offer) -> None:
        self._taking = True
        try:
            await self._in_time("take new weights", "take", version, offer)
        finally:
            self._taking = False

    async def sleep(self, level: int = 1) -> None:
        await self._in_time("sleep", "ask", "sleep", level)

    async def wake(self) -> None:
        await self._in_time("wake", "ask", "wake")

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        with suppress(TunesmithError, TimeoutError):
            await asyncio.wait_for(self.far.call_async("ask", "close"), CLOSING)
        await asyncio.to_thread(self.far.close)

    async def _follow(self) -> None:
        """Ask for progress as long as there are requests."""
        moved = time.monotonic()
        steps = self._stats.steps
        while self.unfinished:
            await self._pause()
            known = {
                number: len(done.token_ids)
                for number, done in self.unfinished.items()
                if self._keeps or number in self._followed
            }
            try:
                new: dict[int, Tokens] = await self._ask("progress", known)
            except EngineError:  # the requests notice, too
                return
            if self._taking or self._stats.steps != steps:
                moved = time.monotonic()
                steps = self._stats.steps
            elif time.monotonic() - moved > STUCK:
                how = f"has computed nothing for {STUCK:g} s and was killed"
                await asyncio.to_thread(self.far.close, how)
                return
            for number, tokens in new.items():
                if number in self.unfinished:
                    self.unfinished[number].extend(tokens)

    async def _pause(self) -> None:
        """Until the next question for progress."""
        if self._followed:
            await asyncio.sleep(STREAMED)
            return
        self._asked.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), PROGRESS)

    async def _in_time(self, what: str, method: str, *args: object) -> None:
        """Ask the engine; one that does not answer is killed."""
        try:
            await asyncio.wait_for(self._ask(method, *args), TAKING)
        except TimeoutError:
            how = f"did not {what} within {TAKING:g} s and was killed"
            await asyncio.to_thread(self.far.close, how)
            self.far.check()

    async def _ask(self, method: str, *args: object) -> Any:
        result, stats = await self.far.call_async(method, *args)
        # Answers may arrive out of order, and counters only rise.
        self._stats = EngineStats(*map(max, astuple(self._stats), astuple(stats)))
        return result
