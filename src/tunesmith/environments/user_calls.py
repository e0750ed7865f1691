"""Running the user's functions beside the event loop, each call with a deadline.

Plain functions run one at a time and in order on a single thread, as in a plain script: code that
redirects ``stdout``, changes directory or keeps state stays correct. Coroutine functions run together on
an event loop of their own, so that one that blocks does not stop the engine's.

A thread cannot be killed. One that overruns is left behind (a daemon: it does not keep the process from
ending) and a fresh one takes over the calls that wait. A function that holds the interpreter lock without
end, such as a regular expression that backtracks for ever, stops every thread: no deadline can see it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tunesmith.errors import DeadlineExceeded

HUNG_AFTER = 3
"""Overruns of a function in a row after which its calls that already wait are failed untried."""
ANSWER_SECONDS = 1.0
"""How long an event loop may take to answer before it counts as blocked."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives a coroutine: also for partials and objects with ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class RaisedInCall(Exception):
    """What a user's function raised, of whatever kind: also ``SystemExit`` and the like."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


class UserCalls:
    """Threads for the user's functions. ``run`` may be awaited concurrently."""

    def __init__(self) -> None:
        self._thread = _SerialThread()
        self._loop: _LoopThread | None = None
        self._overruns: dict[int, int] = {}
        self.abandoned = 0
        """Threads left behind with a call that did not return."""

    async def run(self, function: Callable[..., Any], kwargs: dict[str, Any], timeout: float) -> object:
        """The function's result.

        Raises:
            DeadlineExceeded: it ran for more than ``timeout`` seconds; waiting for its turn does not count.
            RaisedInCall: it raised.
        """
        call = self._run_async if is_async(function) else self._run_plain
        return await call(function, kwargs, timeout)

    def close(self) -> None:
        """End the idle threads; those left behind end with their call or with the process."""
        self._thread.close()
        if self._loop is not None:
            self._loop.stop()
            self._loop = None

    async def _run_plain(self, function: Callable[..., Any], kwargs: dict[str, Any], timeout: float) -> object:
        key = id(function)
        call = self._thread.submit(key, functools.partial(function, **kwargs))
        try:
            await asyncio.wrap_future(call.started)
            if await _done_within(call.result, timeout):
                self._overruns[key] = 0
                return call.result.result()
            overruns = self._overruns[key] = self._overruns.get(key, 0) + 1
            if overruns >= HUNG_AFTER:
                reason = f"not tried, because the last {overruns} calls ran for more than {timeout:g} s"
                self._thread.fail_waiting(key, DeadlineExceeded(reason))
            raise DeadlineExceeded(f"did not return within {timeout:g} s")
        finally:
            if not call.result.done() and not call.result.cancel():
                self.abandoned += self._thread.abandon(call)

    async def _run_async(self, function: Callable[..., Any], kwargs: dict[str, Any], timeout: float) -> object:
        loop = self._loop = self._loop or _LoopThread()
        result = loop.submit(functools.partial(function, **kwargs))
        if await _done_within(result, timeout):
            return result.result()
        if await loop.answers(ANSWER_SECONDS):
            raise DeadlineExceeded(f"did not return within {timeout:g} s")
        self._leave(loop)
        raise DeadlineExceeded(f"did not return within {timeout:g} s, and blocks its event loop")

    def _leave(self, loop: _LoopThread) -> None:
        if self._loop is loop:
            loop.stop()
            self._loop = None
            self.abandoned += 1


async def _done_within(future: Future[object], timeout: float) -> bool:
    """Wait for it; cancel it (where it can be) when time or the caller runs out."""
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait([waiting], timeout=timeout)
        return future.done()
    finally:
        if not waiting.done():
            waiting.cancel()
        elif not waiting.cancelled():
            waiting.exception()  # Otherwise asyncio logs it as never looked at.


@dataclass(eq=False, slots=True)
class _Call:
    key: int
    work: Callable[[], object]
    started: Future[None] = field(default_factory=Future[None])
    result: Future[object] = field(default_factory=Future[object])

    def announce(self) -> None:
        if self.started.set_running_or_notify_cancel():
            self.started.set_result(None)


class _SerialThread:
    """A queue of calls and the daemon thread that owns it; a fresh one takes over when it is abandoned."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._current: _Call | None = None
        self._owner: object | None = None

    def submit(self, key: int, work: Callable[[], object]) -> _Call:
        call = _Call(key, work)
        with self._changed:
            self._waiting.append(call)
            if self._owner is None:
                self._start()
            self._changed.notify_all()
        return call

    def abandon(self, call: _Call) -> bool:
        """Leave the thread that runs this call behind; False if the call has ended meanwhile."""
        with self._changed:
            if self._current is not call:
                return False
            self._current = None
            self._start()
            return True

    def fail_waiting(self, key: int, error: Exception) -> None:
        with self._changed:
            failed = [c for c in self._waiting if c.key == key]
            self._waiting = deque(c for c in self._waiting if c.key != key)
        for call in failed:
            if call.result.set_running_or_notify_cancel():
                call.result.set_exception(error)
                call.announce()

    def close(self) -> None:
        with self._changed:
            self._owner = None
            self._changed.notify_all()

    def _start(self) -> None:
        self._owner = owner = object()
        threading.Thread(target=self._work, args=(owner,), name="reward", daemon=True).start()

    def _work(self, owner: object) -> None:
        while (call := self._next(owner)) is not None:
            if not call.result.set_running_or_notify_cancel():
                continue
            call.announce()
            value, error = None, None
            try:
                value = call.work()
            except BaseException as raised:
                error = RaisedInCall(raised)
            with self._changed:
                if self._current is call:
                    self._current = None
            if error is None:
                call.result.set_result(value)
            else:
                call.result.set_exception(error)

    def _next(self, owner: object) -> _Call | None:
        with self._changed:
            while self._owner is owner and not self._waiting:
                self._changed.wait()
            if self._owner is not owner:
                return None
            self._current = self._waiting.popleft()
            return self._current


class _LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="async-reward", daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[object]:
        async def call() -> object:
            try:
                return await function()
            except BaseException as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # nobody waits for it any more
                    raise
                raise RaisedInCall(error) from None

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    async def answers(self, seconds: float) -> bool:
        """Whether the loop still takes work."""
        pong: Future[None] = Future()
        self._loop.call_soon_threadsafe(pong.set_result, None)
        await asyncio.wait([asyncio.wrap_future(pong)], timeout=seconds)
        return pong.done() and not pong.cancelled()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
