"""Detects from its metrics that a run learns nothing: a run asks after each step, the doctor of a
run's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunesmith.records.doctor.columns import span
from tunesmith.records.doctor.nothing_learned import AT_THE_END, HARMFUL, NOTHING, STEPS, Recent
from tunesmith.records.doctor.rules import Finding, applied
from tunesmith.records.facts import Metrics, RunFacts

MOST = 4000
"""Maximum number of stored steps; in a longer run every second one is dropped."""


def finding(history: Sequence[Metrics], facts: RunFacts) -> Finding | None:
    """The problem of the last ``STEPS`` steps, if nothing could be learned in any of them.

    Args:
        history: the metrics of all steps so far; the earlier ones show later losses.
    """
    if len(history) < STEPS:
        return None
    run = Recent(history, facts)
    rules = [*HARMFUL, *NOTHING] if run.teaches_nothing else HARMFUL
    return next(applied(rules, run, span(run.last)), None)


def at_the_end(history: Sequence[Metrics], facts: RunFacts) -> Finding | None:
    """A problem that remains when the run ends, or a loss that is no lower than at the
    beginning."""
    return finding(history, facts) or next(
        applied(AT_THE_END, Recent(history, facts), span(history)), None
    )


@dataclass(slots=True)
class LearningWatch:
    """Follows a run and reports each finding once."""

    facts: RunFacts
    history: list[Metrics] = field(default_factory=list[Metrics])
    reported: str | None = None
    """The key of the finding that was reported last."""

    def step(self, metrics: Metrics) -> str | None:
        """Add a step; returns a new warning, if any."""
        self.history.append({name: metrics[name] for name in _READ if name in metrics})
        if len(self.history) > MOST:
            del self.history[STEPS:-STEPS:2]
        problem = finding(self.history, self.facts)
        before = self.reported
        self.reported = problem and problem.key
        if problem is None or problem.key == before:
            return None
        return f"warning: nothing is learned: {problem.numbers}. {problem.effect}"

    def end(self) -> str | None:
        problem = at_the_end(self.history, self.facts)
        return problem and f"the run ended without learning: {problem.numbers}. {problem.effect}"


_READ = (
    "step", "loss", "grad_norm", "optimizer_steps", "skipped_steps", "reward", "reward/std",
    "rollouts", "correct", "rollouts/failed", "groups_equal", "groups_kept", "truncated",
    "entropy", "policy_kl", "completion_tokens_max", "nonfinite_tokens",
)  # fmt: skip
