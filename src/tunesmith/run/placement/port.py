"""The port of placements: where the models and engines of a run are built, and how the run reaches
them. ::

    specs (from the configuration) ──► placement ──► parts of the loop
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from tunesmith.run.specs.base import EngineSpec, Report, Trained, WeightSource

if TYPE_CHECKING:
    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.records.timeline import Timeline
    from tunesmith.run.engines.base import RolloutEngine
    from tunesmith.run.specs.scorers import ScorerSpec
    from tunesmith.run.specs.trainers import TrainerSpec


class Placement(Protocol):
    """Builds what specs describe, here or elsewhere. Leaving it ends the processes it has
    started."""

    scores_elsewhere: bool = False
    """Whether reward models run in other processes."""
    restarts: bool = False
    """Whether a trainer that is lost can be built again."""

    def trainer(self, spec: TrainerSpec) -> Trained: ...

    def engine(
        self,
        spec: EngineSpec,
        source: WeightSource,
        report: Report,
        timeline: Timeline | None = None,
    ) -> RolloutEngine: ...

    def scorer(self, spec: ScorerSpec, report: Report) -> RewardModel: ...

    def end_training(self) -> None:
        """End the processes that are started again when the run continues from a checkpoint."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del error
