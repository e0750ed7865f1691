"""From rewarded groups to a batch: shaping, reference log-probabilities, values, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tunesmith.algorithms.advantages import CriticEstimator, compute_advantages
from tunesmith.algorithms.columns import prepare_columns
from tunesmith.algorithms.kl import KLInReward, kl_values
from tunesmith.algorithms.outcomes import Outcome
from tunesmith.algorithms.shaping import clip_reward, stop_properly
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.data.batch import Batch, Floats
from tunesmith.loop.critic import Critic
from tunesmith.loop.learner import Learner
from tunesmith.types import Rollout, RolloutGroup, Sample


def make_experience(
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmSection,
    learner: Learner,
    *,
    kl_coef: float,
    max_new_tokens: int,
    seed: int,
    critic: Critic | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> Batch:
    """The batch of a step's rollouts, one sample per record, with every column its loss reads.

    Failed rollouts are left out. Rollouts that are masked for hitting the length limit count in their group's
    baseline, and are left out after that.
    """
    played = [(r, number) for number, group in enumerate(groups) for r in group.usable if r.num_sampled]
    rollouts = [rollout for rollout, _ in played]
    batch = rollout_batch(played)
    if algorithm.decoupled:
        batch.add("old_logprobs", learner.score(batch))
    rewards = [_shaped(rollout, algorithm, max_new_tokens) for rollout in rollouts]
    greedy = [group.greedy and _shaped(group.greedy, algorithm, max_new_tokens) for group in groups]
    paid: list[Floats | None] = [None] * len(rollouts)
    if algorithm.advantage.by_turn:
        turns = [np.array([reward for record in r.records for reward in record.token_rewards]) for r in rollouts]
        paid = [own if own.any() else None for own in turns]
        rewards = [r - float(t.sum()) for r, t in zip(rewards, turns, strict=True)]
    if algorithm.reference:
        batch.add("ref_logprobs", learner.score(batch, reference=True))
        if isinstance(algorithm.kl, KLInReward):
            kl = kl_values(batch.columns["old_logprobs"], batch.columns["ref_logprobs"], algorithm.kl.estimator)
            # A KL of NaN adds no penalty; the loss leaves that token out.
            penalty = by_rollout(batch, np.nan_to_num(-kl_coef * kl))
            paid = [k if p is None else p + k for p, k in zip(paid, penalty, strict=True)]
    outcomes = [
        Outcome(
            group,
            reward,
            rollout.num_sampled,
            rollout.rewards,
            reward_weights or {},
            token_rewards,
            greedy_reward=greedy[group],
        )
        for (rollout, group), reward, token_rewards in zip(played, rewards, paid, strict=True)
    ]
    if critic:
        bootstrap = isinstance(algorithm.advantage, CriticEstimator) and algorithm.advantage.bootstrap_truncated
        outcomes = _valued(batch, outcomes, rollouts, critic, bootstrap)
    estimated = compute_advantages(algorithm.advantage, outcomes)
    batch.add("advantages", np.concatenate([np.zeros(0), *estimated.advantages]))
    if estimated.returns is not None:
        batch.add("returns", np.concatenate([np.zeros(0), *estimated.returns]))
    masked = np.array([algorithm.mask_truncated and r.finish_reason == "length" for r in rollouts], np.bool_)
    _note_tokens([r if not left_out else None for r, left_out in zip(rollouts, masked, strict=True)], batch, algorithm)
    batch = batch.take(np.flatnonzero(~masked[batch.rollout]))
    prepare_columns(batch, algorithm, seed)
    return batch


def rollout_batch(played: Sequence[tuple[Rollout, int]]) -> Batch:
    """Rollouts, each with the number of its group, as a batch with one sample per record.

    Nothing is tokenized again: the records have the tokens, their authors, and the sampler's log-probabilities, which
    fill the columns ``old_logprobs`` and ``behaviour_logprobs``.
    """
    records = [(r, group, i) for i, (rollout, group) in enumerate(played) for r in rollout.records if r.num_sampled]
    batch = Batch.of([Sample(r.token_ids, r.sampled, group, rollout) for r, group, rollout in records])
    sampler = [p for r, _, _ in records for p, wrote in zip(r.logprobs, r.sampled, strict=True) if wrote]
    batch.add("old_logprobs", sampler)
    batch.add("behaviour_logprobs", sampler)
    return batch


def _note_tokens(rollouts: Sequence[Rollout | None], batch: Batch, algorithm: AlgorithmSection) -> None:
    """Store the batch's values of each rollout's tokens in the rollout; None for rollouts that are not learned from."""
    columns = batch.columns
    noted = {"advantage": columns["advantages"]}
    if algorithm.reference:
        noted["reference"] = columns["ref_logprobs"]
    if algorithm.decoupled:
        noted["ratio"] = np.exp(columns["old_logprobs"] - columns["behaviour_logprobs"])
    by_token = {name: by_rollout(batch, values) for name, values in noted.items()}
    for number, rollout in enumerate(rollouts):
        if rollout:
            rollout.by_token = {name: values[number] for name, values in by_token.items()}
            rollout.advantage = float(np.mean(rollout.by_token["advantage"]))


def by_rollout(batch: Batch, values: Floats) -> list[Floats]:
    """``[N]`` as one array per rollout, record after record."""
    counts = np.bincount(batch.rollout, batch.counts).astype(np.int64)
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []


def _shaped(rollout: Rollout, algorithm: AlgorithmSection, max_new_tokens: int) -> float:
    assert rollout.reward is not None, "a rollout without a reward is not learned from"
    reward = rollout.reward
    if algorithm.stop_properly is not None:
        reward = stop_properly(reward, rollout.finish_reason, algorithm.stop_properly)
    if algorithm.overlong:
        longest = max((turn.stop - turn.start for record in rollout.records for turn in record.turns), default=0)
        reward += algorithm.overlong.penalty(longest, max_new_tokens)
    return clip_reward(reward, *algorithm.reward_clip) if algorithm.reward_clip else reward


def _valued(
    batch: Batch, outcomes: Sequence[Outcome], rollouts: Sequence[Rollout], critic: Critic, bootstrap: bool
) -> list[Outcome]:
    """Add the critic's values; with ``bootstrap`` also the value of the state in which a limit ended a rollout."""
    values, ends = critic.values(batch, ends=bootstrap)
    batch.add("old_values", values)
    last = np.cumsum(np.bincount(batch.rollout)) - 1  # the sample that each rollout ends with
    finals = [float(end) if r.truncated else 0.0 for r, end in zip(rollouts, ends[last], strict=True)]
    return [
        replace(outcome, values=own, final_value=final)
        for outcome, own, final in zip(outcomes, by_rollout(batch, values), finals, strict=True)
    ]
