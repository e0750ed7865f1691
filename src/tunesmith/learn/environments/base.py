"""The interface of environments, and the simplest one: a prompt and one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tunesmith.types import Completion, Rollout


class Growing(Protocol):
    """A completion while it is sampled."""

    def beyond(self, count: int, /) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log-probabilities and versions after the first ones; from any thread."""
        ...


class Generate(Protocol):
    """Completes a sequence of tokens with the current policy."""

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        /,
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        follow: Callable[[Growing], None] | None = None,
    ) -> Completion:
        """Sample with the run's settings, up to ``max_new_tokens`` tokens or one of the ``stop``
        strings.

        Args:
            follow: gets the unfinished completion when it begins; once more, with a new one, if an
                engine was interrupted or lost.
        """
        ...


class Environment(Protocol):
    """Plays one episode of a task.

    ``play`` gets a rollout with the prompt and appends the policy's text (``act``) and the answers
    to it (``observe``). An exception makes that rollout a typed failure and does not affect the
    others. An environment may set ``rollout.reward``; reward functions add to it.
    """

    async def play(self, rollout: Rollout, generate: Generate) -> None: ...


@runtime_checkable
class GroupScorer(Protocol):
    """An environment that also scores a group of episodes of one task together."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Set ``reward`` and ``metrics`` of rollouts that were played; an exception fails them
        all."""


class SingleTurn:
    """The policy answers the prompt once."""

    async def play(self, rollout: Rollout, generate: Generate) -> None:
        rollout.act(await generate(rollout.token_ids))
