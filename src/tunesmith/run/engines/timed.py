"""Records requests to engines on the timeline."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from tunesmith.records.timeline import Timeline, engine_lane
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.types import Completion, Sampling


async def timed(
    timeline: Timeline | None,
    number: int,
    prompt_ids: Sequence[int],
    request: Awaitable[Completion],
) -> Completion:
    """Await a request, and record its time as a span in the lane of engine ``number``."""
    if timeline is None:
        return await request
    with timeline.span(engine_lane(number), "generate", prompt=len(prompt_ids)) as details:
        done = await request
        details["tokens"] = len(done.token_ids)
    return done


class TimedEngine:
    """A single engine whose requests are recorded on the timeline; a pool does this itself."""

    def __init__(self, engine: RolloutEngine, timeline: Timeline, number: int = 0) -> None:
        self._engine = engine
        self._timeline = timeline
        self._number = number
        timeline.enter(engine_lane(number))
        self.interrupt = engine.interrupt
        self.load_weights = engine.load_weights
        self.sleep = engine.sleep
        self.wake = engine.wake
        self.stats = engine.stats

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        request = self._engine.generate(prompt_ids, sampling)
        return await timed(self._timeline, self._number, prompt_ids, request)

    async def close(self) -> None:
        self._timeline.leave(engine_lane(self._number))
        await self._engine.close()
