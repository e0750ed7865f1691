"""The user's reward functions in worker processes, with deadlines; a call whose worker was killed
is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tunesmith.config.sandboxes import ProcessSandbox
from tunesmith.errors import ConfigError
from tunesmith.learn.rewards.function import LOGS, ItemFailure, RewardFunction, Score
from tunesmith.learn.sandboxes.process import environment_of, jail_of
from tunesmith.learn.usercode.calls import (
    FarFunction,
    Function,
    Keywords,
    PerLoop,
    RaisedInCall,
    Turns,
)
from tunesmith.learn.usercode.killable import Pool, UserProgram, Worker, WorkerError, WorkerLost
from tunesmith.types import Status

_PROGRAM = Path(__file__).with_name("user_program.py")
ALONE = 4
"""Limit of concurrent calls with their own process."""


class IsolatedRewards:
    """Reward functions in one worker process, which is replaced when it is killed or ends.

    It runs calls as ``UserCalls`` does in this process.
    """

    abandoned = 0
    """No call runs on after its deadline: its process is killed."""

    def __init__(
        self,
        references: Sequence[tuple[str, str]],
        base_dir: Path,
        memory: str | None,
        sandbox: ProcessSandbox | None = None,
    ) -> None:
        program = UserProgram.of_user(
            _PROGRAM,
            "RewardProgram",
            (list(references), str(base_dir)),
            memory or (sandbox.memory if sandbox else None),
            alone=True,
            jail=jail_of(sandbox, [base_dir]) if sandbox else None,
            environment=environment_of(sandbox) if sandbox else None,
        )
        self._pool = Pool(program, workers=ALONE, reuse=False)
        self._worker: Worker | None = None
        self._turns = Turns()
        self._starting = PerLoop(asyncio.Lock)
        try:
            description = self._pool.server().description
        except WorkerError as error:
            names = ", ".join(entry for _, entry in references)
            why = f"reward.functions: importing {names} failed: {error}"
            raise ConfigError(why, keys=("reward.functions",)) from None
        if "refused" in description:
            self.close()
            raise ConfigError(description["refused"])
        self.functions: list[RewardFunction] = []
        for (name, entry), one in zip(references, description["functions"], strict=True):
            number = len(self.functions)
            function = FarFunction(number, one["parameters"], one["asynchronous"])
            columns = frozenset(one["columns"])
            one_of = frozenset(one["one_of"])
            self.functions.append(RewardFunction(name, entry, function, columns, one_of=one_of))

    async def run(self, function: Function, arguments: Keywords, timeout: float) -> list[Score]:
        """The scores of a call. The values that it logs are given to the functions for this in its
        arguments.

        Raises:
            DeadlineExceeded: it ran for more than ``timeout`` seconds; its process is killed,
                unless it is a coroutine that can be cancelled.
            RaisedInCall: it raised, or its process ended.
            ValueError: its result is unusable.
        """
        assert isinstance(function, FarFunction)
        sent = {name: value for name, value in arguments.items() if name not in LOGS}
        question = (function.number, sent)
        coroutine = function.asynchronous
        try:
            async with nullcontext() if coroutine else self._turns.turn(function.number, timeout):
                answer = await self._ask(question, timeout, coroutine=coroutine)
        except WorkerError as error:
            raise RaisedInCall(None, str(error)) from None
        if "raised" in answer:
            raise RaisedInCall(None, answer["raised"])
        if "unusable" in answer:
            raise ValueError(answer["unusable"])
        for column, values in answer["extras"].items():
            arguments["log_extra"](column, values)
        for name, value in answer["metrics"]:
            arguments["log_metric"](name, value)
        scores = answer["scores"]
        for index, reason in answer["failures"]:
            scores[index] = ItemFailure(Status.REWARD_FAILED, reason)
        return scores

    def close(self) -> None:
        self._pool.close()
        self._worker = None

    async def _ask(self, question: tuple[object, ...], timeout: float, *, coroutine: bool) -> Any:
        """The worker's answer.

        A call is repeated alone, in its own process, if its process was killed from outside or
        ended while other calls ran in it: this shows which call ends its process.
        """
        try:
            async with self._starting.here:
                worker = self._worker
                if worker is None or worker.lost:
                    worker = self._worker = await self._pool.take()
            return await worker.ask(question, timeout, coroutine=coroutine, shared=coroutine)
        except WorkerLost as lost:
            if not (lost.from_outside or coroutine):
                raise
        return await self._pool.run(*question, timeout=timeout, coroutine=coroutine)
