"""The learners of a run, over what placements have built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tunesmith.config.algorithm import CriticSection
from tunesmith.config.schema import RLConfig, RunConfig, TrainSection
from tunesmith.config.section import known
from tunesmith.errors import ConfigError
from tunesmith.models.embedding_rows import enough_rows
from tunesmith.plan.length import critic_steps
from tunesmith.plan.plan import devices_of
from tunesmith.run.engines.base import RolloutEngine, Sampler
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.loop.canary import TOLERANCES, Canary
from tunesmith.run.loop.critic import Critic
from tunesmith.run.loop.learner import Learner
from tunesmith.run.placement.base import Report, Trained
from tunesmith.run.placement.models import TokenizerSpec
from tunesmith.run.placement.port import Placement
from tunesmith.run.placement.specs import critic_spec
from tunesmith.run.trainers.optimizer import learning_rate
from tunesmith.types import Sampling


def make_learner(
    config: RunConfig,
    trained: Trained,
    report: Report,
    aggregation: str,
    steps: int,
    *,
    section: TrainSection | CriticSection | None = None,
    max_new_tokens: int | None = None,
    keep_groups: bool = False,
    max_tokens: int | None = None,
) -> Learner:
    """A learner for a run.

    Args:
        steps: optimizer steps of the whole run.
        section: has the learning rate's schedule, if it is not the policy's.
        max_tokens: tokens per micro-batch, if different from the policy's.
    """
    system = config.system
    rates = section or config.train
    return Learner(
        backend=trained.backend,
        aggregation=aggregation,
        max_new_tokens=max_new_tokens,
        learning_rate=partial(
            learning_rate,
            peak=rates.lr,
            total=steps,
            warmup=rates.warmup_steps,
            schedule=rates.schedule,
            min_ratio=rates.min_lr_ratio,
        ),
        max_tokens=max_tokens or system.max_tokens_per_microbatch,
        scoring_max_tokens=known(system, "scoring_max_tokens"),
        share_prompts=system.share_prompts,
        keep_groups=keep_groups,
        group_size=config.rollout.group_size if isinstance(config, RLConfig) else 1,
        flops_per_second=trained.limits.flops_per_second,
        report=report,
    )


def make_critic(
    config: RLConfig,
    placement: Placement,
    policy: Learner,
    tokenizer: Any,
    report: Report,
    size: int,
) -> Critic | None:
    """A separate value model, or the value head on the policy's trunk; None if the algorithm needs
    neither.

    Args:
        size: the number of training prompts, on which the length of the last step depends.

    Raises:
        ConfigError: the vocabulary of ``critic.path`` differs from the policy's.
        ModelError: the value model cannot be loaded.
    """
    if "critic" not in config.algorithm.needs:
        return None
    section = config.critic
    clip = section.value_clip or None
    if section.shared_trunk:
        return Critic(policy, 0, clip, section.value_coef)
    if section.path is not None:
        _check_tokens(section.path, config.model.trust_remote_code, tokenizer)
    learner = make_learner(
        config,
        placement.trainer(critic_spec(config)),
        report,
        "token_mean",
        critic_steps(config, size),
        section=section,
        max_tokens=config.system.critic_max_tokens,
    )
    return Critic(learner, section.passes_per_batch, clip)


def _check_tokens(path: str, trust_remote_code: bool, tokenizer: Any) -> None:
    key = "critic.path"
    theirs = TokenizerSpec(path, key, trust_remote_code=trust_remote_code).build()
    if theirs.get_vocab() != tokenizer.get_vocab() or not enough_rows(tokenizer, theirs):
        raise ConfigError(
            f"{key}: '{path}' has a different vocabulary from the policy, whose tokens it judges. "
            f"Take a model of the policy's family, or leave {key} out.",
            keys=(key,),
        )


def make_canary(
    config: RLConfig, engine: RolloutEngine, learner: Learner, prompt_ids: Sequence[int]
) -> Canary | None:
    """The canary; None if trainer and engine share their weights or ``system.canary`` is off."""
    system = config.system
    if not system.canary or not devices_of(config).weights_apart:
        return None
    new = min(8, config.rollout.max_new_tokens)
    sampling = Sampling(new, temperature=config.rollout.temperature, ignore_eos=True, seed=1)
    way = (
        f"through system.weight_plane = {system.weight_plane}"
        if system.weight_plane
        else f"to {system.engine}"
    )

    def engines() -> Mapping[str, Sampler]:
        if isinstance(engine, EnginePool):
            return {member.name: member for member in engine.members}
        return {"the engine": engine}

    return Canary(engines, learner, prompt_ids[:40], sampling, TOLERANCES[config.model.dtype], way)
