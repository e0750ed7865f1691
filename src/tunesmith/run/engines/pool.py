"""Several engines behind one interface: distributes requests, updates all engines' weights,
replaces lost engines."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, takewhile
from typing import Any

from tunesmith.errors import EngineError, EngineLostError
from tunesmith.records.timeline import Timeline, engine_lane
from tunesmith.run.engines.base import EngineStats, Member, add_stats, check_sampling
from tunesmith.run.engines.timed import timed
from tunesmith.run.weights.base import Offer, Plane
from tunesmith.types import Completion, Sampling

OFFERS = 3
PAUSE = 0.5
"""Attempts to deliver weights, and seconds between them: a connection may break."""
SLACK = 1.5
"""An engine that knows the prompt gets it unless it has this many times the requests of the least
busy one ..."""
SIBLINGS = 16
"""... plus this many, if it knows the whole prompt: the requests of a group."""
BLOCK = 16
REMEMBERED = 1 << 16
"""Tokens per block of a prompt, and blocks remembered per engine."""

Start = Callable[[int], Awaitable[Member]]
"""Starts the engine with this number."""


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
class _Seat:
    """A running engine."""

    number: int
    member: Member
    running: int = 0
    prefixes: Prefixes = field(default_factory=Prefixes)


class EnginePool:
    """Implements ``RolloutEngine`` with ``size`` engines, started on the first call.

    A prompt goes to the engine that has read its prefix, so that a group shares its prefill, unless
    that engine is far busier. A lost engine is replaced, at most ``restarts * size`` times in all:
    its requests go to other engines, and its replacement gets the current weights, so no rollout is
    lost and none is counted twice.

    Args:
        timeline: gets a span for each request, in a lane for each engine.
    """

    def __init__(
        self,
        start: Start,
        plane: Plane,
        *,
        size: int = 1,
        restarts: int = 3,
        report: Callable[[str], None] = print,
        timeline: Timeline | None = None,
    ) -> None:
        self._start = start
        self._plane = plane
        self._report = report
        self._timeline = timeline
        self._size = size
        self._restarts_left = restarts * size
        self._numbers = count()
        self._seats: list[_Seat] = []
        self._changed = asyncio.Event()
        self._loading = asyncio.Lock()
        self._publishing = asyncio.Lock()
        self._starting: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._published_version: int | None = None
        self._loaded_version = 0
        self._state = "awake"
        self._departed_stats = EngineStats()
        self._running = self._peak = 0
        self._sync_bytes = 0
        self._sync_seconds = 0.0
        self._failure: Exception | None = None

    @property
    def version(self) -> int:
        return self._loaded_version

    @property
    def members(self) -> list[Member]:
        """The engines that are running now."""
        return [seat.member for seat in self._seats]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        check_sampling(sampling)
        if self._state != "awake":
            raise EngineError(f"the engine is {self._state}")
        self._running += 1
        self._peak = max(self._peak, self._running)
        beginning = blocks(prompt_ids)
        try:
            while True:
                seat = await self._seat_for(beginning)
                seat.prefixes.add(beginning)
                try:
                    return await self._ask(seat, prompt_ids, sampling)
                except EngineLostError as lost:
                    self._replace(seat, lost)
        finally:
            self._running -= 1

    async def interrupt(self) -> None:
        await gather_with_errors(seat.member.interrupt() for seat in list(self._seats))

    async def load_weights(self, version: int) -> None:
        async with self._loading:
            began = time.monotonic()
            async with self._publishing:
                await self._plane.publish(version)
                self._published_version = version
            await self._each(self._load, tries=OFFERS)
            self._sync_seconds += time.monotonic() - began
            self._loaded_version = version

    async def sleep(self, level: int = 1) -> None:
        if self._running:
            raise EngineError(
                f"{self._running} requests are in flight: an engine sleeps when they have ended"
            )
        await self._each(
            lambda seats: gather_with_errors(seat.member.sleep(level) for seat in seats)
        )
        self._state = "asleep"

    async def wake(self) -> None:
        await self._each(lambda seats: gather_with_errors(seat.member.wake() for seat in seats))
        self._state = "awake"

    def stats(self) -> EngineStats:
        total = EngineStats()
        for seat in self._seats:
            total = add_stats(total, seat.member.stats(), separate=True)
        synced = {"sync_bytes": self._sync_bytes, "sync_seconds": self._sync_seconds}
        return replace(add_stats(total, self._departed_stats), peak_running=self._peak, **synced)

    async def close(self) -> None:
        self._state = "closed"
        self._failure = EngineError("the engine was closed")
        self._changed.set()
        for task in self._starting:
            task.cancel()
        await gather_with_errors(self._starting)
        for seat in list(self._seats):
            self._remove(seat)
        await gather_with_errors(self._ending)
        await self._plane.close()

    async def _seat_for(self, beginning: Sequence[int]) -> _Seat:
        """The engine that has read the longest prefix, among those not much busier than the least
        busy one."""
        seats = self._seats or await self._all_ready()
        least = min(seat.running for seat in seats)
        known = {seat: seat.prefixes.known(beginning) for seat in seats}
        more = {seat: SIBLINGS if known[seat] == len(beginning) else 1 for seat in seats}
        free = [seat for seat in seats if seat.running <= SLACK * least + more[seat]]
        return max(free, key=lambda seat: (known[seat], -seat.running, -seat.number))

    async def _ask(self, seat: _Seat, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        seat.running += 1
        try:
            done = await timed(
                self._timeline, seat.number, prompt_ids, seat.member.generate(prompt_ids, sampling)
            )
        finally:
            seat.running -= 1
        seat.prefixes.add(blocks([*prompt_ids, *done.token_ids]))
        return done

    async def _all_ready(self) -> list[_Seat]:
        """All engines; starts those that are missing."""
        while self._failure is None:
            missing = self._size - len(self._seats)
            if not missing:
                return self._seats
            for _ in range(missing - len(self._starting)):
                _go(self._add(), self._starting)
            self._changed.clear()
            await self._changed.wait()
        raise self._failure

    async def _each(
        self, ask: Callable[[Sequence[_Seat]], Awaitable[list[Any]]], *, tries: int = 1
    ) -> None:
        """Ask all engines, including replacements for lost ones.

        An engine that fails in a round in which another is lost may have failed because of it, and
        is asked again.
        """
        done: set[_Seat] = set()
        while seats := [seat for seat in await self._all_ready() if seat not in done]:
            answers = dict(zip(seats, await ask(seats), strict=True))
            failures = [answer for answer in answers.values() if isinstance(answer, Exception)]
            lost = {seat: a for seat, a in answers.items() if isinstance(a, EngineLostError)}
            if failures and not lost:
                tries -= 1
                if not tries:
                    raise failures[0]
                await asyncio.sleep(PAUSE)
            for seat, error in lost.items():
                self._replace(seat, error)
            done |= {seat for seat, answer in answers.items() if not isinstance(answer, Exception)}

    async def _load(self, seats: Sequence[_Seat]) -> list[Any]:
        for seat in seats:  # prefixes cached with older weights cannot be used
            seat.prefixes = Prefixes()
        return await self._give([seat.member for seat in seats])

    async def _give(self, members: Sequence[Member]) -> list[Any]:
        """Offer the published weights; a member that fails does not keep the others waiting."""
        version = self._published_version
        offers = await self._plane.offer(len(members))
        assert version is not None, "nothing was published"

        async def take(member: Member, offer: Offer) -> None:
            try:
                await member.take(version, offer)
            except Exception:
                await self._plane.withdraw(offers)
                raise
            self._sync_bytes += offer.get("bytes", 0)

        return await gather_with_errors(take(*pair) for pair in zip(members, offers, strict=True))

    async def _add(self) -> None:
        """Start one more engine, and give it the weights of the others."""
        number = next(self._numbers)
        member = None
        seat = None
        try:
            member = await self._start(number)
            async with self._publishing:
                if self._published_version is not None:
                    [failure] = await self._give([member])
                    if failure:
                        raise failure
            seat = _Seat(number, member)
            self._seats.append(seat)
            if self._timeline:
                self._timeline.enter(engine_lane(number))
        except EngineLostError as lost:
            self._spend_restart(lost)
        except Exception as error:
            self._failure = error
        finally:
            self._changed.set()
            if member is not None and seat is None:
                await member.close()

    def _replace(self, seat: _Seat, lost: EngineLostError) -> None:
        """Replace a lost engine, once."""
        if seat not in self._seats:
            return
        self._remove(seat)
        if self._state != "closed":
            self._spend_restart(lost)
            self._report(f"{lost}: starting another; its unanswered requests are repeated")

    def _remove(self, seat: _Seat) -> None:
        self._seats.remove(seat)
        if self._timeline:
            self._timeline.leave(engine_lane(seat.number))
        self._departed_stats = add_stats(self._departed_stats, seat.member.stats())
        _go(seat.member.close(), self._ending)

    def _spend_restart(self, lost: EngineLostError) -> None:
        if self._restarts_left:
            self._restarts_left -= 1
            _go(self._add(), self._starting)
        else:
            self._failure = EngineError(f"{lost}, once too often (system.engine_restarts)")
            self._changed.set()


def _go(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def gather_with_errors(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results in order; a failed call's result is its exception."""
    return await asyncio.gather(*calls, return_exceptions=True)
