"""What an environment is, and the simplest one: a prompt and one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tunesmith.types import Completion, Rollout


class Generate(Protocol):
    """Completes a run of tokens with the current policy."""

    async def __call__(
        self, prompt_ids: Sequence[int], /, *, max_new_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> Completion:
        """Sample as the run says; at most ``max_new_tokens`` where that is fewer, ending at ``stop`` as well."""
        ...


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
