"""The user's code in worker processes, as the run asks for it: with deadlines, and asked again where that may help."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config.schema import EnvironmentSection
from tunesmith.config.sizes import parse_size
from tunesmith.environments.games import Game, Loaded
from tunesmith.environments.killable import Program, Worker, WorkerError, WorkerLost, Workers
from tunesmith.environments.multi_turn import Observation, Step
from tunesmith.environments.reward_types import ItemFailure, Notes, RewardFunction
from tunesmith.environments.tools import Tool
from tunesmith.environments.user_calls import ANSWER_SECONDS, FarFunction, RaisedInCall, Turns, done_within
from tunesmith.errors import ConfigError, DeadlineExceeded, EpisodeError
from tunesmith.types import Message, Status, Task

ATTEMPTS = 3
"""How often a call is made whose worker was killed from outside."""
ALONE = 4
"""Calls that are made at once in processes of their own."""
IMPORT_SECONDS = 600.0


def memory_of(size: str | None) -> int:
    """Bytes that a worker may have: as set, else half of the machine's memory."""
    if size is not None:
        return parse_size(size)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def user_program(file: str, function: str, arguments: tuple[Any, ...], memory: str | None) -> Program:
    """One of the programs beside this file, which loads code of the user's."""
    path = Path(__file__).with_name(file)
    alone = function == "RewardProgram"
    return Program(path, function, 0.0, arguments, memory_of(memory), IMPORT_SECONDS, shows=True, alone=alone)


class IsolatedRewards:
    """Reward functions in one worker process at a time, which is replaced when it is killed or ends."""

    def __init__(self, references: Sequence[tuple[str, str]], base_dir: Path, memory: str | None) -> None:
        program = user_program("reward_program.py", "RewardProgram", (list(references), str(base_dir)), memory)
        self._workers = Workers(program)
        self._worker: Worker | None = None
        self._turns = Turns()
        self._alone: tuple[object, asyncio.Semaphore] = (None, asyncio.Semaphore(ALONE))
        try:
            found = self._workers.host().description
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
        """Scores of a call; what it logged goes into ``notes``.

        Raises:
            DeadlineExceeded: it ran for more than ``timeout`` seconds; its process is killed, unless it is a coroutine
                that can be ended.
            RaisedInCall: it raised, or its process ended.
            ValueError: what it returned is of no use.
        """
        sent = {name: value for name, value in arguments.items() if name not in ("log_extra", "log_metric")}
        asked = (function.number, notes.size, sent)
        if function.asynchronous:
            found = await self._ask(asked, timeout, cancel=True)
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

    async def _ask(self, asked: tuple[Any, ...], timeout: float, *, cancel: bool = False) -> Any:
        """The answer. What a process lost that ended under it is asked again, alone in a process of its own.

        That tells the call that ends its process from those that were under way beside it.
        """
        try:
            if self._worker is None or not self._worker.alive:
                self._worker = self._workers.take()
            return await answered(self._worker, asked, timeout, cancel=cancel)
        except WorkerLost as lost:
            if not (lost.from_outside or cancel):
                raise RaisedInCall(None, str(lost)) from None
        except WorkerError as error:
            raise RaisedInCall(None, str(error)) from None
        running = asyncio.get_running_loop()
        if self._alone[0] is not running:
            self._alone = running, asyncio.Semaphore(ALONE)
        async with self._alone[1]:
            return await self._ask_alone(asked, timeout)

    async def _ask_alone(self, asked: tuple[Any, ...], timeout: float) -> Any:
        for attempt in range(2, ATTEMPTS + 1):
            worker = self._workers.host().worker()
            try:
                return await answered(worker, asked, timeout)
            except WorkerLost as lost:
                if not lost.from_outside or attempt == ATTEMPTS:
                    raise RaisedInCall(None, str(lost)) from None
            except WorkerError as error:
                raise RaisedInCall(None, str(error)) from None
            finally:
                worker.kill()
        raise AssertionError("there is an attempt")


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


@dataclass(slots=True)
class FarGame(Game):
    """An episode in a worker process."""

    worker: Worker | None = None
    timeout: float = 0.0

    async def ask(self, do: str, *given: Any, what: str = "") -> Any:
        """The answer. EpisodeError where the code raised or its process ended, DeadlineExceeded where it overran."""
        assert self.worker is not None
        try:
            found = await answered(self.worker, (do, *given), self.timeout)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{what or f'{self.name}.{do}'} {error}") from None
        except WorkerError as error:
            raise EpisodeError(f"{what or f'{self.name}.{do}'}: {error}") from None
        if "error" in found:
            raise EpisodeError(found["error"])
        return found["value"]

    async def call_tool(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        return await self.ask("call", tool.name, dict(arguments), what=f"the tool '{tool.name}'")

    async def reset(self, task: Task, prompt: list[Message]) -> Observation:
        return await self.ask("reset", (task.id, task.prompt, (), dict(task.columns)), prompt)

    async def step(self, text: str) -> Step:
        return Step(*await self.ask("step", text))

    async def finish(self) -> float | None:
        return await self.ask("finish")

    async def close(self) -> None:
        await self.ask("close")


class IsolatedGames:
    """Episodes of the user's environments, each in a worker process; one that ended well takes the next episode."""

    def __init__(self, section: EnvironmentSection, base_dir: Path) -> None:
        given = (section.model_dump(), str(base_dir))
        self._workers = Workers(user_program("environment_program.py", "EnvironmentProgram", given, section.memory))

    @asynccontextmanager
    async def open_game(self, loaded: Loaded, timeout: float) -> AsyncGenerator[Game]:
        try:
            worker = self._workers.take()
        except WorkerError as error:
            raise EpisodeError(f"{loaded.reference}: {error}") from None
        methods = {tool.name: tool for tool in loaded.methods.values()}
        name = loaded.name if loaded.code is None else loaded.code.__name__
        game = FarGame(_NoCode(), {**loaded.tools, **methods}, None, name, worker, timeout)
        try:
            await game.ask("open", loaded.name, what=f"{name}()")
            yield game
        except BaseException:
            worker.kill()  # who knows what was left undone
            raise
        self._workers.give_back(worker)

    def close(self) -> None:
        self._workers.close()


class _NoCode:
    async def run(self, what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{what} runs in its worker: {function}, {args}, {kwargs}")
