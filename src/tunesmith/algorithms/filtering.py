"""Dynamic filtering (DAPO, arXiv:2503.14476): groups that are always or never right teach nothing.

A group stays when its mean score lies strictly between two bounds. Scores are in [0, 1] and are taken
before shaping, so that a length penalty does not make a solved group look unsolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunesmith.errors import ConfigError
from tunesmith.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Filtered:
    """The two halves of a batch; ``len(kept) / (len(kept) + len(rejected))`` is the yield to report."""

    kept: list[RolloutGroup]
    rejected: list[RolloutGroup]


def rollout_score(rollout: Rollout, weights: Mapping[str, float] | None = None) -> float | None:
    """Weighted mean of the rollout's raw rewards by name, of those that apply; None without any.

    Penalties (weights of 0 and below) say nothing about whether a task is solved and are left out. A
    rollout whose rewards have no names is scored by its one reward.

    Raises:
        ConfigError: a score lies outside [0, 1], so its mean says nothing about how often a task is solved.
    """
    rewards = rollout.rewards or {"reward": rollout.reward}
    share = {name: (weights or {}).get(name, 1.0) for name in rewards}
    scores = {name: value for name, value in rewards.items() if value is not None and share[name] > 0}
    for name, value in scores.items():
        if not 0.0 <= value <= 1.0:
            raise ConfigError(
                f"algorithm.dynamic_filter needs rewards between 0 and 1, but '{name}' gave {value:g}. "
                "Rescale that reward, or set algorithm.dynamic_filter=false."
            )
    total = sum(share[name] for name in scores)
    return sum(scores[name] * share[name] for name in scores) / total if scores else None


def group_score(group: RolloutGroup, weights: Mapping[str, float] | None = None) -> float | None:
    """Mean score of the usable rollouts; None where none is usable."""
    scores = [s for r in group.usable if (s := rollout_score(r, weights)) is not None]
    return sum(scores) / len(scores) if scores else None


def is_informative(score: float | None, low: float = 0.0, high: float = 1.0) -> bool:
    """Strictly between the bounds; a group without a score is not."""
    return score is not None and low < score < high


def filter_groups(
    groups: Sequence[RolloutGroup],
    low: float = 0.0,
    high: float = 1.0,
    weights: Mapping[str, float] | None = None,
) -> Filtered:
    """Split a batch, in order, into groups to train on and groups to replace."""
    kept: list[RolloutGroup] = []
    rejected: list[RolloutGroup] = []
    for group in groups:
        (kept if is_informative(group_score(group, weights), low, high) else rejected).append(group)
    return Filtered(kept, rejected)
