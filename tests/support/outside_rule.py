"""A rule as another package adds it: this function, and the line of an entry point."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.schema import RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.rules.rule import rule
from tunesmith.plan.rules.situation import Situation


@rule(RunConfig)
def short_runs(s: Situation[RunConfig]) -> Iterator[Problem]:
    steps = s.steps
    if steps is not None and steps > 100:
        yield Problem(("train.steps",), f"train.steps = {steps}: here a run has 100 at most")
