"""The forms of users' environments, each as a ``Game``.

- ``Game`` itself: no environment, only tools; the episode ends with the first turn without a call.
- ``Native``: ``reset(**columns)`` and ``step(action)``.
- ``TRL``: the classes of TRL's ``environment_factory``. Public methods are tools,
  ``reset(**columns)`` begins an episode, and the reward is ``get_reward()`` or the attribute
  ``reward``.
- ``OpenRLHF``: ``reset(states)`` and ``step(states)`` with dictionaries. Its feedback includes the
  chat template's markers and is appended to the policy's text unchanged.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from tunesmith.errors import EpisodeError, shortened
from tunesmith.learn.environments.steps import (
    Observation,
    StepResult,
    as_observation,
    as_reward,
    as_step,
)
from tunesmith.learn.environments.tools import Tool
from tunesmith.learn.usercode.calls import EpisodeCode, Function, keywords_for, own_copy
from tunesmith.types import Message, Task

TRL_RESERVED = ("reset", "get_reward")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A user's environment, imported."""

    name: str
    reference: str
    kind: Literal["agent", "command", "native", "trl", "openrlhf", "tools"]
    code: Any
    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    """The run's tools that the policy may call in it."""
    methods: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    """TRL: a tool for each public method."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Descriptions of all tools that the policy may call."""
        return [tool.schema for tool in (*self.tools.values(), *self.methods.values())]


def columns_of(task: Task) -> dict[str, Any]:
    """Arguments of user code by name: the columns of the data, and the prompt in its original form.

    They are copies, because the task's other rollouts and later epochs share the objects.
    """
    columns = {**task.columns, "prompt": task.prompt}
    return {name: own_copy(value) for name, value in columns.items()}


class Code(Protocol):
    """Runs the user's code; its exceptions become an EpisodeError."""

    async def run(self, what: str, function: Function, /, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(slots=True)
class Game:
    """One episode, played with an object ``it`` of the user's class."""

    code: Code
    tools: Mapping[str, Tool]
    it: Any = None
    name: str = ""

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.it, method)
        return await self.code.run(f"{self.name}.{method}", function, *args, **kwargs)

    async def call_tool(self, name: str, arguments: Mapping[str, object]) -> str:
        """The tool's answer for the policy: text unchanged, all else as JSON, or its exception as
        text."""
        function = self.tools[name].function
        try:
            result = await self.code.run(f"the tool '{name}'", function, **arguments)
            if isinstance(result, str):
                return result
            return json.dumps(result, ensure_ascii=False, default=str)
        # JSON cannot represent every result.
        except (EpisodeError, TypeError, ValueError, RecursionError) as error:
            cause = error.__cause__ or error
            return f"Error: {type(cause).__name__}: {cause}"

    async def reset(self, task: Task, prompt: list[Message]) -> Observation:
        """``prompt`` is the task's prompt as messages."""
        del prompt
        if not hasattr(self.it, "reset"):
            return None
        value = await self.call("reset", **keywords_for(self.it.reset, columns_of(task)))
        return as_observation(value, f"{self.name}.reset")

    async def step(self, text: str) -> StepResult:
        del text
        return StepResult(done=True)

    async def finish(self) -> float | None:
        """The reward at the end of the episode."""
        return None

    async def close(self) -> None: ...


@dataclass(slots=True)
class Native(Game):
    stepped: bool = False

    async def step(self, text: str) -> StepResult:
        self.stepped = True
        return as_step(await self.call("step", text), f"{self.name}.step")

    async def finish(self) -> float | None:
        """An episode without a step (it only called tools) has a reward of 0."""
        return None if self.stepped else 0.0

    async def close(self) -> None:
        if callable(getattr(self.it, "close", None)):
            await self.call("close")


class TRL(Game):
    __slots__ = ()

    async def finish(self) -> float | None:
        if hasattr(self.it, "get_reward"):
            return as_reward(await self.call("get_reward"), f"{self.name}.get_reward")
        return as_reward(getattr(self.it, "reward", None), f"{self.name}.reward")


@dataclass(slots=True)
class OpenRLHF(Game):
    text: str = ""
    """The conversation so far."""
    label: Any = None

    async def reset(self, task: Task, prompt: list[Message]) -> Observation:
        self.text = prompt[0]["content"]
        self.label = task.columns.get("label", task.columns.get("answer"))
        value = await self.call("reset", {"observation": self.text, "label": self.label})
        observation = value.get("observation") if isinstance(value, Mapping) else None
        if not isinstance(observation, str):
            returned = f"{self.name}.reset returned {shortened(repr(value))}"
            raise EpisodeError(f"{returned}; expected a dictionary with 'observation'")
        if observation == self.text:
            return None
        self.text = observation
        return [{"role": "user", "content": observation}]

    async def step(self, text: str) -> StepResult:
        what = f"{self.name}.step"
        states = {
            "observation_text": self.text,
            "action_text": text,
            "label": self.label,
            "sampling_params": None,
        }
        value = await self.call("step", states)
        if not isinstance(value, Mapping) or "done" not in value or "rewards" not in value:
            expected = "a dictionary with 'rewards', 'environment_feedback' and 'done'"
            raise EpisodeError(f"{what} returned {shortened(repr(value))}; expected {expected}")
        if value.get("sampling_params") is not None:
            changes = f"{what} changes 'sampling_params'"
            raise EpisodeError(f"{changes}; sampling is set by the run alone")
        feedback = value.get("environment_feedback") or ""
        self.text += text + feedback
        metrics: dict[str, Any] = {"scores": value.get("scores")}
        for name, logged in (value.get("extra_logs") or {}).items():
            with suppress(EpisodeError):  # only numbers become metrics
                metrics[name] = as_reward(logged, what)
        step = StepResult(feedback or None, value["rewards"], bool(value["done"]), metrics)
        return as_step(step, what)


SHAPES = {"native": Native, "trl": TRL, "openrlhf": OpenRLHF}


@asynccontextmanager
async def open_game(loaded: Loaded, timeout: float) -> AsyncGenerator[Game]:
    """An episode on its own threads."""
    with EpisodeCode(timeout) as code:
        yield await make_game(loaded, code)


async def make_game(loaded: Loaded, code: Code) -> Game:
    """An episode with a new object of the user's class, whose methods are the tools in TRL's
    form."""
    if loaded.kind == "tools":
        return Game(code, loaded.tools)
    kind = loaded.code

    async def awaited() -> Any:
        it: Any = object.__new__(kind)
        await it.__init__()  # as in OpenRLHF's first examples
        return it

    late = loaded.kind == "openrlhf" and inspect.iscoroutinefunction(kind.__init__)
    it = await code.run(f"{kind.__name__}()", awaited if late else kind)
    methods = loaded.methods.items()
    own = {tool.name: replace(tool, function=getattr(it, method)) for method, tool in methods}
    return SHAPES[loaded.kind](code, {**loaded.tools, **own}, it, kind.__name__)
