"""The shapes that the user's environments come in, each as a ``Game``.

- ``Native``: ``reset(**columns)`` and ``step(action)``.
- ``ToolsOnly``: no environment; the episode ends with the first turn that calls no tool.
- ``TRL``: what TRL's ``environment_factory`` takes. Public methods are tools, ``reset(**columns)`` begins,
  and the reward is ``get_reward()`` or the attribute ``reward``.
- ``OpenRLHF``: ``reset(states)`` and ``step(states)`` with dictionaries. Its feedback holds the chat template's
  markers itself and is put behind the policy's text as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tunesmith.environments.episode_code import EpisodeCode, keywords
from tunesmith.environments.multi_turn import Game, Observation, Open, Step, as_observation, as_reward, as_step, shown
from tunesmith.environments.tools import Tool
from tunesmith.errors import EpisodeError
from tunesmith.types import Task

TRL_RESERVED = ("reset", "get_reward")
CLOSE_SECONDS = 5.0


def columns_of(task: Task) -> dict[str, Any]:
    """What user code can ask for by name: the columns of the data, and the prompt in the shape it has there."""
    return {**task.columns, "prompt": task.prompt}


async def _reset_with_columns(code: EpisodeCode, it: Any, name: str, task: Task) -> Observation:
    """``reset`` with what it takes of the task's columns."""
    what = f"{name}.reset"
    return as_observation(await code.run(what, it.reset, **keywords(it.reset, columns_of(task))), what)


@dataclass(slots=True)
class ToolsOnly:
    tools: Mapping[str, Tool]

    async def reset(self, task: Task) -> Observation:
        del task

    async def step(self, text: str) -> Step:
        del text
        return Step(done=True)

    async def finish(self) -> float | None:
        return None

    async def close(self) -> None: ...


@dataclass(slots=True)
class Native:
    code: EpisodeCode
    it: Any
    name: str
    tools: Mapping[str, Tool]
    stepped: bool = False

    async def reset(self, task: Task) -> Observation:
        return await _reset_with_columns(self.code, self.it, self.name, task)

    async def step(self, text: str) -> Step:
        self.stepped = True
        what = f"{self.name}.step"
        return as_step(await self.code.run(what, self.it.step, text), what)

    async def finish(self) -> float | None:
        """An episode that never came to a step (it only called tools) has earned nothing."""
        return None if self.stepped else 0.0

    async def close(self) -> None:
        if callable(getattr(self.it, "close", None)):
            await self.code.run(f"{self.name}.close", self.it.close)


@dataclass(slots=True)
class TRL:
    code: EpisodeCode
    it: Any
    name: str
    tools: Mapping[str, Tool]

    async def reset(self, task: Task) -> Observation:
        return await _reset_with_columns(self.code, self.it, self.name, task) if hasattr(self.it, "reset") else None

    async def step(self, text: str) -> Step:
        del text
        return Step(done=True)

    async def finish(self) -> float | None:
        what = f"{self.name}.get_reward"
        if hasattr(self.it, "get_reward"):
            return as_reward(await self.code.run(what, self.it.get_reward), what)
        return as_reward(getattr(self.it, "reward", None), f"{self.name}.reward")

    async def close(self) -> None: ...


@dataclass(slots=True)
class OpenRLHF:
    code: EpisodeCode
    it: Any
    name: str
    prompt_text: Callable[[Task], str]
    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    said: str = ""
    label: Any = None

    async def reset(self, task: Task) -> Observation:
        what = f"{self.name}.reset"
        self.said = self.prompt_text(task)
        self.label = task.columns.get("label", task.columns.get("answer"))
        value = await self.code.run(what, self.it.reset, {"observation": self.said, "label": self.label})
        observation = value.get("observation") if isinstance(value, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(observation, str):
            raise EpisodeError(
                f"{what} returned {shown(cast('object', value))}; expected a dictionary with 'observation'"
            )
        if observation == self.said:
            return None
        self.said = observation
        return [{"role": "user", "content": observation}]

    async def step(self, text: str) -> Step:
        what = f"{self.name}.step"
        states = {"observation_text": self.said, "action_text": text, "label": self.label, "sampling_params": None}
        value = await self.code.run(what, self.it.step, states)
        if not isinstance(value, Mapping) or "done" not in value or "rewards" not in value:
            expected = "a dictionary with 'rewards', 'environment_feedback' and 'done'"
            raise EpisodeError(f"{what} returned {shown(cast('object', value))}; expected {expected}")
        result = cast("Mapping[str, Any]", value)
        if result.get("sampling_params") is not None:
            raise EpisodeError(f"{what} changes 'sampling_params'; how the policy samples is the run's to say")
        feedback = result.get("environment_feedback") or ""
        self.said += text + feedback
        step = as_step((feedback or None, result["rewards"], bool(result["done"])), what)
        logged = {**(result.get("extra_logs") or {}), "scores": result.get("scores")}
        numbers = {name: as_reward(number, f"{what}: {name}") for name, number in logged.items()}
        return replace(step, metrics={name: number for name, number in numbers.items() if number is not None})

    async def finish(self) -> float | None:
        return None

    async def close(self) -> None: ...


def open_tools(tools: Mapping[str, Tool]) -> Open:
    async def opened(code: EpisodeCode) -> Game:
        del code
        return ToolsOnly(tools)

    return opened


def open_native(kind: type[Any], tools: Mapping[str, Tool]) -> Open:
    name = kind.__name__

    async def opened(code: EpisodeCode) -> Game:
        return Native(code, await code.run(f"{name}()", kind), name, tools)

    return opened


def open_trl(kind: type[Any], methods: Mapping[str, Tool], tools: Mapping[str, Tool]) -> Open:
    """``methods`` are the class's; each episode calls those of its own object."""
    name = kind.__name__

    async def opened(code: EpisodeCode) -> Game:
        it = await code.run(f"{name}()", kind)
        own = {tool.name: replace(tool, function=getattr(it, method)) for method, tool in methods.items()}
        return TRL(code, it, name, {**tools, **own})

    return opened


def open_openrlhf(kind: type[Any], prompt_text: Callable[[Task], str]) -> Open:
    name = kind.__name__

    async def create() -> Any:
        it: Any = object.__new__(kind)
        await it.__init__()  # OpenRLHF's first examples have it so
        return it

    async def opened(code: EpisodeCode) -> Game:
        make = create if inspect.iscoroutinefunction(kind.__init__) else kind
        return OpenRLHF(code, await code.run(f"{name}()", make), name, prompt_text)

    return opened
