"""Environments of the ``verifiers`` package (https://github.com/PrimeIntellect-ai/verifiers),
played as agents.

The environment runs its rollout against the episode's endpoint and scores it with its rubric.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tunesmith.errors import ConfigError, EpisodeError
from tunesmith.learn.environments.steps import StepResult
from tunesmith.types import as_messages

LOADER = "load_environment"
"""The package's conventional name of the function that creates the environment."""


def is_environment(code: object) -> bool:
    """Whether ``code`` is a ``verifiers.Environment``; does not import the package."""
    kinds = [(k.__module__.split(".")[0], k.__name__) for k in type(code).__mro__]
    return ("verifiers", "Environment") in kinds


def as_agent(environment: Any, reference: str) -> Callable[..., Coroutine[Any, Any, StepResult]]:
    """An agent that runs the environment's rollout and returns its reward and metrics.

    Raises:
        ConfigError: the environment scores several rollouts together.
    """
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"'{reference}' has reward functions over a group of rollouts; each rollout is scored "
            "by itself here. Move such functions to [reward]."
        )

    async def play(base_url: str, api_key: str, prompt: Any, **columns: Any) -> StepResult:
        from openai import AsyncOpenAI
        from verifiers.legacy.clients import OpenAIChatCompletionsClient

        del columns["client"]
        task = {"example_id": 0, **columns, "prompt": as_messages(prompt)}
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as http:
            client = OpenAIChatCompletionsClient(http)
            output = await environment.run_rollout(task, client, "policy", {}, state_columns=[])
        if output["error"] is not None:
            raise EpisodeError(f"{reference}: {output['error']}")
        return StepResult(reward=output["reward"], done=True, metrics=output["metrics"] or {})

    return play
