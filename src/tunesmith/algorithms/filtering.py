"""Dynamic filtering (DAPO, arXiv:2503.14476): groups whose rollouts are all as good teach nothing.

A group stays when the scores of its rollouts differ and their mean lies strictly between the bounds, where there are
any. Scores are taken before shaping, so that a length penalty does not make a solved group look unsolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from tunesmith.types import Rollout, RolloutGroup


def rollout_score(rollout: Rollout, weights: Mapping[str, float] | None = None) -> float | None:
    """Weighted mean of the rollout's raw rewards by name, of those that apply; None without any.

    What an environment paid is one of them, with a weight of 1 (``RewardSet.score``).
    Penalties (weights of 0 and below) say nothing about whether a task is solved and are left out.
    """
    share = {name: (weights or {}).get(name, 1.0) for name in rollout.rewards}
    scores = {name: value for name, value in rollout.rewards.items() if value is not None and share[name] > 0}
    total = sum(share[name] for name in scores)
    return sum(scores[name] * share[name] for name in scores) / total if scores else None


def has_contrast(
    group: RolloutGroup, low: float | None = None, high: float | None = None, weights: Mapping[str, float] | None = None
) -> bool:
    """Whether the usable rollouts' scores differ, and their mean is strictly between the bounds."""
    scores = [s for r in group.usable if (s := rollout_score(r, weights)) is not None]
    if not scores or min(scores) == max(scores):
        return False
    return (-inf if low is None else low) < sum(scores) / len(scores) < (inf if high is None else high)


def filter_groups(
    groups: Sequence[RolloutGroup],
    low: float | None = None,
    high: float | None = None,
    weights: Mapping[str, float] | None = None,
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """Split a batch, in order, into groups to train on and groups to replace."""
    kept: list[RolloutGroup] = []
    rejected: list[RolloutGroup] = []
    for group in groups:
        (kept if has_contrast(group, low, high, weights) else rejected).append(group)
    return kept, rejected
