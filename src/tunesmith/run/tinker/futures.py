"""Requests in order, and their results until clients have fetched them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping

from tunesmith.errors import UserError

Result = Mapping[str, object] | bytes
"""JSON, or a protobuf message."""
Work = Callable[[], Awaitable[Result]]
KEPT = 10_000
"""Results that are kept, the newest ..."""
FETCHED_BYTES = 256 << 20
"""... and of those that clients have fetched, this much: an answer may be lost on its way."""


class Futures:
    """Futures by id. A failure is a result too."""

    def __init__(self) -> None:
        self._known: dict[str, asyncio.Future[Result]] = {}
        self._fetched: dict[str, int] = {}
        """The bytes of each result that was fetched."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def promise(self, name: str) -> asyncio.Future[Result]:
        """A new future."""
        for old in [key for key, future in self._known.items() if future.done()][:-KEPT]:
            self._give_up(old)
        future = asyncio.get_running_loop().create_future()
        self._known[name] = future
        return future

    def start(self, name: str, work: Work) -> None:
        """Begin work that waits for no other, unless it has begun before."""
        if name in self._known:
            return
        task = asyncio.create_task(settle(self.promise(name), work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self, name: str, seconds: float) -> Result | None:
        """The result; None if it is not there in time.

        Raises:
            KeyError: there is no such future, or its result was given up.
        """
        await asyncio.wait([self._known[name]], timeout=seconds)
        future = self._known.get(name)
        if future is None or not future.done():
            return None
        result = future.result()
        self._fetched[name] = len(result) if isinstance(result, bytes) else 0
        while sum(self._fetched.values()) > FETCHED_BYTES:
            self._give_up(next(iter(self._fetched)))
        return result

    def _give_up(self, name: str) -> None:
        del self._known[name]
        self._fetched.pop(name, None)


class RequestLine:
    """The requests of one model, run in the order of their numbers from 0 on, each once."""

    def __init__(self, name: str, futures: Futures) -> None:
        self.name = name
        self._futures = futures
        self._next = 0
        self._waiting: dict[int, tuple[asyncio.Future[Result], Work]] = {}
        self._running: asyncio.Task[None] | None = None

    def submit(self, number: int, work: Work) -> str:
        """The id of the request's future. A number that came before is the same future."""
        name = f"{self.name}:{number}"
        if number < self._next or number in self._waiting:
            return name
        self._waiting[number] = (self._futures.promise(name), work)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return name

    async def _run(self) -> None:
        while self._next in self._waiting:
            future, work = self._waiting.pop(self._next)
            self._next += 1
            await settle(future, work)


async def settle(future: asyncio.Future[Result], work: Work) -> None:
    """Do the work and set the future to its result, or to why there is none."""
    try:
        result = await work()
    except UserError as error:
        result = {"error": str(error), "category": "user"}
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        result = {"error": f"{type(error).__name__}: {error}", "category": "server"}
    if not future.done():
        future.set_result(result)
