"""Rewards that need the run's tokenizer or a model of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tunesmith.config.generation import SamplingConfig
from tunesmith.config.schema import ModelReward, RLConfig
from tunesmith.monitor.waits import long_wait
from tunesmith.rewards.reward_set import RewardSet

if TYPE_CHECKING:
    from tunesmith.cluster.ray_cluster import Cluster
    from tunesmith.rewards.model import RewardModel


def add_rewards(
    rewards: RewardSet,
    config: RLConfig | SamplingConfig,
    tokenizer: Any,
    note: Callable[[str], None],
    cluster: Cluster | None = None,
) -> None:
    """Add the remote rewards, and the reward models, which are loaded here or in actors of ``cluster``.

    ``note`` is told what each model sees. Does nothing where they were added before.

    Raises:
        ConfigError, ModelError: a reward model cannot be loaded.
    """
    if config.reward is None or len(rewards.functions) == len(rewards.weights):
        return
    if config.reward.remote:
        from tunesmith.rewards.remote import remote_reward

        decode = partial(tokenizer.decode, skip_special_tokens=False)
        for entry in config.reward.remote:
            rewards.add(remote_reward(entry, config.reward.answer, decode))
    if not config.reward.models:
        return
    from tunesmith.assembly.cluster import remote_reward_model
    from tunesmith.data.prompts import with_system
    from tunesmith.rewards.model import model_reward, same_tokens

    for entry in config.reward.models:
        if cluster:
            assert isinstance(config, RLConfig), "only training is put on a cluster"
            model = remote_reward_model(cluster, config, entry, note)
        else:
            model = load_reward_model(config, entry)
        exact = same_tokens(model.model.tokenizer, tokenizer)
        conversation = partial(with_system, config.data) if model.template else None
        rewards.add(
            model_reward(entry.name, model, exact=exact, conversation=conversation, in_thread=cluster is not None)
        )
        sees = (
            "the rollouts' own tokens: its tokenizer is the policy's"
            if exact
            else "prompt and answer encoded anew: its tokenizer or chat template is not the policy's"
        )
        scale = f"; normalised by mean {model.stats.mean:.4g} and std {model.stats.std:.4g}" if model.stats else ""
        note(f"reward model '{entry.name}' sees {sees}{scale}")


def load_reward_model(config: RLConfig | SamplingConfig, entry: ModelReward) -> RewardModel:
    import torch

    from tunesmith.rewards.model import RewardModel

    system = config.system
    with long_wait(f"loading {entry.path}"):
        return RewardModel.load(
            entry,
            dtype=getattr(torch, config.model.dtype),
            device=system.device,
            max_tokens=system.max_tokens_per_microbatch,
            chat=config.data.chat,
            trust_remote_code=config.model.trust_remote_code,
        )
