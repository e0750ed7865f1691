"""From tasks to rewarded groups of rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from tunesmith.errors import EngineError, EpisodeError, NoEngineError, UserError
from tunesmith.learn.environments.base import Environment, Generate, GroupScorer, Growing
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.learn.usercode.calls import all_or_error
from tunesmith.records.timeline import REWARD, ROLLOUTS, Timeline
from tunesmith.run.engines.deadline import DEADLINE
from tunesmith.run.engines.partial import FOLLOWER
from tunesmith.run.loop.seeds import derive_seed
from tunesmith.types import Completion, Rollout, RolloutGroup, Sampling, Status, Task

Complete = Callable[[Sequence[int], Sampling], Awaitable[Completion]]
"""The method ``generate`` of an engine."""


@dataclass(slots=True)
class Collector:
    """Plays tasks; finished groups are scored while others still play."""

    complete: Complete
    scorer: RewardSet | None
    """None leaves the rollouts without a reward."""
    environments: Mapping[str, Environment]
    decode: Callable[[Sequence[int]], str]
    timeout: float
    """Seconds that one rollout may play; waiting for its turn does not count."""
    concurrency: int | None = None
    """Rollouts that may play at once; None is no limit."""
    timeline: Timeline | None = None
    _turn: AbstractAsyncContextManager[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._turn = asyncio.Semaphore(self.concurrency) if self.concurrency else nullcontext()

    async def collect(
        self, tasks: Sequence[Task], sampling: Sampling, group_size: int, seed: int
    ) -> list[RolloutGroup]:
        """One group per task, in order. A rollout's samples depend only on ``seed`` and its
        place."""
        seeded = [(task, derive_seed(seed, place)) for place, task in enumerate(tasks)]
        return await all_or_error(
            [self._group(task, sampling, group_size, own) for task, own in seeded]
        )

    async def _group(self, task: Task, sampling: Sampling, size: int, seed: int) -> RolloutGroup:
        samplings = [replace(sampling, seed=derive_seed(seed, member)) for member in range(size)]
        rollouts = await all_or_error([self._rollout(task, s) for s in samplings])
        environment = self.environments[task.environment]
        if isinstance(environment, GroupScorer):
            await self._score_together(environment, rollouts)
        played = [r for r in rollouts if r.status is Status.OK]
        try:
            if played and self.scorer:
                with self._span(REWARD, "score", task):
                    await self.scorer.score(played, [self.decode(r.answer_ids) for r in played])
        finally:
            for rollout in rollouts:
                rollout.instance = None
        return RolloutGroup(task, rollouts)

    async def _rollout(self, task: Task, sampling: Sampling) -> Rollout:
        rollout = Rollout(task)
        rollout.observe(task.prompt_ids)
        async with self._turn:
            with self._span(ROLLOUTS, task.environment, task):
                await self._play(rollout, sampling)
        return rollout

    async def _score_together(self, environment: GroupScorer, rollouts: Sequence[Rollout]) -> None:
        played = [rollout for rollout in rollouts if rollout.status is Status.OK]
        try:
            async with asyncio.timeout(self.timeout):
                await environment.score_group(played)
        except UserError:
            raise
        except Exception as error:
            why = f"its group was not scored: {type(error).__name__}: {error}"
            for rollout in played:
                rollout.fail(Status.ENVIRONMENT_FAILED, why)

    def _span(self, lane: str, name: str, task: Task) -> AbstractContextManager[Any]:
        return self.timeline.span(lane, name, task=task.id) if self.timeline else nullcontext()

    async def _play(self, rollout: Rollout, sampling: Sampling) -> None:
        environment = self.environments[rollout.task.environment]
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                await environment.play(rollout, self._generate(sampling, deadline))
        except (UserError, NoEngineError):
            raise
        except EngineError as error:
            rollout.fail(Status.ENGINE_FAILED, str(error))
        except EpisodeError as error:
            rollout.fail(Status.ENVIRONMENT_FAILED, str(error))
        except Exception as error:
            late = isinstance(error, TimeoutError)
            why = f"{type(error).__name__}: {error}"
            if late and deadline.expired():
                why = f"not finished within {self.timeout:g} s (rollout.timeout)"
            rollout.fail(Status.TIMED_OUT if late else Status.ENVIRONMENT_FAILED, why)

    def _generate(self, sampling: Sampling, deadline: asyncio.Timeout) -> Generate:
        """The policy for one rollout. Each call has its own seed; the first has the rollout's."""
        calls = count()

        async def generate(
            prompt_ids: Sequence[int],
            /,
            *,
            max_new_tokens: int | None = None,
            stop: tuple[str, ...] = (),
            follow: Callable[[Growing], None] | None = None,
        ) -> Completion:
            DEADLINE.set(deadline)
            FOLLOWER.set(follow)
            number = next(calls)
            seed = sampling.seed
            if number and seed is not None:
                seed = derive_seed(seed, number)
            changed = replace(sampling.within(max_new_tokens, stop), seed=seed)
            return await self.complete(prompt_ids, changed)

        return generate
