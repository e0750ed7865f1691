"""The engines of a pool: which are running, which are lost, and which take their places.

A place is a number from 0. An engine that is lost leaves its place empty, and others go on; the
next engine in this place joins them when it has started and has the weights. ::

    starting ──► running ──► lost ──► starting ...     spends one of ``restarts``
        ▲                                │
        └── every RETRY seconds ◄────────┘             while its machine or server is not there
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, takewhile
from typing import Any

from tunesmith.errors import (
    EngineError,
    EngineLostError,
    NoEngineError,
    NoPlaceError,
    TunesmithError,
    UserError,
)
from tunesmith.records.timeline import Timeline, engine_lane
from tunesmith.run.engines.base import EngineStats, Member, add_stats

RETRY = 20.0
"""Seconds between attempts to start an engine where the last one failed."""
PATIENCE = 900.0
"""Seconds for which a run without any engine waits for one to come back."""
BLOCK = 16
REMEMBERED = 1 << 16
"""Tokens per block of a prompt, and blocks remembered per engine."""

Start = Callable[[int], Awaitable[Member]]
"""Starts the engine of a place."""


class Prefixes:
    """The prompt prefixes that one engine has read, as ``blocks``; a block's hash covers all tokens
    before it."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def known(self, blocks: Sequence[int]) -> int:
        """How many leading blocks the engine has seen."""
        return sum(1 for _ in takewhile(self._seen.__contains__, blocks))

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)


def blocks(token_ids: Sequence[int]) -> list[int]:
    """One hash per whole block, of all tokens up to its end; a prompt shorter than a block is one
    block."""
    whole = len(token_ids) // BLOCK * BLOCK or len(token_ids)
    pieces = (token_ids[start : start + BLOCK] for start in range(0, whole, BLOCK))
    return list(accumulate(pieces, lambda before, piece: hash((before, *piece)), initial=0))[1:]


@dataclass(slots=True, eq=False)
class EngineSeat:
    """A running engine."""

    number: int
    member: Member
    running: int = 0
    publication: int = 0
    """Which of the pool's publications of weights it has; 0: none."""
    version: int = 0
    """The version of these weights."""
    prefixes: Prefixes = field(default_factory=Prefixes)


class Roster:
    """``size`` engines, started when they are first needed; all of these have to start.

    Later, an engine that is lost or cannot start costs the run no more than its share of the work.
    An engine that is lost is replaced, at most ``restarts * size`` times in all; one that cannot be
    started counts too, unless there is no place for it now.

    Args:
        join: gives a started engine what the others have.
        patience: seconds to wait for an engine when there is none and none can be started.
    """

    def __init__(
        self,
        start: Start,
        join: Callable[[EngineSeat], Awaitable[None]],
        report: Callable[[str], None],
        timeline: Timeline | None,
        *,
        size: int,
        restarts: int,
        patience: float = PATIENCE,
    ) -> None:
        self._start = start
        self._join = join
        self._report = report
        self._timeline = timeline
        self._patience = patience
        self._size = size
        self._given_up = 0
        """Places that stay empty."""
        self.restarts_left = restarts * size
        self.seats: list[EngineSeat] = []
        self.departed = EngineStats()
        """The counters of engines that have left."""
        self._changed = asyncio.Event()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._filling: dict[int, asyncio.Task[None]] = {}
        """What fills each empty place."""
        self._starting: set[int] = set()
        """Places whose next engine is starting now."""
        self._opening: set[int] | None = None
        """Places whose first engine is starting; None: nothing was asked of the engines yet."""
        self._none_since = 0.0
        self._ending: set[asyncio.Future[None]] = set()
        self._failure: Exception | None = None

    async def opened(self) -> None:
        """Start the engines, unless that was done, and wait for them.

        Raises:
            TunesmithError: one of them cannot start.
        """
        if self._opening is None:
            self._opening = set(range(self._size))
            self._none_since = time.monotonic()
            for number in range(self._size):
                self._fill(number)
        await self._until(lambda: not self._opening)

    async def ready(self, wanted: Callable[[], bool] = lambda: True) -> list[EngineSeat]:
        """The running engines, at least one; if all are lost, waits for one, as long as it is
        ``wanted``.

        Raises:
            TunesmithError: one of the first engines cannot start.
            NoEngineError: all engines are lost, and none comes back.
        """
        await self.opened()
        await self._until(lambda: bool(self.seats) or not wanted())
        return self.seats

    async def hold(self) -> None:
        """Start no engine until ``go_on``; waits for those that are starting now."""
        await self.opened()
        await self._until(lambda: not self._starting)
        self._may_start.clear()

    def go_on(self) -> None:
        self._may_start.set()

    def notify(self) -> None:
        """Have those who wait in ``ready`` look whether they still want to."""
        self._changed.set()

    def lose(self, seat: EngineSeat, lost: EngineLostError) -> None:
        """Remove a lost engine, once, and fill its place."""
        if seat not in self.seats:
            return
        unanswered = seat.running
        self._remove(seat)
        if self._closed:
            return
        if not self.seats:
            self._none_since = time.monotonic()
        replaced = self._affords(seat.number, lost)
        if replaced:
            self._fill(seat.number)
        what = "starting another" if replaced else "it is not replaced (system.engine_restarts)"
        if not self._closed:
            repeated = f"its {unanswered} unanswered requests are repeated"
            text = f"{lost}: {what}; {repeated}, {self._others()}"
            self._report(f"engine {seat.number} is lost: {text}")

    async def close(self) -> None:
        self._failure = EngineError("the engine was closed")
        self._changed.set()
        for task in self._filling.values():
            task.cancel()
        await gather_with_errors(self._filling.values())
        for seat in list(self.seats):
            self._remove(seat)
        await gather_with_errors(self._ending)

    @property
    def _closed(self) -> bool:
        return self._failure is not None

    async def _until(self, holds: Callable[[], bool]) -> None:
        while self._failure is None:
            if holds():
                return
            self._changed.clear()
            await self._changed.wait()
        raise self._failure

    def _fill(self, number: int) -> None:
        task = asyncio.create_task(self._filled(number))
        self._filling[number] = task
        task.add_done_callback(lambda _: self._filling.pop(number, None))

    async def _filled(self, number: int) -> None:
        """Start an engine in an empty place; if that fails, again and again."""
        reported = ""
        for attempt in count():
            try:
                await self._add(number)
            except TunesmithError as error:
                if not self._goes_on(number, error, is_new=str(error) != reported):
                    return
                reported = str(error)
            except Exception as error:  # a bug, not a fault of an engine
                self._fail(error)
                return
            else:
                if not self._is_opening(number):
                    self._report(f"engine {number} has joined: {self._others()}")
                self._settle(number)
                return
            self._settle(number)
            await asyncio.sleep(RETRY if attempt else 0.0)
        raise AssertionError("attempts do not end")

    async def _add(self, number: int) -> None:
        """Start one engine and give it what the others have."""
        await self._may_start.wait()
        self._starting.add(number)
        try:
            seat = EngineSeat(number, await self._start(number))
            try:
                await self._join(seat)
            except BaseException:
                await seat.member.close()
                raise
            self.seats.append(seat)
            if self._timeline:
                self._timeline.enter(engine_lane(number))
        finally:
            self._starting.discard(number)
            self._changed.set()

    def _goes_on(self, number: int, error: TunesmithError, *, is_new: bool) -> bool:
        """Whether to try again after an engine could not be started; a new reason is reported."""
        if self._is_opening(number) and not isinstance(error, EngineLostError):
            self._fail(error)
            return False
        absent = isinstance(error, NoPlaceError | UserError)  # nothing was started
        if not absent and not self._affords(number, error):
            return False
        alone = not self.seats and not self._starting
        limit = f"{self._patience:g} s"
        if alone and time.monotonic() - self._none_since > self._patience:
            self._fail(NoEngineError(f"{error}; no engine has come back for {limit}"))
            return False
        if is_new:
            until = f"; the run ends if there is none for {limit}" if alone else ""
            again = f"tried again every {RETRY:g} s, {self._others()}{until}"
            self._report(f"engine {number} cannot be started: {error}; {again}")
        return True

    def _affords(self, number: int, error: TunesmithError) -> bool:
        """Spend a restart on a place; if none is left, the place is given up."""
        if self.restarts_left:
            self.restarts_left -= 1
            return True
        self._given_up += 1
        if self._given_up == self._size:
            self._fail(NoEngineError(f"{error}, once too often (system.engine_restarts)"))
        self._settle(number)
        return False

    def _others(self) -> str:
        return f"{len(self.seats)} of {self._size} engines go on"

    def _is_opening(self, number: int) -> bool:
        return self._opening is not None and number in self._opening

    def _settle(self, number: int) -> None:
        """Nobody waits any more for the first engine of a place."""
        if self._opening:
            self._opening.discard(number)
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _remove(self, seat: EngineSeat) -> None:
        self.seats.remove(seat)
        if self._timeline:
            self._timeline.leave(engine_lane(seat.number))
        self.departed = add_stats(self.departed, seat.member.stats())
        task = asyncio.ensure_future(seat.member.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._changed.set()


async def gather_with_errors(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results in order; a failed call's result is its exception."""
    return await asyncio.gather(*calls, return_exceptions=True)
