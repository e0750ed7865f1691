"""Detects from its metrics that a run learns nothing, with the likely cause and what to do.

The causes are tables of ``rules.toml``. A run applies them after each step, the doctor to a run's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tunesmith.doctor.record import Metrics, RunFacts
from tunesmith.doctor.rules import Finding, described, rules
from tunesmith.doctor.signs import statistics
from tunesmith.plan.rules.rules import applies

STEPS = 3
"""Consecutive steps without anything to learn from, before a warning."""
NO_GRADIENT = 1e-9
MOST = 4000
"""Maximum number of stored steps; in a longer run every second one is dropped."""


def finding(history: Sequence[Metrics], facts: RunFacts) -> Finding | None:
    """The problem of the last ``STEPS`` steps, if nothing could be learned in any of them.

    Args:
        history: the metrics of all steps so far; the earlier ones show later losses.
    """
    last = history[-STEPS:]
    if len(last) < STEPS:
        return None
    tables = ["harmful"]
    if all(_rollouts_teach_nothing(step, facts) if facts.rollouts else _no_gradient(step) for step in last):
        tables.append("nothing_learned")
    return _first(tables, last, _signs(history, facts))


def at_the_end(history: Sequence[Metrics], facts: RunFacts) -> Finding | None:
    """A problem that remains when the run ends, or a loss that is no lower than at the beginning."""
    if problem := finding(history, facts):
        return problem
    quarter = max(1, sum("loss" in step for step in history) // 4)
    values = statistics(history, quarter) | {"rl": facts.rollouts, "quarter": quarter}
    return _first(["at_the_end"], history, values)


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
        problem, before = finding(self.history, self.facts), self.reported
        self.reported = problem and problem.key
        if problem is None or problem.key == before:
            return None
        return f"warning: nothing is learned: {problem.numbers}. {problem.effect}"

    def end(self) -> str | None:
        problem = at_the_end(self.history, self.facts)
        return problem and f"the run ended without learning: {problem.numbers}. {problem.effect}"


_READ = (
    *("step", "loss", "grad_norm", "optimizer_steps", "skipped_steps", "reward", "reward/std", "rollouts", "correct"),
    *("rollouts/failed", "groups_equal", "groups_kept", "truncated", "entropy", "policy_kl"),
    *("completion_tokens_max", "nonfinite_tokens"),
)


def _first(tables: Sequence[str], steps: Sequence[Metrics], values: Mapping[str, Any]) -> Finding | None:
    """The finding of the first rule that applies."""
    for rule in (rule for table in tables for rule in rules()[table]):
        if applies(rule, values):
            covered = {"first_step": int(steps[0]["step"]), "last_step": int(steps[-1]["step"])}
            return described({**rule, "severity": "problem", "cause": "nothing is learned"}, {**values, **covered})
    return None


def _signs(history: Sequence[Metrics], facts: RunFacts) -> dict[str, Any]:
    """The facts, statistics of the last ``STEPS`` steps, and values derived from both."""
    last = history[-STEPS:]
    values: dict[str, Any] = asdict(facts) | {"rl": facts.rollouts, "grad_norm.mean": 0.0, "loss.mean": 0.0}
    values |= (signs := statistics(last, None))
    first, loss, full = history[0].get("loss"), values["loss.mean"], facts.full_reward
    reward, correct, entropy = (values.get(f"{name}.mean") for name in ("reward", "correct", "entropy"))
    differing = [step for step in history[: 1 - STEPS] if "reward" in step and step.get("reward/std")]
    if differing and reward is not None:
        best = max(differing, key=lambda step: step["reward"])
        values |= {"best": best["reward"], "best_step": best["step"]}
        values["ruined"] = best["reward"] - reward >= 0.5 * max(abs(best["reward"]), best["reward/std"])
    rises = False
    if len(history) >= 2 * STEPS and first is not None and "loss.mean" in signs:
        rises = loss > first + max(1.0, abs(first) / 2)
    right = correct == 1 or (full is not None and reward is not None and reward >= full - 1e-9)
    return values | {
        "first_loss": first,
        "loss_rises": rises and not facts.rollouts,
        "all_skipped": all(map(_all_skipped, last)),
        "right": right,
        "rewarded": reward is not None and reward > 0 and correct != 0,
        "certain": facts.temperature < 0.1 or (entropy is not None and entropy < 0.01),
        "entropy": "" if entropy is None else f", entropy {entropy:.2g} nats per token",
        "no_loss": abs(loss) < 1e-4,
    }


def _all_skipped(step: Metrics) -> bool:
    return step.get("skipped_steps", 0) >= step.get("optimizer_steps", 1) > 0


def _no_gradient(step: Metrics) -> bool:
    return step.get("optimizer_steps") == 0 or _all_skipped(step) or step.get("grad_norm", 1.0) <= NO_GRADIENT


def _rollouts_teach_nothing(step: Metrics, facts: RunFacts) -> bool:
    if step["step"] <= facts.frozen_steps:
        return False
    if _no_gradient(step):
        return True
    if not (facts.rewarded and facts.from_total) or step.get("rollouts", 0) < 2:
        return False
    return step.get("reward/std") == 0 or (facts.compares_group and step.get("groups_equal") == 1)
