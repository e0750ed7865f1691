"""Everything in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunesmith.records.timeline import Timeline
from tunesmith.run.placement.port import Placement
from tunesmith.run.specs.base import EngineSpec, Report, Trained, WeightSource

if TYPE_CHECKING:
    from tunesmith.learn.rewards.model import RewardModel
    from tunesmith.run.engines.base import RolloutEngine
    from tunesmith.run.specs.scorers import ScorerSpec
    from tunesmith.run.specs.trainers import TrainerSpec


class Here(Placement):
    """Args: tokenizer: the run's; None: each model loads its own."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def trainer(self, spec: TrainerSpec) -> Trained:
        return spec.train_here(self._tokenizer)

    def engine(
        self,
        spec: EngineSpec,
        source: WeightSource,
        report: Report,
        timeline: Timeline | None = None,
    ) -> RolloutEngine:
        spec.check(source, report)
        return spec.around(source, report, timeline)

    def scorer(self, spec: ScorerSpec, report: Report) -> RewardModel:
        del report
        return spec.build()
