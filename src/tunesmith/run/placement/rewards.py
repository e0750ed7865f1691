"""Rewards that need the run's tokenizer or a reward model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tunesmith.config.commands import SamplingConfig
from tunesmith.config.schema import RLConfig
from tunesmith.errors import about
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.plan import AnyPlan
from tunesmith.run.placement.base import Report
from tunesmith.run.placement.port import Placement
from tunesmith.run.placement.specs import scorer_spec

if TYPE_CHECKING:
    from tunesmith.learn.rewards.model import RewardModel


def add_rewards(
    rewards: RewardSet,
    plan: AnyPlan,
    tokenizer: Any,
    report: Report,
    placement: Placement,
) -> None:
    """Add the remote rewards and reward models, unless they have already been added.

    Args:
        report: receives a sentence about the tokens that each model sees.
        placement: where the reward models score.

    Raises:
        ConfigError, ModelError: a reward model cannot be loaded.
    """
    config: RLConfig | SamplingConfig = plan.said
    if config.reward is None or len(rewards.functions) == len(rewards.weights):
        return
    if config.reward.remote:
        from tunesmith.learn.rewards.remote import remote_reward

        decode = partial(tokenizer.decode, skip_special_tokens=False)
        for entry in config.reward.remote:
            rewards.add(remote_reward(entry, config.reward.answer, decode))
    if not config.reward.models:
        return
    from tunesmith.learn.data.prompts import with_system
    from tunesmith.learn.rewards.model import model_reward, same_tokens

    for entry in config.reward.models:
        with about("reward.models"):
            model = placement.scorer(scorer_spec(plan, entry), report)
        exact = same_tokens(model.tokenizer, tokenizer)
        conversation = partial(with_system, config.data) if model.template else None
        rewards.add(
            model_reward(
                entry.name,
                model,
                exact=exact,
                conversation=conversation,
                in_thread=placement.scores_elsewhere,
            )
        )
        report(f"reward model '{entry.name}' sees {_seen_by(model, exact)}")


def _seen_by(model: RewardModel, exact: bool) -> str:
    sees = (
        "the rollouts' own tokens, since its tokenizer is the policy's"
        if exact
        else "prompt and answer tokenized again, since its tokenizer or chat template is not the "
        "policy's"
    )
    if model.stats is None:
        return sees
    return f"{sees}; normalised by mean {model.stats.mean:.4g} and std {model.stats.std:.4g}"
