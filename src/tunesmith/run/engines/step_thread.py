"""The thread on which an engine computes, so that the event loop never waits for a step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

from tunesmith.errors import EngineError
from tunesmith.models.openmp import end_team

T = TypeVar("T")

TURNS = 16
"""Event-loop iterations that callers have to follow a completion with their next request."""


def promise() -> Future[Any]:
    """A future that is not cancelled with the caller who waits for it."""
    done = Future[Any]()
    done.set_running_or_notify_cancel()
    return done


class StepThread:
    """Runs an engine's steps one after another, and calls between steps. Used from one event loop
    at a time.

    Args:
        step: does some work; returns whether any is left.
        fail: called on the thread with the exception of a failed step.
        posted: called where a call was posted, which waits for the end of the current step.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], bool],
        fail: Callable[[Exception], None],
        posted: Callable[[], object] = lambda: None,
    ) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._step = step
        self._fail = fail
        self._posted = posted
        self._closed = False
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``. Blocks: use it only at startup, before there is an event loop."""
        return self._thread.submit(work).result()

    def post(self, work: Callable[[], T]) -> Future[T]:
        """Schedule ``work`` before the next step, after earlier calls; returns the future of its
        result.

        Raises:
            EngineError: the thread was closed.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        done: Future[T] = promise()
        self._loop = asyncio.get_running_loop()
        self._calls.append((work, done))
        self._posted()
        end_team()  # the caller's team: the caller waits now
        self._thread.submit(self._serve)
        return done

    @property
    def called(self) -> bool:
        """Whether calls wait for the end of the current step."""
        return bool(self._calls)

    async def call(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which runs before the next step. Raises EngineError as ``post``
        does."""
        return await asyncio.wrap_future(self.post(work))

    async def close(self, work: Callable[[], object]) -> None:
        """Run ``work``, which must leave nothing to do, and wait for the thread to end."""
        last = self.post(work)
        self._closed = True
        await asyncio.wrap_future(last)
        await asyncio.to_thread(self._thread.shutdown)

    def wait_for_callers(self) -> None:
        """On the thread: let the event loop run what is ready.

        Requests that arrive together then start together, and a request that immediately follows a
        completion starts at the same step in every run. A resumed run thus repeats bitwise, which
        is why this has no time limit.
        """
        loop = self._loop
        done = Event()
        assert loop is not None, "somebody posted"

        def turn(left: int) -> None:
            if left:
                loop.call_soon(turn, left - 1)
            else:
                done.set()

        try:
            loop.call_soon_threadsafe(turn, TURNS)
        except RuntimeError:  # the loop was closed
            return
        while not done.wait(0.1) and loop.is_running():
            pass

    def _serve(self) -> None:
        """Step until there is nothing to do. Each ``post`` submits this once more, so that no call
        is missed."""
        stepping = False
        while True:
            if not stepping:
                if not self._calls:
                    end_team()
                    return
                # nothing was running: the first request must not start alone
                self.wait_for_callers()
            for _ in range(len(self._calls)):  # later calls wait for others that arrive with them
                work, done = self._calls.popleft()
                try:
                    done.set_result(work())
                except BaseException as error:
                    done.set_exception(error)
            try:
                stepping = self._step()
            except Exception as error:
                stepping = True
                self._fail(error)
