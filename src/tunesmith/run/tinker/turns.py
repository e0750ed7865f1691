"""Turns of those who want different things of which there is room for one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class SharedTurns:
    """Who wants the same shares a turn. Others wait for it to end, first come, first served; then
    nobody joins it any more."""

    def __init__(self) -> None:
        self._now: object = None
        self._users = 0
        self._waiting: deque[tuple[object, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def of(self, what: object) -> AsyncGenerator[None]:
        """A turn with ``what``."""
        if self._users and (self._waiting or self._now != what):
            await self._wait(what)
        else:
            self._now = what
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, what: object) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((what, place))
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was its turn already
                self._leave()
            raise

    def _leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        waiting = [entry for entry in self._waiting if not entry[1].cancelled()]
        self._waiting.clear()
        for what, place in waiting:
            if not self._users:
                self._now = what
            if what == self._now:
                self._users += 1
                place.set_result(None)
            else:
                self._waiting.append((what, place))
