"""The parts of a reinforcement-learning run."""

from __future__ import annotations

from dataclasses import dataclass

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
    """What the loop is given; built by ``tunesmith.assembly``."""

    config: RLConfig
    sampling: Sampling
    tasks: Curriculum
    rewards: RewardSet
    collector: Collector
    learner: Learner
    critic: Critic | None
    kl: KLController
    evaluation: EvaluationPlan | None
    canary: Canary | None = None
    """Compares sampler and trainer after each sync, where they do not share their weights."""
    objective: Objective | None = None
    """Minimised on the samples in place of the algorithm's loss."""

    @property
    def engine(self) -> RolloutEngine:
        return self.collector.engine

    @property
    def backend(self) -> TrainBackend:
        return self.learner.backend

    @property
    def backends(self) -> list[TrainBackend]:
        """The policy's, and a critic's of its own."""
        critic = self.critic and self.critic.learner.backend
        return [self.backend] if critic is None or critic is self.backend else [self.backend, critic]
