"""Calls of the user's code in worker processes: deadlines, cancellation and memory limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.config.sizes import parse_size
from tunesmith.errors import DeadlineExceeded
from tunesmith.usercode.calls import ANSWER_SECONDS, PerLoop, done_within
from tunesmith.usercode.killable import UserProgram, Worker, WorkerLost, Workers

IMPORT_SECONDS = 600.0


def user_program(
    path: Path, function: str, arguments: tuple[Any, ...], memory: str | None, *, alone: bool = False
) -> UserProgram:
    """A program that loads the user's code; with ``alone`` it has one worker at a time.

    ``memory`` limits each worker; None: half of the machine's memory.
    """
    limit = parse_size(memory) if memory else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return UserProgram(path, function, arguments, limit, IMPORT_SECONDS, shows=True, alone=alone)


async def answered(
    worker: Worker, asked: Sequence[Any], timeout: float, *, coroutine: bool = False, shared: bool = False
) -> Any:
    """A worker's answer. A worker that does not answer in time is killed.

    Args:
        coroutine: the function is a coroutine function.
        shared: other calls are in progress in the worker, so only this call's coroutine is cancelled, as long as the
            worker's event loop still answers.

    Raises:
        DeadlineExceeded: it did not answer in time.
        WorkerLost: it ended, or was killed because one of its calls blocked the event loop.
        WorkerError: it raised.
    """
    result = worker.ask(*asked, coroutine=coroutine)
    try:
        if await done_within(result, timeout):
            return result.result()
        if not shared:
            raise DeadlineExceeded(f"did not return within {timeout:g} s; its process was killed")
        worker.cancel(result)
        if not await done_within(result, ANSWER_SECONDS):
            worker.kill()  # one of its calls, perhaps not this one, blocks the event loop
            await done_within(result, ANSWER_SECONDS)
        if isinstance(lost := result.done() and result.exception(), WorkerLost):
            raise lost
        raise DeadlineExceeded(f"did not return within {timeout:g} s")
    except asyncio.CancelledError:
        if shared:
            worker.cancel(result)
        raise
    finally:
        if not (shared or result.done()):
            worker.kill()


class KillablePool:
    """Up to ``workers`` processes of one program, each with one call at a time; ends with ``close``.

    Args:
        deadline: seconds for one call, not counting the worker's start.
    """

    def __init__(self, program: UserProgram, deadline: float, workers: int = 1) -> None:
        self._workers, self._deadline = Workers(program), deadline
        self._places = PerLoop(lambda: asyncio.Semaphore(workers))
        self.close = self._workers.close

    async def run(self, *arguments: Any) -> Any:
        """The function's result. A call whose process was killed from outside is repeated once.

        Raises:
            DeadlineExceeded: its process was killed at the deadline.
            WorkerError: it raised, or its process ended.
        """
        async with self._places.here:
            try:
                return await self._run_once(arguments)
            except WorkerLost as lost:
                if not lost.from_outside:
                    raise
                return await self._run_once(arguments)

    async def _run_once(self, arguments: tuple[Any, ...]) -> Any:
        worker = await asyncio.to_thread(self._workers.take)
        try:
            return await answered(worker, arguments, self._deadline)
        finally:
            self._workers.give_back(worker)
