"""What an environment is, and the simplest one: a prompt and one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from tunesmith.types import Completion, Rollout

Generate = Callable[[Sequence[int]], Awaitable[Completion]]
"""Completes a run of tokens with the current policy."""


class Environment(Protocol):
    """Plays one task out.

    ``play`` gets a rollout that holds the prompt, and appends to it: what the policy wrote (``act``) and
    what came back (``observe``). An exception makes that rollout a typed failure and leaves its siblings
    alone. An environment may set ``rollout.reward``; reward functions add to it.
    """

    async def play(self, rollout: Rollout, generate: Generate) -> None: ...


class SingleTurn:
    """The policy answers the prompt once."""

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        rollout.act(await generate(rollout.token_ids))
