"""Advantage estimators. Plain NumPy.

An estimator takes the rollouts of a whole batch and returns one array per rollout, with an
advantage for every token that the policy wrote, in order. Other tokens, such as a tool's answer,
are not in the arrays.

An estimator is a class whose fields are its settings. Group statistics use the unbiased deviation
plus ``EPSILON``. A group of equal rewards gives exactly zero: equality is tested, not computed by
subtraction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from tunesmith.config.families import AdvantageChoice
from tunesmith.config.values import Share
from tunesmith.learn.algorithms.outcomes import (
    EPSILON,
    Advantages,
    Floats,
    Outcome,
    broadcast,
    by_group,
    equal,
    flat,
    per_group,
    per_token,
    suffix_sums,
    whiten,
)


class Estimator(AdvantageChoice):
    """An advantage estimator. A subclass has fields with defaults and ``__call__``."""

    @abstractmethod
    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        """Advantages of a whole batch, one array ``[n]`` per rollout; rewards are finite."""


def compute_advantages(estimator: AdvantageChoice, outcomes: Sequence[Outcome]) -> Advantages:
    """Advantages of a whole batch. Rewards are finite: a rollout with any other reward has already
    failed."""
    assert isinstance(estimator, Estimator)
    for o in outcomes:
        assert np.isfinite(o.total), f"a reward of {o.total} reached the estimator"
        for values in (o.token_rewards, o.values):
            fits = values is None or values.shape == (o.length,)
            assert fits, "one value per token the policy wrote"
    return estimator(outcomes)


class GroupEstimator(Estimator):
    """Gives every token of a rollout the same advantage: that of the total reward within its
    group."""

    needs = frozenset({"group"})

    @abstractmethod
    def relative(self, rewards: Floats, lengths: Floats) -> Floats:
        """Advantages ``[n]`` of the rollouts of one group, in which not all rewards are equal."""

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        scalars = per_group(outcomes, [o.total for o in outcomes], self.relative)
        return Advantages(broadcast(outcomes, scalars))


def _returns_to_go(
    outcomes: Sequence[Outcome], final: Sequence[float] | Floats, gamma: float
) -> Advantages:
    return Advantages(whiten(suffix_sums(per_token(outcomes, final), [gamma] * len(outcomes))))


class GRPO(GroupEstimator):
    """Standardised within the group, with the unbiased deviation as in TRL, verl and OpenRLHF."""

    name = "grpo"
    formula = "(r − mean) / (std + 1e-6)"
    source = "DeepSeekMath, arXiv:2402.03300"
    use = "the usual choice where several answers per prompt can be compared"

    def relative(self, rewards: Floats, lengths: Floats) -> Floats:
        return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


class DrGRPO(GroupEstimator):
    """Centred, not divided by the deviation, which would favour tasks that are nearly always or
    never solved."""

    name = "dr_grpo"
    formula = "r − mean"
    source = "Dr. GRPO, arXiv:2503.20783"
    use = "tasks of very different difficulty, long answers"

    def relative(self, rewards: Floats, lengths: Floats) -> Floats:
        return rewards - rewards.mean()


class RLOO(GroupEstimator):
    """Leave one out, computed as ``n/(n − 1)·(r − mean)``."""

    name = "rloo"
    formula = "r − mean of the others"
    source = "RLOO, arXiv:2402.14740"
    use = "small groups; an unbiased baseline"

    def relative(self, rewards: Floats, lengths: Floats) -> Floats:
        return rewards.size / (rewards.size - 1) * (rewards - rewards.mean())


class OPO(GroupEstimator):
    """The baseline of lowest variance: the group's mean reward weighted by length."""

    name = "opo"
    formula = "r − Σ|y|r / Σ|y|"
    source = "OPO, arXiv:2505.23585"
    use = "strictly on-policy training with answers of very different lengths"

    def relative(self, rewards: Floats, lengths: Floats) -> Floats:
        weights = lengths if lengths.any() else np.ones_like(lengths)
        return rewards - np.average(rewards, weights=weights)


class GPGEstimator(DrGRPO):
    """Centred, and scaled up to make up for groups without a gradient, whose rewards are equal.

    This counts groups, as the paper does; verl counts rollouts with a non-zero reward.
    """

    name = "gpg"
    formula = "(groups / groups with spread) · (r − mean)"
    source = "GPG, arXiv:2504.02546"
    use = "many groups have equal rewards and dynamic filtering costs too much"

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        groups = by_group(outcomes)
        uneven = sum(not equal(np.array([outcomes[i].total for i in places])) for places in groups)
        scale = len(groups) / max(uneven, 1)
        return Advantages([scale * a for a in super().__call__(outcomes).advantages])


class GDPO(Estimator):
    """Each reward standardised separately, then summed and whitened over the batch's policy tokens.

    A reward that does not apply (None) adds nothing and is not in its group's statistics. Whitening
    is over tokens as in verl; TRL whitens over sequences.
    """

    name = "gdpo"
    formula = "whiten(Σ_k w_k (r_k − mean_k) / (std_k + 1e-6))"
    source = "GDPO, arXiv:2601.05242"
    use = "several rewards of different scale"
    needs = frozenset({"group", "reward_weights"})
    shaping = "reads each reward before shaping"

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        assert all(o.components for o in outcomes), "gdpo reads every reward alone"
        scalars = np.zeros(len(outcomes))
        for name in dict.fromkeys(name for o in outcomes for name in o.components):
            weights = np.array([o.weights.get(name, 1.0) for o in outcomes])
            rewards = [o.components.get(name) for o in outcomes]
            scalars += weights * per_group(outcomes, rewards, GRPO().relative)
        return Advantages(whiten(broadcast(outcomes, scalars)))


class ReinforceEstimator(Estimator):
    """The return to go of the final reward and the token rewards, whitened over the batch."""

    name = "reinforce"
    formula = "whiten(Σ_{k≥t} γ^{k−t} r_k)"
    source = "REINFORCE++, arXiv:2501.03262"
    use = "one answer per prompt, no second model"
    by_turn = True

    gamma: Share = 1.0
    """Discount per token."""

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        return _returns_to_go(outcomes, [o.reward for o in outcomes], self.gamma)


class ReinforceBaseline(Estimator):
    """Centred within the group, then whitened over the batch.

    Token rewards (the KL penalty) are added after the baseline, as return to go with γ = 1, as in
    OpenRLHF.
    """

    name = "reinforce_baseline"
    formula = "whiten(r − mean, minus the KL to go)"
    source = "REINFORCE++-baseline, arXiv:2501.03262"
    use = "groups, with one scale of advantages in the batch"
    needs = frozenset({"group"})

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        centred = per_group(outcomes, [o.reward for o in outcomes], DrGRPO().relative)
        return _returns_to_go(outcomes, centred, 1.0)


class ReMax(Estimator):
    """The difference from the reward of the same policy's greedy rollout."""

    name = "remax"
    formula = "r − r(greedy rollout)"
    source = "ReMax, arXiv:2310.10505"
    use = "one or two answers per prompt, deterministic tasks"
    needs = frozenset({"greedy_rollout"})

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        scalars: list[float] = []
        for o in outcomes:
            assert o.greedy_reward is not None, "remax compares with the reward of a greedy rollout"
            scalars.append(o.total - o.greedy_reward)
        return Advantages(broadcast(outcomes, scalars))


class CriticEstimator(Estimator):
    """An estimator that reads a critic's values."""

    needs = frozenset({"critic"})
    by_turn = True

    gamma: Share = 1.0
    """Discount per token."""
    bootstrap_truncated: bool = False
    """Add the critic's last value to the return of a rollout that a limit cut off."""


class GAE(CriticEstimator):
    """Generalised advantages, whitened; the critic's returns are not whitened.

    With ``critic_lambda`` the critic's returns use a different λ (decoupled GAE, VC-PPO,
    arXiv:2503.01491).
    """

    name = "gae"
    formula = "whiten(Σ_k (γλ)^k δ_{t+k}), δ_t = r_t + γV_{t+1} − V_t"
    source = "GAE, arXiv:1506.02438"
    use = (
        "credit differs from token to token, or rewards are paid along the way; a critic is "
        "affordable"
    )

    gae_lambda: Share = 0.95
    """λ: how far rewards reach back, from 0 (one token) to 1 (all earlier tokens)."""
    critic_lambda: Share | None = None
    """λ of the returns that the critic learns; none: ``gae_lambda``."""

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        critic = self.gae_lambda if self.critic_lambda is None else self.critic_lambda
        estimated = _generalise(outcomes, self.gamma, [self.gae_lambda] * len(outcomes), critic)
        return Advantages(whiten(estimated.advantages), estimated.returns)


class VAPO(CriticEstimator):
    """Length-adaptive λ, so that the reward reaches the first token of a long rollout. Not
    whitened.

    The paper uses λ = 1 − 1/(α|y|), which is negative for |y| < 20; the 1 added to the denominator
    keeps λ in (0, 1).
    """

    name = "vapo"
    formula = "GAE with λ = 1 − 1/(α|y| + 1) for the policy and 1 for the critic"
    source = "VAPO, arXiv:2504.05118"
    use = "as gae, for long reasoning"

    lambda_alpha: Annotated[float, Field(gt=0)] = 0.05
    """α: with a larger α, λ approaches 1 at shorter lengths."""

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        lambdas = [1.0 - 1.0 / (self.lambda_alpha * o.length + 1.0) for o in outcomes]
        return _generalise(outcomes, self.gamma, lambdas, 1.0)


def _generalise(
    outcomes: Sequence[Outcome], gamma: float, lambdas: Sequence[float], critic_lambda: float
) -> Advantages:
    """``Σ_k (γλ)^k δ_{t+k}`` with each rollout's λ; returns are the sums with ``critic_lambda``
    plus the values."""
    deltas: list[Floats] = []
    values: list[Floats] = []
    for o, rewards in zip(outcomes, per_token(outcomes, [o.reward for o in outcomes]), strict=True):
        assert o.values is not None, "generalised advantages need a critic's values"
        following = np.append(o.values, o.final_value)[1:]
        deltas.append(rewards + gamma * following - o.values)
        values.append(o.values)
    returns = suffix_sums(deltas, [gamma * critic_lambda] * len(deltas))
    advantages = suffix_sums(deltas, [gamma * lam for lam in lambdas])
    return Advantages(advantages, list(map(np.add, returns, values)))


class TokenReward(Estimator):
    """The reward of each token minus the batch's mean: with the KL to a teacher in the reward,
    logπ_T − logπ.

    Rewards are not summed over later tokens: a token's own difference gives the gradient of the
    reverse KL there. The rollout's reward is not read. The mean leaves the expected gradient
    unchanged and removes most of its noise.
    """

    name = "token_reward"
    formula = "r_t − mean(r)"
    source = "on-policy distillation, Thinking Machines 2025"
    use = "distillation: every token has a reward"
    needs = frozenset({"teacher"})
    shaping = "does not read the rollout's reward"

    def __call__(self, outcomes: Sequence[Outcome]) -> Advantages:
        rewards = per_token(outcomes, [0.0] * len(outcomes))
        every = flat(rewards)
        return Advantages([0.0 * r if equal(every) else r - every.mean() for r in rewards])
