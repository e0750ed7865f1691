"""The parts of a run, which ``tunesmith.run.assembly`` builds.

Both kinds have the same methods for checkpoints. ``rehearse`` writes the models without their
weights and returns what is to be noted. ``state`` returns what a run needs to continue after a
number of steps besides the files of ``write``, as JSON values; ``load`` reads those files, and
``take`` continues from the state. ``give_up`` undoes the changes of an interrupted step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tunesmith.config.algorithm import Algorithm
from tunesmith.config.schema import RLConfig
from tunesmith.learn.algorithms.kl import KLController
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.loader import Loader, State
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.length import done_before
from tunesmith.plan.plan import Plan
from tunesmith.run.engines.base import RolloutEngine, RunningEngine
from tunesmith.run.loop.canary import Canary
from tunesmith.run.loop.collect import Collector
from tunesmith.run.loop.critic import Critic
from tunesmith.run.loop.curriculum import Curriculum
from tunesmith.run.loop.evaluate import EvaluationPlan
from tunesmith.run.loop.gate import Gate
from tunesmith.run.loop.learner import Learner
from tunesmith.run.loop.teacher import Teacher
from tunesmith.run.trainers.base import Metrics, TrainBackend
from tunesmith.types import Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RLParts:
    """Everything that ``rl.run`` works with."""

    plan: Plan[RLConfig]
    algorithm: Algorithm
    engine: RolloutEngine
    sampling: Sampling
    tasks: Curriculum
    rewards: RewardSet
    collector: Collector
    learner: Learner
    critic: Critic | None
    kl: KLController
    evaluation: EvaluationPlan | None
    gate: Gate | None = None
    """Between collector and engine, if rollouts are played ahead."""
    engines: Callable[[], Sequence[RunningEngine]] | None = None
    """The engines that are running now; None: a single one in this process."""
    canary: Canary | None = None
    """Compares sampler and trainer after each sync, if they do not share their weights."""
    objective: Objective | None = None
    """Minimised instead of the algorithm's loss."""
    teacher: Teacher | None = None
    """A teacher outside of the trainer's passes, which takes the reference's place."""
    kl_name: str = "ref_kl"
    """The metric's name for the KL to what takes the reference's place."""

    @property
    def backend(self) -> TrainBackend:
        return self.learner.backend

    @property
    def backends(self) -> list[TrainBackend]:
        """The policy's backend, and the critic's if it has its own model."""
        critics = [self.critic.learner.backend] if self.critic else []
        return [self.backend, *(critic for critic in critics if critic is not self.backend)]

    @property
    def epoch(self) -> int:
        return self.tasks.epoch

    def write(self, directory: Path, *, model_only: bool) -> None:
        for part in filter(None, (self.backend, self.critic)):
            part.save(directory, model_only=model_only)

    def rehearse(self, directory: Path) -> list[str]:
        notes = [part.rehearse(directory) for part in (self.backend, self.critic) if part]
        return list(filter(None, notes))

    def load(self, directory: Path) -> None:
        for part in filter(None, (self.backend, self.critic)):
            part.load(directory)

    def state(self, steps: int) -> State:
        plan = self.plan
        return {
            "tasks": self.tasks.state_dict(),
            "done": asdict(done_before(plan.said, plan.training, steps, len(self.tasks))),
            **self.learner.state(),
            "kl": self.kl.state_dict(),
            "critic": self.critic.learner.state() if self.critic else None,
        }

    def take(self, state: State) -> None:
        self.tasks.load_state_dict(state["tasks"])
        self.learner.resume(state)
        self.kl.load_state_dict(state["kl"])
        if self.critic:
            self.critic.learner.resume(state["critic"])

    def give_up(self) -> None:
        for backend in self.backends:
            backend.give_up()


@dataclass(frozen=True, slots=True)
class SupervisedParts(Generic[T]):
    """Everything that ``supervised.run`` works with. A ``T`` is one line of data, ready for use."""

    items: Loader[T]
    learner: Learner
    objective: Objective
    prepare: Callable[[Sequence[T]], Batch]
    """Makes an optimizer batch with every column the objective reads; may run models to score
    it."""
    evaluate: Callable[[], Metrics] | None
    """Returns the held-out set's metrics, under names that begin with ``eval/``."""
    summarise: Callable[[Metrics], Metrics] = dict
    """Makes a step's metrics from the objective's, which are sums over micro-batches."""
    save_beside: Callable[[Path], None] | None = None
    """Writes everything else a run needs to continue, after the backend has written the model."""
    describe: Callable[[Path], None] | None = None
    """Writes measurements of the model into a checkpoint."""

    @property
    def epoch(self) -> int:
        return self.items.epoch

    def write(self, directory: Path, *, model_only: bool) -> None:
        self.learner.backend.save(directory, model_only=model_only)
        if self.save_beside is not None and not model_only:
            self.save_beside(directory)

    def rehearse(self, directory: Path) -> list[str]:
        note = self.learner.backend.rehearse(directory)
        return [note] if note else []

    def load(self, directory: Path) -> None:
        self.learner.backend.load(directory)

    def state(self, steps: int) -> State:  # noqa: ARG002
        return {"samples": self.items.state_dict(), **self.learner.state()}

    def take(self, state: State) -> None:
        self.items.load_state_dict(state["samples"])
        self.learner.resume(state)

    def give_up(self) -> None:
        self.learner.backend.give_up()


Parts = RLParts | SupervisedParts[Any]
