"""From rewarded groups to a batch: shaping, reference log-probabilities, values, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import numpy as np

from tunesmith.config.algorithm import Algorithm
from tunesmith.config.families import KLInReward
from tunesmith.learn.algorithms.advantages import CriticEstimator, compute_advantages
from tunesmith.learn.algorithms.kl import kl_values
from tunesmith.learn.algorithms.objective import prepare_columns
from tunesmith.learn.algorithms.outcomes import Outcome, flat
from tunesmith.learn.algorithms.shaping import clip_reward, overlong_penalty, stop_properly
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.run.loop.critic import Critic
from tunesmith.run.loop.learner import Learner
from tunesmith.run.loop.teacher import Teacher
from tunesmith.types import Rollout, RolloutGroup, Sample


def make_experience(
    groups: Sequence[RolloutGroup],
    algorithm: Algorithm,
    learner: Learner,
    *,
    kl_coef: float,
    max_new_tokens: int,
    seed: int,
    critic: Critic | None = None,
    reward_weights: Mapping[str, float] | None = None,
    teacher: Teacher | None = None,
) -> Batch:
    """The batch of a step's rollouts, one sample per record, with every column its loss reads.

    Failed rollouts are left out. Rollouts that are masked for hitting the length limit count in
    their group's baseline, and are left out after that.

    Args:
        teacher: takes the reference's place.
    """
    numbered = [(rollout, n) for n, group in enumerate(groups) for rollout in group.usable]
    played = [(rollout, n) for rollout, n in numbered if rollout.num_sampled]
    rollouts = [rollout for rollout, _ in played]
    shaped = partial(_shape, algorithm=algorithm, max_new_tokens=max_new_tokens)
    greedy = [group.greedy and shaped(group.greedy) for group in groups]
    weights = reward_weights or {}
    outcomes = [
        Outcome(group, shaped(r), r.num_sampled, r.rewards, weights, greedy_reward=greedy[group])
        for r, group in played
    ]
    if algorithm.advantage.by_turn:
        outcomes = list(map(_pay_by_turn, outcomes, rollouts))

    batch = rollout_batch(played)
    if algorithm.decoupled:
        batch.add("old_logprobs", learner.score(batch))
    if teacher:
        for name, values in teacher(rollouts, batch).items():
            batch.add(name, values)
    elif algorithm.reference:
        batch.add("ref_logprobs", learner.score(batch, reference=True))
    if isinstance(algorithm.kl, KLInReward):
        outcomes = _penalise(outcomes, batch, algorithm.kl.estimator, kl_coef)
    if critic:
        estimator = algorithm.advantage
        bootstrap = isinstance(estimator, CriticEstimator) and estimator.bootstrap_truncated
        outcomes = _add_values(outcomes, batch, rollouts, critic, bootstrap)

    estimated = compute_advantages(algorithm.advantage, outcomes)
    batch.add("advantages", flat(estimated.advantages))
    if estimated.returns is not None:
        batch.add("returns", flat(estimated.returns))
    if algorithm.mask_truncated:
        whole = np.array([r.finish_reason != "length" for r in rollouts], np.bool_)
        batch = batch.take(np.flatnonzero(whole[batch.rollout]))
    _note_tokens(rollouts, batch, algorithm)
    prepare_columns(batch, algorithm, seed)
    return batch


def rollout_batch(played: Sequence[tuple[Rollout, int]]) -> Batch:
    """Rollouts, each with the number of its group, as a batch with one sample per record.

    Nothing is tokenized again: the records have the tokens, their authors, and the sampler's
    log-probabilities, which fill the columns ``old_logprobs`` and ``behaviour_logprobs``.
    """
    samples: list[Sample] = []
    sampler: list[float] = []
    for number, (rollout, group) in enumerate(played):
        for r in rollout.records:
            if r.num_sampled:
                samples.append(Sample(r.token_ids, r.sampled, group, number, experts=r.experts))
                sampler += compress(r.logprobs, r.sampled)
    batch = Batch.of(samples)
    batch.add("old_logprobs", sampler)
    batch.add("behaviour_logprobs", sampler)
    return batch


def _shape(rollout: Rollout, algorithm: Algorithm, max_new_tokens: int) -> float:
    assert rollout.reward is not None, "a rollout without a reward is not learned from"
    reward = rollout.reward
    if algorithm.stop_properly is not None:
        reward = stop_properly(reward, rollout.finish_reason, algorithm.stop_properly)
    if algorithm.overlong:
        turns = [turn for record in rollout.records for turn in record.turns]
        longest = max((turn.stop - turn.start for turn in turns), default=0)
        reward += overlong_penalty(algorithm.overlong, longest, max_new_tokens)
    return clip_reward(reward, *algorithm.reward_clip) if algorithm.reward_clip else reward


def _pay_by_turn(outcome: Outcome, rollout: Rollout) -> Outcome:
    """The rewards of turns are paid at the ends of their turns, and only the rest at the last
    token."""
    paid = [record.token_rewards for record in rollout.records]
    turns = np.concatenate(paid, dtype=np.float64)
    return replace(outcome, reward=outcome.reward - float(turns.sum()), token_rewards=turns)


def _penalise(
    outcomes: Sequence[Outcome], batch: Batch, estimator: str, kl_coef: float
) -> list[Outcome]:
    """Subtract the KL to the reference from the reward of every token."""
    kl = kl_values(batch.columns["old_logprobs"], batch.columns["ref_logprobs"], estimator)
    # A KL of NaN adds no penalty; the loss leaves that token out.
    penalties = by_rollout(batch, np.nan_to_num(-kl_coef * kl))
    return [
        replace(o, token_rewards=penalty if o.token_rewards is None else o.token_rewards + penalty)
        for o, penalty in zip(outcomes, penalties, strict=True)
    ]


def _add_values(
    outcomes: Sequence[Outcome],
    batch: Batch,
    rollouts: Sequence[Rollout],
    critic: Critic,
    bootstrap: bool,
) -> list[Outcome]:
    """Add the critic's values; with ``bootstrap`` also the value of the state in which a limit
    ended a rollout."""
    values, ends = critic.values(batch, ends=bootstrap)
    batch.add("old_values", values)
    last = np.cumsum(np.bincount(batch.rollout)) - 1  # the sample that each rollout ends with
    finals = np.where([rollout.truncated for rollout in rollouts], ends[last], 0.0)
    return [
        replace(outcome, values=own, final_value=float(final))
        for outcome, own, final in zip(outcomes, by_rollout(batch, values), finals, strict=True)
    ]


def _note_tokens(rollouts: Sequence[Rollout], batch: Batch, algorithm: Algorithm) -> None:
    """Store the batch's values of each rollout's tokens in the rollout."""
    columns = batch.columns
    noted = {"advantage": columns["advantages"]}
    if algorithm.reference:
        noted["reference"] = columns["ref_logprobs"]
    if algorithm.decoupled:
        noted["ratio"] = np.exp(columns["old_logprobs"] - columns["behaviour_logprobs"])
    by_token = {name: by_rollout(batch, values) for name, values in noted.items()}
    for n in np.unique(batch.rollout):
        rollouts[n].by_token = {name: values[n] for name, values in by_token.items()}


def by_rollout(batch: Batch, values: Floats) -> list[Floats]:
    """``[N]`` as one array per rollout, record after record."""
    counts = np.bincount(batch.rollout, batch.counts).astype(np.int64)
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []
