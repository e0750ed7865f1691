"""Episodes of the user's environments in worker processes, with deadlines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.config.sandboxes import ProcessSandbox
from tunesmith.config.schema import EnvironmentSection
from tunesmith.errors import DeadlineExceeded, EpisodeError
from tunesmith.learn.environments.games import Game, Loaded
from tunesmith.learn.environments.steps import Observation, StepResult
from tunesmith.learn.sandboxes.process import environment_of, jail_of
from tunesmith.learn.usercode.calls import Function
from tunesmith.learn.usercode.killable import Pool, UserProgram, Worker, WorkerError
from tunesmith.types import Message, Task

_PROGRAM = Path(__file__).with_name("environment_program.py")


@dataclass(slots=True)
class FarGame(Game):
    """An episode in a worker process."""

    worker: Worker | None = None
    timeout: float = 0.0

    async def ask(self, method: str, *args: Any, what: str = "") -> Any:
        """Call a method of the worker's ``EnvironmentProgram``; ``what`` names it in errors.

        Raises:
            EpisodeError: the user's code raised, or its process ended.
            DeadlineExceeded: it did not return in time.
        """
        assert self.worker is not None
        what = what or f"{self.name}.{method}"
        try:
            answer = await self.worker.ask((method, *args), self.timeout)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{what} {error}") from None
        except WorkerError as error:
            raise EpisodeError(f"{what}: {error}") from None
        if "error" in answer:
            raise EpisodeError(answer["error"])
        return answer["value"]

    async def call_tool(self, name: str, arguments: Mapping[str, object]) -> str:
        return await self.ask("call_tool", name, arguments, what=f"the tool '{name}'")

    async def reset(self, task: Task, prompt: list[Message]) -> Observation:
        return await self.ask("reset", replace(task, prompt_ids=()), prompt)

    async def step(self, text: str) -> StepResult:
        return StepResult(*await self.ask("step", text))

    async def finish(self) -> float | None:
        return await self.ask("finish")

    async def close(self) -> None:
        await self.ask("close")


class IsolatedGames:
    """Episodes of users' environments, each in a worker process that is reused after an episode
    without errors."""

    def __init__(self, section: EnvironmentSection, base_dir: Path) -> None:
        arguments = (section.model_dump(), str(base_dir))
        self._timeout = section.timeout
        sandbox = section.sandbox
        confined = isinstance(sandbox, ProcessSandbox)
        program = UserProgram.of_user(
            _PROGRAM,
            "EnvironmentProgram",
            arguments,
            section.memory or (sandbox.memory if sandbox else None),
            jail=jail_of(sandbox, [base_dir]) if confined else None,
            environment=environment_of(sandbox) if confined else None,
        )
        self._pool = Pool(program)
        self.close = self._pool.close

    @asynccontextmanager
    async def open_game(self, loaded: Loaded) -> AsyncGenerator[Game]:
        try:
            worker = await self._pool.take()
        except WorkerError as error:
            raise EpisodeError(f"{loaded.reference}: {error}") from None
        methods = {tool.name: tool for tool in loaded.methods.values()}
        name = loaded.name if loaded.code is None else loaded.code.__name__
        game = FarGame(_NoCode(), {**loaded.tools, **methods}, None, name, worker, self._timeout)
        try:
            await game.ask("open", loaded.name, what=f"{name}()")
            yield game
        except BaseException:
            worker.close()  # its state is unknown
            raise
        self._pool.give_back(worker)


class _NoCode:
    async def run(self, what: str, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{what} runs in its worker: {function}, {args}, {kwargs}")
