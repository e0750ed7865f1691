"""From rewarded groups to samples: shaping, reference log-probabilities, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tunesmith.algorithms.advantages import AdvantageParams, Outcome, compute_advantages, outcomes, spread
from tunesmith.algorithms.columns import prepare_columns
from tunesmith.algorithms.kl import kl_values
from tunesmith.algorithms.objective import needs_reference
from tunesmith.algorithms.shaping import clip_reward, overlong_penalty
from tunesmith.config.schema import AlgorithmSection
from tunesmith.loop.learner import Learner, Metrics
from tunesmith.types import Rollout, RolloutGroup, Sample


def experience(
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmSection,
    learner: Learner,
    *,
    kl_coef: float,
    max_new_tokens: int,
    seed: int,
) -> list[Sample]:
    """The batch's samples with every column its loss reads.

    A rollout that failed is not here. One that is masked for hitting the length limit still counts in its
    group's baseline, and is left out after that.
    """
    rollouts = [r for g in groups for r in g.usable if r.num_sampled]
    seen = [
        replace(outcome, reward=_shaped(outcome.reward, rollout, algorithm, max_new_tokens))
        for outcome, rollout in zip(outcomes(groups), (r for g in groups for r in g.usable), strict=True)
        if rollout.num_sampled
    ]
    samples = [_sample(r, o.group) for r, o in zip(rollouts, seen, strict=True)]
    if algorithm.decoupled:
        samples = learner.score(samples, "old_logprobs", reference=False)
    if needs_reference(algorithm):
        samples = learner.score(samples, "ref_logprobs", reference=True)
        if algorithm.kl_in == "reward":
            seen = [_with_kl_penalty(o, s, algorithm, kl_coef) for o, s in zip(seen, samples, strict=True)]
    assert algorithm.advantage is not None, "the algorithm is not resolved"
    found = compute_advantages(algorithm.advantage, seen, advantage_params(algorithm)).advantages
    samples = [_with(s, "advantages", spread(a, s.loss_mask)) for s, a in zip(samples, found, strict=True)]
    trained = [
        s
        for s, r in zip(samples, rollouts, strict=True)
        if not (algorithm.mask_truncated and r.finish_reason == "length")
    ]
    return prepare_columns(trained, algorithm, seed)


def advantage_params(algorithm: AlgorithmSection) -> AdvantageParams:
    """The estimator's constants; what the section leaves open keeps its default."""
    given = {name: getattr(algorithm, name, None) for name in AdvantageParams.__dataclass_fields__}
    return AdvantageParams(**{name: value for name, value in given.items() if value is not None})


def batch_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """What a step's rollouts look like, beside their rewards."""
    rollouts = [r for g in groups for r in g.rollouts]
    if not rollouts:
        return {"rollouts": 0.0}
    lengths = np.array([r.num_sampled for r in rollouts])
    return {
        "rollouts": float(len(rollouts)),
        "tokens": float(lengths.sum()),
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "groups_equal": float(np.mean([len({r.reward for r in g.usable}) < 2 for g in groups])),
    }


def _shaped(reward: float, rollout: Rollout, algorithm: AlgorithmSection, max_new_tokens: int) -> float:
    buffer, factor = algorithm.overlong_buffer or 0, algorithm.overlong_factor or 0.0
    reward += overlong_penalty(rollout.num_sampled, max_new_tokens, buffer, factor)
    return clip_reward(reward, *algorithm.reward_clip) if algorithm.reward_clip else reward


def _sample(rollout: Rollout, group: int) -> Sample:
    """Nothing is tokenized again: the tokens, and who wrote them, are the rollout's own."""
    columns = {"old_logprobs": rollout.logprobs, "behaviour_logprobs": rollout.logprobs}
    return Sample(rollout.token_ids, rollout.sampled, columns, group)


def _with_kl_penalty(outcome: Outcome, sample: Sample, algorithm: AlgorithmSection, coef: float) -> Outcome:
    mask = np.array(sample.loss_mask)
    old, reference = (np.array(sample.columns[name])[mask] for name in ("old_logprobs", "ref_logprobs"))
    assert algorithm.kl_estimator is not None, "the algorithm is not resolved"
    return replace(outcome, token_rewards=-coef * kl_values(old, reference, algorithm.kl_estimator))


def _with(sample: Sample, name: str, column: list[float]) -> Sample:
    return replace(sample, columns={**sample.columns, name: column})
