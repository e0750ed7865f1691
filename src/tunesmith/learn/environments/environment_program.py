"""A user's environment in a worker process: one episode at a time, played call by call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.config.schema import EnvironmentSection
from tunesmith.errors import EpisodeError
from tunesmith.learn.environments.games import Game, make_game
from tunesmith.learn.environments.loading import load_environments
from tunesmith.learn.usercode.calls import Function, RaisedInCall, is_async
from tunesmith.records.plain import plain


class InlineCode:
    """Runs the user's code directly; the process is killed if it takes too long."""

    async def run(self, what: str, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            return await result if is_async(function) else result
        except BaseException as error:
            raise EpisodeError(f"{what} raised\n{RaisedInCall(error).trace}") from error


class EnvironmentProgram:
    """Called with a method of the game and its arguments; returns ``{"value": ...}`` or ``{"error":
    ...}``."""

    def __init__(self, section: Mapping[str, Any], base_dir: str) -> None:
        loaded = load_environments(EnvironmentSection(**section), Path(base_dir)).loaded
        self._loaded = {one.name: one for one in loaded}
        self._game: Game
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, method: str, *args: Any) -> dict[str, Any]:
        # Made in the worker: a forked process needs its own loop.
        self._loop = self._loop or asyncio.new_event_loop()
        try:
            return {"value": plain(self._loop.run_until_complete(self._run(method, *args)))}
        except EpisodeError as error:
            return {"error": str(error)}

    async def _run(self, method: str, *args: Any) -> Any:
        match method:
            case "open":
                self._game = await make_game(self._loaded[args[0]], InlineCode())
            case "step":
                step = await self._game.step(*args)
                return [step.observation, step.reward, step.done, dict(step.metrics)]
            case "close":
                await self._game.close()
                del self._game  # an idle worker keeps no reference to the user's objects
            case _:
                return await getattr(self._game, method)(*args)
        return None
