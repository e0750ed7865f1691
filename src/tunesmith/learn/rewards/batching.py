"""Concurrent requests, run together as batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Runs one batch at a time: all items submitted while the previous batch ran, or within
    ``window`` seconds.

    ``run`` returns one result per item. An exception from it reaches every caller of that batch.
    """

    def __init__(
        self, run: Callable[[list[T]], Awaitable[Sequence[R]]], window: float = 0.0
    ) -> None:
        self._run = run
        self._window = window
        self._waiting: list[tuple[Sequence[T], asyncio.Future[list[R]]]] = []
        self._worker: asyncio.Task[None] | None = None
        self.batches = 0
        """Batches run so far."""

    async def submit(self, items: Sequence[T]) -> list[R]:
        """The results of ``items``, in order. Items of a caller cancelled before its batch starts
        are not run."""
        future: asyncio.Future[list[R]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._window)
            batch = [(items, future) for items, future in self._waiting if not future.cancelled()]
            self._waiting = []
            if not batch:
                continue
            self.batches += 1
            try:
                results = iter(await self._run([item for items, _ in batch for item in items]))
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for items, future in batch:
                part = list(islice(results, len(items)))
                if not future.done():
                    future.set_result(part)
