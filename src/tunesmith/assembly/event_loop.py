"""Running coroutines where an event loop may be running already, as in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


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


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, even if an event loop is already running."""
    with outside_event_loop():
        return asyncio.run(work)
