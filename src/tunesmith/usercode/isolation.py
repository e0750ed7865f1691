"""Calls of the user's code in worker processes: deadlines, cancellation and the memory it may have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.config.sizes import parse_size
from tunesmith.errors import DeadlineExceeded
from tunesmith.usercode.calls import ANSWER_SECONDS, done_within
from tunesmith.usercode.killable import Program, Worker, WorkerLost

IMPORT_SECONDS = 600.0


def memory_of(size: str | None) -> int:
    """Bytes that a worker may have: as set, else half of the machine's memory."""
    if size is not None:
        return parse_size(size)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def user_program(
    path: Path, function: str, arguments: tuple[Any, ...], memory: str | None, *, alone: bool = False
) -> Program:
    """A program that loads code of the user's; with ``alone`` a host of it has one worker."""
    return Program(path, function, 0.0, arguments, memory_of(memory), IMPORT_SECONDS, shows=True, alone=alone)


async def answered(worker: Worker, asked: Sequence[Any], timeout: float, *, cancel: bool = False) -> Any:
    """What a worker answers. If it does not in time it is killed; with ``cancel`` only the call's coroutine is ended,
    if the event loop still answers.

    Raises:
        DeadlineExceeded: it did not answer in time.
        WorkerLost: it ended, or with ``cancel`` was killed because some call of it blocked the event loop.
        WorkerError: it raised.
    """
    number, result = worker.ask(*asked)
    given_up = False
    try:
        if await done_within(result, timeout):
            return result.result()
        if cancel:
            worker.cancel(number)
            if not await done_within(result, ANSWER_SECONDS):
                worker.kill()  # one of its calls blocks the event loop, which may be another
                await done_within(result, ANSWER_SECONDS)
            if isinstance(lost := result.done() and result.exception(), WorkerLost):
                raise lost
            raise DeadlineExceeded(f"did not return within {timeout:g} s")
        raise DeadlineExceeded(f"did not return within {timeout:g} s; its process was killed")
    except asyncio.CancelledError:
        if cancel:
            worker.cancel(number)
            given_up = True
        raise
    finally:
        if not result.done() and not given_up:
            worker.kill()
