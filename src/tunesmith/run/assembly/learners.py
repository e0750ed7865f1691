"""The learners of a run, over what placements have built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from tunesmith.config.algorithm import CriticSection
from tunesmith.config.schema import RLConfig, TrainSection
from tunesmith.errors import ConfigError
from tunesmith.models.embedding_rows import enough_rows
from tunesmith.plan.length import critic_steps, optimizer_steps
from tunesmith.plan.plan import AnyPlan, Plan
from tunesmith.run.engines.base import RolloutEngine, Sampler
from tunesmith.run.engines.pool import EnginePool
from tunesmith.run.loop.canary import OF_WEIGHTS, TOLERANCES, Canary
from tunesmith.run.loop.critic import Critic
from tunesmith.run.loop.learner import Learner
from tunesmith.run.placement.port import Placement
from tunesmith.run.specs.base import Report, Trained
from tunesmith.run.specs.from_plan import critic_spec
from tunesmith.run.specs.models import TokenizerSpec
from tunesmith.run.trainers.optimizer import learning_rate
from tunesmith.types import Sampling, Tokenizer


def make_learner(
    plan: AnyPlan,
    trained: Trained,
    report: Report,
    aggregation: str,
    rate: Callable[[int], float],
    *,
    max_new_tokens: int | None = None,
    keep_groups: bool = False,
    max_tokens: int | None = None,
) -> Learner:
    """A learner for a run.

    Args:
        rate: the learning rate of each optimizer step.
        max_tokens: tokens per micro-batch, if different from the policy's.
    """
    max_tokens = max_tokens or plan.memory.microbatch
    assert max_tokens is not None, "the run trains"
    return Learner(
        backend=trained.backend,
        aggregation=aggregation,
        max_new_tokens=max_new_tokens,
        learning_rate=rate,
        max_tokens=max_tokens,
        scoring_max_tokens=plan.memory.scoring,
        share_prompts=plan.said.system.share_prompts,
        keep_groups=keep_groups,
        group_size=plan.training.group,
        flops_per_second=trained.limits.flops_per_second,
        report=report,
    )


def policy_rate(plan: AnyPlan, size: int) -> Callable[[int], float]:
    """The learning rate of the policy by step.

    Args:
        size: the number of items of training data.
    """
    training = plan.training
    steps = optimizer_steps(plan.said, training, size)
    return rate_of(plan.said.train, training.lr, training.warmup, steps)


def rate_of(
    section: TrainSection | CriticSection, lr: float, warmup: int | None, steps: int
) -> Callable[[int], float]:
    """The learning rate of each of ``steps`` optimizer steps."""
    return partial(
        learning_rate,
        peak=lr,
        total=steps,
        warmup=warmup or 0,
        schedule=section.schedule,
        min_ratio=section.min_lr_ratio,
    )


def make_critic(
    plan: Plan[RLConfig],
    placement: Placement,
    policy: Learner,
    tokenizer: Tokenizer,
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
    critic = plan.training.critic
    if critic is None:
        return None
    section = plan.said.critic
    clip = section.value_clip or None
    if section.shared_trunk:
        return Critic(policy, 0, clip, critic.value_coef)
    if section.path is not None:
        _check_tokens(section.path, plan.said.model.trust_remote_code, tokenizer)
    steps = critic_steps(plan.said, plan.training, size)
    learner = make_learner(
        plan,
        placement.trainer(critic_spec(plan)),
        report,
        "token_mean",
        rate_of(section, critic.lr, section.warmup_steps, steps),
        max_tokens=plan.memory.critic,
    )
    return Critic(learner, critic.passes, clip)


def _check_tokens(path: str, trust_remote_code: bool, tokenizer: Tokenizer) -> None:
    key = "critic.path"
    theirs = TokenizerSpec(path, key, trust_remote_code=trust_remote_code).build()
    if theirs.get_vocab() != tokenizer.get_vocab() or not enough_rows(tokenizer, theirs):
        raise ConfigError(
            f"{key}: '{path}' has a different vocabulary from the policy, whose tokens it judges. "
            f"Take a model of the policy's family, or leave {key} out.",
            keys=(key,),
        )


def make_canary(
    plan: Plan[RLConfig], engine: RolloutEngine, learner: Learner, prompt_ids: Sequence[int]
) -> Canary | None:
    """The canary; None if trainer and engine share their weights or ``system.canary`` is off."""
    system = plan.said.system
    devices = plan.devices
    if not system.canary or not devices.weights_apart:
        return None
    new = min(8, plan.said.rollout.max_new_tokens)
    sampling = Sampling(new, temperature=plan.sampling.temperature, ignore_eos=True, seed=1)
    plane = devices.weight_plane
    way = f"through system.weight_plane = {plane}" if plane else f"to {devices.engine.title}"

    def engines() -> Mapping[str, Sampler]:
        if isinstance(engine, EnginePool):
            return {member.name: member for member in engine.members}
        return {"the engine": engine}

    tolerance = max(TOLERANCES[devices.dtype], OF_WEIGHTS[devices.engine_weights])
    quiet = (lambda: engine.moving) if isinstance(engine, EnginePool) else nullcontext
    return Canary(engines, learner, prompt_ids[:40], sampling, tolerance, way, quiet)
