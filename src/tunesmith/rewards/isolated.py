"""The user's reward functions in worker processes, with deadlines; a call whose worker was killed is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.rewards.function import ItemFailure, Notes, RewardFunction
from tunesmith.types import Status
from tunesmith.usercode.calls import FarFunction, RaisedInCall, Turns
from tunesmith.usercode.isolation import answered, user_program
from tunesmith.usercode.killable import Worker, WorkerError, WorkerLost, Workers

_PROGRAM = Path(__file__).with_name("user_program.py")
ATTEMPTS = 3
"""Attempts of a call whose worker was killed from outside."""
ALONE = 4
"""Limit of concurrent calls that each have their own process."""


class IsolatedRewards:
    """Reward functions in one worker process, which is replaced when it is killed or ends."""

    def __init__(self, references: Sequence[tuple[str, str]], base_dir: Path, memory: str | None) -> None:
        program = user_program(_PROGRAM, "RewardProgram", (list(references), str(base_dir)), memory, alone=True)
        self._workers = Workers(program)
        self._worker: Worker | None = None
        self._turns = Turns()
        self._alone: tuple[object, asyncio.Semaphore] = (None, asyncio.Semaphore(ALONE))
        try:
            found = self._workers.server().description
        except WorkerError as error:
            names = ", ".join(entry for _, entry in references)
            raise ConfigError(f"importing the rewards {names} failed: {error}") from None
        if "refused" in found:
            self.close()
            raise ConfigError(found["refused"])
        self.functions = [
            RewardFunction(
                name,
                entry,
                FarFunction(number, one["parameters"], one["asynchronous"]),
                frozenset(one["columns"]),
                one_of=frozenset(one["one_of"]),
            )
            for number, ((name, entry), one) in enumerate(zip(references, found["functions"], strict=True))
        ]

    async def run(self, function: FarFunction, arguments: dict[str, Any], notes: Notes, timeout: float) -> list[Any]:
        """The scores of a call, whose logged values go into ``notes``.

        Raises:
            DeadlineExceeded: it ran for more than ``timeout`` seconds; its process is killed, unless it is a coroutine
                that can be ended.
            RaisedInCall: it raised, or its process ended.
            ValueError: its result is unusable.
        """
        sent = {name: value for name, value in arguments.items() if name not in ("log_extra", "log_metric")}
        asked = (function.number, notes.size, sent)
        if function.asynchronous:
            found = await self._ask(asked, timeout, coroutine=True)
        else:
            async with self._turns.turn(function.number, timeout):
                found = await self._ask(asked, timeout)
        if "raised" in found:
            raise RaisedInCall(None, found["raised"])
        if "unusable" in found:
            raise ValueError(found["unusable"])
        notes.extras.update(found["extras"])
        notes.metrics.extend((name, value) for name, value in found["metrics"])
        scores = found["scores"]
        for place, reason in found["failures"]:
            scores[place] = ItemFailure(Status.REWARD_FAILED, reason)
        return scores

    def close(self) -> None:
        self._workers.close()
        self._worker = None

    async def _ask(self, asked: tuple[Any, ...], timeout: float, *, coroutine: bool = False) -> Any:
        """The answer. What a process lost that ended under it is asked again, alone in a process of its own.

        That tells the call that ends its process from those that were under way beside it.
        """
        try:
            if self._worker is None or not self._worker.alive:
                self._worker = self._workers.take()
            return await answered(self._worker, asked, timeout, coroutine=coroutine, shared=coroutine)
        except WorkerLost as lost:
            if not (lost.from_outside or coroutine):
                raise RaisedInCall(None, str(lost)) from None
        except WorkerError as error:
            raise RaisedInCall(None, str(error)) from None
        running = asyncio.get_running_loop()
        if self._alone[0] is not running:
            self._alone = running, asyncio.Semaphore(ALONE)
        async with self._alone[1]:
            return await self._ask_alone(asked, timeout, coroutine)

    async def _ask_alone(self, asked: tuple[Any, ...], timeout: float, coroutine: bool) -> Any:
        for attempt in range(2, ATTEMPTS + 1):
            worker = self._workers.server().worker()
            try:
                return await answered(worker, asked, timeout, coroutine=coroutine)
            except WorkerLost as lost:
                if not lost.from_outside or attempt == ATTEMPTS:
                    raise RaisedInCall(None, str(lost)) from None
            except WorkerError as error:
                raise RaisedInCall(None, str(error)) from None
            finally:
                worker.kill()
        raise AssertionError("there is an attempt")
