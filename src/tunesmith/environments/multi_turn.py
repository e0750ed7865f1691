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
(messages) or leaves it alone (None). ``step`` gets what the policy wrote and returns a ``StepResult`` or the tuple
``(observation, reward, done)``. Both may be ``async``. A ``close`` is called at the end, where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from tunesmith.environments.base import Generate
from tunesmith.environments.conversation import Conversation, OutOfRoom, Reply, Setting
from tunesmith.environments.games import Game
from tunesmith.environments.rendering import Tools
from tunesmith.environments.steps import Observation, as_reward
from tunesmith.environments.tools import BadCall, find
from tunesmith.errors import TunesmithError
from tunesmith.types import Message, Rollout, Task


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Fulfils ``Environment`` with the user's code."""

    open: Callable[[float], AbstractAsyncContextManager[Game]]
    """Given the seconds that one call of it may take."""
    setting: Setting
    schemas: Tools = None
    """Of the game's tools; the prompts of its tasks have them."""
    keeps: bool = False
    """Whether the user's instance stays on the rollout, for its rewards."""

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        prompt = self.setting.prompt_of(rollout.task)
        # What follows plain text is plain text, whatever its data says of tools.
        tools = self.schemas or (told_by(rollout.task) if self.setting.parse else None)
        conversation = Conversation(rollout, generate, self.setting, prompt, tools)
        async with self.open(self.setting.timeout) as game:
            try:
                messages = opening(prompt, await game.reset(rollout.task, prompt))
                rewards = await self._turns(game, conversation, messages, tools)
                rewards.append(await game.finish())
            finally:
                conversation.close()
                await _close(game, rollout)
        given = [reward for reward in rewards if reward is not None]
        rollout.reward = as_reward(sum(given), "the episode", "sum of its rewards") if given else None
        rollout.metrics["turns"] = float(conversation.turns)
        rollout.metrics["forks"] = float(len(rollout.records) - 1)
        rollout.instance = game.it if self.keeps else None

    async def _turns(
        self, game: Game, conversation: Conversation, messages: list[Message], schemas: Tools
    ) -> list[float | None]:
        """Play to the end; the turns' rewards. An episode that its limits end keeps what it has."""
        metrics = conversation.rollout.metrics
        metrics |= {"unfinished": 0.0, **({"bad_calls": 0.0} if schemas else {})}
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
                answers, bad = await _answer(reply, game)
                metrics["bad_calls"] += bad
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


async def _answer(reply: Reply, game: Game) -> tuple[list[Message], int]:
    """Run the calls of a turn, in order; the tools' messages, and how many calls were bad ones.

    What a tool raises is told to the policy, which may know better next time.
    """
    answers: list[Message] = []
    ids = iter(reply.message.get("tool_calls", ()))
    bad = 0
    for call in reply.calls:
        made = {"role": "tool"} if isinstance(call, BadCall) else {"role": "tool", "tool_call_id": next(ids)["id"]}
        tool = find(call, game.tools)
        if isinstance(tool, BadCall):
            bad += 1
            answers.append({**made, "content": f"Error: {tool.reason}"})
            continue
        assert not isinstance(call, BadCall)
        text = await game.call_tool(tool, call.arguments)
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
