"""Episodes of several turns: the policy writes, an environment or a tool answers, until one of them is done.

An environment is a class in the user's own file; each episode gets an instance of its own::

    class GuessNumber:
        def reset(self, secret, **columns):
            self.secret = secret

        def step(self, action):
            guess = int(action)
            if guess == self.secret:
                return "right", 1.0, True
            return ("higher" if guess < self.secret else "lower"), 0.0, False

``reset`` gets the columns of the data; what it returns is put behind the prompt (text), replaces it
(messages) or leaves it alone (None). ``step`` gets what the policy wrote and returns a ``Step`` or the tuple
``(observation, reward, done)``. Both may be ``async``. A ``close`` is called at the end, where there is one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, cast

from tunesmith.environments.base import Generate
from tunesmith.environments.conversation import Conversation, Limits, OutOfRoom, Reply
from tunesmith.environments.episode_code import EpisodeCode
from tunesmith.environments.rendering import Renderer, Tools
from tunesmith.environments.tool_calls import BadCall, Parse
from tunesmith.environments.tools import Tool, answer_of, find
from tunesmith.errors import EpisodeError, TunesmithError
from tunesmith.types import Message, Rollout, Task

Observation = str | list[Message] | None


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to a turn.

    ``observation`` becomes a user message (or the messages given); it may be None only when ``done``.
    ``reward`` None says nothing about the turn.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Game(Protocol):
    """One episode of an environment, whatever shape the user's code has."""

    tools: Mapping[str, Tool]

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, text: str) -> Step: ...

    async def finish(self) -> float | None:
        """A last reward."""
        ...

    async def close(self) -> None: ...


Open = Callable[[EpisodeCode], Awaitable[Game]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all environments of a run have in common."""

    renderer: Renderer
    limits: Limits
    prompt_of: Callable[[Task], list[Message]]
    """A task's prompt as the messages that its tokens say."""
    parse: Parse | None
    timeout: float
    """Seconds of one call of the user's code."""
    bad_call: Literal["tell", "end"]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Fulfils ``Environment`` with the user's code."""

    name: str
    open: Open
    setting: Setting
    schemas: Tools = None
    """Of the game's tools; the prompts of its tasks have them."""

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        s = self.setting
        prompt = s.prompt_of(rollout.task)
        tools = self.schemas or told_by(rollout.task)
        conversation = Conversation(rollout, generate, s.renderer, s.limits, prompt, s.parse, tools)
        with EpisodeCode(s.timeout) as code:
            game = await self.open(code)
            try:
                messages = opening(prompt, await game.reset(rollout.task))
                rewards = await self._turns(game, code, conversation, messages, tools)
                rewards.append(await game.finish())
            finally:
                conversation.close()
                await _close(game, rollout)
        given = [reward for reward in rewards if reward is not None]
        rollout.reward = sum(given) if given else None
        rollout.metrics["turns"] = float(conversation.turns)
        rollout.metrics["forks"] = float(len(rollout.records) - 1)

    async def _turns(
        self, game: Game, code: EpisodeCode, conversation: Conversation, messages: list[Message], schemas: Tools
    ) -> list[float | None]:
        """Play to the end; the turns' rewards. An episode that its limits end keeps what it has."""
        metrics = conversation.rollout.metrics
        metrics["unfinished"] = 0.0
        rewards: list[float | None] = []
        while True:
            try:
                reply = await conversation.reply(messages, schemas)
            except OutOfRoom:
                if not conversation.turns:
                    raise
                metrics["unfinished"] = 1.0
                return rewards
            messages = [*messages, reply.message]
            if reply.calls:
                answers, bad = await _answer(reply, game.tools, code)
                metrics["bad_calls"] = metrics.get("bad_calls", 0.0) + bad
                messages += answers
                if bad and self.setting.bad_call == "end":
                    return rewards
                continue
            step = await game.step(reply.text)
            metrics.update(step.metrics)
            rewards.append(step.reward)
            if step.reward is not None:
                conversation.pay(step.reward)
            if step.done:
                return rewards
            messages += _as_messages(step.observation)


def told_by(task: Task) -> Tools:
    """The tools that the data itself names in a task's prompt (its column ``tools``)."""
    value = task.columns.get("tools")
    found: Any = json.loads(value) if isinstance(value, str) and value else value
    return found or None


async def _answer(reply: Reply, tools: Mapping[str, Tool], code: EpisodeCode) -> tuple[list[Message], int]:
    """Run the calls of a turn, in order; the tools' messages, and how many calls were bad ones.

    What a tool raises is told to the policy, which may know better next time.
    """
    answers: list[Message] = []
    ids = iter(reply.message.get("tool_calls", ()))
    bad = 0
    for call in reply.calls:
        made = {"role": "tool"} if isinstance(call, BadCall) else {"role": "tool", "tool_call_id": next(ids)["id"]}
        tool = find(call, tools)
        if isinstance(tool, BadCall):
            bad += 1
            answers.append({**made, "content": f"Error: {tool.reason}"})
            continue
        assert not isinstance(call, BadCall)
        try:
            text = answer_of(await code.run(f"the tool '{tool.name}'", tool.function, **call.arguments))
        except EpisodeError as error:
            cause = error.__cause__
            text = f"Error: {type(cause).__name__}: {cause}"
        answers.append({**made, "name": tool.name, "content": text})
    return answers, bad


async def _close(game: Game, rollout: Rollout) -> None:
    """An environment that fails to clean up has been played all the same."""
    try:
        await game.close()
    except (TunesmithError, TimeoutError) as error:
        rollout.notes["close"] = str(error)


def opening(prompt: list[Message], observation: Observation) -> list[Message]:
    """The conversation that an episode begins with. Text is put behind the prompt's last message, if a user's."""
    if observation is None:
        return prompt
    if isinstance(observation, list):
        return observation
    if prompt and prompt[-1]["role"] == "user":
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
    return [*prompt, {"role": "user", "content": observation}]


def _as_messages(observation: Observation) -> list[Message]:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation or ())


def as_observation(value: object, what: str) -> Observation:
    """Check what user code calls an observation.

    Raises:
        EpisodeError: it is neither text nor messages nor None.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        messages = cast("Sequence[Any]", value)
        if messages and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
            return [dict(cast("Mapping[str, Any]", m)) for m in messages]
    raise EpisodeError(f"{what} gave {shown(value)} as observation; expected text, a list of messages or None")


def as_reward(value: object, what: str) -> float | None:
    """Check what user code calls a reward.

    Raises:
        EpisodeError: it is neither a finite number nor None.
    """
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(cast("SupportsFloat", value))
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise EpisodeError(f"{what} gave {shown(value)} as reward; expected a finite number or None")
    return number


def as_step(value: object, what: str) -> Step:
    """A ``Step``, or the tuple ``(observation, reward, done)``, checked.

    Raises:
        EpisodeError: it is something else.
    """
    if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 3:
        value = Step(*cast("tuple[Any, Any, Any]", value))
    if not isinstance(value, Step):
        raise EpisodeError(f"{what} returned {shown(value)}; expected (observation, reward, done) or a Step")
    observation = as_observation(value.observation, what)
    if isinstance(cast("object", value.done), str | None):
        raise EpisodeError(f"{what} gave {shown(value.done)} as done; expected true or false")
    if not value.done and not observation:
        raise EpisodeError(f"{what} is not done and gave no observation: there is nothing to answer")
    return Step(observation, as_reward(value.reward, what), bool(value.done), value.metrics)


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
