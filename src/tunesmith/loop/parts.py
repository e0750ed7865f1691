"""The parts of a run that trains by reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.algorithms.kl import KLController
from tunesmith.algorithms.objective import Objective
from tunesmith.backends.base import TrainBackend
from tunesmith.config.schema import RLConfig
from tunesmith.engines.base import RolloutEngine
from tunesmith.loop.canary import Canary
from tunesmith.loop.collect import Collector
from tunesmith.loop.critic import Critic
from tunesmith.loop.curriculum import Curriculum
from tunesmith.loop.evaluate import EvaluationPlan
from tunesmith.loop.learner import Learner
from tunesmith.rewards.reward_set import RewardSet
from tunesmith.types import Sampling


@dataclass(frozen=True, slots=True)
class RLParts:
    """Everything that ``rl.run`` works with; ``tunesmith.assembly`` builds it. See ``session.Parts``."""

    config: RLConfig
    engine: RolloutEngine
    sampling: Sampling
    tasks: Curriculum
    rewards: RewardSet
    collector: Collector
    learner: Learner
    critic: Critic | None
    kl: KLController
    evaluation: EvaluationPlan | None
    canary: Canary | None = None
    """Compares sampler and trainer after each sync, if they do not share their weights."""
    objective: Objective | None = None
    """Minimised instead of the algorithm's loss."""

    @property
    def backend(self) -> TrainBackend:
        return self.learner.backend

    @property
    def backends(self) -> list[TrainBackend]:
        """The policy's backend, and the critic's if it has its own model."""
        critic = self.critic and self.critic.learner.backend
        return [self.backend] if critic is None or critic is self.backend else [self.backend, critic]

    @property
    def epoch(self) -> int:
        return self.tasks.epoch

    def write(self, directory: Path, *, model_only: bool) -> None:
        for part in filter(None, (self.backend, self.critic)):
            part.save(directory, model_only=model_only)

    def load(self, directory: Path) -> None:
        for part in filter(None, (self.backend, self.critic)):
            part.load(directory)

    def state(self) -> Callable[[], dict[str, Any]]:
        tasks = self.tasks.snapshot()
        rest = {
            **self.learner.caps,
            "kl": self.kl.state_dict(),
            "critic": {**self.critic.learner.caps} if self.critic else None,
        }
        return lambda: {"tasks": tasks(), **rest}

    def take(self, state: dict[str, Any]) -> None:
        self.tasks.load_state_dict(state["tasks"])
        self.learner.resume(state)
        self.kl.load_state_dict(state["kl"])
        if self.critic:
            self.critic.learner.resume(state["critic"])

    def give_up(self) -> None:
        for backend in self.backends:
            backend.give_up()
