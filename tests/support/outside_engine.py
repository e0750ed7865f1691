"""An engine as another package adds it: this file, and the line of an entry point."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.fake_engine import FakeEngine
from tunesmith.config.engines import EngineKind
from tunesmith.plan.plan import AnyPlan
from tunesmith.records.timeline import Timeline
from tunesmith.run.engines.base import RolloutEngine
from tunesmith.run.specs.base import EngineSpec, Report, WeightSource

KIND = EngineKind("uniform", "A uniform engine", f"{__name__}:make_spec")
MADE: list[FakeEngine] = []
"""The engines, which a test asks what they sampled."""


def make_spec(plan: AnyPlan) -> UniformSpec:
    return UniformSpec(plan.sampling.running)


@dataclass(frozen=True, slots=True)
class UniformSpec(EngineSpec):
    max_running: int

    def around(
        self, source: WeightSource, report: Report, timeline: Timeline | None
    ) -> RolloutEngine:
        del report, timeline
        assert source.model is not None
        MADE.append(FakeEngine(vocab_size=source.model.head.out_features, context=64))
        return MADE[-1]
