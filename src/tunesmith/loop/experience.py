"""From rewarded groups to samples: shaping, reference log-probabilities, values, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tunesmith.algorithms.advantages import (
    ESTIMATORS,
    AdvantageParams,
    Floats,
    Outcome,
    compute_advantages,
    outcomes,
    spread,
)
from tunesmith.algorithms.columns import prepare_columns
from tunesmith.algorithms.kl import kl_values
from tunesmith.algorithms.objective import needs_reference
from tunesmith.algorithms.shaping import clip_reward, overlong_penalty, stop_properly
from tunesmith.config.schema import AlgorithmSection
from tunesmith.loop.critic import Critic
from tunesmith.loop.learner import Learner
from tunesmith.types import Record, Rollout, RolloutGroup, Sample


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
) -> list[Sample]:
    """The batch's samples with every column its loss reads.

    A rollout that failed is not here. One that is masked for hitting the length limit still counts in its
    group's baseline, and is left out after that.
    """
    assert algorithm.advantage is not None, "the algorithm is not resolved"
    rollouts = [r for g in groups for r in g.usable if r.num_sampled]
    baselines = [g.greedy and _shaped(g.greedy, algorithm, max_new_tokens) for g in groups]
    rollout_outcomes = [
        replace(o, reward=_shaped(rollout, algorithm, max_new_tokens), greedy_reward=baselines[o.group])
        for o, rollout in zip(outcomes(groups), (r for g in groups for r in g.usable), strict=True)
        if rollout.num_sampled
    ]
    # One sample per record; an outcome is the whole rollout's, its tokens record after record.
    rollout_of_sample = [i for i, r in enumerate(rollouts) for record in r.records if record.num_sampled]
    records = [record for r in rollouts for record in r.records if record.num_sampled]
    if "gamma" in ESTIMATORS[algorithm.advantage].settings:  # others do not look at when a reward was paid
        rollout_outcomes = [_with_turn_rewards(o, r) for o, r in zip(rollout_outcomes, rollouts, strict=True)]
    samples = [_sample(r, rollout_outcomes[i].group, i) for r, i in zip(records, rollout_of_sample, strict=True)]
    if algorithm.decoupled:
        samples = learner.score(samples, "old_logprobs")
    if needs_reference(algorithm):
        samples = learner.score(samples, "ref_logprobs", reference=True)
        if algorithm.kl_in == "reward":
            old, reference = (written(samples, rollout_of_sample, name) for name in ("old_logprobs", "ref_logprobs"))
            rollout_outcomes = [
                _with_kl_penalty(*one, algorithm, kl_coef) for one in zip(rollout_outcomes, old, reference, strict=True)
            ]
    if critic:
        bootstrap = algorithm.bootstrap_truncated or False
        samples, rollout_outcomes = _valued(samples, rollout_outcomes, rollout_of_sample, rollouts, critic, bootstrap)
    estimated = compute_advantages(algorithm.advantage, rollout_outcomes, advantage_params(algorithm, reward_weights))
    for rollout, values in zip(rollouts, estimated.advantages, strict=True):
        rollout.advantage = None if _masked(rollout, algorithm) else float(np.mean(values))
    samples = with_written(samples, estimated.advantages, "advantages")
    if estimated.returns is not None:
        samples = with_written(samples, estimated.returns, "returns")
    trained = [s for s, i in zip(samples, rollout_of_sample, strict=True) if not _masked(rollouts[i], algorithm)]
    return prepare_columns(trained, algorithm, seed)


def _masked(rollout: Rollout, algorithm: AlgorithmSection) -> bool:
    return bool(algorithm.mask_truncated) and rollout.finish_reason == "length"


def advantage_params(algorithm: AlgorithmSection, reward_weights: Mapping[str, float] | None = None) -> AdvantageParams:
    """The estimator's constants; what the section leaves open keeps its default."""
    given = {name: getattr(algorithm, name, None) for name in AdvantageParams.__dataclass_fields__}
    given["component_weights"] = reward_weights
    return AdvantageParams(**{name: value for name, value in given.items() if value is not None})


def _shaped(rollout: Rollout, algorithm: AlgorithmSection, max_new_tokens: int) -> float:
    assert rollout.reward is not None, "a rollout without a reward is not learned from"
    reward = rollout.reward
    if algorithm.stop_properly is not None:
        reward = stop_properly(reward, rollout.finish_reason, algorithm.stop_properly)
    buffer, factor = algorithm.overlong_buffer or 0, algorithm.overlong_factor or 0.0
    longest = max((turn.stop - turn.start for record in rollout.records for turn in record.turns), default=0)
    reward += overlong_penalty(longest, max_new_tokens, buffer, factor)
    return clip_reward(reward, *algorithm.reward_clip) if algorithm.reward_clip else reward


def _valued(
    samples: Sequence[Sample],
    outcomes: Sequence[Outcome],
    owners: Sequence[int],
    rollouts: Sequence[Rollout],
    critic: Critic,
    bootstrap: bool,
) -> tuple[list[Sample], list[Outcome]]:
    """With the critic's values; with ``bootstrap`` also of the state that a limit left a rollout in."""
    last = {owner: place for place, owner in enumerate(owners)}
    cut = [bootstrap and rollouts[i].truncated and last[i] == place for place, i in enumerate(owners)]
    valued, finals = critic.add_values(samples, cut)
    values = written(valued, owners, "old_values")
    return valued, [
        replace(o, values=v, final_value=finals[last[i]]) for i, (o, v) in enumerate(zip(outcomes, values, strict=True))
    ]


def _sample(record: Record, group: int, rollout: int) -> Sample:
    """Nothing is tokenized again: the tokens, and who wrote them, are the record's own."""
    columns = {"old_logprobs": record.logprobs, "behaviour_logprobs": record.logprobs}
    return Sample(record.token_ids, record.sampled, columns, group, rollout)


def written(samples: Sequence[Sample], owners: Sequence[int], name: str) -> list[Floats]:
    """A column at the tokens the policy wrote, ``[n]`` per rollout: the samples of one ``owner`` joined in order."""
    parts: dict[int, list[Floats]] = {}
    for sample, owner in zip(samples, owners, strict=True):
        parts.setdefault(owner, []).append(np.array(sample.columns[name])[np.array(sample.loss_mask)])
    return [np.concatenate(part) for part in parts.values()]


def with_written(samples: Sequence[Sample], values: Sequence[Floats], name: str) -> list[Sample]:
    """The inverse of ``written``: values per rollout as a column of its samples."""
    cuts = np.cumsum([s.num_loss_tokens for s in samples])[:-1]
    parts = np.split(np.concatenate([np.zeros(0), *values]), cuts) if samples else []
    return [
        replace(s, columns={**s.columns, name: spread(part, s.loss_mask)})
        for s, part in zip(samples, parts, strict=True)
    ]


def _with_turn_rewards(outcome: Outcome, rollout: Rollout) -> Outcome:
    """What was paid on the way stands where its turn ended, and no longer at the end."""
    paid = np.array([reward for record in rollout.records for reward in record.token_rewards])
    return replace(outcome, reward=outcome.reward - float(paid.sum()), token_rewards=paid) if paid.any() else outcome


def _with_kl_penalty(
    outcome: Outcome, old: Floats, reference: Floats, algorithm: AlgorithmSection, coef: float
) -> Outcome:
    assert algorithm.kl_estimator is not None, "the algorithm is not resolved"
    # Where one is not a number there is nothing to pay; the loss leaves that token out.
    penalty = np.nan_to_num(-coef * kl_values(old, reference, algorithm.kl_estimator))
    paid = penalty if outcome.token_rewards is None else outcome.token_rewards + penalty
    return replace(outcome, token_rewards=paid)
