"""Recognises from its metrics that a run learns nothing, with the likely cause and what to do.

Each cause is a function of what was seen; it returns the values for its text in ``findings.toml`` where it applies.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

Metrics = Mapping[str, float]
Values = dict[str, Any]

STEPS = 3
"""Steps in a row without anything to learn from, before a warning."""
NO_GRADIENT = 1e-9
LEAST_REACH = 1e-6
"""Learning rate times optimizer steps below which no weight changes noticeably: AdamW moves a weight by about the
learning rate per step, and weights are about 0.02."""
MOST = 4000
"""Steps that are remembered; in a longer run every second one is dropped."""
LONG_ENOUGH = 20
"""Steps after which the end of a loss curve can be compared with its beginning."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be known about a run to judge its metrics."""

    rollouts: bool = False
    """Whether it samples, or trains on given data."""
    rewarded: bool = True
    """Whether it learns from rewards; with a teacher it does not."""
    from_total: bool = True
    """Whether equal total rewards teach nothing; not so where single rewards or lengths count too."""
    compares_group: bool = True
    """Whether a rollout is compared with the others of its group."""
    full_reward: float | None = None
    """The reward of a perfect answer, where it is known."""
    frozen_steps: int = 0
    """First steps, in which only the critic learns."""
    reach: float = 1.0
    """Learning rate times optimizer steps of the run."""
    lr: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 0
    unknown: float = 0.0
    """Share of the prompts' tokens that are unknown to the tokenizer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why nothing is learned: a key of the cause, the numbers that show it, and what to do."""

    cause: str
    numbers: str
    advice: str

    def __str__(self) -> str:
        return f"{self.numbers}. {self.advice}"


@dataclass(frozen=True, slots=True)
class _Seen:
    """The metrics of a run so far: ``last`` has the last ``STEPS`` steps, ``history`` all that are remembered."""

    history: Sequence[Metrics]
    last: Sequence[Metrics]
    facts: Facts

    def mean(self, name: str) -> float | None:
        """Of the last steps; None where none of them has the metric."""
        values = [step[name] for step in self.last if name in step]
        return sum(values) / len(values) if values else None

    def always(self, holds: Callable[[Metrics], bool]) -> bool:
        return all(map(holds, self.last))


def finding(history: Sequence[Metrics], facts: Facts) -> Finding | None:
    """What is wrong with the last ``STEPS`` steps, if nothing could be learned in any of them.

    Args:
        history: the metrics of all steps so far; the earlier ones show what has been lost since.
    """
    seen = _Seen(history, history[-STEPS:], facts)
    if len(seen.last) < STEPS:
        return None
    if found := _first(_HARMFUL, seen):
        return found
    if not seen.always(lambda step: _rollouts_teach_nothing(step, facts) if facts.rollouts else _no_gradient(step)):
        return None
    return _first(_ROLLOUT_CAUSES if facts.rollouts else _SUPERVISED_CAUSES, seen)


def at_the_end(history: Sequence[Metrics], facts: Facts) -> Finding | None:
    """What is still wrong when the run ends, or a loss that is no lower than at the beginning."""
    if found := finding(history, facts):
        return found
    losses = [step["loss"] for step in history if "loss" in step]
    if facts.rollouts or len(losses) < LONG_ENOUGH:
        return None
    part = len(losses) // 4
    first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
    return (
        None if last < first else _described("loss_does_not_fall", facts, {"first": first, "last": last, "part": part})
    )


@dataclass(slots=True)
class LearningWatch:
    """Follows a run and reports each finding once."""

    facts: Facts
    history: list[Metrics] = field(default_factory=list[Metrics])
    reported: str | None = None
    """The cause that was reported last."""

    def step(self, metrics: Metrics) -> str | None:
        """Take in a step; returns a warning if there is a new one."""
        self.history.append({name: metrics[name] for name in _READ if name in metrics})
        if len(self.history) > MOST:
            del self.history[STEPS:-STEPS:2]
        found, before = finding(self.history, self.facts), self.reported
        self.reported = found and found.cause
        return f"warning: nothing is learned: {found}" if found and found.cause != before else None

    def end(self) -> str | None:
        found = at_the_end(self.history, self.facts)
        return None if found is None else f"the run ended without learning: {found}"


_READ = (
    *("step", "loss", "grad_norm", "optimizer_steps", "skipped_steps", "reward", "reward/std", "rollouts", "correct"),
    *("rollouts/failed", "groups_equal", "groups_kept", "truncated", "entropy", "policy_kl"),
    *("completion_tokens_max", "nonfinite_tokens"),
)


def _first(causes: Mapping[str, Cause], seen: _Seen) -> Finding | None:
    """The first cause that applies."""
    for key, applies in causes.items():
        if (values := applies(seen)) is not None:
            return _described(key, seen.facts, values)
    return None


def _described(key: str, facts: Facts, values: Values) -> Finding:
    text, values = _texts()[key], asdict(facts) | values
    return Finding(text.get("cause", key), text["numbers"].format(**values), text["advice"].format(**values))


@cache
def _texts() -> dict[str, dict[str, str]]:
    return tomllib.loads(files("tunesmith.monitor").joinpath("findings.toml").read_text(encoding="utf-8"))


def _all_skipped(step: Metrics) -> bool:
    return step.get("skipped_steps", 0) >= step.get("optimizer_steps", 1) > 0


def _no_gradient(step: Metrics) -> bool:
    return step.get("optimizer_steps") == 0 or _all_skipped(step) or step.get("grad_norm", 1.0) <= NO_GRADIENT


def _rollouts_teach_nothing(step: Metrics, facts: Facts) -> bool:
    if step["step"] <= facts.frozen_steps:
        return False
    if _no_gradient(step):
        return True
    if not (facts.rewarded and facts.from_total) or step.get("rollouts", 0) < 2:
        return False
    return step.get("reward/std") == 0 or (facts.compares_group and step.get("groups_equal") == 1)


def _no_reach(seen: _Seen) -> Values | None:
    return {} if seen.facts.reach < LEAST_REACH else None


def _policy_moves_too_fast(seen: _Seen) -> Values | None:
    far = seen.always(lambda step: step.get("policy_kl", 0.0) > 1)
    return {"policy_kl": seen.mean("policy_kl")} if far else None


def _loss_rises(seen: _Seen) -> Values | None:
    first, now = seen.history[0].get("loss"), seen.mean("loss")
    if seen.facts.rollouts or first is None or now is None or len(seen.history) < 2 * STEPS:
        return None
    return {"first": first, "loss": now} if now > first + max(1.0, abs(first) / 2) else None


def _failing(seen: _Seen) -> Values | None:
    failed = seen.mean("rollouts/failed") or 0.0
    return {"failed": failed} if failed >= 0.5 else None


def _not_finite(seen: _Seen) -> Values | None:
    return {} if seen.always(_all_skipped) else None


def _ruined(seen: _Seen) -> Values | None:
    earlier = [step for step in seen.history[:-STEPS] if "reward" in step and step.get("reward/std")]
    earlier += [step for step in seen.last[:1] if step.get("reward/std")]
    now = seen.mean("reward")
    if not earlier or now is None:
        return None
    best = max(earlier, key=lambda step: step["reward"])
    if best["reward"] - now < 0.5 * max(abs(best["reward"]), best["reward/std"]):
        return None
    return {"reward": now, "best": best["reward"], "step": best["step"]}


def _unknown_prompts(seen: _Seen) -> Values | None:
    return {} if seen.facts.unknown >= 0.5 else None


def _always_right(seen: _Seen) -> Values | None:
    reward, full = seen.mean("reward"), seen.facts.full_reward
    right = full is not None and reward is not None and reward >= full - 1e-9
    return {"reward": reward or 0.0} if right or seen.mean("correct") == 1 else None


def _truncated(seen: _Seen) -> Values | None:
    cut, reward = seen.mean("truncated") or 0.0, seen.mean("reward")
    rewarded = reward is not None and reward > 0 and seen.mean("correct") != 0
    return {"truncated": cut} if cut >= 0.9 and not rewarded else None


def _always_wrong(seen: _Seen) -> Values | None:
    wrong = seen.mean("correct") in (None, 0.0) and seen.mean("reward") == 0
    return {"rollouts": seen.last[-1].get("rollouts", 0)} if wrong else None


def _constant(seen: _Seen) -> Values | None:
    return {"reward": seen.mean("reward")} if seen.always(lambda step: step.get("reward/std") == 0) else None


def _equal_rewards(seen: _Seen) -> Values | None:
    return {} if seen.always(lambda step: step.get("groups_equal") == 1) else None


def _equal_answers(seen: _Seen) -> Values | None:
    entropy = seen.mean("entropy")
    if _equal_rewards(seen) is None or (seen.facts.temperature >= 0.1 and (entropy is None or entropy >= 0.01)):
        return None
    return {"entropy": "" if entropy is None else f", entropy {entropy:.2g} nats per token"}


def _no_samples(seen: _Seen) -> Values | None:
    return {} if seen.always(lambda step: step.get("optimizer_steps") == 0) else None


def _knows_the_data(seen: _Seen) -> Values | None:
    loss = seen.mean("loss") or 0.0
    return {"loss": loss} if abs(loss) < 1e-4 else None


Cause = Callable[[_Seen], Values | None]
_HARMFUL: Mapping[str, Cause] = {
    "lr_without_effect": _no_reach,
    "policy_moves_too_fast": _policy_moves_too_fast,
    "loss_rises": _loss_rises,
}
"""These count even where steps have something to learn from."""
_ROLLOUT_CAUSES: Mapping[str, Cause] = {
    "failing": _failing,
    "not_finite": _not_finite,
    "ruined": _ruined,
    "unknown_prompts": _unknown_prompts,
    "always_right": _always_right,
    "truncated": _truncated,
    "always_wrong": _always_wrong,
    "constant_reward": _constant,
    "equal_answers": _equal_answers,
    "equal_rewards": _equal_rewards,
    "no_samples": _no_samples,
    "no_gradient": lambda seen: {"grad_norm": seen.mean("grad_norm") or 0.0},
}
_SUPERVISED_CAUSES: Mapping[str, Cause] = {
    "not_finite": _not_finite,
    "unknown_prompts": _unknown_prompts,
    "known": _knows_the_data,
    "no_gradient_at_a_loss": lambda seen: {"loss": seen.mean("loss") or 0.0},
}
