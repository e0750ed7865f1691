"""Running coroutines where an event loop may be running already, as in a notebook."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Generator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

ENDING = 5.0
"""Seconds for the tasks to end after a signal."""


@contextmanager
def outside_event_loop() -> Generator[None]:
    """A context in which this thread can run a second event loop while one is already running."""
    running = asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage]
    if running is None:
        yield
        return
    swap: Any = getattr(asyncio.tasks, "_swap_current_task", None)  # since Python 3.12
    task = swap(running, None) if swap else None
    asyncio._set_running_loop(None)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        asyncio.set_event_loop(running)
        asyncio._set_running_loop(running)  # pyright: ignore[reportPrivateUsage]
        if swap:
            swap(running, task)


@contextmanager
def event_loop() -> Generator[asyncio.Runner]:
    """A runner whose tasks end quietly if a signal interrupts one of them.

    ``Interrupted`` rises in whichever task the signal meets. That task's group raises it again when
    the group ends, in the task above, and so on: each time it leaves the loop, which then has to
    run on until no task is left.
    """
    with asyncio.Runner() as runner:
        try:
            yield runner
        except KeyboardInterrupt:
            _end_tasks(runner.get_loop())
            raise


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    loop.set_exception_handler(_say_nothing)  # what a task raises while it ends is not news
    ends = time.monotonic() + ENDING
    told = set[asyncio.Task[Any]]()
    while (tasks := asyncio.all_tasks(loop)) and time.monotonic() < ends:
        for task in tasks - told:
            task.cancel()
        told |= tasks
        with suppress(KeyboardInterrupt):
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, even if an event loop is already running."""
    with outside_event_loop(), event_loop() as runner:
        return runner.run(work)


def _say_nothing(*_: object) -> None:
    pass
