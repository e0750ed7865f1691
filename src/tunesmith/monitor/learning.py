"""Detects from its metrics that a run learns nothing, with the likely cause and remedy.

Each cause is a condition on the metrics of the last steps; ``findings.toml`` has its text.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError
from tunesmith.storage import read_json, write_json

Metrics = Mapping[str, float]

FACTS_FILE = "facts.json"
STEPS = 3
"""Consecutive steps without anything to learn from, before a warning."""
NO_GRADIENT = 1e-9
LEAST_REACH = 1e-6
"""Learning rate times optimizer steps below which no weight changes noticeably: AdamW moves a weight by about the
learning rate per step, and weights are about 0.02."""
MOST = 4000
"""Maximum number of stored steps; in a longer run every second one is dropped."""
LONG_ENOUGH = 20
"""Steps after which the end of a loss curve can be compared with its beginning."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that are needed to judge its metrics."""

    rollouts: bool = False
    """Whether it samples, or trains on given data."""
    rewarded: bool = True
    """Whether it learns from rewards; with a teacher it does not."""
    from_total: bool = True
    """Whether equal total rewards teach nothing; False if individual rewards or lengths also count."""
    compares_group: bool = True
    """Whether a rollout is compared with the others of its group."""
    full_reward: float | None = None
    """The reward of a perfect answer, if known."""
    frozen_steps: int = 0
    """Number of initial steps in which only the critic learns."""
    reach: float = 1.0
    """Learning rate times optimizer steps of the run."""
    lr: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 0
    unknown: float = 0.0
    """Share of the prompts' tokens that are unknown to the tokenizer."""
    train_size: int = 0
    """Tasks or samples."""
    eval_size: int | None = None
    repeated: float = 0.0
    """Share of duplicates in the training data."""
    seen: float = 0.0
    """Share of the held-out data that is in the training data."""
    too_long: float = 0.0
    """Share of the training data's lines that were left out because they are too long."""
    bad: float = 0.0
    """Share of its lines that were left out because they are unusable."""
    source_share: float | None = None
    """Share of the samples from the largest source, if there are several."""
    threads_per_core: float = 1.0
    """Threads of all processes that compute at once on this machine's CPU, per usable core."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason why nothing is learned: the key of the cause, the numbers that show it, and advice."""

    cause: str
    numbers: str
    advice: str

    def __str__(self) -> str:
        return f"{self.numbers}. {self.advice}"


def write_facts(facts: RunFacts, run_dir: Path) -> None:
    """Write the facts for ``tunesmith doctor``, which judges a run by its files."""
    write_json(run_dir / FACTS_FILE, asdict(facts))


def read_facts(run_dir: Path) -> RunFacts | None:
    """Read the facts; None if they are missing or of another version."""
    with suppress(StorageError, TypeError):
        return RunFacts(**read_json(run_dir / FACTS_FILE))
    return None


def finding(history: Sequence[Metrics], facts: RunFacts) -> Cause | None:
    """The problem of the last ``STEPS`` steps, if nothing could be learned in any of them.

    Args:
        history: the metrics of all steps so far; the earlier ones show later losses.
    """
    last = history[-STEPS:]
    if len(last) < STEPS:
        return None
    numbers = _Numbers(history, facts)
    applying = _harmful(numbers)
    if all(_rollouts_teach_nothing(step, facts) if facts.rollouts else _no_gradient(step) for step in last):
        applying |= _rollout_causes(numbers) if facts.rollouts else _supervised_causes(numbers)
    cause = next((cause for cause, applies in applying.items() if applies), None)
    return None if cause is None else _described(cause, facts, vars(numbers))


def at_the_end(history: Sequence[Metrics], facts: RunFacts) -> Cause | None:
    """A problem that remains when the run ends, or a loss that is no lower than at the beginning."""
    if problem := finding(history, facts):
        return problem
    losses = [step["loss"] for step in history if "loss" in step]
    if facts.rollouts or len(losses) < LONG_ENOUGH:
        return None
    part = len(losses) // 4
    first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
    values = {"first": first, "last": last, "part": part}
    return None if last < first else _described("loss_does_not_fall", facts, values)


@dataclass(slots=True)
class LearningWatch:
    """Follows a run and reports each finding once."""

    facts: RunFacts
    history: list[Metrics] = field(default_factory=list[Metrics])
    reported: str | None = None
    """The cause that was reported last."""

    def step(self, metrics: Metrics) -> str | None:
        """Add a step; returns a new warning, if any."""
        self.history.append({name: metrics[name] for name in _READ if name in metrics})
        if len(self.history) > MOST:
            del self.history[STEPS:-STEPS:2]
        problem, before = finding(self.history, self.facts), self.reported
        self.reported = problem and problem.cause
        return f"warning: nothing is learned: {problem}" if problem and problem.cause != before else None

    def end(self) -> str | None:
        problem = at_the_end(self.history, self.facts)
        return None if problem is None else f"the run ended without learning: {problem}"


_READ = (
    *("step", "loss", "grad_norm", "optimizer_steps", "skipped_steps", "reward", "reward/std", "rollouts", "correct"),
    *("rollouts/failed", "groups_equal", "groups_kept", "truncated", "entropy", "policy_kl"),
    *("completion_tokens_max", "nonfinite_tokens"),
)


class _Numbers:
    """Statistics of the last ``STEPS`` steps; a mean is None if none of them has the metric."""

    def __init__(self, history: Sequence[Metrics], facts: RunFacts) -> None:
        self.history, self.last, self.facts = history, history[-STEPS:], facts
        self.failed = self._mean("rollouts/failed") or 0.0
        self.truncated = self._mean("truncated") or 0.0
        self.reward, self.correct = self._mean("reward"), self._mean("correct")
        self.rollouts = self.last[-1].get("rollouts", 0)
        self.policy_kl, self.grad_norm = self._mean("policy_kl"), self._mean("grad_norm") or 0.0
        self.loss, self.first = self._mean("loss"), history[0].get("loss")
        self.equal_rewards = self.always(lambda step: step.get("groups_equal") == 1)
        entropy = self._mean("entropy")
        self.certain = facts.temperature < 0.1 or (entropy is not None and entropy < 0.01)
        self.entropy = "" if entropy is None else f", entropy {entropy:.2g} nats per token"
        differing = [step for step in history[: 1 - STEPS] if "reward" in step and step.get("reward/std")]
        best = max(differing, key=lambda step: step["reward"], default=None)
        self.best, self.step, spread = (best["reward"], best["step"], best["reward/std"]) if best else (0.0, 0, 0.0)
        self.fallen = best is not None and self.reward is not None and (
            self.best - self.reward >= 0.5 * max(abs(self.best), spread)
        )  # fmt: skip

    def _mean(self, name: str) -> float | None:
        values = [step[name] for step in self.last if name in step]
        return sum(values) / len(values) if values else None

    def always(self, holds: Callable[[Metrics], bool]) -> bool:
        return all(map(holds, self.last))


def _harmful(n: _Numbers) -> dict[str, bool]:
    """Causes that count even if steps have something to learn from; the first that applies is reported."""
    first, loss = n.first, n.loss
    long_enough = not n.facts.rollouts and len(n.history) >= 2 * STEPS
    return {
        "lr_without_effect": n.facts.reach < LEAST_REACH,
        "policy_moves_too_fast": n.always(lambda step: step.get("policy_kl", 0.0) > 1),
        "loss_rises": long_enough and not (first is None or loss is None) and loss > first + max(1.0, abs(first) / 2),
    }


def _rollout_causes(n: _Numbers) -> dict[str, bool]:
    full = n.facts.full_reward
    rewarded = n.reward is not None and n.reward > 0 and n.correct != 0
    return {
        "failing": n.failed >= 0.5,
        "not_finite": n.always(_all_skipped),
        "ruined": n.fallen,
        "unknown_prompts": n.facts.unknown >= 0.5,
        "always_right": n.correct == 1 or (full is not None and n.reward is not None and n.reward >= full - 1e-9),
        "truncated": n.truncated >= 0.9 and not rewarded,
        "always_wrong": n.reward == 0 and not n.correct,
        "constant_reward": n.always(lambda step: step.get("reward/std") == 0),
        "equal_answers": n.equal_rewards and n.certain,
        "equal_rewards": n.equal_rewards,
        "no_samples": n.always(lambda step: step.get("optimizer_steps") == 0),
        "no_gradient": True,
    }


def _supervised_causes(n: _Numbers) -> dict[str, bool]:
    return {
        "not_finite": n.always(_all_skipped),
        "unknown_prompts": n.facts.unknown >= 0.5,
        "known": abs(n.loss or 0.0) < 1e-4,
        "no_gradient_at_a_loss": True,
    }


def _described(key: str, facts: RunFacts, values: Mapping[str, Any]) -> Cause:
    text = _texts()[key]
    values = asdict(facts) | {name: 0.0 if value is None else value for name, value in values.items()}
    return Cause(text.get("cause", key), text["numbers"].format(**values), text["advice"].format(**values))


@cache
def _texts() -> dict[str, dict[str, str]]:
    return tomllib.loads(files("tunesmith.monitor").joinpath("findings.toml").read_text(encoding="utf-8"))


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
