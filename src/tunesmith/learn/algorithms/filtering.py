"""Dynamic filtering (DAPO, arXiv:2503.14476): groups with equal scores give no gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from math import inf
from operator import not_

from tunesmith.config.families import DynamicFilter
from tunesmith.types import Rollout, RolloutGroup

Weights = Mapping[str, float] | None
"""Weights of rewards by name; a reward without an entry has weight 1."""


def is_kept(bounds: DynamicFilter, group: RolloutGroup, weights: Weights = None) -> bool:
    """Whether a group is trained on.

    Scores are taken before shaping, so that a length penalty does not make a solved group look
    unsolved.
    """
    every = (rollout_score(rollout, weights) for rollout in group.usable)
    scores = [score for score in every if score is not None]
    if not scores or min(scores) == max(scores):
        return False
    low = -inf if bounds.low is None else bounds.low
    high = inf if bounds.high is None else bounds.high
    return low < sum(scores) / len(scores) < high


def split(
    bounds: DynamicFilter, groups: Sequence[RolloutGroup], weights: Weights = None
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """The groups to train on and those to replace, in order."""
    kept = [is_kept(bounds, group, weights) for group in groups]
    return list(compress(groups, kept)), list(compress(groups, map(not_, kept)))


def rollout_score(rollout: Rollout, weights: Weights = None) -> float | None:
    """The weighted mean of the rollout's raw rewards that apply; None if there are none.

    The environment's reward is among them, with a weight of 1 (``RewardSet.score``). Penalties
    (weights of 0 or less) are not: they do not tell whether a task is solved.
    """
    scores = 0.0
    shares = 0.0
    for name, value in rollout.rewards.items():
        share = (weights or {}).get(name, 1.0)
        if value is not None and share > 0:
            scores += value * share
            shares += share
    return scores / shares if shares else None
