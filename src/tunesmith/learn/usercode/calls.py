"""Calls of the user's functions on threads of this process, each with a deadline.

Plain functions run one at a time and in order on a single thread, as in a script: code that
redirects ``stdout``, changes directory or keeps state stays correct. Coroutine functions run
concurrently on a separate event loop, so that one that blocks does not stop the engine's loop.

A thread cannot be killed. A thread that exceeds its deadline is abandoned (as a daemon, it does not
keep the process alive), and a new one takes over the waiting calls. A function that never releases
the interpreter lock, such as a regular expression that backtracks, stops every thread, and no
deadline can end it. This code needs its own process (``isolation = "process"``).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from tunesmith.config.objects import describe_exception
from tunesmith.errors import ConfigError, DeadlineExceeded, EpisodeError, nearest
from tunesmith.learn.usercode.host import OneThread

T = TypeVar("T")

Function = Callable[..., Any]
"""A function of the user's."""
Keywords = dict[str, Any]

PROGRAMS = ("user_program.py", "environment_program.py")
"""Our files that call the user's code in worker processes."""
HUNG_AFTER = 3
"""After this many consecutive timeouts of a function, its waiting calls fail without being
tried."""
ANSWER_SECONDS = 1.0
"""An event loop that takes longer to answer counts as blocked."""


class NotTried(DeadlineExceeded):
    """A call that was skipped, because those before it timed out."""


def is_async(function: Function) -> bool:
    """Whether calling the function returns a coroutine; also for partials and objects with
    ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


async def all_or_error(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error cancels the rest and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(one) for one in work]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class FarFunction:
    """The description of a function in another process."""

    number: int
    parameters: list[str] | None
    """Its keyword parameters; None: it takes any keyword."""
    asynchronous: bool

    def __call__(self, **_: object) -> Any:
        raise AssertionError("this function is called in its worker process")


def parameters_of(function: Function) -> list[str] | None:
    """Keyword parameters of the function; None: it takes any keyword."""
    if isinstance(function, FarFunction):
        return function.parameters
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def keywords_for(function: Function, available: Mapping[str, object]) -> Keywords:
    """The entries of ``available`` that the function accepts as keywords."""
    names = parameters_of(function)
    return {name: value for name, value in available.items() if names is None or name in names}


def check_keywords(function: Function, reference: str, available: set[str], skip: int = 0) -> None:
    """Reject (ConfigError) a function with a required parameter, after the first ``skip``, not in
    ``available``."""
    for p in required_parameters(function)[skip:]:
        if p.name not in available or p.kind is p.POSITIONAL_ONLY:
            why = f"'{reference}' needs '{p.name}', which is not a column of the data"
            raise ConfigError(f"{why}.{nearest(p.name, available)}")


def required_parameters(function: Function) -> list[inspect.Parameter]:
    """The parameters that a call has to give. TypeError or ValueError if it has no signature."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [p for p in named if p.default is p.empty]


def own_copy(value: object) -> Any:
    """A copy for user code to change; a value nested too deeply to be copied is passed as is."""
    try:
        return deepcopy(value)
    except RecursionError:
        return value


_open_calls = 0
_dtype_before: Any = None


@contextmanager
def kept_default_dtype() -> Generator[None]:
    """Restore PyTorch's default dtype after the user's code, so that training is not affected.

    Calls may overlap: the dtype before the first of them is restored. Used from one event loop.
    """
    global _open_calls, _dtype_before
    torch: Any = sys.modules.get("torch")
    if not _open_calls:
        _dtype_before = torch and torch.get_default_dtype()
    _open_calls += 1
    try:
        yield
    finally:
        _open_calls -= 1
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_default_dtype(_dtype_before or torch.float32)


class RaisedInCall(Exception):
    """An exception of a user's function, of any kind including ``SystemExit``.

    From another process only ``trace`` is known, or the reason why the process ended.
    """

    def __init__(self, error: BaseException | None, trace: str = "") -> None:
        super().__init__(repr(error) if error else trace)
        self.error = error
        self._trace = trace

    @property
    def trace(self) -> str:
        """The traceback, starting in the user's code."""

        def is_ours(file: str) -> bool:
            return file == __file__ or "/asyncio/" in file or Path(file).name in PROGRAMS

        return self._trace if self.error is None else describe_exception(self.error, skip=is_ours)


class PerLoop(Generic[T]):
    """A lock or semaphore per event loop, because it belongs to the loop that waits for it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[object, T] = None, make()

    @property
    def here(self) -> T:
        loop = asyncio.get_running_loop()
        if self._made[0] is not loop:
            self._made = loop, self._make()
        return self._made[1]


class Turns:
    """Calls of plain functions, one at a time and in order, on one event loop at a time."""

    def __init__(self) -> None:
        self._turn = PerLoop(asyncio.Lock)
        self._overruns: dict[int, int] = {}

    @asynccontextmanager
    async def turn(self, key: int, timeout: float) -> AsyncGenerator[None]:
        """Wait for a turn. ``key`` identifies the function.

        Raises:
            NotTried: the function timed out ``HUNG_AFTER`` times in a row while this call
                waited.
        """
        before = self._overruns.get(key, 0)
        async with self._turn.here:
            overruns = self._overruns.get(key, 0)
            if overruns >= HUNG_AFTER and overruns > before:
                late = f"the last {overruns} calls ran for more than {timeout:g} s"
                raise NotTried(f"not tried, because {late}")
            try:
                yield
            except DeadlineExceeded:
                self._overruns[key] = overruns + 1
                raise
            self._overruns[key] = 0


class UserCalls:
    """Threads for the user's functions. ``run`` may be awaited concurrently, on one event loop at a
    time."""

    def __init__(self) -> None:
        self._thread: OneThread | None = None
        self._loop: _LoopThread | None = None
        self._turns = Turns()
        self.abandoned = 0
        """Number of abandoned threads, whose call did not return."""

    async def run(self, function: Function, kwargs: Keywords, timeout: float) -> object:
        """The function's result.

        Raises:
            DeadlineExceeded: it ran for more than ``timeout`` seconds, not counting the wait for
                its turn.
            RaisedInCall: it raised.
        """
        run = self._run_async if is_async(function) else self._run_plain
        return await run(function, kwargs, timeout)

    def close(self) -> None:
        """End the idle threads; abandoned ones end with their call or with the process."""
        for thread in filter(None, (self._thread, self._loop)):
            thread.stop()
        self._thread = self._loop = None

    async def _run_plain(self, function: Function, kwargs: Keywords, timeout: float) -> object:
        async with self._turns.turn(id(function), timeout):
            if self._thread is None:
                self._thread = OneThread()
                threading.Thread(target=self._thread.run, name="reward", daemon=True).start()
            thread = self._thread
            result = thread.submit(_call, function, kwargs)
            try:
                if not await done_within(result, timeout):
                    raise DeadlineExceeded(f"did not return within {timeout:g} s")
                return result.result()
            finally:
                if not result.done():
                    thread.stop()
                    self._thread = None
                    self.abandoned += 1

    async def _run_async(self, function: Function, kwargs: Keywords, timeout: float) -> object:
        loop = self._loop = self._loop or _LoopThread()
        result = loop.call(function, kwargs)
        if await done_within(result, timeout):
            if result.cancelled():
                raise DeadlineExceeded("was ended, because another call blocked its event loop")
            return result.result()
        blocks = not await loop.answers(ANSWER_SECONDS)
        if blocks and self._loop is loop:
            loop.stop()
            self._loop = None
            self.abandoned += 1
        also = ", and blocks its event loop" if blocks else ""
        raise DeadlineExceeded(f"did not return within {timeout:g} s{also}")


class EpisodeCode:
    """The user's code of one episode, on separate threads, with a ``timeout`` in seconds for each
    call.

    An episode that blocks or hangs does not affect others, and its calls share a thread, so that a
    later call can use resources that an earlier one opened.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._calls = UserCalls()

    async def run(self, what: str, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        """The function's result; ``what`` names it in errors.

        Raises:
            EpisodeError: it raised; includes the traceback.
            DeadlineExceeded: it did not return in time.
        """
        try:
            return await self._calls.run(functools.partial(function, *args), kwargs, self._timeout)
        except RaisedInCall as raised:
            raise EpisodeError(f"{what} raised\n{raised.trace}") from raised.error
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{what} {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._calls.close()


async def done_within(future: Future[object], timeout: float) -> bool:
    """Wait for a future; cancel it if possible after the timeout or when the caller is
    cancelled."""
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait([waiting], timeout=timeout)
        return future.done()
    finally:
        if not waiting.done():
            waiting.cancel()
        elif not waiting.cancelled():
            waiting.exception()  # otherwise asyncio logs it as never retrieved


def _call(function: Callable[..., object], kwargs: Keywords) -> object:
    try:
        return function(**kwargs)
    except BaseException as error:
        raise RaisedInCall(error) from None


class _LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="async-reward", daemon=True).start()

    def call(self, function: Function, kwargs: Keywords) -> Future[object]:
        async def call() -> object:
            try:
                return await function(**kwargs)
            except BaseException as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise RaisedInCall(error) from None

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    async def answers(self, seconds: float) -> bool:
        """Whether the loop still responds."""
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
