"""Several engines behind one interface: distributes requests, updates all engines' weights,
replaces lost engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from tunesmith.errors import EngineError, EngineLostError
from tunesmith.records.timeline import Timeline
from tunesmith.run.engines.base import EngineStats, Member, add_stats, check_idle, check_sampling
from tunesmith.run.engines.deadline import paused
from tunesmith.run.engines.roster import (
    PATIENCE,
    EngineSeat,
    Prefixes,
    Roster,
    Start,
    blocks,
    gather_with_errors,
)
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


class EnginePool:
    """Implements ``RolloutEngine`` with ``size`` engines, started on the first call.

    A prompt goes to the engine that has read its prefix, so that a group shares its prefill, unless
    that engine is far busier. The requests of a lost engine go to others, and its replacement gets
    the current weights when it comes (``Roster``), so no rollout is lost and none is counted twice.
    Meanwhile the others go on. An engine that fails a request which another one then answers is as
    good as lost.

    Args:
        restarts: replacements for each engine, counted over all together.
        timeline: gets a span for each request, in a lane for each engine.
        patience: see ``Roster``.
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
        patience: float = PATIENCE,
    ) -> None:
        self.roster = Roster(
            start, self._join, report, timeline, size=size, restarts=restarts, patience=patience
        )
        self._plane = plane
        self._timeline = timeline
        self._loading = asyncio.Lock()
        self.moving = asyncio.Lock()
        """Held while weights are published or taken; a plane without a copy of its own needs the
        trainer then."""
        self._published_version: int | None = None
        self._publications = 0
        self._loaded_version = 0
        self._state = "awake"
        self._interrupts = 0
        self._running = self._peak = 0
        self._sync_bytes = 0
        self._sync_seconds = 0.0

    @property
    def version(self) -> int:
        return self._loaded_version

    @property
    def members(self) -> list[Member]:
        """The engines that are running now."""
        return [seat.member for seat in self.roster.seats]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        check_sampling(sampling)
        if self._state != "awake":
            raise EngineError(f"the engine is {self._state}")
        self._running += 1
        self._peak = max(self._peak, self._running)
        beginning = blocks(prompt_ids)
        suspect: tuple[EngineSeat, EngineError] | None = None
        try:
            while True:
                seat = await self._seat_for(beginning, but=suspect and suspect[0])
                if seat is None:
                    return Completion([], [], [], "abort")
                seat.prefixes.add(beginning)
                try:
                    done = await self._ask(seat, prompt_ids, sampling)
                except EngineLostError as lost:
                    self.roster.lose(seat, lost)
                except EngineError as error:
                    if seat not in self.roster.seats:
                        continue  # it was lost, and closed with this request in flight
                    if suspect or self.members == [seat.member]:
                        raise
                    suspect = seat, error
                else:
                    if suspect:  # the request was not at fault
                        self._give_up(*suspect)
                    return done
        finally:
            self._running -= 1

    async def interrupt(self) -> None:
        self._interrupts += 1
        self.roster.notify()
        await gather_with_errors(seat.member.interrupt() for seat in list(self.roster.seats))

    async def load_weights(self, version: int) -> None:
        async with self._loading:
            self.roster.go_on()
            began = time.monotonic()
            async with self.moving:
                await self._plane.publish(version)
                self._published_version = version
                self._publications += 1
            await self._load_all()
            self._sync_seconds += time.monotonic() - began
            self._loaded_version = version

    async def sleep(self, level: int = 1) -> None:
        check_idle(self._running)
        await self.roster.hold()

        await self._all(lambda member: member.sleep(level))
        self._state = "asleep"

    async def wake(self) -> None:
        await self._all(lambda member: member.wake())
        self.roster.go_on()
        self._state = "awake"

    def stats(self) -> EngineStats:
        total = EngineStats()
        for seat in self.roster.seats:
            total = add_stats(total, seat.member.stats(), separate=True)
        synced = {"sync_bytes": self._sync_bytes, "sync_seconds": self._sync_seconds}
        return replace(add_stats(total, self.roster.departed), peak_running=self._peak, **synced)

    async def close(self) -> None:
        self._state = "closed"
        await self.roster.close()
        await self._plane.close()

    async def _seat_for(
        self, beginning: Sequence[int], but: EngineSeat | None
    ) -> EngineSeat | None:
        """The engine that has read the longest prefix, among those not much busier than the least
        busy one; None if there was none until ``interrupt``.

        Args:
            but: an engine that is asked only if there is no other.
        """
        interrupts = self._interrupts
        seats = self.roster.seats
        if not seats:
            with paused():
                seats = await self.roster.ready(lambda: interrupts == self._interrupts)
        if not seats:
            return None
        seats = [seat for seat in seats if seat is not but] or seats
        least = min(seat.running for seat in seats)
        known = {seat: seat.prefixes.known(beginning) for seat in seats}
        more = {seat: SIBLINGS if known[seat] == len(beginning) else 1 for seat in seats}
        free = [seat for seat in seats if seat.running <= SLACK * least + more[seat]]
        return max(free, key=lambda seat: (known[seat], -seat.running, -seat.number))

    async def _ask(
        self, seat: EngineSeat, prompt_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        seat.running += 1
        try:
            done = await timed(
                self._timeline, seat.number, prompt_ids, seat.member.generate(prompt_ids, sampling)
            )
        finally:
            seat.running -= 1
        seat.prefixes.add(blocks([*prompt_ids, *done.token_ids]))
        return done

    async def _load_all(self) -> None:
        """Give the published weights to all engines.

        An engine that fails in a round with others may have failed because of them: they are
        offered the weights again, the last time one by one. Then an engine that fails is as good
        as lost, if another one has them.
        """
        tries = OFFERS
        ready = self.roster.ready
        while seats := [s for s in await ready() if s.publication != self._publications]:
            if tries == 1:
                answers = [(await self._give([seat]))[0] for seat in seats]
                self._lose(seats, answers)
                continue
            answers = await self._give(seats)
            self._lose(seats, [a if isinstance(a, EngineLostError) else None for a in answers])
            failures = [answer for answer in answers if isinstance(answer, Exception)]
            if failures and not any(isinstance(failure, EngineLostError) for failure in failures):
                tries -= 1
                await asyncio.sleep(PAUSE)

    async def _give(self, seats: Sequence[EngineSeat]) -> list[Any]:
        """Offer the published weights; an engine that fails does not keep the others waiting."""
        async with self.moving:
            version = self._published_version
            assert version is not None, "nothing was published"
            publication = self._publications
            offers = await self._plane.offer(len(seats))

            async def take(seat: EngineSeat, offer: Offer) -> None:
                seat.prefixes = Prefixes()  # cached with older weights, they cannot be used
                try:
                    await seat.member.take(version, offer)
                except Exception:
                    await self._plane.withdraw(offers)
                    raise
                seat.publication = publication
                seat.version = version
                self._sync_bytes += offer.get("bytes", 0)

            return await gather_with_errors(take(*pair) for pair in zip(seats, offers, strict=True))

    async def _join(self, seat: EngineSeat) -> None:
        """Give an engine that has started the weights of the others."""
        if self._publications:
            [failure] = await self._give([seat])
            if failure:
                raise failure

    async def _all(self, ask: Callable[[Member], Awaitable[None]]) -> None:
        """Ask all engines; one that fails is as good as lost, if another one does not."""
        seats = list(self.roster.seats)
        self._lose(seats, await gather_with_errors(ask(seat.member) for seat in seats))

    def _lose(self, seats: Sequence[EngineSeat], answers: Sequence[object]) -> None:
        """Remove engines that failed.

        Raises:
            Exception: none is left, and one of them failed without being lost.
        """
        failed = {s: a for s, a in zip(seats, answers, strict=True) if isinstance(a, Exception)}
        alive = [error for error in failed.values() if not isinstance(error, EngineLostError)]
        if alive and failed.keys() >= set(self.roster.seats):
            raise alive[0]
        for seat, error in failed.items():
            if isinstance(error, EngineLostError):
                self.roster.lose(seat, error)
            else:
                self._give_up(seat, error)

    def _give_up(self, seat: EngineSeat, error: Exception) -> None:
        """Replace an engine that is there, but fails where others do not."""
        self.roster.lose(seat, EngineLostError(f"{seat.member.name} is given up: {error}"))
