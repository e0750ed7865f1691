"""From tasks to rewarded groups of rollouts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from tunesmith.engines.base import RolloutEngine
from tunesmith.environments.base import Environment
from tunesmith.errors import EngineError, UserError
from tunesmith.types import Rollout, RolloutGroup, Sampling, Status, Task

T = TypeVar("T")


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
        """One group per task, in order. What a rollout draws depends on ``seed`` and its place."""
        return await _together(
            [self._group(task, sampling, group_size, derive_seed(seed, place)) for place, task in enumerate(tasks)]
        )

    async def _group(self, task: Task, sampling: Sampling, size: int, seed: int) -> RolloutGroup:
        samplings = [replace(sampling, seed=derive_seed(seed, member)) for member in range(size)]
        rollouts = await _together([self._rollout(task, s) for s in samplings])
        played = [r for r in rollouts if r.status is Status.OK]
        if played:
            await self.scorer.score(played, [self.decode(r.completion_ids) for r in played])
        return RolloutGroup(task, rollouts)

    async def _rollout(self, task: Task, sampling: Sampling) -> Rollout:
        rollout = Rollout(task)
        rollout.observe(task.prompt_ids)
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                await self.environments[task.environment].play(
                    rollout, lambda prompt_ids: self.engine.generate(prompt_ids, sampling)
                )
        except TimeoutError as error:
            own = f"not finished within {self.timeout:g} s (rollout.timeout)"
            rollout.fail(Status.TIMED_OUT, own if deadline.expired() else f"{type(error).__name__}: {error}")
        except UserError:
            raise
        except EngineError as error:
            rollout.fail(Status.ENGINE_FAILED, str(error))
        except Exception as error:
            rollout.fail(Status.ENVIRONMENT_FAILED, f"{type(error).__name__}: {error}")
        return rollout


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error ends all of the work and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(one) for one in work]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]
