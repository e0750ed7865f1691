"""Answers tasks into a file that can be continued after a kill at any moment.

The completions of a task depend only on the seed and the task's position in the data, so a continued run writes the
lines that an uninterrupted one would have written.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from math import ceil
from pathlib import Path

from tunesmith.engines.base import EngineStats
from tunesmith.monitor.metrics import JsonLines
from tunesmith.monitor.progress import open_progress
from tunesmith.offline.lines import Json, repair
from tunesmith.rewards.metrics import check_failed, reward_metrics
from tunesmith.types import Rollout, RolloutGroup, Task

BLOCK = 64
"""Rollouts that are checked for failures and written together."""
REPORT_SECONDS = 2.0
"""Time between progress reports."""

Produce = Callable[[int, Task], Awaitable[RolloutGroup]]
"""Plays a task, given its position in the data."""


async def answer(
    path: Path,
    tasks: Sequence[Task],
    produce: Produce,
    line: Callable[[RolloutGroup], Json],
    *,
    window: int,
    max_failed_share: float,
    live: bool | None = None,
    stats: Callable[[], EngineStats] = EngineStats,
) -> None:
    """Append a line per task to ``path``, from the first task that has none, in the order of the tasks.

    Args:
        window: tasks in flight at once, and the most results that wait in memory.
        max_failed_share: limit for the rollouts of a block; above it the run stops before the block is written.
        live: how to show the progress (``open_progress``).

    Raises:
        RewardError: too many rollouts failed.
    """
    start = done = reported = repair(path)
    block: list[RolloutGroup] = []
    recent: list[Rollout] = []
    counted, since = EngineStats(), time.monotonic()
    with ExitStack() as stack:
        out = JsonLines(path, private=True)
        stack.callback(out.close)
        progress = stack.enter_context(open_progress(len(tasks), start=start, live=live))
        async with aclosing(_in_order(tasks, start, produce, window)) as groups:
            async for group in groups:
                block.append(group)
                rollouts = [rollout for member in block for rollout in member.rollouts]
                last = done + len(block) == len(tasks)
                if len(rollouts) < BLOCK and not last:
                    continue
                # A short last block is judged as if it were a full one whose other rollouts are good.
                good = [Rollout(tasks[0])] * (BLOCK - len(rollouts)) if done else []
                check_failed([*good, *rollouts], max_failed_share)
                for member in block:
                    out.write(line(member))
                done += len(block)
                recent, block = recent + rollouts, []
                seconds = time.monotonic() - since
                if seconds > REPORT_SECONDS or last:
                    now = stats()
                    progress.step(done, _metrics(recent, now.since(counted), seconds), seconds / (done - reported))
                    counted, recent, reported, since = now, [], done, time.monotonic()


async def _in_order(tasks: Sequence[Task], start: int, produce: Produce, window: int) -> AsyncGenerator[RolloutGroup]:
    """The groups of ``tasks[start:]`` in order, with ``window`` tasks in flight, which closing it cancels."""
    flying: deque[asyncio.Task[RolloutGroup]] = deque()
    try:
        for place in range(start, len(tasks)):
            flying.append(asyncio.ensure_future(produce(place, tasks[place])))
            if len(flying) == window:
                yield await flying.popleft()
        while flying:
            yield await flying.popleft()
    finally:
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, return_exceptions=True)


def _metrics(rollouts: Sequence[Rollout], stats: EngineStats, seconds: float) -> dict[str, float]:
    metrics = reward_metrics(rollouts)
    metrics["completion_tokens"] = sum(r.num_sampled for r in rollouts) / max(1, len(rollouts))
    if stats.sampled_tokens:
        metrics["tokens_per_second"] = stats.sampled_tokens / seconds
    if 0 < stats.attainable_seconds <= seconds:
        metrics["limit_share"] = stats.attainable_seconds / seconds
    return metrics


def window_of(max_running: int, n: int) -> int:
    """Number of tasks in flight that keeps an engine full while the first of them is awaited."""
    return max(1, ceil(2 * max_running / n))
