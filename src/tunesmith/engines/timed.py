"""An engine whose requests are on the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from tunesmith.engines.base import Member, RolloutEngine
from tunesmith.monitor.timeline import Timeline
from tunesmith.types import Completion, Sampling

E = TypeVar("E", bound=RolloutEngine | Member)


def timed(engine: E, timeline: Timeline, lane: str) -> E:
    """``engine``, each of its requests a span of ``lane``; it takes part until it is closed."""
    timeline.enter(lane)
    return cast(E, _Timed(engine, timeline, lane))


class _Timed:
    """Everything but ``generate`` and ``close`` is the engine's own."""

    def __init__(self, engine: RolloutEngine | Member, timeline: Timeline, lane: str) -> None:
        self._engine, self._timeline, self._lane = engine, timeline, lane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        with self._timeline.span(self._lane, "generate", prompt=len(prompt_ids)) as details:
            done = await self._engine.generate(prompt_ids, sampling)
            details["tokens"] = len(done.token_ids)
        return done

    async def close(self) -> None:
        self._timeline.leave(self._lane)
        await self._engine.close()
