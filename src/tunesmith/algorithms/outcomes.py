"""What advantage estimators read and give, and the arithmetic they share. Plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EPSILON = 1e-6
"""Added to a deviation that is divided by. TRL adds 1e-4, OpenRLHF 1e-9, verl 1e-6."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rollout as an estimator sees it. ``n`` is ``length``, the number of tokens the policy wrote."""

    group: int
    """Rollouts of one task share a number."""
    reward: float
    """After shaping and clipping; paid at the last token."""
    length: int
    components: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Each reward by itself (``gdpo``); None where it does not apply."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the components; one that is not named weighs 1."""
    token_rewards: Floats | None = None
    """``[n]``, paid on tokens beside ``reward``: per-turn rewards, minus the KL penalty."""
    values: Floats | None = None
    """``[n]``, the critic's value of the state each token was written in (``gae``, ``vapo``)."""
    final_value: float = 0.0
    """The critic's value after the last token: 0 where the episode ended there; with ``bootstrap_truncated``, the
    critic's where a limit cut it (arXiv:1712.00378). TRL, verl and OpenRLHF always take 0."""
    greedy_reward: float | None = None
    """Reward of the greedy rollout of the same task (``remax``)."""

    @property
    def total(self) -> float:
        """The reward of the whole rollout, whatever token it was paid on."""
        return self.reward + (0.0 if self.token_rewards is None else float(self.token_rewards.sum()))


@dataclass(frozen=True, slots=True)
class Advantages:
    """One array ``[n]`` per rollout; ``returns`` are what a critic is trained on."""

    advantages: list[Floats]
    returns: list[Floats] | None = None


def whiten(parts: Sequence[Floats]) -> list[Floats]:
    """All values of the batch to mean 0 and deviation 1; exactly 0 where they are all equal.

    Unbiased deviation plus ``EPSILON`` (verl: ``sqrt(var + 1e-8)``, OpenRLHF: the biased deviation).
    """
    values = flat(parts)
    if equal(values):
        return [np.zeros_like(p) for p in parts]
    mean, deviation = values.mean(), values.std(ddof=1)
    return [(p - mean) / (deviation + EPSILON) for p in parts]


def suffix_sums(parts: Sequence[Floats], discounts: Sequence[float]) -> list[Floats]:
    """``s[t] = x[t] + discount · s[t + 1]`` within each part.

    All parts advance together, one token per step from their ends, so the Python loop is as long as the
    longest rollout and not as the batch.
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
"""``(rewards, lengths) -> advantages`` of the rollouts of one group, in which not all rewards are equal."""


def per_group(outcomes: Sequence[Outcome], rewards: Sequence[float | None], relative: Relative) -> Floats:
    """``relative`` within each group; exactly zero for equal rewards (or one rollout), and where there is none."""
    advantages = np.zeros(len(outcomes))
    for places in by_group(outcomes):
        given = {i: reward for i in places if (reward := rewards[i]) is not None}
        values = np.array(list(given.values()), dtype=np.float64)
        if not equal(values):
            advantages[list(given)] = relative(values, np.array([outcomes[i].length for i in given], dtype=np.float64))
    return advantages


def broadcast(outcomes: Sequence[Outcome], scalars: Sequence[float] | Floats) -> list[Floats]:
    return [np.full(o.length, s) for o, s in zip(outcomes, scalars, strict=True)]


def paid(outcomes: Sequence[Outcome], final: Sequence[float] | Floats) -> list[Floats]:
    """Reward per token: ``token_rewards``, and ``final`` at the last token."""
    rewards: list[Floats] = []
    for o, reward in zip(outcomes, final, strict=True):
        tokens = np.zeros(o.length) if o.token_rewards is None else o.token_rewards.astype(np.float64)
        tokens[-1:] += reward
        rewards.append(tokens)
    return rewards
