"""Answers tasks into a file that can be continued after a kill at any moment.

The completions of a task depend only on the seed and the task's position in the data, so a
continued run writes the lines that an uninterrupted one would have written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from tunesmith.learn.rewards.metrics import check_failed
from tunesmith.records.interrupts import check, elsewhere, held
from tunesmith.records.metrics import JsonLines
from tunesmith.records.text import shown_path
from tunesmith.run.assembly.event_loop import run_async
from tunesmith.run.offline.lines import Json, records_of, repair
from tunesmith.run.offline.unfinished import Unfinished
from tunesmith.run.offline.watch import JobWatch
from tunesmith.types import Rollout, RolloutGroup, Status, Task

BLOCK = 64
"""Rollouts that are checked for failures together."""
TICK = 0.5
"""Seconds between updates of the display when nothing finishes."""

_Finished = tuple[Json, Sequence[Rollout]]
Produce = Callable[[int, Task, Unfinished], Awaitable[RolloutGroup]]
"""Plays a task, given its position in the data, with the completions of it that are finished
already."""


def answer(
    path: Path,
    tasks: Sequence[Task],
    produce: Produce,
    line: Callable[[RolloutGroup], Json],
    *,
    window: int,
    max_failed_share: float,
    watch: JobWatch,
    serving: AbstractAsyncContextManager[None] | None = None,
) -> None:
    """Append a line per task to ``path``, from the first task that has none, in the order of the
    tasks.

    What is finished is on disk at once: a line in ``path`` if all lines before it are there, and
    otherwise in the file of ``Unfinished``, which is removed at the end. An error says in a note
    how much of it there is.

    Args:
        window: most tasks in flight, and most finished ones that wait for an earlier one.
        max_failed_share: limit for the rollouts of a block; above it the run stops, without lines
            that hold failures.
        serving: is open meanwhile, in the event loop.

    Raises:
        RewardError: too many rollouts failed.
    """
    start = repair(path)
    with closing(JsonLines(path, private=True)) as out:
        unfinished = Unfinished(path, start)
        order = _InOrder(out, unfinished, start, len(tasks), max_failed_share)
        for place, known in unfinished.lines():
            if place < len(tasks):
                order.take(place, known, [Rollout(tasks[place]) for _ in records_of(known)])

        async def work() -> None:
            async with serving or nullcontext():
                await _answer(tasks, produce, line, order, window, watch)

        watch.begin(path, order.finished, unfinished)
        try:
            # In the midst of a task of the event loop, a signal would leave others behind.
            with elsewhere():
                run_async(work())
        except BaseException as error:
            more = unfinished.completions
            kept = f" and {more} more completions" if more else ""
            lines = f"{order.finished} of {len(tasks)} lines{kept}"
            error.add_note(f"{lines} are kept, for {shown_path(path)}")
            raise
        finally:
            watch.end()
            unfinished.close(finished=order.written == len(tasks))


async def _answer(
    tasks: Sequence[Task],
    produce: Produce,
    line: Callable[[RolloutGroup], Json],
    order: _InOrder,
    window: int,
    watch: JobWatch,
) -> None:
    """Play all tasks that ``order`` does not have, with at most ``window`` in flight, and end those
    on an error."""
    flying: dict[asyncio.Future[RolloutGroup], int] = {}
    ended: asyncio.Queue[asyncio.Future[RolloutGroup]] = asyncio.Queue()
    place = order.seen
    try:
        while order.written < len(tasks):
            while place < len(tasks) and place < order.seen + window:
                if place not in order.waiting:
                    one = asyncio.ensure_future(produce(place, tasks[place], order.unfinished))
                    one.add_done_callback(ended.put_nowait)
                    flying[one] = place
                place += 1
            check()
            try:
                async with asyncio.timeout(TICK):
                    one = await ended.get()
            except TimeoutError:
                watch.tick()
                continue
            group = one.result()
            place_of = flying.pop(one)
            made = line(group)
            order.add(place_of, made, group.rollouts)
            watch.add(place_of, group, made, order.finished)
            watch.tick()
    finally:
        for one in flying:
            one.cancel()
        await asyncio.gather(*flying, return_exceptions=True)


@dataclass(slots=True)
class _InOrder:
    """Writes lines in the order of the data. Failures are written when their whole block has been
    judged."""

    out: JsonLines
    unfinished: Unfinished
    written: int
    """Lines in the output."""
    total: int
    max_failed_share: float
    seen: int = field(init=False)
    """The first place that is not finished."""
    waiting: dict[int, _Finished] = field(init=False, default_factory=dict[int, "_Finished"])
    """Finished lines that are not written, by place."""
    _judged: int = field(init=False)
    """Places before this one may be written even if rollouts failed."""
    _block: list[Rollout] = field(init=False, default_factory=list[Rollout])
    _whole: bool = field(init=False)
    """Whether there are lines before this block."""

    def __post_init__(self) -> None:
        self.seen = self._judged = self.written
        self._whole = self.written > 0

    @property
    def finished(self) -> int:
        return self.written + len(self.waiting)

    def add(self, place: int, line: Json, rollouts: Sequence[Rollout]) -> None:
        """Add a finished line; keep it on disk."""
        with held():
            if place != self.written and _good(rollouts):
                self.unfinished.keep({"place": place, "line": line})
            self.take(place, line, rollouts)
            self.unfinished.tidy()

    def take(self, place: int, line: Json, rollouts: Sequence[Rollout]) -> None:
        """Add a finished line, and write all that can be written."""
        self.waiting[place] = line, rollouts
        while self.seen in self.waiting:
            self._block += self.waiting[self.seen][1]
            self.seen += 1
            if len(self._block) >= BLOCK or self.seen == self.total:
                self._judge()
            while self.written < self.seen and (
                self.written < self._judged or _good(self.waiting[self.written][1])
            ):
                self.out.write(self.waiting.pop(self.written)[0])
                self.unfinished.drop(self.written)
                self.written += 1

    def _judge(self) -> None:
        # A short last block is judged as if it were a full one whose other rollouts are good.
        good = [Rollout(self._block[0].task)] * (BLOCK - len(self._block)) if self._whole else []
        check_failed([*good, *self._block], self.max_failed_share)
        self._judged = self.seen
        self._block = []
        self._whole = True


def _good(rollouts: Sequence[Rollout]) -> bool:
    return all(rollout.status is Status.OK for rollout in rollouts)


def window_of(max_running: int, n: int) -> int:
    """Number of tasks in flight that keeps an engine full while the first of them is awaited."""
    return max(1, ceil(2 * max_running / n))
