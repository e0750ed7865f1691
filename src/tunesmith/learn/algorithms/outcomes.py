"""Inputs, outputs and common arithmetic of advantage estimators. Plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EPSILON = 1e-6
"""Added to a deviation in a denominator. TRL adds 1e-4, OpenRLHF 1e-9, verl 1e-6."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rollout for an estimator. ``n`` is ``length``, the number of tokens that the policy
    wrote."""

    group: int
    """The number of the task."""
    reward: float
    """After shaping and clipping; paid at the last token."""
    length: int
    components: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Each reward separately (``gdpo``); None if it does not apply."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weights of the components; 1 for one without an entry."""
    token_rewards: Floats | None = None
    """``[n]``, paid in addition to ``reward``: rewards of turns, minus the KL penalty."""
    values: Floats | None = None
    """``[n]``, the critic's value of the state before each token (``gae``, ``vapo``)."""
    final_value: float = 0.0
    """The value after the last token: 0 if the episode ended there; the critic's if a limit cut it
    off and ``bootstrap_truncated`` is set (arXiv:1712.00378). TRL, verl and OpenRLHF always take
    0."""
    greedy_reward: float | None = None
    """The reward of the task's greedy rollout (``remax``)."""

    @property
    def total(self) -> float:
        """The sum of all rewards of the rollout."""
        paid = 0.0 if self.token_rewards is None else float(self.token_rewards.sum())
        return self.reward + paid


@dataclass(frozen=True, slots=True)
class Advantages:
    """One array ``[n]`` per rollout; ``returns`` are a critic's targets."""

    advantages: list[Floats]
    returns: list[Floats] | None = None


def whiten(parts: Sequence[Floats]) -> list[Floats]:
    """Scale all values of the batch to mean 0 and deviation 1; exactly 0 if they are all equal.

    Unbiased deviation plus ``EPSILON`` (verl: ``sqrt(var + 1e-8)``, OpenRLHF: the biased
    deviation). A value that is not finite, as after a critic's overflow, stays so by itself.
    """
    values = flat(parts)
    values = values[np.isfinite(values)]
    if equal(values):
        return [np.where(np.isfinite(p), 0.0, p) for p in parts]
    mean = values.mean()
    deviation = values.std(ddof=1)
    return [(p - mean) / (deviation + EPSILON) for p in parts]


def suffix_sums(parts: Sequence[Floats], discounts: Sequence[float]) -> list[Floats]:
    """``s[t] = x[t] + discount · s[t + 1]`` within each part.

    Each iteration computes one token of every part, from the ends, so the longest part sets the
    number of iterations.
    """
    lengths = np.array([p.size for p in parts], dtype=np.int64)
    ends = np.cumsum(lengths)
    sums = flat(parts)
    order = np.argsort(-lengths, kind="stable")
    discount = np.array(discounts, dtype=np.float64)[order]
    for step in range(1, int(lengths.max(initial=0))):
        active = int((lengths > step).sum())
        rows = ends[order[:active]] - 1 - step
        sums[rows] += discount[:active] * sums[rows + 1]
    return np.split(sums, ends[:-1]) if len(parts) else []


def flat(parts: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def equal(values: Floats) -> bool:
    return bool(np.all(values == values[:1]))


def by_group(outcomes: Sequence[Outcome]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for place, outcome in enumerate(outcomes):
        groups.setdefault(outcome.group, []).append(place)
    return list(groups.values())


Relative = Callable[[Floats, Floats], Floats]
"""``(rewards, lengths) -> advantages`` of the rollouts of one group, in which not all rewards are
equal."""


def per_group(
    outcomes: Sequence[Outcome], rewards: Sequence[float | None], relative: Relative
) -> Floats:
    """``relative`` within each group; exactly zero for equal rewards, a single rollout, and a
    reward of None."""
    advantages = np.zeros(len(outcomes))
    for places in by_group(outcomes):
        members = [i for i in places if rewards[i] is not None]
        values = np.array([rewards[i] for i in members], dtype=np.float64)
        lengths = np.array([outcomes[i].length for i in members], dtype=np.float64)
        if not equal(values):
            advantages[members] = relative(values, lengths)
    return advantages


def broadcast(outcomes: Sequence[Outcome], scalars: Sequence[float] | Floats) -> list[Floats]:
    return [np.full(o.length, s) for o, s in zip(outcomes, scalars, strict=True)]


def per_token(outcomes: Sequence[Outcome], final: Sequence[float] | Floats) -> list[Floats]:
    """Rewards per token: ``token_rewards`` plus ``final`` at the last token."""
    rewards: list[Floats] = []
    for o, reward in zip(outcomes, final, strict=True):
        tokens = np.zeros(o.length)
        if o.token_rewards is not None:
            tokens += o.token_rewards
        tokens[-1:] += reward
        rewards.append(tokens)
    return rewards
