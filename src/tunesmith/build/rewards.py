"""Rewards that need the run's tokenizer or a model of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tunesmith.config.schema import RLConfig
from tunesmith.environments.rewards import RewardSet


def add_rewards(rewards: RewardSet, config: RLConfig, tokenizer: Any, note: Callable[[str], None]) -> None:
    """Add the remote rewards, and the reward models, which are loaded here; ``note`` is told what each model sees.

    Raises:
        ConfigError, ModelError: a reward model cannot be loaded.
    """
    if config.reward.remote:
        from tunesmith.environments.remote_reward import remote_reward

        decode = partial(tokenizer.decode, skip_special_tokens=False)
        for entry in config.reward.remote:
            rewards.add(remote_reward(entry, config.reward.answer, decode))
    if config.reward.models:
        _add_models(rewards, config, tokenizer, note)


def _add_models(rewards: RewardSet, config: RLConfig, tokenizer: Any, note: Callable[[str], None]) -> None:
    import torch

    from tunesmith.data.learned import with_system
    from tunesmith.models.reward_model import RewardModel, model_reward, same_tokens

    data, system = config.data, config.system
    assert config.model.dtype and system.device and system.max_tokens_per_microbatch, "not resolved"
    for entry in config.reward.models:
        model = RewardModel.load(
            entry,
            dtype=getattr(torch, config.model.dtype),
            device=system.device,
            max_tokens=system.max_tokens_per_microbatch,
            chat=data.chat,
            trust_remote_code=config.model.trust_remote_code,
        )
        exact = same_tokens(model.model.tokenizer, tokenizer)
        conversation = partial(with_system, data) if model.template else None
        rewards.add(model_reward(entry.name, model, exact=exact, conversation=conversation))
        sees = (
            "the rollouts' own tokens: its tokenizer is the policy's"
            if exact
            else "prompt and answer encoded anew: its tokenizer or chat template is not the policy's"
        )
        scale = f"; normalised by mean {model.stats.mean:.4g} and std {model.stats.std:.4g}" if model.stats else ""
        note(f"reward model '{entry.name}' sees {sees}{scale}")
