"""From tasks to rewarded groups of rollouts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tunesmith.engines.base import RolloutEngine
from tunesmith.environments.base import Environment
from tunesmith.errors import EngineError, UserError
from tunesmith.types import Rollout, RolloutGroup, Sampling, Status, Task


class Scorer(Protocol):
    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:
        """Fill in ``rewards`` and ``reward`` of rollouts, or mark them failed."""
        ...


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on nothing but its parts: no state to save, none to lose."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@dataclass(frozen=True, slots=True)
class Collector:
    """Plays tasks with an engine and has the finished groups scored while others still run."""

    engine: RolloutEngine
    scorer: Scorer
    environments: Mapping[str, Environment]
    decode: Callable[[Sequence[int]], str]
    timeout: float
    """Seconds that one rollout may take."""

    async def collect(
        self, tasks: Sequence[Task], sampling: Sampling, group_size: int, seed: int
    ) -> list[RolloutGroup]:
        """One group per task, in order. Which rollout draws which tokens depends on ``seed`` and its place."""
        try:
            async with asyncio.TaskGroup() as running:
                groups = [
                    running.create_task(self._group(task, sampling, group_size, derive_seed(seed, place)))
                    for place, task in enumerate(tasks)
                ]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return [group.result() for group in groups]

    async def _group(self, task: Task, sampling: Sampling, size: int, seed: int) -> RolloutGroup:
        samplings = [replace(sampling, seed=derive_seed(seed, member)) for member in range(size)]
        rollouts = await asyncio.gather(*(self._rollout(task, s) for s in samplings))
        played = [r for r in rollouts if r.status is Status.OK]
        if played:
            await self.scorer.score(played, [self.decode(r.completion_ids) for r in played])
        return RolloutGroup(task, list(rollouts))

    async def _rollout(self, task: Task, sampling: Sampling) -> Rollout:
        rollout = Rollout(task)
        rollout.observe(task.prompt_ids)
        try:
            async with asyncio.timeout(self.timeout):
                await self.environments[task.environment].play(
                    rollout, lambda prompt_ids: self.engine.generate(prompt_ids, sampling)
                )
        except TimeoutError:
            rollout.fail(Status.TIMED_OUT, f"not finished within {self.timeout:g} s")
        except UserError:
            raise
        except EngineError as error:
            rollout.fail(Status.ENGINE_FAILED, str(error))
        except Exception as error:
            rollout.fail(Status.ENVIRONMENT_FAILED, f"{type(error).__name__}: {error}")
        return rollout
