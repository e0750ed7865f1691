"""The critic of a run whose algorithm needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tunesmith.assembly.common import limits_of, load_model, load_tokenizer, make_backend, make_learner
from tunesmith.backends.base import TrainBackend
from tunesmith.backends.torch import TorchBackend
from tunesmith.config.schema import LoraSection, RLConfig
from tunesmith.errors import ConfigError
from tunesmith.loop.critic import Critic
from tunesmith.loop.learner import Learner
from tunesmith.loop.session import Session
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.score_model import ScoreModel
from tunesmith.plan.cost.operations import PeakRates
from tunesmith.plan.cost.price import USUAL_RANK

Trained = tuple[TrainBackend, PeakRates]
"""The backend that trains a model, and the peak rates of its devices."""


def make_value_head(config: RLConfig, model: CausalLM) -> nn.Linear | None:
    """A head on the policy's trunk, initialised to output 0; None unless the critic shares the trunk."""
    if not config.critic.shared_trunk:
        return None
    wide = torch.promote_types(model.dtype, torch.float32)
    head = nn.Linear(model.head.in_features, 1, bias=False, dtype=wide, device=model.device)
    nn.init.zeros_(head.weight)
    return head


def make_critic(
    config: RLConfig,
    session: Session,
    tokenizer: Any,
    policy: Learner,
    remote: Callable[[RLConfig], Trained] | None = None,
) -> Critic | None:
    """A separate value model, or the value head on the policy's trunk; None if the algorithm needs neither.

    Args:
        remote: loads the value model elsewhere, given the critic's configuration; None loads it here.

    Raises:
        ConfigError: the vocabulary of ``critic.path`` differs from the policy's.
        ModelError: the value model cannot be loaded.
    """
    if "critic" not in config.algorithm.needs:
        return None
    section, clip = config.critic, config.critic.value_clip or None
    if section.shared_trunk:
        return Critic(policy, 0, clip, section.value_coef)
    _check_tokens(config, tokenizer)
    shared = ("lr", "schedule", "min_lr_ratio", "warmup_steps", "max_grad_norm", "passes_per_batch")
    train = {"ema_decay": None, **{key: getattr(section, key) for key in shared}}
    own = config.model_copy(update={"train": config.train.model_copy(update=train), "lora": _new_adapter(config.lora)})
    backend, limits = remote(own) if remote else (critic_backend(own, tokenizer), limits_of(own))
    steps = config.critic_steps(config.train.steps)
    tokens = config.system.critic_max_tokens
    learner = make_learner(own, session, backend, "token_mean", steps, limits=limits, max_tokens=tokens)
    return Critic(learner, section.passes_per_batch, clip)


def critic_backend(config: RLConfig, tokenizer: Any) -> TorchBackend[ScoreModel]:
    """Args: config: the run's, with the critic's ``train`` and ``lora`` sections."""
    return make_backend(config, load_model(ScoreModel, config, tokenizer, config.critic.path), ScoreModel.predict)


def _new_adapter(section: LoraSection) -> LoraSection:
    """The critic's adapter settings: the policy's, but always for a new adapter, even if the policy continues one."""
    if section.path is None:
        return section
    return section.model_copy(update={"path": None, "rank": section.rank or USUAL_RANK})


def _check_tokens(config: RLConfig, tokenizer: Any) -> None:
    if (path := config.critic.path) is None:
        return
    theirs = load_tokenizer(config.model_copy(update={"model": config.model.model_copy(update={"path": path})}))
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"critic.path: '{path}' has a different vocabulary from the policy, whose tokens it judges. "
            "Take a model of the policy's family, or leave critic.path out."
        )
