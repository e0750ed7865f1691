"""Agents: a user's loop around the policy, written as one function::

    async def agent(client, question, answer):
        messages = [{"role": "user", "content": question}]
        reply = await client.chat.completions.create(messages=messages)
        return float(answer in reply.choices[0].message.content)

Its parameters select its arguments: ``client`` (OpenAI's interface, within the process), or
``base_url`` and ``api_key`` (the same over HTTP, for an agent with its own client, which may be a
plain function), ``opponent`` (as ``client``, and nothing that it writes is trained on), and data
columns. It returns the reward, a ``StepResult`` with a reward and
metrics, or None if reward functions score the episode. Where the function has the attribute
``score_group``, this scores the episodes of a task together: ``async def score_group(kept)`` gets
what each left in ``StepResult.kept`` and returns a ``StepResult`` for each.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunesmith.errors import ConfigError, EpisodeError
from tunesmith.learn.endpoint.client import PolicyClient
from tunesmith.learn.endpoint.episode import EpisodePolicy
from tunesmith.learn.environments.base import Generate
from tunesmith.learn.environments.conversation import Conversation, EpisodeSettings
from tunesmith.learn.environments.games import columns_of
from tunesmith.learn.environments.steps import StepResult, as_reward, as_step
from tunesmith.learn.usercode.calls import EpisodeCode, Function, is_async, keywords_for
from tunesmith.types import Rollout

if TYPE_CHECKING:
    from tunesmith.learn.endpoint.server import Endpoint

GIVEN = frozenset({"client", "base_url", "api_key"})
OVER_HTTP = frozenset({"base_url", "api_key"})
OPPONENT = "opponent"


def is_agent(function: Function, reference: str) -> bool:
    """Whether a function has an agent's form.

    Raises:
        ConfigError: it has the form, but no access to the policy.
    """
    access = GIVEN & inspect.signature(function).parameters.keys()
    if not access and not is_async(function):
        return False
    if not access:
        neither = f"'{reference}' takes neither 'client' nor 'base_url'"
        write = "Write async def agent(client, **columns)"
        raise ConfigError(f"{neither}, so it has no access to the policy. {write}.")
    if "client" in access and not is_async(function):
        awaited = f"'{reference}' takes 'client', whose calls are awaited"
        raise ConfigError(f"{awaited}: define it with `async def`.")
    return True


@dataclass(frozen=True, slots=True)
class Agent:
    """An ``Environment`` whose episodes a user's agent plays."""

    name: str
    function: Function
    setting: EpisodeSettings
    model: str
    endpoint: Callable[[], Endpoint]
    """Starts the endpoint on first use."""

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        task = rollout.task
        with (
            policy_of(rollout, generate, self.setting, self.model, self.name) as policy,
            ExitStack() as served,
        ):
            arguments: dict[str, Any] = {**columns_of(task), "client": PolicyClient(policy)}
            if OPPONENT in inspect.signature(self.function).parameters:
                other = Conversation(Rollout(task), generate, self.setting, ())
                second = served.enter_context(closing(EpisodePolicy(other, self.model)))
                arguments[OPPONENT] = PolicyClient(second)
            if not OVER_HTTP.isdisjoint(inspect.signature(self.function).parameters):
                base_url, key = served.enter_context(self.endpoint().open(policy))
                arguments |= {"base_url": base_url, "api_key": key}
            with EpisodeCode(math.inf) as code:  # the rollout's deadline applies
                arguments = keywords_for(self.function, arguments)
                value = await code.run(self.name, self.function, **arguments)
            self._paid(rollout, value)

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """See ``GroupScorer``."""
        score: Callable[[list[object]], Awaitable[Sequence[StepResult]]] | None
        score = getattr(self.function, "score_group", None)
        kept = [rollout for rollout in rollouts if rollout.instance is not None]
        if score is not None and kept:
            steps = await score([rollout.instance for rollout in kept])
            for rollout, step in zip(kept, steps, strict=True):
                self._paid(rollout, step)

    def _paid(self, rollout: Rollout, value: object) -> None:
        if isinstance(value, StepResult):
            step = as_step(replace(value, done=True), self.name)
            rollout.metrics.update(step.metrics)
            rollout.instance = step.kept
            value = step.reward
        rollout.reward = as_reward(value, self.name)


@contextmanager
def policy_of(
    rollout: Rollout, generate: Generate, setting: EpisodeSettings, model: str, name: str
) -> Generator[EpisodePolicy]:
    """The policy of an episode that an agent plays, which checks at the end what came of it.

    Raises:
        EpisodeError: the policy was not asked.
        Exception: the engine's, even if the agent hid it.
    """
    prompt = setting.prompt_of(rollout.task)
    conversation = Conversation(rollout, generate, setting, prompt, rollout.task.tools)
    policy = EpisodePolicy(conversation, model)
    with closing(conversation), closing(policy):
        try:
            yield policy
        except EpisodeError:
            if conversation.failure is None:
                raise
    if conversation.failure is not None:
        raise conversation.failure
    if not rollout.turns:
        raise EpisodeError(f"{name} ended without a turn of the policy")
    rollout.metrics["turns"] = float(conversation.turns)
    rollout.metrics["forks"] = float(len(rollout.records) - 1)
