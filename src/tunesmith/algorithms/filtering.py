"""Dynamic filtering (DAPO, arXiv:2503.14476): groups whose rollouts are all equally good teach nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Self

from pydantic import model_validator

from tunesmith.config.section import Section
from tunesmith.config.values import PositiveInt
from tunesmith.types import Rollout, RolloutGroup


class DynamicFilter(Section):
    """Keeps groups whose rollouts differ in score, with a mean score strictly between the bounds, if there are any.

    Scores are taken before shaping, so that a length penalty does not make a solved group look unsolved.
    """

    low: float | None = None
    """Lower bound of a group's mean score."""
    high: float | None = None
    """Upper bound of a group's mean score."""
    rest_epochs: PositiveInt | None = None
    """Epochs for which a prompt is left out after its group was filtered; none: it comes again with the next one."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low:g} has to be below high = {self.high:g}")
        return self

    def keeps(self, group: RolloutGroup, weights: Mapping[str, float] | None = None) -> bool:
        """Whether a group has something to teach."""
        scores = [s for r in group.usable if (s := rollout_score(r, weights)) is not None]
        if not scores or min(scores) == max(scores):
            return False
        low, high = -inf if self.low is None else self.low, inf if self.high is None else self.high
        return low < sum(scores) / len(scores) < high

    def split(
        self, groups: Sequence[RolloutGroup], weights: Mapping[str, float] | None = None
    ) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        """A batch, in order, as groups to train on and groups to replace."""
        kept: list[RolloutGroup] = []
        rejected: list[RolloutGroup] = []
        for group in groups:
            (kept if self.keeps(group, weights) else rejected).append(group)
        return kept, rejected


def rollout_score(rollout: Rollout, weights: Mapping[str, float] | None = None) -> float | None:
    """Weighted mean of the rollout's raw rewards by name, of those that apply; None without any.

    What an environment paid is one of them, with a weight of 1 (``RewardSet.score``).
    Penalties (weights of 0 and below) say nothing about whether a task is solved and are left out.
    """
    share = {name: (weights or {}).get(name, 1.0) for name in rollout.rewards}
    scores = {name: value for name, value in rollout.rewards.items() if value is not None and share[name] > 0}
    total = sum(share[name] for name in scores)
    return sum(scores[name] * share[name] for name in scores) / total if scores else None
