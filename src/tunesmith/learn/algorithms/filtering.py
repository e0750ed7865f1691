"""Dynamic filtering (DAPO, arXiv:2503.14476): groups with equal scores give no gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from math import inf
from typing import Self

from pydantic import model_validator

from tunesmith.config.section import Section
from tunesmith.config.values import PositiveInt
from tunesmith.types import Rollout, RolloutGroup


class DynamicFilter(Section):
    """Keeps groups with unequal scores and, if there are bounds, a mean score strictly between
    them.

    Scores are taken before shaping, so that a length penalty does not make a solved group look
    unsolved.
    """

    low: float | None = None
    """Lower bound of a group's mean score."""
    high: float | None = None
    """Upper bound of a group's mean score."""
    rest_epochs: PositiveInt | None = None
    """Epochs for which a prompt is skipped after its group was filtered; none: it returns in the
    next epoch."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low:g} has to be below high = {self.high:g}")
        return self

    def keeps(self, group: RolloutGroup, weights: Mapping[str, float] | None = None) -> bool:
        """Whether a group is trained on."""
        scores = [s for r in group.usable if (s := rollout_score(r, weights)) is not None]
        if not scores or min(scores) == max(scores):
            return False
        low = -inf if self.low is None else self.low
        high = inf if self.high is None else self.high
        return low < sum(scores) / len(scores) < high

    def split(
        self, groups: Sequence[RolloutGroup], weights: Mapping[str, float] | None = None
    ) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        """The groups to train on and those to replace, in order."""
        keeps = [self.keeps(group, weights) for group in groups]
        return list(compress(groups, keeps)), [
            group for group, kept in zip(groups, keeps, strict=True) if not kept
        ]


def rollout_score(rollout: Rollout, weights: Mapping[str, float] | None = None) -> float | None:
    """The weighted mean of the rollout's raw rewards that apply; None if there are none.

    The environment's reward is among them, with a weight of 1 (``RewardSet.score``). Penalties
    (weights of 0 or less) are not: they do not tell whether a task is solved.
    """
    shares = {name: (weights or {}).get(name, 1.0) for name in rollout.rewards}
    scores = [
        (value, shares[name])
        for name, value in rollout.rewards.items()
        if value is not None and shares[name] > 0
    ]
    return (
        sum(value * share for value, share in scores) / sum(share for _, share in scores)
        if scores
        else None
    )
