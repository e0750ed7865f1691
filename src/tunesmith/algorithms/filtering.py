"""Dynamic filtering (DAPO, arXiv:2503.14476): groups that are always or never right teach nothing.

A group stays when its mean score lies strictly between two bounds. Scores are in [0, 1] and are taken
before shaping, so that a length penalty does not make a solved group look unsolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunesmith.errors import ConfigError
from tunesmith.types import Rollout, RolloutGroup


def rollout_score(rollout: Rollout, weights: Mapping[str, float] | None = None) -> float | None:
    """Weighted mean of the rollout's raw rewards by name, of those that apply; None without any.

    What an environment paid is one of them, with a weight of 1 (``RewardSet.score``).
    Penalties (weights of 0 and below) say nothing about whether a task is solved and are left out.

    Raises:
        ConfigError: a score lies outside [0, 1], so its mean says nothing about how often a task is solved.
    """
    share = {name: (weights or {}).get(name, 1.0) for name in rollout.rewards}
    scores = {name: value for name, value in rollout.rewards.items() if value is not None and share[name] > 0}
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


def filter_groups(
    groups: Sequence[RolloutGroup],
    low: float = 0.0,
    high: float = 1.0,
    weights: Mapping[str, float] | None = None,
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """Split a batch, in order, into groups to train on and groups to replace; those without a score are replaced."""
    kept: list[RolloutGroup] = []
    rejected: list[RolloutGroup] = []
    for group in groups:
        score = group_score(group, weights)
        (kept if score is not None and low < score < high else rejected).append(group)
    return kept, rejected
