"""Episodes of several turns: the policy writes and an environment or a tool answers, until the
episode is done.

An environment is a class in the user's file; each episode gets an instance::

    class GuessNumber:
        def reset(self, secret, **columns):
            self.secret = secret

        def step(self, action):
            guess = int(action)
            if guess == self.secret:
                return "right", 1.0, True
            return ("higher" if guess < self.secret else "lower"), 0.0, False

``reset`` gets the columns of the data; its result is appended to the prompt (text), replaces it
(messages) or leaves it unchanged (None). ``step`` gets the policy's text and returns a
``StepResult`` or the tuple ``(observation, reward, done)``. Both may be ``async``. ``close``, if it
exists, is called at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from tunesmith.errors import TunesmithError
from tunesmith.learn.environments.base import Generate
from tunesmith.learn.environments.conversation import (
    Conversation,
    EpisodeSettings,
    OutOfRoom,
    Reply,
)
from tunesmith.learn.environments.games import Game
from tunesmith.learn.environments.steps import Observation, as_reward
from tunesmith.learn.environments.tools import BadCall, valid_call
from tunesmith.types import Message, Rollout, Tools


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """An ``Environment`` whose episodes are played with the user's code."""

    open: Callable[[], AbstractAsyncContextManager[Game]]
    """Opens an episode."""
    setting: EpisodeSettings
    keeps: bool = False
    """Whether the user's instance stays on the rollout, for the reward functions."""

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        prompt = self.setting.prompt_of(rollout.task)
        tools = rollout.task.tools
        conversation = Conversation(rollout, generate, self.setting, prompt, tools)
        async with self.open() as game:
            try:
                messages = opening(prompt, await game.reset(rollout.task, prompt))
                rewards = await self._turns(game, conversation, messages, tools)
                rewards.append(await game.finish())
            finally:
                conversation.close()
                try:
                    await game.close()
                except (TunesmithError, TimeoutError) as error:  # does not fail the episode
                    rollout.notes["close"] = str(error)
        earned = [reward for reward in rewards if reward is not None]
        if earned:
            rollout.reward = as_reward(sum(earned), "the episode", "sum of its rewards")
        rollout.metrics["turns"] = float(conversation.turns)
        rollout.metrics["forks"] = float(len(rollout.records) - 1)
        rollout.instance = game.it if self.keeps else None

    async def _turns(
        self, game: Game, conversation: Conversation, messages: list[Message], schemas: Tools
    ) -> list[float | None]:
        """Play to the end and return the turns' rewards; an episode that reaches its limits keeps
        those so far."""
        metrics = conversation.rollout.metrics
        counts = ("unfinished", "tool_calls", "bad_calls") if schemas else ("unfinished",)
        metrics |= dict.fromkeys(counts, 0.0)
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
                metrics["tool_calls"] += len(reply.calls)
                metrics["bad_calls"] += bad
                messages += answers
                if bad and self.setting.section.bad_call == "end":
                    return rewards
                continue
            step = await game.step(reply.text)
            metrics.update(step.metrics)
            rewards.append(step.reward)
            if step.reward is not None:
                conversation.pay(step.reward)
            if step.done:
                return rewards
            seen = step.observation
            messages += [{"role": "user", "content": seen}] if isinstance(seen, str) else seen or []


async def _answer(reply: Reply, game: Game) -> tuple[list[Message], int]:
    """Run the calls of a turn in order; the tools' messages and the number of bad calls.

    If a tool raises, the policy gets the exception as its answer.
    """
    answers: list[Message] = []
    ids = iter(reply.message.get("tool_calls", ()))
    bad = 0
    for written in reply.calls:
        answer = {"role": "tool"}
        if not isinstance(written, BadCall):
            answer["tool_call_id"] = next(ids)["id"]
        call = valid_call(written, game.tools)
        if isinstance(call, BadCall):
            bad += 1
            answers.append({**answer, "content": f"Error: {call.reason}"})
        else:
            text = await game.call_tool(call.name, call.arguments)
            answers.append({**answer, "name": call.name, "content": text})
    return answers, bad


def opening(prompt: list[Message], observation: Observation) -> list[Message]:
    """The first messages of an episode. Text is appended to the prompt's last message if that is a
    user message."""
    if not isinstance(observation, str):
        return prompt if observation is None else observation
    if prompt and prompt[-1]["role"] == "user":
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
    return [*prompt, {"role": "user", "content": observation}]
