"""The deadline of a rollout, which counts only the time in which an engine can serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

DEADLINE: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)
"""The deadline of the rollout that calls the engine, in any task. ``Collector`` sets it."""


@contextmanager
def paused() -> Generator[None]:
    """Time spent inside does not count towards the deadline."""
    deadline = DEADLINE.get()
    due = deadline and deadline.when()
    if deadline is None or due is None:
        yield
        return
    now = asyncio.get_running_loop().time
    since = now()
    _move(deadline, None)
    try:
        yield
    finally:
        _move(deadline, due + now() - since)


def _move(deadline: asyncio.Timeout, due: float | None) -> None:
    with suppress(RuntimeError):  # the rollout has ended before its request
        deadline.reschedule(due)
